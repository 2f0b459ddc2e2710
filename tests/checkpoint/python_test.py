#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Python reads our files.

usage: python_test.py WRITE_EXAMPLE SMP_CKPT

Parses the safetensors files with the standard library alone. Reads them with safetensors and the
state dictionary with torch, too, in the Python that SMP_TEST_PYTHON names (default: this one), and
says so where that Python lacks them.
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

FORMATS = {"F32": "f", "F64": "d", "I64": "q", "BOOL": "?", "BF16": "H", "C64": "f"}
EXPECTED = {
    "matrix": ("F32", [2, 3], [0, 1, 2, 3, 4, 5]),
    "transposed": ("F64", [3, 2], [0, 3, 1, 4, 2, 5]),
    "half": ("BF16", [4], [0x0000, 0x3F00, 0x3F80, 0x3FC0]),  # 0, 0.5, 1, 1.5
    "count": ("I64", [], [-7]),
    "mask": ("BOOL", [3], [True, False, True]),
    "empty": ("F32", [0, 3], []),
    "rotation": ("C64", [2], [0, 3, 1, 3]),  # real and imaginary parts
}

WITH_PACKAGES = """
import sys
import torch
model, state = sys.argv[1:]
expected = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6, dtype=torch.float64).reshape(2, 3).t(),
    "half": (torch.arange(4.0) / 2).to(torch.bfloat16),
    "count": torch.tensor(-7),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
    "rotation": torch.tensor([3j, 1 + 3j], dtype=torch.complex64),
}
def check(got, names):
    assert set(got) == set(names), set(got)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
loaded = torch.load(state)
assert type(loaded) is dict, type(loaded)
check(loaded, [*expected, "tied"])
assert loaded["tied"].data_ptr() == loaded["matrix"].data_ptr()
print("torch.load: as expected")
try:
    import safetensors.torch
except ImportError:
    print("SKIPPED: this Python has no safetensors")
else:
    check(safetensors.torch.load_file(model), expected)
    print("safetensors.torch.load_file: as expected")
"""

# Writes a state dictionary with tied weights, a view and buffers.
STATE_OF_PYTHON = """
import sys
import torch
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
net[2].bias = net[0].bias
state = dict(net.state_dict())
state["view"] = torch.arange(12.0).reshape(3, 4).t()[1:]
if sys.argv[1] == "write":
    torch.save(state, sys.argv[2])
else:
    got = torch.load(sys.argv[2])
    assert set(got) == set(state), set(got)
    for name, tensor in state.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    assert got["0.bias"].data_ptr() == got["2.bias"].data_ptr()
    print("a state dictionary of Python, through a checkpoint: as expected")
"""


def read_safetensors(path):
    """name -> (dtype, shape, elements); follows the format's description."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        elements = data[8 + length + begin : 8 + length + end]
        code = FORMATS[entry["dtype"]]
        count = len(elements) // struct.calcsize(code)
        values = list(struct.unpack(f"<{count}{code}", elements))
        tensors[name] = (entry["dtype"], entry["shape"], values)
    return tensors


def main(write_example, smp_ckpt):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/checkpoint"
        subprocess.run([write_example, checkpoint], check=True)
        files = sorted(path.name for path in pathlib.Path(checkpoint).iterdir())
        model = f"{checkpoint}/model-00001-of-00001.safetensors"
        assert len(files) == 3, files
        assert read_safetensors(model) == EXPECTED, read_safetensors(model)
        optimizer = read_safetensors(f"{checkpoint}/optimizer-00001-of-00001.safetensors")
        assert optimizer == {"matrix/exp_avg": ("F32", [2, 3], [0.25] * 6)}, optimizer
        index = json.loads(pathlib.Path(f"{checkpoint}/index.json").read_text())
        assert index["model"]["tied"] == {"same_as": "matrix"}
        assert index["files"][files[1]] == os.path.getsize(model)

        merged = f"{folder}/merged.safetensors"
        subprocess.run([smp_ckpt, "merge", checkpoint, merged], check=True)
        assert read_safetensors(merged) == EXPECTED
        print("safetensors files: as expected")

        state = f"{folder}/model.pt"
        subprocess.run([smp_ckpt, "merge", checkpoint, state], check=True)
        python = os.environ.get("SMP_TEST_PYTHON", sys.executable)
        if subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode:
            print(f"SKIPPED: {python} has no torch; set SMP_TEST_PYTHON to one that has")
            return
        subprocess.run([python, "-c", WITH_PACKAGES, merged, state], check=True)

        written, converted, back = f"{folder}/python.pt", f"{folder}/python", f"{folder}/back.pt"
        subprocess.run([python, "-c", STATE_OF_PYTHON, "write", written], check=True)
        subprocess.run([smp_ckpt, "convert", written, converted], check=True)
        subprocess.run([smp_ckpt, "convert", converted, back], check=True)
        subprocess.run([python, "-c", STATE_OF_PYTHON, "read", back], check=True)


main(*sys.argv[1:])
