# SPDX-License-Identifier: Apache-2.0
"""Runs the programs in tests/exported/archives in Python, for tests that compare C++ with it.

usage: results.py FOLDER NAME...  (a Python with torch and safetensors)

FOLDER/NAME.safetensors gets the results of `ep.module()` of NAME.pt2: of three steps the inputs,
the loss and all gradients, with a step of SGD (0.1) after each, and all parameters and buffers at
the end. One thread, and torch.manual_seed(100 + step) before the forward pass of each step. Of
evaluations, which are without gradients, there are inputs and losses only. Inputs that the program
has written are there once more, as it leaves them.
"""

import pathlib
import sys
from unittest import mock

import torch
import torch._export.verifier
from safetensors.torch import save_file

import make_fixtures

ARCHIVES = pathlib.Path(__file__).parent / "archives"
STEPS = 3


def load(path):
    """The program, with its weights in memory of libtorch's, which is aligned: torch.export.load
    leaves them in bytes of Python, and kernels may round by where an operand starts."""
    # torch 2.11 writes a region without results, and then asks for a value of it.
    with mock.patch.object(torch._export.verifier, "_check_val"):
        program = torch.export.load(path)
    aligned = {}  # tied weights stay so
    for tensor in program.state_dict.values():
        tensor.data = aligned.setdefault(tensor.data_ptr(), tensor.data.clone())
    return program


def loss_of(result):
    if isinstance(result, dict):
        result = result["out"][0]
    return (result * result).mean()


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


def results_of(program, make_inputs, train):
    """The results of a training, or an evaluation, by Python's module of the program."""
    module = program.module()
    parameters = dict(module.named_parameters())
    tensors = {}
    for step in range(STEPS):
        torch.manual_seed(50 + step)
        args, kwargs = make_inputs(step)
        inputs = tensors_in([args, kwargs])
        for i, tensor in enumerate(inputs):
            tensors[f"{step}.input.{i}"] = tensor.clone()
        torch.manual_seed(100 + step)
        module.zero_grad()
        with torch.set_grad_enabled(train):
            loss = loss_of(module(*args, **kwargs))
        tensors[f"{step}.loss"] = loss.detach()
        for i, tensor in enumerate(inputs):
            if not torch.equal(tensor, tensors[f"{step}.input.{i}"]):
                tensors[f"{step}.written.{i}"] = tensor.clone()
        if not train:
            continue
        loss.backward()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                tensors[f"{step}.gradient.{name}"] = parameter.grad.clone()
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=-0.1)
    for name, tensor in [*parameters.items(), *module.named_buffers()] if train else []:
        tensors[f"value.{name}"] = tensor.detach().clone()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def main(folder, names):
    torch.set_num_threads(1)
    for name in names:
        inputs = make_fixtures.PROGRAMS[name][2]
        program = load(ARCHIVES / f"{name}.pt2")
        save_file(results_of(program, inputs, train=not name.endswith("_eval")),
                  folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
