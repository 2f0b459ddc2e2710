#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares DistributedDataParallel with PyTorch's own on the same model and data.

    bazel build //bench/ddp:gradients //tools:smprun_bin
    PYTHON bench/ddp/against_pytorch.py

PYTHON has torch 2.11 (`pip install torch==2.11.0 numpy`). Two ranks each train the network of
norm_net.h for some steps, with PyTorch over gloo and with smp; then gradients, parameters
and, where both broadcast them alike, buffers of each rank are compared. The modes are plain training, accumulation under `no_sync`,
uneven inputs under `join`, and the hooks for half precision. Ends with 1 where they differ by more
than rounding.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_peer import ConvNet

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS, STEPS, BATCH = 2, 4, 8
# The largest difference relative to the largest element. gloo adds half precision in half
# precision; smp in float32, rounded once.
MODES = {"plain": 1e-5, "no_sync": 1e-5, "join": 1e-5, "fp16": 2e-3, "bf16": 2e-2}


def write_input(folder):
    torch.manual_seed(1)
    net = ConvNet()
    torch.save({**net.state_dict(), "x": torch.randn(RANKS, STEPS, BATCH, 1, 28, 28),
                "y": torch.randint(10, (RANKS, STEPS, BATCH))}, folder / "input.pt")


def train(rank, folder, mode):
    """The same as `train` of gradients.cc."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29741")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = torch.load(folder / "input.pt")
    net = ConvNet()
    net.dropout1.p = net.dropout2.p = 0
    net.load_state_dict({name: data[name] for name in net.state_dict()})
    model = DistributedDataParallel(net)
    if mode in ("fp16", "bf16"):
        model.register_comm_hook(None, getattr(default_hooks, f"{mode}_compress_hook"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data["x"][rank], data["y"][rank]
    batches = STEPS - rank if mode == "join" else STEPS
    with model.join() if mode == "join" else contextlib.nullcontext():
        for i in range(batches):
            add_up = mode == "no_sync" and i % 2 == 0
            with model.no_sync() if add_up else contextlib.nullcontext():
                nn.functional.nll_loss(model(x[i]), y[i]).backward()
            if add_up:
                continue
            optimizer.step()
            if i + 1 < batches:
                optimizer.zero_grad()
    gradients = {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    torch.save({**net.state_dict(), **gradients}, folder / f"torch-{rank}.pt")
    dist.destroy_process_group()


def compare(folder, mode):
    """Prints the largest differences; returns whether they are small."""
    worst, same = ("", 0.0), True
    for rank in range(RANKS):
        # Tensors pickled by C++ carry a type tag that torch.load takes for code.
        ours = torch.load(folder / f"ours-{rank}.pt", weights_only=False)
        theirs = torch.load(folder / f"torch-{rank}.pt")
        for name, tensor in theirs.items():
            if mode == "join" and name.startswith("gradient"):
                continue  # a rank that has joined keeps nothing that is defined
            # Ours broadcasts before a pass that reduces, PyTorch after one; and in `join` ours from
            # the first rank that has data, PyTorch from the last.
            if mode in ("no_sync", "join") and name.split(".")[-1].startswith(("running", "num")):
                continue
            difference = (ours[name].double() - tensor.double()).abs().max()
            scale = tensor.double().abs().max().clamp(min=1e-12)
            same = same and torch.equal(ours[name], tensor)
            worst = max(worst, (name, float(difference / scale)), key=lambda pair: pair[1])
    equal = "equal in every bit" if same else f"largest relative difference {worst[1]:.1e} ({worst[0]})"
    print(f"{mode}: {equal}")
    return worst[1] <= MODES[mode]


def main():
    good = True
    for mode in MODES:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            write_input(folder)
            multiprocessing.spawn(train, (folder, mode), nprocs=RANKS)
            subprocess.run([ROOT / "bazel-bin/tools/smprun_bin", "--config",
                            ROOT / "examples/mnist_ddp/ddp.json", "--np", str(RANKS),
                            ROOT / "bazel-bin/bench/ddp/gradients", "--folder", folder, "--mode",
                            mode], check=True, stdout=subprocess.DEVNULL)
            good = compare(folder, mode) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
