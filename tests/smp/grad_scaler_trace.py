#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints tests/smp/grad_scaler_trace.h: the scales of torch.amp.GradScaler for given overflows.

Needs Python's torch (recorded with 2.11, on the CPU):

    python3 tests/smp/grad_scaler_trace.py > tests/smp/grad_scaler_trace.h
"""
import random

import torch

RUNS = [
    dict(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3),
    dict(init_scale=3.7, growth_factor=1.5, backoff_factor=0.3, growth_interval=2),
    # Grows as far as float32 reaches.
    dict(init_scale=2.0**126, growth_factor=2.0, backoff_factor=0.5, growth_interval=1),
    # Falls below every float32.
    dict(init_scale=2.0**-146, growth_factor=2.0, backoff_factor=0.25, growth_interval=2),
]
STEPS = 24
NON_FINITE = [float("inf"), float("-inf"), float("nan")]


class CountingSgd(torch.optim.SGD):
    steps = 0

    def step(self):
        self.steps += 1


def record(number, options):
    draw = random.Random(number)
    scaler = torch.amp.GradScaler("cpu", **options)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = CountingSgd([weight], lr=1.0)
    scaler.scale(torch.zeros(()))
    for step in range(STEPS):
        overflows = draw.random() < (0.1 if number == 2 else 0.3)
        weight.grad = torch.ones(3)
        if overflows:
            weight.grad[draw.randrange(3)] = draw.choice(NON_FINITE)
        before = optimizer.steps
        scaler.step(optimizer)
        stepped = optimizer.steps > before
        scaler.update()
        state = scaler.state_dict()
        yield overflows, stepped, state["scale"], state["_growth_tracker"]


def boolean(value):
    return "true" if value else "false"


print("#pragma once")
print()
print("#include <vector>")
print()
print("// Written by grad_scaler_trace.py with torch " + torch.__version__.split("+")[0] + ".")
print("namespace smp::testing {")
print()
print("/// A step of torch.amp.GradScaler: whether the gradient was not finite, whether the optimizer")
print("/// stepped, and the state after update().")
print("struct ScalerStep {")
print("  bool overflow;")
print("  bool stepped;")
print("  double scale;")
print("  int growth_tracker;")
print("};")
print()
print("struct ScalerRun {")
print("  double init_scale, growth_factor, backoff_factor;")
print("  int growth_interval;")
print("  std::vector<ScalerStep> steps;")
print("};")
print()
print("inline const std::vector<ScalerRun>& scaler_runs() {")
print("  static const std::vector<ScalerRun> runs = {")
for number, options in enumerate(RUNS):
    print("      {%s, %s, %s, %d," % (
        options["init_scale"].hex(), options["growth_factor"], options["backoff_factor"],
        options["growth_interval"]))
    print("       {")
    for overflows, stepped, scale, tracker in record(number, options):
        print("           {%s, %s, %s, %d}," % (
            boolean(overflows), boolean(stepped), float(scale).hex(), tracker))
    print("       }},")
print("  };")
print("  return runs;")
print("}")
print()
print("}  // namespace smp::testing")
