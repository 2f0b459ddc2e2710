# SPDX-License-Identifier: Apache-2.0
"""The console scripts: each becomes the program of its name in the wheel."""

import functools
import os
import pathlib
import sys


def _run(name):
    program = pathlib.Path(__file__).parent / "bin" / name
    os.execv(program, [name, *sys.argv[1:]])


smprun = functools.partial(_run, "smprun")
smp_plan = functools.partial(_run, "smp_plan")
smp_ckpt = functools.partial(_run, "smp_ckpt")
smp_diff = functools.partial(_run, "smp_diff")
smp_train = functools.partial(_run, "smp_train")
