#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: torchrun_test.sh RANKS SECONDS PROGRAM [ARGUMENT...]
# Runs the program RANKS times with the variables that torchrun sets, and ends the whole job when it
# takes longer than SECONDS.
set -u
ranks=$1 seconds=$2
shift 2
MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export MASTER_ADDR=127.0.0.1 MASTER_PORT WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks
processes=()
for ((rank = 0; rank < ranks; ++rank)); do
  RANK=$rank LOCAL_RANK=$rank timeout --kill-after=5 "$seconds" "$@" &
  processes+=($!)
done
status=0
for process in "${processes[@]}"; do
  wait "$process" || status=$?
done
exit $status
