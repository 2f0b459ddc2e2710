#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Computes the results of smp_train, to the bit, in one process of PyTorch: docs/smp_train.md.
usage: smp_train.py MODEL.pt2 SAMPLES.safetensors SETTINGS.json TRAINED.safetensors"""
import json
import math
import sys

import numpy
import torch
from safetensors.torch import load_file, save_file
from smp_streams import KeyedInterpreter, RandomKey  # beside this file
from torch.nn import functional as F

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
LOSSES = {"mse": F.mse_loss, "l1": F.l1_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}

def order(count, seed, epoch):
    n = numpy.uint64  # arithmetic of 64 bits, as in C
    def mix(z):
        z = (z ^ (z >> n(30))) * n(0xbf58476d1ce4e5b9)
        z = (z ^ (z >> n(27))) * n(0x94d049bb133111eb)
        return z ^ (z >> n(31))
    start = mix(mix(numpy.array([seed], n)) + n(epoch))
    return torch.from_numpy(mix(start + numpy.arange(1, count + 1, dtype=n)
                                * n(0x9e3779b97f4a7c15)).argsort())

def rate(s, step):
    if step < s["warmup"]:
        return (step + 1) / s["warmup"]
    done = min((step - s["warmup"]) / max(s["schedule_steps"] - s["warmup"], 1), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if s["schedule"] == "cosine" else 1 - done
    return 1 if s["schedule"] == "constant" else s["final_rate"] + (1 - s["final_rate"]) * left

def loss_sum(s, y, t):
    if s["loss"] == "cross_entropy":
        return F.cross_entropy(y.flatten(0, -2), t.flatten(), reduction="sum")  # without -100
    return LOSSES[s["loss"]](y, t, reduction="sum")

def train(model, x, t, s):
    known = {}  # tied parameters have one memory in the file; here they become one again
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = known.setdefault(p.data_ptr(), p)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if (p.dim() >= 2) == is_matrix],
               "weight_decay": is_matrix * s["weight_decay"]} for is_matrix in (True, False)]
    optimizer = OPTIMIZERS[s["optimizer"]](groups, lr=s["lr"], fused=True)
    size, parts, shards = s["batch_size"], s["microbatches"], s["gradient_shards"]
    for step in range(s["steps"]):
        epoch, place = divmod(step, len(x) // size)
        batch = order(len(x), s["seed"], epoch)[place * size:(place + 1) * size]
        counts = t[batch] != -100 if s["loss"] == "cross_entropy" else torch.ones(t[batch].shape)
        tokens = counts.sum(dtype=torch.int64).clamp(min=1)
        loss, sums = 0, [0] * len(parameters)
        for number, rows in enumerate(batch.chunk(parts)):
            keyed = KeyedInterpreter(model, RandomKey(s["seed"], "train", step, number))
            part = loss_sum(s, keyed.run(x[rows]), t[rows]) * parts / tokens
            part.backward()
            loss = loss + part.detach()
            if (number + 1) % (parts // shards) == 0:  # a shard ends
                sums = [total + p.grad for total, p in zip(sums, parameters)]
                optimizer.zero_grad()
        for total, p in zip(sums, parameters):
            p.grad = total / parts
        torch.nn.utils.clip_grad_norm_(parameters, s["clip"] or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = s["lr"] * rate(s, step)
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step + 1, "loss": (loss / parts).item()}), flush=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    trained = torch.export.load(sys.argv[1]).module()
    data = {name: t.long() if t.dtype in (torch.uint16, torch.uint32) else t
            for name, t in load_file(sys.argv[2]).items()}
    with open(sys.argv[3], encoding="utf-8") as settings:
        train(trained, data["input"], data["target"], json.load(settings))
    save_file({name: p.detach().clone() for name, p in trained.state_dict().items()}, sys.argv[4])
