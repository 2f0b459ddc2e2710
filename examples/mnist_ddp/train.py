# SPDX-License-Identifier: Apache-2.0
"""The script of the documentation of smddp and of PyTorch: MNIST by DistributedDataParallel, saved by
rank 0, loaded by all ranks behind a barrier, and trained on.

    torchrun --nproc-per-node 2 examples/mnist_ddp/train.py --backend smddp --data DIR

DIR holds the idx files. With --backend none one process trains on the batches of two ranks, one
after the other: the weights that two ranks have, to the bit where no dropout draws numbers.
"""

import argparse
import gzip
import os

import numpy
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, dropout=1.0):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25 * dropout)
        self.dropout2 = nn.Dropout(0.5 * dropout)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def read_idx(path):
    """The bytes of an idx file, which may be gzipped, in its shape."""
    found, opener = (path, open) if os.path.exists(path) else (path + ".gz", gzip.open)
    with opener(found, "rb") as file:
        raw = file.read()
    axes = raw[3]
    shape = numpy.frombuffer(raw, ">u4", axes, 4)
    return numpy.frombuffer(raw, "u1", -1, 4 + 4 * axes).reshape(shape).copy()


def digits(folder, name):
    """Digits as MNIST's examples normalise them: `name` is "train" or "t10k"."""
    images = torch.from_numpy(read_idx(os.path.join(folder, f"{name}-images-idx3-ubyte")))
    labels = torch.from_numpy(read_idx(os.path.join(folder, f"{name}-labels-idx1-ubyte")))
    return TensorDataset((images[:, None] / 255 - 0.1307) / 0.3081, labels.long())


def train(model, loaders, optimizer, device):
    model.train()
    for batches in zip(*loaders):
        optimizer.zero_grad()
        for data, target in batches:
            output = model(data.to(device))
            (F.nll_loss(output, target.to(device)) / len(batches)).backward()
        optimizer.step()


@torch.no_grad()
def test(model, dataset, device, said):
    model.eval()
    loss, correct = 0.0, 0
    for data, target in DataLoader(dataset, batch_size=500):
        output, target = model(data.to(device)), target.to(device)
        loss += F.nll_loss(output, target, reduction="sum").item()
        correct += output.argmax(dim=1).eq(target).sum().item()
    print(f"{said}: average loss {loss / len(dataset):.4f}, accuracy {correct}/{len(dataset)}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["smddp", "gloo", "nccl", "none"], default="smddp")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", required=True, help="folder of the idx files")
    parser.add_argument("--batch-size", type=int, default=64, help="digits of a step of all ranks")
    parser.add_argument("--epochs", type=int, default=14, help="before the checkpoint is saved")
    parser.add_argument("--more-epochs", type=int, default=1, help="after it is loaded")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dropout", type=float, default=1.0, help="factor on its probabilities")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", default="mnist_ddp.pt")
    parser.add_argument("--save-weights", help="where each rank leaves its weights; {} is its rank")
    return parser.parse_args()


def main():
    args = parse_arguments()
    alone = args.backend == "none"
    if args.backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    if not alone:
        dist.init_process_group(backend=args.backend)
    rank, world_size = (0, 2) if alone else (dist.get_rank(), dist.get_world_size())
    device = torch.device("cpu")
    if args.device == "cuda" or args.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed + rank)  # DDP gives all ranks the weights of rank 0
    net = Net(args.dropout).to(device)
    model = net if alone else DDP(net)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    training, testing = digits(args.data, "train"), digits(args.data, "t10k")

    def loader_of(one, epoch):
        sampler = DistributedSampler(training, num_replicas=world_size, rank=one, seed=args.seed)
        sampler.set_epoch(epoch)
        return DataLoader(training, batch_size=args.batch_size // world_size, sampler=sampler)

    def train_epochs(first, last):
        for epoch in range(first, last):
            ranks = range(world_size) if alone else [rank]
            train(model, [loader_of(one, epoch) for one in ranks], optimizer, device)
            scheduler.step()
            if rank == 0:
                test(net, testing, device, f"epoch {epoch}")

    train_epochs(0, args.epochs)
    if rank == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, args.checkpoint)
    if not alone:
        dist.barrier()
    saved = torch.load(args.checkpoint, map_location=device)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    test(net, testing, device, f"rank {rank} has loaded")
    train_epochs(args.epochs, args.epochs + args.more_epochs)
    if args.save_weights:
        torch.save(list(net.state_dict().values()), args.save_weights.format(rank))
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
