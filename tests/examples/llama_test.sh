#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: llama_test.sh SMPRUN LLAMA NAMES CONFIG_2X2 CONFIG_1X1 FINETUNE CONFIG_FINETUNE
#   CONFIG_2X2X2
# Trains the Llama of the examples on ranks and alone, and fine-tunes its checkpoint.
set -uo pipefail
smprun=$PWD/$1 llama=$PWD/$2 names=$PWD/$3 two_by_two=$PWD/$4 one_by_one=$PWD/$5
finetune=$PWD/$6 two_stages=$PWD/$7 with_replicas=$PWD/$8
cd "$TEST_TMPDIR" || exit 1
failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

# run NAME COMMAND...
run() { "${@:2}" >"$1.log" 2>&1 || { cat "$1.log"; fail "$1 ended with an error"; }; }

# loss NAME STEP: the printed one
loss() { sed -n "s/^step $2: loss //p" "$1.log"; }

# holds NAME EXPRESSION: one of Python
holds() { python3 -c "import sys; sys.exit(not ($2))" || fail "$1: $2"; }

short() { run "$1" "${@:2}" --names "$names" --steps 20 --batch 8; }
short ranks "$smprun" --np 4 --config "$two_by_two" "$llama" --to ranks
short sharded "$smprun" --np 8 --config "$with_replicas" "$llama" --to sharded
short alone "$llama" --config "$one_by_one" --to alone
holds "ranks that divide layers, and one" "abs($(loss ranks 20) - $(loss alone 20)) < 1e-3"
holds "with sharded state, and one" "abs($(loss sharded 20) - $(loss alone 20)) < 1e-3"
grep -q 'Tensor parallelism among 2 ranks' ranks.log || { cat ranks.log; fail "no report"; }
grep -q '"LlamaForCausalLM"' ranks/config.json || fail "no config.json"

run up "$llama" --names "$names" --to up
holds "counts up" "$(loss up 100) < 1.0"
short further "$llama" --from up
holds "goes on from what was written" "$(loss further 20) < 1.0"

python3 - "$two_stages" <<'PYTHON' || fail "could not write the configuration"
import json, sys
json.dump({**json.load(open(sys.argv[1])), "timeline": "timeline"}, open("recorded.json", "w"))
PYTHON
run down "$smprun" --np 2 --config recorded.json "$finetune" --names "$names" --from up --to down
holds "counts down" "$(loss down 100) < 0.7 * $(loss down 1)"
# The timeline shows of each stage: the first has forwards only.
python3 - timeline.json <<'PYTHON' || fail "the timeline of the frozen stage"
import json, sys
names = {e["name"][:2] for e in json.load(open(sys.argv[1]))["traceEvents"] if e["ph"] == "X"}
sys.exit(not ({"0F", "1F", "1B"} <= names and not {"0B", "0I", "0W"} & names))
PYTHON
short merged "$llama" --from down
[ -s down/model.safetensors ] || fail "nothing was written"
# The same first batch as before: the learnt terms are in the written weights.
run again "$finetune" --names "$names" --from down --to again --steps 1
holds "the merged model counts down" "$(loss again 1) < 0.7 * $(loss down 1)"

exit "$((failures > 0))"
