#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes a C++ source that holds the files, for pages that need nothing else (core/web_page.h).
# usage: embed.sh FILE... > web_files.cc
set -eu
printf '#include "core/web_files.h"\nnamespace smp::core {\nconst WebFile kWebFiles[] = {\n'
for file in "$@"; do
  printf '{"%s", R"web(' "${file##*/}"
  cat "$file"
  printf ')web"},\n'
done
printf '{nullptr, nullptr}};\n}  // namespace smp::core\n'
