# SPDX-License-Identifier: Apache-2.0
"""usage: smddp_exit.py PAIRS

How processes end that do not call destroy_process_group: all with status 0.

Makes pairs of processes for each way to end, by the last line of a script, while the library's threads
complete what it has started. Forks instead of starting Python anew, to make many.
"""

import gc
import os
import shutil
import sys
import tempfile

import torch
import torch._dynamo  # each process that trains would import it by DistributedDataParallel
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401


def end_after_futures(rank):
    """The last to hold a result may be the thread that completes futures."""
    for _ in range(50):
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait()


def end_with_works_under_way(rank):
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True).get_future()
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.isend(torch.ones(1 << 20), 1 - rank)


def end_after_callbacks(rank):
    seen = []
    for _ in range(20):
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        work.get_future().then(lambda future: seen.append(future.value()[0].sum()))
        work.wait()


def end_after_training(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(5):
        model(torch.ones(2, 8)).sum().backward()


ENDS = [end_after_futures, end_with_works_under_way, end_after_callbacks, end_after_training]


def child(rank, end, store):
    torch.set_num_threads(1)
    dist.init_process_group("smddp", init_method=f"file://{store}", rank=rank, world_size=2)
    end(rank)


def main():
    """Returns in the children, too, which so end as any script."""
    folder, pairs = tempfile.mkdtemp(), int(sys.argv[1])
    gc.freeze()  # no child goes through all of torch's objects when it ends
    for number in range(pairs):
        for end in ENDS:
            processes = {}
            for rank in range(2):
                process = os.fork()
                if process == 0:
                    return child(rank, end, os.path.join(folder, f"{number}_{end.__name__}"))
                processes[process] = rank
            for process, rank in processes.items():
                status = os.waitpid(process, 0)[1]
                assert status == 0, f"{end.__name__}: rank {rank} ended with status {status}"
    shutil.rmtree(folder)
    print(f"smddp: {2 * pairs * len(ENDS)} processes ended with status 0", flush=True)


if __name__ == "__main__":
    main()
