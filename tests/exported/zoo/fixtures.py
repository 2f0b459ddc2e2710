# SPDX-License-Identifier: Apache-2.0
"""Trains the programs of fixtures/ in Python, as fixtures_test.sh takes them.

usage: fixtures.py FOLDER  (a Python with torch, safetensors and xxhash)

FOLDER/NAME.safetensors gets the batches of fixtures/NAME.safetensors, and the results with them.
"""

import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parents[2] / "docs"), str(HERE.parent)]
import reference
from results import load


class Output(dict):
    """In place of the class of transformers that the program of FNet returns."""


pytree.register_pytree_node(
    Output, lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(zip(names, values)),
    serialized_type_name="transformers.modeling_outputs.SequenceClassifierOutput")


def batches_of(program, tensors):
    """Inputs and targets of each step."""
    def named(kind, names):
        return [{name: tensors[f"{kind}.{step}.{name}"] for name in names}
                for step in range(reference.STEPS)]

    targets = [name.removeprefix("target.0.") for name in tensors if name.startswith("target.0.")]
    inputs = named("input", program.graph_signature.user_inputs)
    return list(zip(inputs, named("target", targets)))


def main(folder):
    torch.set_num_threads(1)
    for archive in sorted((HERE / "fixtures").glob("*.pt2")):
        tensors = load_file(archive.with_suffix(".safetensors"))
        loss = archive.stem.rpartition(".")[2]
        program = load(archive)
        trace = reference.train_program(program, batches_of(program, tensors), loss)
        save_file({**tensors, **trace}, folder / f"{archive.stem}.safetensors")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
