#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: no_localhost_test.sh PROGRAM [ARGUMENT...]
# Runs the program on a host that knows no name, not even localhost. Skipped where namespaces cannot
# be made.
set -eu
source tests/needs_namespaces.sh NoLocalhost
names=$(mktemp)
trap 'rm -f "$names"' EXIT
unshare --mount sh -c 'mount --bind "$0" /etc/hosts && ! getent hosts localhost && exec "$@"' \
  "$names" "$@"
