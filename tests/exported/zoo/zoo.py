# SPDX-License-Identifier: Apache-2.0
"""Exports the models of models.py, trains each in Python and in C++, and writes the page.

Started by tools/exported_zoo, which says what the arguments are.
"""

import argparse
import copy
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import traceback

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "docs"))
import models
import operators
import page
import reference
import smp_streams as streams

RANKS = (1, 2, 4)
TIME_LIMIT = 900  # seconds of a model


def batches_of(model):
    """Returns inputs and targets of each step."""
    batches = []
    for step in range(reference.STEPS):
        torch.manual_seed(50 + step)
        size = reference.SAMPLES * reference.MICROBATCHES
        batches.append((model.inputs(size), model.targets(size)))
    return batches


def export(net, model):
    """Returns the program, and whether its batch is dynamic."""
    batch = torch.export.Dim("batch", min=2, max=64)
    torch.manual_seed(40)
    example = model.inputs(3)
    try:
        dynamic = {name: {0: batch} for name in example}
        return torch.export.export(net, (), example, dynamic_shapes=dynamic), True
    except Exception:  # whatever torch throws: it may still export with a fixed size
        torch.manual_seed(40)
        return torch.export.export(net, (), model.inputs(reference.SAMPLES)), False


def without_stack_traces(program):
    """They are paths of this machine."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else []:
            node.meta.pop("stack_trace", None)
    return program


def functions_of(program):
    return [module for module in program.graph_module.modules()
            if isinstance(module, torch.fx.GraphModule)]


def calls_of(program):
    return [node for module in functions_of(program) for node in module.graph.nodes
            if node.op == "call_function"]


def backward_of(model, result, targets):
    reference.loss_of(result, model.loss, reference.microbatch_of(targets, 0)).backward()


def log_of_program(program, model, inputs, targets):
    """Returns the draws of a microbatch, and its kernels."""
    module, key = program.module(), reference.key_of(0, 0)
    draws = operators.DrawLog()
    with draws:
        reference.run_keyed(module, reference.microbatch_of(inputs, 0), key, draws.on_random)
    kernels = operators.KernelLog()
    with kernels:
        result = reference.run_keyed(module, reference.microbatch_of(inputs, 0), key)
        backward_of(model, result, targets)
    return draws.draws, kernels.kernels


def compare_eager(net, program, model, batches, trace):
    """Says where the eager model differs; None if it does not."""
    draws, kernels = log_of_program(copy.deepcopy(program), model, *batches[0])

    def call(module):
        def run(inputs, key):
            with operators.KeyedKernels(draws, key):
                return module(**inputs)
        return run

    eager = reference.train(first := copy.deepcopy(net), "sgd", batches, model.loss, call(first))
    expected = {key: tensor for key, tensor in trace.items() if key.startswith("sgd.")}
    if all(key in eager and reference.same_bits(eager[key], tensor)
           for key, tensor in expected.items()):
        return None
    log = operators.KernelLog()
    with log:
        key = reference.key_of(0, 0)
        backward_of(model, call(net)(reference.microbatch_of(batches[0][0], 0), key),
                    batches[0][1])
    return operators.first_difference(log.kernels, kernels) or "no kernel of the first microbatch"


def verdicts_of(program_path, reference_path, model, command):
    """The output of zoo_run: verdict and reason by ranks and optimizer."""
    run = subprocess.run([*command, program_path, reference_path, model.loss],
                         capture_output=True, text=True, timeout=TIME_LIMIT,
                         env={**os.environ, "SMP_LOG_LEVEL": "error"})
    verdicts = {}
    for line in run.stdout.splitlines():
        ranks, optimizer, verdict, reason = line.split("\t")
        verdicts[f"{ranks} {optimizer}"] = [verdict, reason]
    for ranks in RANKS:
        for optimizer in reference.OPTIMIZERS:
            verdicts.setdefault(f"{ranks} {optimizer}", ["failed", run.stderr.strip()[-500:]])
    return verdicts


def results_of(path, *args, **kwargs):
    """Outputs, gradients and buffers of a call of a program, by name."""
    program = torch.export.load(path)
    module = program.module()
    torch.manual_seed(1)
    outputs = module(*args, **kwargs)
    reference.loss_of(outputs, "squares", {}).backward()
    found = {f"output {i}": leaf.detach() for i, leaf in enumerate(pytree.tree_leaves(outputs))
             if isinstance(leaf, torch.Tensor)}
    # Tied parameters have one memory after loading, and one of them has the gradient.
    gradients = {parameter.data_ptr(): parameter.grad for parameter in module.parameters()
                 if parameter.grad is not None}
    for name, tensor in reference.tensors_of(module).items():
        if name in program.state_dict:
            found[f"value {name}"] = tensor.detach()
            found[f"gradient {name}"] = gradients.get(tensor.data_ptr())
    return found


def is_same(tensor, other):
    if tensor is None or other is None:
        return tensor is other
    return reference.same_bits(tensor, other)


def compare_written(archive, expected, batches, command):
    """Has C++ load the program and write it again; says where that differs in Python, for batches of
    several sizes. None if it does not."""
    written = archive.with_suffix(".written.pt2")
    run = subprocess.run([*command, archive, expected, "--write", written], capture_output=True,
                         text=True, timeout=TIME_LIMIT)
    if run.returncode != 0:
        return "refused: " + run.stderr.strip()[-500:]
    try:
        for size, (inputs, _) in zip((2, 3, 6), batches):
            part = {name: inputs[name][:size].clone() for name in sorted(inputs)}
            first, again = results_of(archive, **part), results_of(written, part)
            different = [name for name, tensor in first.items()
                         if not is_same(tensor, again.get(name))]
            if different:
                return f"a batch of {size} has another {different[0]}"
    finally:
        written.unlink()
    return None


def first_line(error):
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:300]


def run_model(model, folder, command, known):
    """Runs one model; returns its row. With one of an earlier run only the way back is new."""
    from safetensors.torch import save_file
    torch.set_num_threads(1)
    row = {**known, "name": model.name, "package": model.package}
    torch.manual_seed(1)
    net = model.make().train()
    row["parameters"] = sum(parameter.numel() for parameter in net.parameters())
    pristine = copy.deepcopy(net)
    archive, expected = folder / f"{model.name}.pt2", folder / f"{model.name}.safetensors"
    try:
        program, row["dynamic"] = export(net, model)
        torch.export.save(without_stack_traces(program), archive)
    except Exception as error:  # whatever torch throws
        return {**row, "not_exported": first_line(error)}
    row["operators"] = len(calls_of(program))
    row["random"] = sum(streams.is_random(node.target) for node in calls_of(program))
    batches = batches_of(model)
    trace = {} if known else reference.train_program(copy.deepcopy(program), batches, model.loss)
    for step, (inputs, targets) in enumerate(batches):
        for kind, tensors in (("input", inputs), ("target", targets)):
            trace.update({f"{kind}.{step}.{name}": value for name, value in tensors.items()})
    save_file(trace, expected)
    try:
        row["back"] = compare_written(archive, expected, batches, command)
    except Exception as error:  # a column of its own: the row stays
        traceback.print_exc()
        row["back"] = first_line(error)
    if known:
        return row
    row["verdicts"] = verdicts_of(archive, expected, model, command)
    try:
        row["eager"] = compare_eager(pristine, program, model, batches, trace)
    except Exception as error:  # the eager model is a column of its own: the row stays
        traceback.print_exc()
        row["eager"] = first_line(error)
    return row


def write_fixture(model, folder, fixtures):
    """Archive and batches as fixtures_test.sh takes them."""
    from safetensors.torch import load_file, save_file
    name = f"{model.name}.{model.loss}"
    (fixtures / f"{name}.pt2").write_bytes((folder / f"{model.name}.pt2").read_bytes())
    trace = load_file(folder / f"{model.name}.safetensors")
    save_file({key: tensor for key, tensor in trace.items()
               if key.startswith(("input.", "target."))}, fixtures / f"{name}.safetensors")


def run_in_child(model, folder, command, known):
    """Runs one in a process of its own: models leave state behind, and may end it."""
    def child(connection):
        try:
            connection.send(run_model(model, folder, command, known))
        except BaseException as error:
            traceback.print_exc()
            connection.send({"name": model.name, "package": model.package,
                             "error": first_line(error)})

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender,))
    process.start()
    sender.close()
    row = {"name": model.name, "package": model.package, "error": "its process ended"}
    try:
        if receiver.poll(TIME_LIMIT):
            row = receiver.recv()
        else:
            row["error"] = f"took more than {TIME_LIMIT} seconds"
            process.kill()
    except EOFError:
        pass
    process.join()
    return row


def summary(row):
    if "error" in row:
        return "error: " + row["error"]
    if "not_exported" in row:
        return "not exported: " + row["not_exported"]
    cells = {verdict for verdict, _ in row["verdicts"].values()}
    reasons = sorted({reason for _, reason in row["verdicts"].values() if reason})
    eager = "equal" if row["eager"] is None else row["eager"]
    return ", ".join(sorted(cells)) + "".join(f"\n    {reason}" for reason in reasons) + \
        f"\n    eager: {eager}\n    back: {row['back'] or 'equal'}"


def write_page(options):
    """Writes the rows of this and of earlier runs."""
    from importlib.metadata import version
    paths = [options.folder / f"{model.name}.json" for model in models.MODELS]
    rows = [json.loads(path.read_text()) for path in paths if path.exists()]
    packages = list(dict.fromkeys(model.package for model in models.MODELS))
    options.page.write_text(page.page_of(rows, {name: version(name) for name in packages}))


def main():
    parser = argparse.ArgumentParser(prog="exported_zoo", description=__doc__)
    parser.add_argument("--run", required=True, help="the C++ program zoo_run")
    parser.add_argument("--folder", required=True, type=pathlib.Path,
                        help="for archives, references and rows, which later runs keep")
    parser.add_argument("--page", type=pathlib.Path, help="the page that is written of all rows")
    parser.add_argument("--only", nargs="*", help="models by name; none: writes the page only")
    parser.add_argument("--fixtures", type=pathlib.Path,
                        help="also writes archives there, with their batches")
    parser.add_argument("--back", action="store_true",
                        help="the way back alone, of models that have a row")
    parser.add_argument("--keep", action="store_true", help="archives and references, too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    by_name = {model.name: model for model in models.MODELS}
    unknown = set(options.only or []) - set(by_name)
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    chosen = models.MODELS if options.only is None else [by_name[name] for name in options.only]
    paths = {model.name: options.folder / f"{model.name}.json" for model in chosen}
    without = [name for name, path in paths.items() if options.back and not path.exists()]
    if without:
        parser.error(f"no row of {', '.join(without)} in {options.folder}: leave out --back")
    for model in chosen:
        began = time.monotonic()
        path = paths[model.name]
        known = json.loads(path.read_text()) if options.back else {}
        row = run_in_child(model, options.folder, [options.run], known)
        path.write_text(json.dumps(row, indent=1))
        if options.fixtures:
            write_fixture(model, options.folder, options.fixtures)
        if not options.keep:
            for suffix in (".pt2", ".safetensors"):
                (options.folder / f"{model.name}{suffix}").unlink(missing_ok=True)
        print(f"{model.name} ({time.monotonic() - began:.0f} s): {summary(row)}", flush=True)
    if options.page:
        write_page(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
