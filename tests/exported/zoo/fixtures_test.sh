#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: fixtures_test.sh LIBTORCH PACKAGES ZOO_RUN  (the first two are those of with_torch.sh)
# Trains each program of fixtures/ on 1, 2 and 4 ranks: losses, gradients and values have the bits of
# Python, which trains them first.
set -uo pipefail
run=$3 here=$(dirname "$0")
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
bash tests/python/with_torch.sh "$1" "$2" "" "$results/python" \
  python3 "$here/fixtures.py" "$results" || exit 1
status=0
for archive in "$here"/fixtures/*.pt2; do
  model=$(basename "$archive" .pt2) # NAME.LOSS
  echo "$model"
  SMP_LOG_LEVEL=error "$run" "$archive" "$results/$model.safetensors" "${model##*.}" || status=1
done
exit $status
