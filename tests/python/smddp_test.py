# SPDX-License-Identifier: Apache-2.0
"""The collectives of torch.distributed over the backend "smddp", held against gloo and one plain
process.

Run on every rank: docs/data_parallel.md gives the commands. Any failed assertion fails the job.
"""

import datetime
import importlib
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

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


def test_truth_values(rank, size):
    for op, expected in (
        (dist.ReduceOp.SUM, [True, True, False]),
        (dist.ReduceOp.PRODUCT, [size == 1, True, False]),
    ):
        values = torch.tensor([rank == 0, True, False])
        dist.all_reduce(values, op=op)
        assert values.tolist() == expected, op


def test_permuted(rank, size):
    """Each rank lays its tensor out in another way; elements are told by their indices."""

    def laid_out(values):
        image = torch.arange(120.0).view(2, 3, 4, 5) + values
        return image.contiguous(memory_format=torch.channels_last) if rank % 2 else image

    total = laid_out(rank)
    assert total.is_contiguous() == (rank % 2 == 0)
    dist.all_reduce(total)
    assert torch.equal(total, size * laid_out(0) + sum(range(size)))
    given = laid_out(rank)
    dist.broadcast(given, src=size - 1)
    assert torch.equal(given, laid_out(size - 1))
    column = torch.full((2, 3), float(rank)).t()
    parts = [torch.empty(2, 3).t() for _ in range(size)]
    dist.all_gather(parts, column)
    assert all((part == r).all() for r, part in enumerate(parts))
    error = error_of(lambda: dist.all_reduce(torch.ones(8)[::2]))
    assert "on group 'world': expected tensor to be contiguous, got sizes [4]" in error, error


def test_receive_from_any(rank, size):
    if rank != 0:
        dist.send(torch.tensor([rank]), 0, tag=5)
        dist.send(torch.tensor([rank]), 0, tag=6)
        return
    got = torch.empty(1, dtype=torch.int64)
    sources = []
    for _ in range(1, size):
        sources.append(dist.recv(got, tag=5))
        assert got.item() == sources[-1]
    for source in range(1, size):
        work = dist.irecv(got, source, tag=6)
        work.wait()
        assert work._source_rank() == source == got.item()
    assert sorted(sources) == list(range(1, size))


def test_futures(rank, size):
    """A callback may wait for later futures; PowerSGD's hook does."""
    one, two = torch.ones(3), torch.ones(3)

    def callback(future):
        dist.all_reduce(two, async_op=True).get_future().wait()
        return [future.value()[0] + two]

    last = dist.all_reduce(one, async_op=True).get_future().then(callback)
    last.wait()
    assert torch.equal(last.value()[0], torch.full((3,), 2.0 * size))


def test_power_sgd(rank, gloo):
    def trained(group):
        model = torch.nn.parallel.DistributedDataParallel(make_model(), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return train(model, lambda step: [batch(step, rank)])

    for a, b in zip(trained(None), trained(gloo)):
        torch.testing.assert_close(a, b)


def test_timeout_of_a_wait(rank, size):
    """The wait's own, far below the group's; the receive goes on."""
    got = torch.zeros(2)
    work = dist.irecv(got, (rank + 1) % size, tag=8)
    start = time.monotonic()
    error = error_of(lambda: work.wait(datetime.timedelta(milliseconds=200)))
    assert time.monotonic() - start < 100
    assert "c10d recv on group 'world' was not complete within the timeout of 0.2 s" in error, error
    dist.barrier()
    dist.send(torch.ones(2), (rank - 1) % size, tag=8)
    work.wait()
    assert torch.equal(got, torch.ones(2))


def test_profiler(rank, size):
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3))
        requests = [
            dist.isend(torch.ones(5), (rank + 1) % size),
            dist.irecv(torch.ones(5), (rank - 1) % size),
        ]
        for request in requests:
            request.wait()
        dist.barrier()
    shapes = {e.name: e.input_shapes for e in profile.events() if e.name.startswith("smddp:")}
    expected = {"all_reduce": [[2, 3]], "send": [[5]], "recv": [[5]], "barrier": []}
    assert shapes == {"smddp:" + name: value for name, value in expected.items()}, shapes


def test_deprecated_modules(rank, size):
    """Scripts of before 1.4 import these, and need nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = importlib.import_module("smdistributed.dataparallel.torch.distributed")
        parallel = importlib.import_module("smdistributed.dataparallel.torch.parallel.distributed")
    assert sum("is deprecated: use" in str(warning.message) for warning in caught) == 2
    assert old.is_available() and old.is_initialized()
    assert (old.get_rank(), old.get_world_size()) == (rank, size)
    assert (old.get_local_rank(), old.get_local_size()) == (rank, size)
    values = torch.tensor([float(rank)])
    old.all_reduce(values, op=old.ReduceOp.AVERAGE)
    assert values.item() == (size - 1) / 2
    old.all_reduce(values, async_op=True).wait()
    assert values.item() == size * (size - 1) / 2
    old.barrier()
    model = parallel.DistributedDataParallel(make_model(), None, None, True, None, 1)
    plain = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=1)
    for a, b in zip(*(train(m, lambda step: [batch(step, rank)]) for m in (model, plain))):
        assert torch.equal(a, b)


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("expected an error")


def test_errors(group):
    error = error_of(lambda: dist.all_reduce(torch.eye(2).to_sparse(), group=group))
    assert "to be dense, got a tensor of layout Sparse. Pass to_dense() of it." in error, error
    assert "all_reduce on group 'new_group" in error and "of ranks [0, 1" in error, error
    try:
        importlib.import_module("smdistributed.dataparallel.tensorflow")
    except ImportError as error:
        assert "is deprecated and not available: use" in str(error)
    else:
        raise AssertionError("the package for TensorFlow was imported")


def test_again():
    """The store of torchrun keeps the entries of earlier groups of these processes."""
    for _ in range(4):
        dist.destroy_process_group()
        dist.init_process_group(backend="smddp")
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == dist.get_world_size()


def main():
    torch.set_num_threads(1)
    dist.init_process_group(backend="smddp")
    assert dist.Backend.backend_capability["smddp"] == ["cpu", "cuda"]
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    everyone = dist.new_group(list(range(size)))
    test_collectives(rank, size)
    test_ddp(rank, size, gloo)
    test_no_sync_and_join(rank, size)
    test_groups(rank, size, gloo)
    test_truth_values(rank, size)
    test_permuted(rank, size)
    test_receive_from_any(rank, size)
    test_futures(rank, size)
    test_power_sgd(rank, gloo)
    test_timeout_of_a_wait(rank, size)
    test_profiler(rank, size)
    test_deprecated_modules(rank, size)
    test_errors(everyone)
    dist.barrier()
    test_again()
    if rank == 0:
        print(f"smddp: all tests passed on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
