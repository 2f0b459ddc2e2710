#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face's library, in our models and back (docs/recipes.md).

    check.py --write tests/huggingface/samples          the samples of //tests/huggingface:huggingface_test
    check.py PROGRAM                                    PROGRAM: bazel-bin/tests/huggingface/convert
    check.py PROGRAM --run "tools/smprun --np 4 --config examples/gpt/tensor2x2.json"

needs a Python that imports torch 2.11, transformers, safetensors and numpy (a virtual environment of
its own). Models are small, and random from configurations: no weights are fetched. The check writes
models of several shapes, has PROGRAM read, train and write them, opens what it wrote with
transformers and compares its logits with those that our model computed.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys
import tempfile

import safetensors.torch
import torch
import transformers as hf

TOLERANCE = 1e-5  # fraction of the largest logit
MAPS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "huggingface"


def samples():
    """A configuration and the class of its model, by name."""
    gpt = dict(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    bert = dict(vocab_size=16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=16, max_position_embeddings=10)
    return {
        "gpt2": (hf.GPT2Config(**gpt), hf.GPT2LMHeadModel),
        "gpt_neox": (hf.GPTNeoXConfig(**bert, rotary_pct=0.5), hf.GPTNeoXForCausalLM),
        "gptj": (hf.GPTJConfig(**gpt, rotary_dim=2), hf.GPTJForCausalLM),
        "llama": (hf.LlamaConfig(**{**bert, "num_attention_heads": 4}, num_key_value_heads=2),
                  hf.LlamaForCausalLM),
        "bert": (hf.BertConfig(**bert), hf.BertForMaskedLM),
        "roberta": (hf.RobertaConfig(**bert, type_vocab_size=1), hf.RobertaForMaskedLM),
        "vit": (hf.ViTConfig(**{k: v for k, v in bert.items() if k not in ("vocab_size", "max_position_embeddings")},
                             image_size=8, patch_size=4, num_channels=1, num_labels=4),
                hf.ViTForImageClassification),
    }


def further():
    """Features that the samples leave out: other activations, sizes and ties."""
    gpt = dict(vocab_size=24, n_positions=12, n_embd=16, n_layer=3, n_head=4)
    bert = dict(vocab_size=24, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
                intermediate_size=24, max_position_embeddings=14)
    return {
        "gpt2 with relu": (hf.GPT2Config(**gpt, n_inner=24, activation_function="relu"), hf.GPT2LMHeadModel),
        "gptj, all channels turned": (hf.GPTJConfig(**gpt, rotary_dim=4), hf.GPTJForCausalLM),
        "gpt_neox with gelu_new": (hf.GPTNeoXConfig(**bert, hidden_act="gelu_new", rotary_pct=1.0),
                                   hf.GPTNeoXForCausalLM),
        "llama, tied, its own keys": (hf.LlamaConfig(**bert, num_key_value_heads=4, tie_word_embeddings=True),
                                      hf.LlamaForCausalLM),
        "bert with relu": (hf.BertConfig(**bert, hidden_act="relu"), hf.BertForMaskedLM),
    }


def logits_of(net, inputs):
    with torch.no_grad():
        return net(inputs).logits


def write(folder, config, kind):
    """A model whose tensors all differ from those of a new one, with inputs and logits."""
    torch.manual_seed(1)
    net = kind(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    if isinstance(config, hf.ViTConfig):
        inputs = torch.randn(4, config.num_channels, config.image_size, config.image_size)
    else:
        inputs = torch.randint(2, config.vocab_size, (4, 8))
    net.save_pretrained(folder)
    safetensors.torch.save_file({"inputs": inputs, "logits": logits_of(net, inputs)}, folder / "sample.safetensors")


def write_samples(folder):
    for name, (config, kind) in samples().items():
        write(folder / name, config, kind)
        (folder / name / "generation_config.json").unlink(missing_ok=True)


def check(name, config, kind, command, folder):
    """The error, or nothing."""
    write(folder / "in", config, kind)
    run = subprocess.run([*command, str(MAPS), str(folder / "in"), str(folder / "out")], capture_output=True, text=True)
    if run.returncode != 0:
        return run.stderr
    ours = safetensors.torch.load_file(folder / "out" / "logits.safetensors")["logits"]
    inputs = safetensors.torch.load_file(folder / "in" / "sample.safetensors")["inputs"]
    net, report = kind.from_pretrained(folder / "out", output_loading_info=True)
    if any(report.values()):
        return f"not loaded as it should be: {report}"
    theirs = logits_of(net.eval(), inputs)
    before = logits_of(kind.from_pretrained(folder / "in").eval(), inputs)
    if torch.equal(before, theirs):
        return "the step of training changed nothing"
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"{name:28} {error:.1e} of the largest logit")
    return "" if error < TOLERANCE else f"logits differ by {error:.1e}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", nargs="?")
    parser.add_argument("--run", default="", help="what starts the program on ranks")
    parser.add_argument("--write", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    if arguments.write:
        return write_samples(arguments.write)
    failures = 0
    for name, (config, kind) in {**samples(), **further()}.items():
        with tempfile.TemporaryDirectory() as folder:
            problem = check(name, config, kind, [*shlex.split(arguments.run), arguments.program], pathlib.Path(folder))
        if problem:
            failures += 1
            print(f"FAILED: {name}: {problem}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
