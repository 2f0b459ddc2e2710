#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: tutorial_test.sh SMPRUN TUTORIAL CONFIG_2X1 CONFIG_2X2
# Runs the program of docs/tutorial.md on one rank in one go, begun on two ranks and ended on 2 x 2, and
# with a request to stop in between, and compares the losses. Two and four ranks in one go, as the
# page types them: //tests/cmake:adopt_test.
set -uo pipefail
smprun=$PWD/$1 tutorial=$PWD/$2 two=$PWD/$3 four=$PWD/$4
cd "$TEST_TMPDIR" || exit 1
failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}
on_one() { "$tutorial" "$@"; }
on_two() { "$smprun" --config "$two" "$tutorial" "$@"; }
on_four() { "$smprun" --np 4 --config "$four" "$tutorial" "$@"; }
# train LAYOUT FOLDER [EPOCHS]: its output goes to FOLDER.log, behind the old one.
train() { "$@" >>"$2.log" 2>&1 || { cat "$2.log"; fail "$* ended with an error"; }; }
# same FOLDER: its first 12 epochs have the losses of those that one rank had, to the last bit.
same() {
  diff <(grep '^epoch' alone.log) <(grep '^epoch' "$1.log" | head -12) ||
    fail "$1 printed other losses than alone"
  cmp alone/loss.csv <(head -97 "$1/loss.csv") || fail "$1 and alone had other losses"
}
same_picture() { cmp alone/loss.svg "$1/loss.svg" || fail "$1 and alone drew other pictures"; }

train on_one alone
[ "$(grep -c '^epoch' alone.log)" -eq 12 ] || { cat alone.log; fail "expected 12 epochs"; }
[ "$(wc -l <alone/loss.csv)" -eq 97 ] || { cat alone/loss.csv; fail "expected the losses of 96 updates"; }
[ "$(find alone -name 'batch_*_partial' | sort | tr '\n' ' ')" = \
  "alone/batch_176_partial alone/batch_192_partial " ] || { ls alone; fail "expected two checkpoints"; }
python3 - <<'PYTHON' || fail "the losses or their picture are not right"
import csv
import xml.etree.ElementTree
rows = list(csv.DictReader(open("alone/loss.csv")))
losses = [float(row["loss"]) for row in rows]
validation = [float(row["validation loss"]) for row in rows if row["validation loss"]]
assert len(validation) == 12 and sum(losses[-8:]) < 0.6 * sum(losses[:8]), losses
lines = xml.etree.ElementTree.parse("alone/loss.svg").findall("{*}polyline")
assert [len(line.get("points").split()) for line in lines] == [96, 12], lines
PYTHON

# Begun on two ranks, and ended on four.
train on_two resumed 5
[ "$(grep -c '^epoch' resumed.log)" -eq 5 ] || { cat resumed.log; fail "expected 5 epochs"; }
train on_four resumed
same resumed
same_picture resumed

# Asked to stop in some update, of so many that it is never done before it has heard of that. It may
# have done more than 12 epochs then.
"$smprun" --config "$two" "$tutorial" stopped 2000 >stopped.log 2>&1 &
pid=$!
until grep -q '^epoch 1 ' stopped.log || ! kill -0 $pid 2>/dev/null; do sleep 0.1; done
kill -TERM $pid 2>/dev/null
wait $pid
status=$?
[ $status -eq 75 ] || { tail -40 stopped.log; fail "expected the status 75, got $status"; }
epochs=$(grep -c '^epoch' stopped.log)
train on_four stopped $((epochs < 12 ? 12 : epochs + 1))
same stopped

exit "$((failures > 0))"
