# SPDX-License-Identifier: Apache-2.0
"""usage: forked.py RANKS SCRIPT [ARGUMENT...] [+ RANKS SCRIPT [ARGUMENT...]]...

Runs scripts one after the other, each on ranks that have the variables that torchrun sets. The ranks
are forks of this process, which has imported torch, so that it is imported once for all of them.
"""

import gc
import itertools
import os
import runpy
import socket
import sys

import torch  # noqa: F401
import torch._dynamo  # noqa: F401  (DistributedDataParallel imports it)


def free_port():
    with socket.socket() as bound:
        bound.bind(("", 0))
        return bound.getsockname()[1]


def variables(rank, ranks, port):
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run(ranks, script, *arguments):
    """Runs the script; False in the ranks, which so end as any script does."""
    print("---", ranks, script, *arguments, flush=True)
    processes, port = {}, free_port()
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            os.environ.update(variables(rank, ranks, port))
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return False
        processes[process] = rank
    statuses = {rank: os.waitpid(process, 0)[1] for process, rank in processes.items()}
    assert not any(statuses.values()), f"the ranks ended with {statuses}"
    return True


def main():
    gc.freeze()  # no rank goes through all of torch's objects when it ends
    for is_end, words in itertools.groupby(sys.argv[1:], lambda word: word == "+"):
        if not is_end:
            ranks, *command = words
            if not run(int(ranks), *command):
                return


if __name__ == "__main__":
    main()
