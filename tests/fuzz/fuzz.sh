#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: tests/fuzz/fuzz.sh [SECONDS [TARGET...]]
#
# Runs each fuzz target (config, exported programs, index, safetensors, weight_map, idx, samples of
# smp_train, and readers: schedules, plans, saved graphs, costs, name maps and logs of hashes) for
# SECONDS (600) under libFuzzer with the address and undefined-behaviour sanitizers, from the inputs of
# tests/fuzz/corpus. New inputs stay in fuzz-corpus/TARGET; those that break a reader, in
# fuzz-corpus/TARGET-crash-*. An input of 8 KiB may lead to no allocation above 16 MiB. BAZEL may
# hold another command and options.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-600}
shift || true
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  for folder in tests/fuzz/corpus/*/; do targets+=("$(basename "$folder")"); done
fi
read -r -a bazel <<< "${BAZEL:-bazel}"
labels=()
for target in "${targets[@]}"; do labels+=("//tests/fuzz:${target}_fuzz"); done
"${bazel[@]}" build --config=fuzz "${labels[@]}"
binaries=$("${bazel[@]}" info --config=fuzz bazel-bin)
for target in "${targets[@]}"; do
  mkdir -p "fuzz-corpus/$target"
  echo "== $target, $seconds s"
  "$binaries/tests/fuzz/${target}_fuzz" -max_total_time="$seconds" -max_len=8192 -malloc_limit_mb=16 \
    -timeout=10 -print_final_stats=1 -artifact_prefix="fuzz-corpus/$target-" \
    "fuzz-corpus/$target" "tests/fuzz/corpus/$target"
done
