#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a GPT in Python, trains it in C++, and loads it back into Python (docs/exported.md).

usage: round_trip.py SMP_TRAIN SMPRUN TEXT [STEPS]  (in the root of the sources; a Python with torch
2.11 and safetensors)

Model, job (2,000 steps on 2 stages x 2 replicas) and the held-out part of TEXT are those of
tools/quickstart. The trained program, and the class below with the trained weights, must have equal
logits for that part, and the loss that smp_train printed, to the bit.
"""
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, SEQUENCE, BATCH, MICROBATCHES = 4, 128, 4, 128, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class Gpt(nn.Module):  # that of examples/gpt, with its initial distributions
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for name, value in self.named_parameters():
            if value.dim() > 1:
                writers = 2 * LAYERS if name.endswith(("out.weight", "contract.weight")) else 1
                nn.init.normal_(value, 0, (value.size(1) * writers) ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(value)

    def forward(self, x):
        h = self.token(x) + self.position(torch.arange(x.size(1), device=x.device))
        return self.head(self.norm(self.blocks(h)))


def split(text):
    """The parts to train on and to judge by: every tenth block of 2 KiB, as examples/gpt has it."""
    blocks = [text[i:i + 2048] for i in range(0, len(text), 2048)]
    held_out = [blocks.pop(i) for i in reversed(range(9, len(blocks), 10))][::-1]
    return b"".join(blocks), b"".join(held_out)


def train(program, smprun, folder, steps):
    """Trains folder/model.pt2, and returns the held-out loss."""
    options = ("--format tokens --token-type uint8 --shift --loss cross_entropy --optimizer adamw "
               "--betas 0.9,0.95 --weight-decay 0.1 --lr 3e-3 --schedule cosine --final-rate 0.1 "
               f"--warmup {min(100, steps // 10)} --sequence {SEQUENCE} --batch-size {BATCH} "
               f"--steps {steps} --seed 1 --json")
    lines = subprocess.run(
        [smprun, "--np", "4", "--config", "examples/gpt/2x2.json", program, folder / "model.pt2",
         "--eval-model", folder / "model.pt2", "--data", folder / "train.bin",
         "--eval-data", folder / "held_out.bin", "--folder", folder / "run", *options.split()],
        check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line][-1]


@torch.no_grad()
def judge(models, text):
    """Whether all logits of the models are equal, and the loss, as docs/smp_train.md says."""
    tokens, same, total = torch.tensor(list(text)), True, 0.0
    end = (len(tokens) - 1) // (BATCH * SEQUENCE) * BATCH * SEQUENCE  # whole batches
    x, y = [tokens[i:end + i].view(-1, BATCH, SEQUENCE) for i in (0, 1)]
    for inputs, targets in zip(x, y):
        loss = 0
        for rows, next_rows in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)):
            logits, others = [model(rows) for model in models]
            same &= torch.equal(logits, others)
            part = F.cross_entropy(logits.flatten(0, 1), next_rows.flatten(), reduction="sum")
            loss += part * MICROBATCHES / targets.numel()
        total += (loss / MICROBATCHES).item() * targets.numel()
    return same, total / y.numel()


def main(program, smprun, text, steps="2000"):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, inputs = Gpt().train(), (torch.zeros(BATCH, SEQUENCE, dtype=torch.long),)
    batch = torch.export.Dim("batch", min=2, max=1024)
    exported = torch.export.export(model, inputs, dynamic_shapes=({0: batch},))
    training, held_out = split(pathlib.Path(text).read_bytes())
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        torch.export.save(exported, folder / "model.pt2")
        (folder / "train.bin").write_bytes(training)
        (folder / "held_out.bin").write_bytes(held_out)
        loss = train(program, smprun, folder, int(steps))
        model.load_state_dict(load_file(folder / "run/trained/model/model.safetensors"))
        loaded = torch.export.load(folder / "run/trained/model.pt2").module()
    same, expected = judge([loaded, model], held_out)
    print(f"held-out text: {loss / math.log(2):.3f} bits/byte after {steps} steps")
    print("logits of the program and of the class:", "equal" if same else "different")
    print("loss in C++ and in Python:", "equal" if loss == expected else f"{loss} and {expected}")
    return 0 if same and loss == expected else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
