#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The measurements of bench/transfer, for torch.distributed over gloo: one way between two
ranks of one host, as a ratio to memcpy in the same rounds, and the latency of 64 bytes.

usage: transfer_gloo.py   (with a Python that has torch)
"""

import multiprocessing
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

ROUNDS = 21


def one_way(rank, tensor, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
    return (time.perf_counter() - start) / (2 * repeats)


def copy(target, source, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        target.copy_(source)
    return (time.perf_counter() - start) / repeats


def measure_bandwidth(rank):
    size = 4 << 10
    while size <= 64 << 20:
        tensor, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        repeats = max(2, (16 << 20) // size)
        times, ratios = [], []
        for _ in range(ROUNDS):
            dist.barrier()
            copied = copy(target, tensor, repeats) if rank == 0 else 0
            dist.barrier()
            times.append(one_way(rank, tensor, repeats))
            ratios.append(copied / times[-1])
        if rank == 0:
            print(f"{size:10d} {statistics.median(times) * 1e6:10.1f} us, "
                  f"ratio {statistics.median(ratios):.2f}", flush=True)
        size *= 4


def measure_latency(rank, pause, messages, title):
    message, times = torch.zeros(8, dtype=torch.int64), []
    dist.barrier()
    for i in range(messages):
        if (i % 2 == 0) == (rank == 0):
            time.sleep(pause) if pause else None
            message[0] = time.monotonic_ns()
            dist.send(message, 1 - rank)
        else:
            dist.recv(message, 1 - rank)
            times.append((time.monotonic_ns() - int(message[0])) / 1000)
    if rank == 0:
        print(f"{title}: {statistics.median(times):.2f} us", flush=True)


def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    measure_latency(rank, 0, 5001, "latency of 64 bytes, both awake")
    measure_latency(rank, 0.002, 301, "latency of 64 bytes, the receiver asleep")
    measure_bandwidth(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [multiprocessing.Process(target=run, args=(rank, folder + "/store"))
                 for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
