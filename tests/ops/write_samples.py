#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes samples of torch's OpInfo and ModuleInfo databases for //tests/ops:samples_test.

    tests/ops/write_samples.py FOLDER [--few] [--only NAME...]

Runs in a Python that has torch 2.11, numpy and expecttest. A sample is run under an interceptor on
the dispatch key that smp captures at (graph/intercept.h), and written as the operators that it
calls, the tensors that go in, the outputs, and the gradients of a weighted sum of the outputs.
FOLDER gets pairs NAME.json and NAME.safetensors, a few for each hundred operators, and
skipped.json: which samples are no list of operators, and why. --few: the smallest sample of each
operator, which is what the repository holds (tests/ops/samples).
"""

import argparse
import collections
import itertools
import json
import math
import pathlib
import random
import re
import shutil
import struct
import unittest.mock

import numpy
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

DTYPES = [torch.float32, torch.complex64, torch.int64, torch.bool]
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16",
         torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
         torch.uint8: "U8", torch.bool: "BOOL"}
MOST_BYTES = 1 << 20  # most bytes of a sample's tensors
FEW_BYTES = 8 << 10  # the same with --few
MOST_TRIED = 40  # samples of an operator among which --few takes the smallest
# Operators whose result has no determined content.
UNDETERMINED = re.compile(r"aten::(_?new_empty|_?empty|resize|set_|_resize|_efficientzero)")
KEY = torch._C._dispatch_key_parse("DeferredInit")


class Skipped(Exception):
    """The sample is no list of operators."""


class Recorder:
    """While `record` runs a function, every operator that it calls becomes a line of `calls`."""

    def __init__(self):
        self.library = torch.library.Library("_", "IMPL")
        self.library.fallback(self.call, "DeferredInit")

    def record(self, function, tensors):
        self.ids, self.kept, self.calls, self.random = {}, [], [], False
        for tensor in tensors:
            self.define(tensor)
        with torch._C._IncludeDispatchKeyGuard(KEY):
            return function()

    def define(self, tensor):
        self.kept.append(tensor)  # so that no other object gets its id
        self.ids[id(tensor)] = len(self.kept) - 1

    def find(self, tensor):
        """The number of a value. Factories return a shallow copy of their tensor."""
        if id(tensor) in self.ids:
            return self.ids[id(tensor)]
        for index in reversed(range(len(self.kept))):
            if same_memory(self.kept[index], tensor):
                return index
        raise Skipped("a tensor that Python makes without an operator")

    def call(self, operator, *arguments, **keywords):
        schema = operator._schema
        if operator.namespace != "aten":
            raise Skipped("an operator that Python defines")
        if UNDETERMINED.match(schema.name):
            raise Skipped("its result has no determined content")
        line = [schema.name, schema.overload_name, [self.encode(each) for each in arguments],
                {name: self.encode(each) for name, each in keywords.items()}]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY)):
            result = operator(*arguments, **keywords)
        for tensor in flat_tensors(result):
            self.define(tensor)
        self.calls.append(line)
        self.random |= torch.Tag.nondeterministic_seeded in operator.tags
        return result

    def encode(self, value):
        if isinstance(value, torch.Tensor):
            return {"tensor": self.find(value)}
        if isinstance(value, (list, tuple)):
            return [self.encode(each) for each in value]
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).split(".")[1]}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value).split(".")[1]}
        if isinstance(value, torch.device) and value.type == "cpu":
            return {"device": "cpu"}
        if value is torch.strided:
            return {"layout": "strided"}
        raise Skipped(f"an argument of type {type(value).__name__}")


def same_memory(a, b):
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    return (a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.dtype == b.dtype and
            a.shape == b.shape and a.stride() == b.stride() and
            a.storage_offset() == b.storage_offset())


def decode(value, values):
    """The inverse of `Recorder.encode`."""
    if isinstance(value, list):
        return [decode(each, values) for each in value]
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == "tensor":
        return values[content]
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*content)
    return torch.device(content) if kind == "device" else getattr(torch, content)


def replay(calls, tensors):
    """The values that the calls make, after those given."""
    values = list(tensors)
    for name, overload, arguments, keywords in calls:
        operator = getattr(torch.ops.aten, name.split("::")[1])
        result = getattr(operator, overload or "default")(
            *decode(arguments, values),
            **{name: decode(each, values) for name, each in keywords.items()})
        values += flat_tensors(result)
    return values


def flat_tensors(value):
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def weighted_sum(outputs):
    """The loss that gradients are of; sample_step.cc has the same."""
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output.requires_grad:
            weights = ((torch.arange(output.numel()) * 7) % 13 + 1).reshape(output.shape) / 16
            parts = [output.real, output.imag] if output.is_complex() else [output]
            for part in parts:
                loss = loss + (part * weights.to(part.dtype)).sum().double()
    return loss


def leaf_of(tensor):
    """A tensor of the sample as one that the file can hold."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Skipped(f"a {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise Skipped("a sparse or quantized tensor")
    if (torch.view_as_real(tensor) if tensor.is_complex() else tensor).dtype not in NAMES:
        raise Skipped(f"tensors of {tensor.dtype}")
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(plain)
    copy = plain.clone() if dense else plain.clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(tensor.requires_grad)


def run(function, leaves):
    """The outputs of `function` on the leaves and the leaves' gradients."""
    inputs = [leaf * 1 if leaf.requires_grad else leaf.clone() for leaf in leaves]
    outputs = function(inputs)
    loss = weighted_sum(outputs)
    gradients = [None] * len(leaves)
    if loss.requires_grad:
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        found = torch.autograd.grad(loss, [leaves[i] for i in wanted], allow_unused=True)
        for i, gradient in zip(wanted, found):
            gradients[i] = gradient
    return [output.detach().clone() for output in outputs], gradients


def same(a, b):
    return all(
        (x is None) == (y is None) and
        (x is None or (x.shape == y.shape and x.dtype == y.dtype and
                       torch.equal(x.isnan(), y.isnan()) and
                       torch.allclose(x, y, equal_nan=True)))
        for x, y in zip(a, b))


def capture(recorder, function, tree):
    """`function(tree)` as a sample; `tree` has its tensors."""
    flat, spec = pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf_of(flat[i]) for i in places]

    recorded = {}

    def call(inputs):
        values = list(flat)
        for place, tensor in zip(places, inputs):
            values[place] = tensor
        with unittest.mock.patch("torch.manual_seed"):  # some draw with a seed of their own
            outputs = flat_tensors(recorder.record(
                lambda: function(pytree.tree_unflatten(values, spec)), inputs))
        recorded["outputs"] = [recorder.find(output) for output in outputs]
        if any(output.layout != torch.strided for output in outputs):
            raise Skipped("a sparse result")
        return outputs

    torch.manual_seed(1)
    expected = run(call, leaves)
    calls, outputs = recorder.calls, recorded["outputs"]
    if not calls or not outputs:
        raise Skipped("it calls no operator on tensors")

    def again(seed):
        torch.manual_seed(seed)
        return run(lambda inputs: [replay(calls, inputs)[i] for i in outputs], leaves)

    got = again(1)
    if not (same(got[0], expected[0]) and same(got[1], expected[1])):
        raise Skipped("it does more than to call operators")
    is_random = recorder.random or not same(again(2)[0], expected[0])
    return {"tensors": leaves, "calls": calls, "outputs": outputs, "random": is_random,
            "expected": ([], []) if is_random else expected}


class File:
    """Samples and their tensors, each content once."""

    def __init__(self):
        self.samples, self.tensors, self.names = [], [], {}

    def add(self, name, sample):
        outputs, gradients = sample.pop("expected")
        sample = {"name": name, **sample}
        sample["tensors"] = [self.leaf(tensor) for tensor in sample["tensors"]]
        sample["expected_outputs"] = [self.store(tensor) for tensor in outputs]
        sample["expected_gradients"] = [tensor if tensor is None else self.store(tensor)
                                        for tensor in gradients]
        self.samples.append(sample)

    def leaf(self, tensor):
        return {"data": self.store(tensor.detach()), "strides": list(tensor.stride()),
                "sizes": list(tensor.shape), "requires_grad": tensor.requires_grad,
                "complex": tensor.is_complex()}

    def store(self, tensor):
        tensor = tensor.resolve_conj().resolve_neg()
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.dtype not in NAMES:
            raise Skipped(f"tensors of {tensor.dtype}")
        dense = torch.empty(real.numel(), dtype=real.dtype).copy_(real.reshape(-1))
        key = (NAMES[real.dtype], tuple(real.shape), dense.view(torch.uint8).numpy().tobytes())
        if key not in self.names:
            self.names[key] = f"t{len(self.tensors)}"
            self.tensors.append(key)
        return self.names[key]

    def write(self, path):
        lines = ",\n".join(json.dumps(sample, separators=(",", ":")) for sample in self.samples)
        path.with_suffix(".json").write_text("[\n" + lines + "\n]\n")
        header, offset = {}, 0
        order = sorted(self.tensors, key=lambda key: -int(re.sub(r"\D", "", key[0]) or 8))
        for key in order:
            dtype, shape, data = key
            header[self.names[key]] = {"dtype": dtype, "shape": shape,
                                       "data_offsets": [offset, offset + len(data)]}
            offset += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.with_suffix(".safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text + b"".join(key[2] for key in order))


def seed():
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


def operator_cases(info, few):
    """(name, function, tree) for the samples of an OpInfo, in one dtype with `few`."""
    supported = info.supported_dtypes("cpu")
    base = ".".join(part for part in (info.name, info.variant_test_name) if part)
    dtypes = [dtype for dtype in DTYPES if dtype in supported]
    for dtype in dtypes[:1] if few else dtypes:
        gradient = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        seed()
        for sample in info.sample_inputs("cpu", dtype, requires_grad=gradient):
            tree = (sample.input, sample.args, sample.kwargs)
            kind = str(dtype).split(".")[1]
            yield (f"{base} {kind}", lambda tree, f=info.op: f(tree[0], *tree[1], **tree[2]), tree)
            inplace = info.get_inplace()
            if inplace is not None and not sample.broadcasts_input:
                yield (f"{base} in place {kind}",
                       lambda tree, f=inplace: f(tree[0], *tree[1], **tree[2]), tree)


def call_with(module, state, arguments, keywords):
    """The module's result with other parameters and buffers, which need not be leaves."""
    for path, tensor in state.items():
        owner, _, name = path.rpartition(".")
        owner = module.get_submodule(owner)
        owner._parameters.pop(name, None)
        owner._buffers.pop(name, None)
        setattr(owner, name, tensor)  # an RNN keeps a second list of its parameters
    return module(*arguments, **keywords)


def module_cases(info):
    """The same for a ModuleInfo."""
    for training in (True, False):
        seed()
        for given in info.module_inputs_func(info, device="cpu", dtype=torch.float32,
                                             requires_grad=True, training=training):
            constructor, forward = given.constructor_input, given.forward_input
            if forward is None:
                continue
            module = info.module_cls(*constructor.args, **constructor.kwargs).train(training)
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            yield (f"{info.name} {'train' if training else 'eval'}",
                   lambda tree, module=module: call_with(module, *tree),
                   (state, forward.args, forward.kwargs))


def size_of(sample):
    tensors = sample["tensors"] + sample["expected"][0]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_telling(sample):
    """It has tensors, none of which is empty or a single number where others are more."""
    sizes = [tensor.numel() for tensor in sample["tensors"]]
    return bool(sizes) and min(sizes) > 0 and max(sizes) > 1


def smallest(samples):
    return min(samples, key=lambda sample: (not is_telling(sample), size_of(sample)))


def samples_of(recorder, cases, few, skipped):
    """The samples of an operator or module by name."""
    found = collections.defaultdict(list)
    for name, function, tree in itertools.islice(cases, MOST_TRIED if few else None):
        try:
            sample = capture(recorder, function, tree)
            if size_of(sample) > (FEW_BYTES if few else MOST_BYTES):
                raise Skipped("too large")
            found[name].append(sample)
        except Skipped as reason:
            skipped[name, str(reason)] += 1
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            skipped[name, f"Python fails: {reason}"] += 1
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--only", nargs="*", help="operators by their names in OpInfo")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recorder, skipped = Recorder(), collections.Counter()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    todo = [(info.name, operator_cases(info, options.few)) for info in op_db]
    todo += [(info.name, module_cases(info)) for info in module_db]
    if options.only:
        todo = [(name, cases) for name, cases in todo if name in options.only]
    file, written = File(), 0
    for position, (name, cases) in enumerate(todo):
        for name, samples in samples_of(recorder, cases, options.few, skipped).items():
            for i, sample in enumerate([smallest(samples)] if options.few and samples else samples):
                try:
                    file.add(f"{name} {i}", sample)
                except Skipped as reason:
                    skipped[name, str(reason)] += 1
        last = position + 1 == len(todo)
        if file.samples and (last or (not options.few and len(file.samples) >= 300)):
            file.write(options.folder / f"samples{written:04d}")
            file, written = File(), written + 1
    lines = [{"name": name, "reason": reason, "samples": count}
             for (name, reason), count in sorted(skipped.items())]
    text = ",\n".join(json.dumps(line) for line in lines)
    (options.folder / "skipped.json").write_text("[\n" + text + "\n]\n")


if __name__ == "__main__":
    main()
