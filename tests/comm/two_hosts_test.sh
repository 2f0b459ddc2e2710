#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: two_hosts_test.sh TWO_HOSTS PROGRAM
# The suite of collectives on two hosts of two ranks, which both launchers start. Skipped where
# network namespaces cannot be made, which needs root. Left out are the cases that only ranks of one
# host can see.
set -eu
two_hosts=$1 program=$PWD/$2

source tests/needs_namespaces.sh TwoHosts

for launcher in torchrun mpirun; do
  output=$("$two_hosts" "$launcher" 2 "$program" \
    --gtest_filter='-*ThatDoNotMatch*:*ATimeOutNames*' 2>&1) || {
    echo "$output"
    echo "two hosts by $launcher failed"
    exit 1
  }
  echo "$output" | tail -n 3
  # Or both could have been one host.
  echo "$output" | grep -qE '^two_hosts.sh: [0-9]{6,} bytes from the first host to the second' || {
    echo "little or nothing went over the wire between the hosts of $launcher"
    exit 1
  }
done
