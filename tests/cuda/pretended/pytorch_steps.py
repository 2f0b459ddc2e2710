# SPDX-License-Identifier: Apache-2.0
"""Trains the GPT of bench/gpu_graphs.py in PyTorch, for `run` to count the calls of a step.

usage: pytorch_steps.py STEPS [foreach] [fused] [graph]
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "bench"))
import gpu_graphs  # noqa: E402

training = gpu_graphs.Training(small=False, **dict.fromkeys(sys.argv[2:], True))
for _ in range(int(sys.argv[1])):
    training.run()
