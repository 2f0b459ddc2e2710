# SPDX-License-Identifier: Apache-2.0
"""The same training as worker.cc by PyTorch's DistributedDataParallel over gloo, a process for each rank.

Started by compare.py with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import argparse
import pathlib
import sys
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from peers import VOCABULARY, make_batch, take_steps, whole  # noqa: E402


class ConvNet(nn.Module):
    """norm_net.h."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        x = self.dropout1(torch.max_pool2d(x, 2))
        x = torch.relu(self.fc1(torch.flatten(x, 1)))
        return torch.log_softmax(self.fc2(self.dropout2(x)), 1)


def make(options):
    if options.model == "convnet":
        x = torch.randn(options.batch, 1, 28, 28)
        y = torch.randint(10, (options.batch,))
        return ConvNet(), lambda model: nn.functional.nll_loss(model(x), y)
    shape = types.SimpleNamespace(layers=8, width=512, heads=8, sequence=128, batch=options.batch)
    x, y = make_batch(shape)
    return whole(shape), lambda model: nn.functional.cross_entropy(
        model(x).view(-1, VOCABULARY), y.view(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "barrier"], required=True)
    parser.add_argument("--model", choices=["convnet", "gpt"], required=True)
    for name in ("batch", "steps", "threads"):
        parser.add_argument("--" + name, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    net, loss = make(options)
    model = DistributedDataParallel(net) if options.mode == "ddp" else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss(model).backward()
        if options.mode == "barrier":
            dist.barrier()
        optimizer.step()

    take_steps(step, options.steps)


if __name__ == "__main__":
    main()
