#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: unet_test.sh SMPRUN UNET CONFIG_2X1
# Trains the diffusion model on two stages and alone, and has it draw.
set -uo pipefail
smprun=$PWD/$1 unet=$PWD/$2 two_stages=$PWD/$3
cd "$TEST_TMPDIR" || exit 1
failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}
run() { "${@:2}" >"$1.log" 2>&1 || { cat "$1.log"; fail "$1 ended with an error"; }; }

echo '{"microbatches": 2}' >alone.json
run stages "$smprun" --np 2 --config "$two_stages" "$unet" --steps 60 --batch 8 --width 8 --save saved
run alone "$unet" --config alone.json --steps 60 --batch 8 --width 8
# The same bits: the same losses, and the same picture.
drawn() { grep '^step [0-9]*: loss\|^\( \.\|##\)\+$' "$1.log"; }
diff <(drawn stages) <(drawn alone) || fail "two stages and one process differ"
[ "$(grep -c '^\( \.\|##\)\+$' alone.log)" -eq 16 ] || { cat alone.log; fail "expected a picture"; }
loss() { sed -n "s/^step $1: loss //p" alone.log; }
python3 -c "import sys; sys.exit(not $(loss 60) < 0.9)" || fail "learnt nothing: $(loss 60)"
[ -s saved/index.json ] || fail "nothing was saved"

exit "$((failures > 0))"
