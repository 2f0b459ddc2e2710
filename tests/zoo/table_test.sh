#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# table_test.sh TABLE PAGE: the page has the rows that the program prints, apart from stages,
# balance and boundary, which follow the partitioner.
set -euo pipefail
stable_columns() { grep '^|' | cut -d'|' -f2-4,8; }
diff <(stable_columns < "$2") <("$1" | stable_columns) || {
  echo "docs/zoo.md is out of date: bazel run //tests/zoo:table > docs/zoo.md"
  exit 1
}
