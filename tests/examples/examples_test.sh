#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: examples_test.sh SMPRUN GPT MNIST CONFIG_2X2 CONFIG_1X1 MNIST_MANUAL CONFIG_MANUAL
#   CONFIG_TENSOR_2X2
# Runs the examples as a user would, small, under smprun and alone, and compares their output.
set -uo pipefail
smprun=$PWD/$1 gpt=$PWD/$2 mnist=$PWD/$3 two_by_two=$PWD/$4 one_by_one=$PWD/$5
mnist_manual=$PWD/$6 manual=$PWD/$7 tensor=$PWD/$8
cd "$TEST_TMPDIR" || exit 1
export TERM=dumb HOME=$TEST_TMPDIR
failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

# same NAME FILE FILE: the losses of two runs are equal to the last bit
same() { cmp "$2" "$3" || fail "$1: $2 and $3 differ"; }

# train NAME COMMAND...: trains a small GPT, tied and with dropout, for 6 steps, to NAME.losses
train() {
  "${@:2}" --width 16 --heads 2 --sequence 16 --dropout 0.2 --tied --steps 6 --sample 8 \
    --losses "$1.losses" >"$1.log" 2>&1 || { cat "$1.log"; fail "$1 ended with an error"; }
}
four() { "$smprun" --np 4 --config "$two_by_two" "$gpt" "$@"; }
one() { "$gpt" --config "$one_by_one" "$@"; }

train four four --checkpoint-dir four
train one one --checkpoint-dir one
[ "$(wc -l <four.losses)" -eq 6 ] || fail "expected 6 losses, got: $(cat four.losses)"
same "4 ranks and 1" four.losses one.losses
for text in 'step 6/6' 'held-out text: ' 'a trigram model: 2\.' 'sample:' 'Partition assignments: 2' \
  '^checkpoint: four$' '^losses: four.losses$'; do
  grep -q -- "$text" four.log || { cat four.log; fail "expected '$text' in the output of four"; }
done
diff <(grep 'held-out' four.log) <(grep 'held-out' one.log) || fail "other held-out results"

# Stopped on four ranks, resumed on four, and on one.
train stopped four --checkpoint-dir stopped --stop-after 3
cp -r stopped copy && cp stopped.losses resumed_one.losses
train stopped four --checkpoint-dir stopped --resume
same "stopped and resumed" four.losses stopped.losses
train resumed_one one --checkpoint-dir copy --resume
same "stopped, and resumed by one process" four.losses resumed_one.losses

# Asked to stop, it saves its state; 100000 steps would not end here.
sed '1s/{/{"preempt_seconds": 200,/' "$two_by_two" >preempt.json
"$smprun" --np 4 --config preempt.json "$gpt" --width 16 --heads 2 --sequence 16 --steps 100000 \
  --checkpoint-dir asked --losses asked.losses >asked.log 2>&1 &
launcher=$!
until [ -s asked.losses ] || ! kill -0 $launcher 2>/dev/null; do sleep 0.02; done
kill -TERM $launcher
wait $launcher
status=$?
[ "$status" -eq 75 ] || { cat asked.log; fail "asked to stop: status $status"; }
steps=$(wc -l <asked.losses)
grep -qx "smprun: preempted: checkpoint asked of step $steps" asked.log ||
  { cat asked.log; fail "asked to stop: no checkpoint of step $steps"; }

# Stages of two ranks that divide their layers: the same up to rounding, and from a checkpoint of one.
close() {
  python3 - "$2" "$3" <<'PYTHON' || fail "$1: the losses of $2 and $3 are not close"
import sys
a, b = ([float.fromhex(line.split()[-1]) for line in open(name)] for name in sys.argv[1:])
sys.exit(len(a) != len(b) or any(abs(x - y) > 1e-5 * abs(x) for x, y in zip(a, b)))
PYTHON
}
tensor() { "$smprun" --np 4 --config "$tensor" "$gpt" "$@"; }
train divided tensor --checkpoint-dir divided --stop-after 3
grep -q 'Tensor parallelism among 2 ranks' divided.log || { cat divided.log; fail "no report"; }
cp -r divided whole && cp divided.losses whole.losses
train divided tensor --checkpoint-dir divided --resume
close "divided layers" one.losses divided.losses
train whole one --checkpoint-dir whole --resume
close "divided layers, then whole ones" one.losses whole.losses

"$gpt" --data missing.txt --config "$one_by_one" >missing.log 2>&1 && fail "expected an error status"
grep -q '^gpt: text data: expected a text file, got "missing.txt"' missing.log ||
  { cat missing.log; fail "expected the missing file's name"; }

# A made-up MNIST of 40 digits, each all bright or all dark, and its label says which.
python3 - <<'PYTHON' || fail "could not write the digits"
import struct
labels = bytes(i % 2 for i in range(40))
for name, header, data in (
    ("images-idx3", struct.pack(">4I", 0x803, 40, 28, 28), b"".join(bytes([200 * l]) * 784 for l in labels)),
    ("labels-idx1", struct.pack(">2I", 0x801, 40), labels),
):
    open(f"t10k-{name}-ubyte", "wb").write(header + data)
PYTHON
digits() {
  "${@:2}" --data . --batch-size 4 --test-batch-size 4 --epochs 2 --log-interval 2 \
    --save-model "$1.model" >"$1.log" 2>&1 || { cat "$1.log"; fail "$1 ended with an error"; }
}
digits digits_four "$smprun" --np 4 --config "$two_by_two" "$mnist"
grep -q 'only the t10k files of \.: their first 36 digits for training, the last 4' digits_four.log &&
  grep -q 'epoch 2, step 2/4: loss' digits_four.log && grep -q 'accuracy 4/4' digits_four.log ||
  { cat digits_four.log; fail "unexpected output of mnist"; }

digits digits_manual "$smprun" --np 2 --config "$manual" "$mnist_manual"
grep -q '^features.conv1.weight: partition 0, .*pinned' digits_manual.log &&
  grep -q '^classifier.fc2.bias: partition 1, .*pinned' digits_manual.log &&
  grep -q 'accuracy 4/4' digits_manual.log ||
  { cat digits_manual.log; fail "unexpected output of mnist_manual"; }

exit "$((failures > 0))"
