# SPDX-License-Identifier: Apache-2.0
"""The console scripts: each becomes the program of its name in the wheel."""

import os
import pathlib
import sys


def _run(name):
    program = pathlib.Path(__file__).parent / "bin" / name
    os.execv(program, [name, *sys.argv[1:]])


def smprun():
    _run("smprun")


def smp_plan():
    _run("smp_plan")


def smp_ckpt():
    _run("smp_ckpt")


def smp_diff():
    _run("smp_diff")


def smp_train():
    _run("smp_train")
