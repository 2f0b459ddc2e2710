#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: mnist_ddp_test.sh SMPRUN MNIST_DDP CONFIG MNIST_C10D TORCHRUN
# Runs the example under smprun, under plain mpirun and with torchrun's variables, and its twin on
# c10d, for a few steps on made-up digits.
set -uo pipefail
smprun=$PWD/$1 program=$PWD/$2 config=$PWD/$3 twin=$PWD/$4 torchrun=$PWD/$5
cd "$TEST_TMPDIR" || exit 1
export TERM=dumb HOME=$TEST_TMPDIR
failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

# 40 digits, each all bright or all dark, and its label says which.
python3 - <<'PYTHON' || fail "could not write the digits"
import struct
labels = bytes(i % 2 for i in range(40))
for name, header, data in (
    ("images-idx3", struct.pack(">4I", 0x803, 40, 28, 28), b"".join(bytes([200 * l]) * 784 for l in labels)),
    ("labels-idx1", struct.pack(">2I", 0x801, 40), labels),
):
    open(f"t10k-{name}-ubyte", "wb").write(header + data)
PYTHON

arguments=(--data . --batch-size 4 --test-batch-size 2 --epochs 2 --log-interval 2)

# check NAME: the required output of a run on two ranks
check() {
  for text in 'data: only the t10k files' 'epoch 1, step 0/4: loss' 'epoch 2, step 2/4: loss' \
    'test: average loss .* accuracy ./4'; do
    grep -q -- "$text" "$1.log" || { cat "$1.log"; fail "$1: expected '$text'"; }
  done
  # Both ranks loaded the saved model: the model that rank 0 tested last.
  [ "$(grep -o 'test: average loss.*' "$1.log" | tail -3 | sort -u | wc -l)" -eq 1 ] &&
    [ "$(grep -c 'rank ., loaded: test:' "$1.log")" -eq 4 ] ||
    { cat "$1.log"; fail "$1: expected both ranks to load what rank 0 tested"; }
}

"$smprun" --np 2 --config "$config" "$program" "${arguments[@]}" --save-model smprun.pt \
  >smprun.log 2>&1 || { cat smprun.log; fail "smprun ended with an error"; }
check smprun
mpirun --allow-run-as-root --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none \
  -np 2 "$program" "${arguments[@]}" --save-model mpirun.pt >mpirun.log 2>&1 ||
  { cat mpirun.log; fail "mpirun ended with an error"; }
check mpirun
bash "$torchrun" 2 60 "$program" "${arguments[@]}" --save-model torchrun.pt >torchrun.log 2>&1 ||
  { cat torchrun.log; fail "the run with torchrun's variables ended with an error"; }
check torchrun
bash "$torchrun" 2 60 "$twin" "${arguments[@]}" --save-model c10d.pt >c10d.log 2>&1 ||
  { cat c10d.log; fail "the twin on c10d ended with an error"; }
check c10d
# results LOG: the losses and tests of the ranks, whichever of them printed its line first
results() { grep -o 'epoch.*\|test:.*' "$1" | sort; }

# A program that goes on from a checkpoint trains like one that has none.
"$smprun" --np 2 --config "$config" "$program" "${arguments[@]}" >straight.log 2>&1 ||
  { cat straight.log; fail "the run without checkpoints ended with an error"; }
diff <(results smprun.log | grep epoch) <(results straight.log | grep epoch) ||
  fail "a run from checkpoints and one without trained differently"
# The same ranks, data and seeds.
for other in mpirun torchrun; do
  diff <(results smprun.log) <(results "$other.log") ||
    fail "smprun and $other trained differently"
done
# c10d's reducer halves before it adds, which is exact for two ranks.
diff <(results smprun.log) <(results c10d.log) ||
  fail "mnist_ddp and its twin on c10d trained differently"

exit "$failures"
