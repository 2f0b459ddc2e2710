# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed does over the backend "smddp", held against gloo and one plain process.

Run on every rank: docs/smddp.md gives the commands. Any failed assertion fails the job.
"""

import importlib

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

STEPS = 5
BATCH = 8


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn(BATCH, 6, generator=generator),
        torch.randint(3, (BATCH,), generator=generator),
    )


def train(model, batches_of_step):
    """Plain SGD on the mean loss; the weights after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batches = batches_of_step(step)
        optimizer.zero_grad()
        for x, y in batches:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            (loss / len(batches)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_ddp(rank, size, gloo):
    def data(step):
        return [batch(step, rank)]

    def ddp(group, **options):
        return torch.nn.parallel.DistributedDataParallel(
            make_model(), process_group=group, **options
        )

    ours = train(ddp(None), data)
    theirs = train(ddp(gloo), data)
    plain = train(make_model(), lambda step: [batch(step, r) for r in range(size)])
    for a, b, c in zip(ours, theirs, plain):
        if size == 2:  # a sum of two has one order
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)
    for options in (
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "broadcast_buffers": False},
        {"bucket_cap_mb": 0.0001},
    ):
        for a, b in zip(ours, train(ddp(None, **options), data)):
            torch.testing.assert_close(a, b)


def test_no_sync_and_join(rank, size):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    ones = torch.ones(1, 2) * (rank + 1)
    with model.no_sync():
        model(ones).sum().backward()
    assert torch.equal(model.module.weight.grad, ones)
    model(ones).sum().backward()
    mean = sum(2.0 * (r + 1) for r in range(size)) / size
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 2), mean))
    with model.join():  # ranks with different numbers of batches
        for _ in range(rank + 1):
            model(ones).sum().backward()


def test_collectives(rank, size):
    mine = torch.arange(4.0) + 10 * rank
    everyone = [torch.arange(4.0) + 10 * r for r in range(size)]

    total = mine.clone()
    dist.all_reduce(total)
    assert torch.equal(total, sum(everyone))
    mean = mine.clone()
    work = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    torch.testing.assert_close(mean, sum(everyone) / size)
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1

    given = mine.clone()
    dist.broadcast(given, src=size - 1)
    assert torch.equal(given, everyone[-1])
    summed = mine.clone()
    dist.reduce(summed, dst=0)
    assert rank != 0 or torch.equal(summed, sum(everyone))

    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    assert all(torch.equal(a, b) for a, b in zip(parts, everyone))
    flat = torch.empty(4 * size)
    dist.all_gather_into_tensor(flat, mine)
    assert torch.equal(flat, torch.cat(everyone))
    own = torch.empty(4)
    dist.reduce_scatter_tensor(own, torch.cat([mine + r for r in range(size)]))
    assert torch.equal(own, sum(everyone) + size * rank)

    # Rank r sends r + p + 1 rows to rank p.
    sends = [rank + p + 1 for p in range(size)]
    out = torch.empty(sum(sends), 2)
    rows = torch.cat([torch.full((n, 2), 100.0 * rank + p) for p, n in enumerate(sends)])
    dist.all_to_all_single(out, rows, sends, sends)
    expected = [torch.full((p + rank + 1, 2), 100.0 * p + rank) for p in range(size)]
    assert torch.equal(out, torch.cat(expected))

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    said = [{"seed": 5}] if rank == 0 else [None]
    dist.broadcast_object_list(said, src=0)
    assert said == [{"seed": 5}]
    gathered = [torch.empty(4) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    assert rank != 0 or all(torch.equal(a, b) for a, b in zip(gathered, everyone))
    scattered = torch.empty(4)
    dist.scatter(scattered, everyone if rank == 0 else None, src=0)
    assert torch.equal(scattered, mine)

    received = torch.empty(4)
    requests = [
        dist.isend(mine, (rank + 1) % size, tag=3),
        dist.irecv(received, (rank - 1) % size, tag=3),
    ]
    for request in requests:
        request.wait()
    assert torch.equal(received, everyone[(rank - 1) % size])
    dist.barrier()


def test_groups(rank, size, gloo):
    """New groups, and another backend at the same time: limits that are documented for smddp."""
    last = dist.new_group([size - 1])
    everyone = dist.new_group(list(range(size)))
    one = torch.ones(1)
    if rank == size - 1:
        dist.all_reduce(one, group=last)
        assert one.item() == 1
    dist.all_reduce(one, group=everyone)
    dist.all_reduce(one, group=gloo)
    assert one.item() == size * size
    assert dist.get_backend(everyone) == "smddp" and dist.get_backend(gloo) == "gloo"


def test_errors():
    for name in ("torch.distributed", "torch.parallel", "tensorflow"):
        try:
            importlib.import_module("smdistributed.dataparallel." + name)
        except ImportError as error:
            assert "is deprecated and not available: use" in str(error)
        else:
            raise AssertionError(name + " was imported")
    try:
        dist.recv(torch.empty(1))
    except RuntimeError as error:
        assert "expected the rank to receive from, got any" in str(error)
    else:
        raise AssertionError("a receive from any rank was accepted")


def main():
    torch.set_num_threads(1)
    dist.init_process_group(backend="smddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    test_collectives(rank, size)
    test_ddp(rank, size, gloo)
    test_no_sync_and_join(rank, size)
    test_groups(rank, size, gloo)
    test_errors()
    dist.barrier()
    if rank == 0:
        print(f"smddp: all tests passed on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
