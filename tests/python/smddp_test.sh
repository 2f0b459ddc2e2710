#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: smddp_test.sh LIBTORCH PACKAGES SMDDP SCRIPT
# Runs by torchrun the backend's own test and the documented script, and programs that end without a
# word, SMDDP_PAIRS of each kind if the environment has that.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
where=("${@:1:3}")
script=$(realpath "$4")
work=$TEST_TMPDIR
export HOME=$work OMP_NUM_THREADS=1
failures=0

# seconds_left: in which a command may end, since Bazel would not show its output.
seconds_left() { echo $((${TEST_TIMEOUT:-900} - SECONDS - 30)); }

# run WHAT COMMAND...: with torch; counts failures.
run() {
  local start=$SECONDS what=$1
  shift
  if bash "$here/with_torch.sh" "${where[@]}" "$work" timeout --kill-after=5 "$(seconds_left)" "$@" \
    >"$work/log" 2>&1; then
    printf 'ok    %s (%d s)\n' "$what" $((SECONDS - start))
  else
    failures=$((failures + 1))
    printf 'FAIL  %s (%d s)\n' "$what" $((SECONDS - start))
    sed 's/^/      /' "$work/log"
  fi
}

# on RANKS WHAT SCRIPT ARGUMENT...: as run, by torchrun.
on() {
  run "$2, $1 ranks" python3 -m torch.distributed.run --standalone --nproc-per-node "$1" "${@:3}"
}

on 2 "the backend" "$here/smddp_test.py"
on 3 "the backend" "$here/smddp_test.py"
run "ends without destroy_process_group" python3 "$here/smddp_exit.py" "${SMDDP_PAIRS:-1}"

# The documented script: with dropout the results of gloo, without it those of one process, and the
# same whether it was saved and loaded or not.
run "digits" python3 - "$work" <<'PYTHON'
import sys

import numpy

random = numpy.random.default_rng(1)
for name, count in (("train", 97), ("t10k", 20)):
    labels = random.integers(10, size=count).astype("u1")
    images = random.integers(100, size=(count, 28, 28)).astype("u1")
    images[numpy.arange(count), labels] += 100
    for kind, data in (("images-idx3", images), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, data.ndim]) + numpy.array(data.shape, ">u4").tobytes()
        with open(f"{sys.argv[1]}/{name}-{kind}-ubyte", "wb") as file:
            file.write(header + data.tobytes())
PYTHON

# arguments_of NAME OPTION...: the documented script and its arguments, one a line. Its weights are
# NAME_RANK.pt.
arguments_of() {
  printf '%s\n' "$script" --data "$work" --batch-size 16 --checkpoint "$work/$1.pt" \
    --save-weights "$work/$1_{}.pt" "${@:2}"
}
cat >"$work/same_weights.py" <<'PYTHON'
import sys

import torch

for same in (
    ("smddp_0", "smddp_1", "gloo_0", "gloo_1"),
    ("exact_0", "exact_1", "alone_0", "straight_0"),
):
    weights = [torch.load(f"{sys.argv[1]}/{name}.pt") for name in same]
    for name, others in zip(same, weights):
        for a, b in zip(weights[0], others, strict=True):
            assert torch.equal(a, b), f"{same[0]} and {name} differ"
PYTHON
mapfile -t smddp < <(arguments_of smddp --backend smddp --epochs 2)
mapfile -t gloo < <(arguments_of gloo --backend gloo --epochs 2)
mapfile -t exact < <(arguments_of exact --backend smddp --epochs 2 --dropout 0)
mapfile -t alone < <(arguments_of alone --backend none --epochs 2 --dropout 0)
mapfile -t straight < <(arguments_of straight --backend smddp --epochs 3 --more-epochs 0 --dropout 0)
on 2 "the script" "${smddp[@]}"
run "the script otherwise, and the same weights" python3 "$here/forked.py" 2 "${gloo[@]}" + \
  2 "${exact[@]}" + 1 "${alone[@]}" + 2 "${straight[@]}" + 1 "$work/same_weights.py" "$work"

exit "$failures"
