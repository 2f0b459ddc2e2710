#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: mpi_test.sh RANKS SECONDS PROGRAM [ARGUMENT...]
# Runs the program under mpirun and ends the whole job when it takes longer than SECONDS. Single
# copies between processes are off because containers often forbid them (ptrace), with a warning
# for each rank.
set -u
ranks=$1 seconds=$2
shift 2
exec timeout --kill-after=5 "$seconds" \
  mpirun --allow-run-as-root --oversubscribe --bind-to none \
  --mca btl_vader_single_copy_mechanism none -np "$ranks" "$@"
