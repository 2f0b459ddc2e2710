# SPDX-License-Identifier: Apache-2.0
"""Trains a model of Python as smp does: as an exported program, or eagerly.

Three steps of three microbatches: their gradients are summed in order and divided once, and random
operators draw from the streams of a step function "train" (docs/smp_streams.py). zoo_run.cc does the same.
"""

import torch
from torch.utils import _pytree as pytree

import smp_streams as streams

STEPS = 3
MICROBATCHES = 3
SAMPLES = 2  # samples of a microbatch
SEED = 11

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1,
                                                  fused=True),
}


def key_of(step, microbatch):
    return streams.RandomKey(SEED, "train", step, microbatch)


def loss_of(result, kind, targets):
    """Computes the loss that the model has of its own, or one of its outputs."""
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if kind == "own":
        return outputs[0]
    if kind == "cross_entropy":
        return torch.nn.functional.cross_entropy(outputs[0], targets["y"])
    total = None
    for output in outputs:
        if output.is_floating_point():
            term = (output * output).mean()
            total = term if total is None else total + term
    return total


def microbatch_of(tensors, microbatch):
    """Cuts it from a batch: tensors of its own, which are aligned."""
    start = microbatch * SAMPLES
    return {name: tensor[start:start + SAMPLES].clone() for name, tensor in tensors.items()}


def train(module, optimizer, batches, loss, call):
    """Returns losses, gradients and values at the end, by name.

    `call(inputs, key)` runs the module.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    distinct = list(module.parameters())
    update = OPTIMIZERS[optimizer](distinct)
    trace = {}
    for step, (inputs, targets) in enumerate(batches):
        sums, losses = {}, []
        for microbatch in range(MICROBATCHES):
            update.zero_grad()
            result = call(microbatch_of(inputs, microbatch), key_of(step, microbatch))
            value = loss_of(result, loss, microbatch_of(targets, microbatch))
            value.backward()
            losses.append(value.detach())
            for parameter in distinct:
                if parameter.grad is not None:
                    known = sums.get(parameter)
                    sums[parameter] = (parameter.grad.clone() if known is None
                                       else known + parameter.grad)
        for parameter in distinct:
            parameter.grad = sums[parameter] / MICROBATCHES if parameter in sums else None
        trace[f"{optimizer}.{step}.loss"] = torch.stack(losses)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                trace[f"{optimizer}.{step}.gradient.{name}"] = parameter.grad.clone()
        update.step()
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in [*parameters.items(), *buffers.items()]:
        trace[f"{optimizer}.value.{name}"] = tensor.detach().clone()
    return trace


def tensors_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def run_keyed(module, inputs, key, on_random=None):
    """Calls `ep.module()` with arguments by name, in the order of the export."""
    return streams.KeyedInterpreter(module, key, on_random).run(*inputs.values())


def train_program(program, batches, loss):
    """The results of `ep.module()` with each optimizer, by name."""
    module, buffers = program.module(), set(program.graph_signature.buffers)
    initial = {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}
    trace = {}
    for optimizer in OPTIMIZERS:
        with torch.no_grad():
            for name, tensor in tensors_of(module).items():
                tensor.copy_(initial[name])
                tensor.grad = None
        trace.update(train(module, optimizer, batches, loss,
                           lambda inputs, key: run_keyed(module, inputs, key)))
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)} | buffers
    def is_known(key):
        _, kind, name = key.split(".", 2)
        return kind != "value" or name in names

    return {key: tensor.contiguous() for key, tensor in trace.items() if is_known(key)}


def same_bits(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bytes_of(a) == bytes_of(b)


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
