#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: fixtures_test.sh ZOO_RUN
# Trains each program of fixtures/ on 1, 2 and 4 ranks: losses and values have Python's bits.
set -uo pipefail
run=$PWD/$1
cd "$(dirname "$0")/fixtures" || exit 1
status=0
for archive in *.pt2; do
  model=${archive%.pt2} # NAME.LOSS
  echo "$model"
  SMP_LOG_LEVEL=error "$run" "$archive" "$model.safetensors" "${model##*.}" || status=1
done
exit $status
