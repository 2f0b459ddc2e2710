#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares smp_train with docs/smp_train.py, bit for bit (docs/smp_train.md).

usage: smp_train_python.py SMP_TRAIN SMPRUN  (in the root of the sources; a Python with torch 2.11,
numpy, safetensors and xxhash)

Trains tests/exported/archives/gpt.pt2, and a model with dropout, on one rank, on two stages and on
two replicas, with each optimizer and schedule, and has Python load the programs that were written.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from torch import nn

RUNS = [("gpt", "adamw", 0.01, "cosine", 0.5), ("gpt", "adam", 0.01, "linear", 0.5),
        ("gpt", "sgd", 0.1, "constant", 0), ("gpt", "adamw", 0.01, "constant", 0),
        ("dropout", "adamw", 0.01, "cosine", 0.5)]
LAYOUTS = {"1x1": {"microbatches": 4}, "2x1": {"microbatches": 4, "partitions": 2},
           "1x2": {"microbatches": 2, "ddp": True}}


class Dropout(nn.Module):
    """Draws random numbers in attention and in layers."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(24, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 24)

    def forward(self, x):
        return self.head(self.drop(self.block(self.tokens(x))))


def archive_of(model, folder):
    if model == "gpt":
        return "tests/exported/archives/gpt.pt2"
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Dropout().train(), (torch.zeros(4, 6, dtype=torch.long),),
                                  dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "dropout.pt2")
    return folder / "dropout.pt2"


def losses_in(text):
    return [json.loads(line)["loss"] for line in text.splitlines() if line.startswith('{"step"')]


def run(*command):
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE,
                          text=True, env={**os.environ, "SMP_LOG_LEVEL": "error"}).stdout


def compare(folder, program, smprun, model, settings):
    """The layouts in which the losses or weights are others than Python's."""
    (folder / "settings.json").write_text(json.dumps(settings))
    samples, trained = folder / "samples.safetensors", folder / "python.safetensors"
    losses = losses_in(run(sys.executable, "-W", "ignore", "docs/smp_train.py", model, samples,
                           folder / "settings.json", trained))
    expected, different = load_file(trained), []
    options = [word for name in ("steps", "batch_size", "seed", "optimizer", "lr", "weight_decay",
                                 "schedule", "warmup", "schedule_steps", "final_rate", "clip",
                                 "loss") for word in ("--" + name.replace("_", "-"), settings[name])]
    for layout, parameters in LAYOUTS.items():
        config, out = folder / f"{layout}.json", folder / layout
        config.write_text(json.dumps({"gradient_shards": settings["gradient_shards"], **parameters}))
        start = [] if layout == "1x1" else [smprun, "--np", 2, "--config", config]
        found = losses_in(run(*start, program, model, "--data", samples, "--config", config,
                              "--folder", out, "--json", *options))
        weights = load_file(out / "trained/model/model.safetensors")
        again = torch.export.load(out / "trained/model.pt2").state_dict
        same = (found == losses and len(found) == settings["steps"] and len(weights) > 10
                and all(torch.equal(value, expected[name]) and torch.equal(value, again[name])
                        for name, value in weights.items()))
        different += [] if same else [layout]
    return different


def main(program, smprun):
    failures = 0
    for model, optimizer, lr, schedule, clip in RUNS:
        settings = {"steps": 10, "batch_size": 8, "microbatches": 4, "gradient_shards": 2, "seed": 7,
                    "optimizer": optimizer, "lr": lr, "weight_decay": 0.1, "schedule": schedule,
                    "warmup": 3, "schedule_steps": 10, "final_rate": 0.1, "clip": clip,
                    "loss": "cross_entropy"}
        with tempfile.TemporaryDirectory() as name:
            torch.manual_seed(3)
            tokens = torch.randint(0, 24, (44, 7))
            target = tokens[:, 1:].masked_fill(torch.rand(44, 6) < 0.2, -100)
            tokens = tokens[:, :-1].contiguous().to(torch.uint16)
            save_file({"input": tokens, "target": target},
                      pathlib.Path(name) / "samples.safetensors")
            different = compare(pathlib.Path(name), program, smprun,
                                archive_of(model, pathlib.Path(name)), settings)
        failures += len(different)
        print(f"{model}, {optimizer}, {schedule}, clip {clip}:",
              "differs on " + ", ".join(different) if different else "equal on " + ", ".join(LAYOUTS))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
