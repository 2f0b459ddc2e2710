#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: snippets_test.sh PAGE SOURCE...
# Every block of C++ in PAGE (between ```cpp and ```) must be found in one of the compiled SOURCEs,
# line by line but for indentation, so that the page shows code that was built and run.
set -u
page=$1
shift

squeeze() { sed 's/^[[:space:]]*//; s/[[:space:]]*$//'; }

sources=()
for source in "$@"; do
  sources+=("$(squeeze <"$source")"$'\n')
done

check() {
  local source
  for source in "${sources[@]}"; do
    [[ $source == *"$block"* ]] && return
  done
  printf 'FAIL: %s: this block is in none of: %s\n%s' "$page" "$*" "$block"
  failures=$((failures + 1))
}

failures=0 blocks=0 inside=no block=
while IFS= read -r line; do
  if [[ $inside == no && $line == '```cpp'* ]]; then
    inside=yes block=
  elif [[ $inside == yes && $line == '```'* ]]; then
    inside=no blocks=$((blocks + 1))
    check "$@"
  elif [[ $inside == yes ]]; then
    block+=$(squeeze <<<"$line")$'\n'
  fi
done <"$page"

[[ $inside == no ]] || { echo "FAIL: $page ends inside a block"; failures=$((failures + 1)); }
[[ $blocks -gt 0 ]] || { echo "FAIL: $page has no block of C++"; failures=$((failures + 1)); }
echo "$page: $blocks blocks, $failures failures"
[[ $failures -eq 0 ]]
