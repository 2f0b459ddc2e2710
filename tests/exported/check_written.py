#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads the programs that C++ has written, and compares their results with those of C++.

usage: SMP_WRITTEN_PROGRAMS=FOLDER bazel-bin/tests/exported/write_test   (writes them)
       check_written.py FOLDER [NAME...] [--aoti NAME]... [--onnx NAME]...  (a Python with torch)

Each NAME.pt2 is loaded by torch.export.load, its sample inputs by torch.load with
weights_only=True, and run with each NAME.N.safetensors: outputs, gradients and buffers must be equal
to the bit, with one thread. --aoti compiles a program by AOTInductor, --onnx exports it, and both
compare outputs within 1e-4.
"""

import argparse
import io
import json
import pathlib
import struct
import sys
import warnings
import zipfile

import torch
from torch.utils import _pytree as pytree

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
         "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
         "U8": torch.uint8, "BOOL": torch.bool}
BOUND = 1e-4


def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensor = torch.empty(0, dtype=TYPES[entry["dtype"]])
        if end > begin:
            tensor = torch.frombuffer(bytearray(data[begin:end]), dtype=TYPES[entry["dtype"]])
        tensors[name] = tensor.reshape(entry["shape"])
    return tensors


def group(tensors, prefix):
    return {name[len(prefix):]: tensor for name, tensor in tensors.items()
            if name.startswith(prefix)}


def sample_inputs_of(path):
    """Positional and named ones. With weights_only=True nothing but tensors, numbers and containers
    can be read."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/sample_inputs/model.pt")]
        return torch.load(io.BytesIO(archive.read(names[0])), weights_only=True)


def arguments_of(path, run):
    """The sample inputs with the tensors of a run in place of theirs."""
    inputs = iter(group(run, "input.")[str(i)] for i in range(len(group(run, "input."))))
    return pytree.tree_map(lambda leaf: next(inputs) if isinstance(leaf, torch.Tensor) else leaf,
                           sample_inputs_of(path))


def tensors_in(result):
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def as_written(tensor):
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def run_of(module, args, kwargs):
    """The results of a call, and its side effects, as in tests/exported/written.h."""
    module.zero_grad()
    torch.manual_seed(7)
    results = tensors_in(module(*args, **kwargs))
    run = {f"output.{i}": as_written(tensor).clone() for i, tensor in enumerate(results)}
    losses = [tensor.float().pow(2).mean() for tensor in results if tensor.requires_grad]
    if losses:
        sum(losses[1:], losses[0]).backward()
    # Python loads tied weights as parameters on the same memory, one of which gets the gradient.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    gradients = {parameter.data_ptr(): parameter.grad for parameter in parameters.values()
                 if parameter.grad is not None}
    for name, parameter in parameters.items():
        if parameter.data_ptr() in gradients:
            run[f"gradient.{name}"] = as_written(gradients[parameter.data_ptr()])
    for name, buffer in module.named_buffers(remove_duplicate=False):
        run[f"buffer.{name}"] = as_written(buffer).clone()
    return run


def differences(folder, name):
    archive = folder / f"{name}.pt2"
    program = torch.export.load(archive)
    module = program.module()
    constants = set(program.constants)
    found = []
    for path in sorted(folder.glob(f"{name}.*.safetensors")):
        expected = read_safetensors(path)
        got = run_of(module, *arguments_of(archive, expected))
        for key, tensor in expected.items():
            if key.startswith("input."):
                continue
            if key not in got or not torch.equal(got[key], tensor):
                found.append(f"{path.name}: {key}")
        found += [f"{path.name}: {key} besides" for key in got.keys() - expected.keys()
                  if key.partition(".")[2] not in constants]
    return found


def compare_outputs(name, what, archive, expected, call):
    args, kwargs = arguments_of(archive, expected)
    got = tensors_in(call(*args, **kwargs))
    largest = max(float((a.double() - expected[f"output.{i}"].double()).abs().max())
                  for i, a in enumerate(got))
    print(f"{name} by {what}: largest difference {largest:.1e}")
    return [] if largest <= BOUND else [f"{name} by {what}: difference {largest}"]


def check_aoti(folder, name):
    archive = folder / f"{name}.pt2"
    package = torch._inductor.aoti_compile_and_package(
        torch.export.load(archive), package_path=str(folder / f"{name}.aoti.pt2"))
    call = torch._inductor.aoti_load_package(package)
    found = []
    for path in sorted(folder.glob(f"{name}.*.safetensors")):
        found += compare_outputs(name, "AOTInductor", archive, read_safetensors(path), call)
    return found


def check_onnx(folder, name):
    archive = folder / f"{name}.pt2"
    exported = torch.onnx.export(torch.export.load(archive), dynamo=True)
    found = []
    for path in sorted(folder.glob(f"{name}.*.safetensors")):
        found += compare_outputs(name, "ONNX", archive, read_safetensors(path), exported)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--aoti", action="append", default=[])
    parser.add_argument("--onnx", action="append", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = options.names or sorted(path.stem for path in options.folder.glob("*.pt2")
                                    if not path.stem.endswith(".aoti"))
    failed = 0
    for name in names:
        found = differences(options.folder, name)
        print(name, "differs:\n  " + "\n  ".join(found) if found else "is equal", flush=True)
        failed += bool(found)
    for name in options.aoti:
        failed += bool(check_aoti(options.folder, name))
    for name in options.onnx:
        failed += bool(check_onnx(options.folder, name))
    print(f"{len(names)} programs, {failed} failed")
    return 1 if failed or not names else 0


if __name__ == "__main__":
    sys.exit(main())
