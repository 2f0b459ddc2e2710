#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: process_failure_test.sh LAUNCHER ABORT_PROGRAM FAILING_PROGRAM TEXT_OF_A_KILLED_RANK
# A failure on one rank must end the whole job, with its reason on every rank: none waits for its own
# time-out, or for the launcher's, which are minutes.
set -u
# The programs fail on purpose; their reports are not the result of this test.
unset XML_OUTPUT_FILE
launcher=$1 abort_program=$2 failing_program=$3 killed=$4
export SMP_TEST_MARKS=$TEST_TMPDIR/marks
failures=0

# check NAME EXPECTED-LINE... : runs "${command[@]}" on three ranks
check() {
  local name=$1 output status
  shift
  rm -rf "$SMP_TEST_MARKS"
  mkdir "$SMP_TEST_MARKS"
  output=$("$launcher" 3 200 "${command[@]}" 2>&1)
  status=$?
  if [[ $status == 0 ]]; then
    echo "$name: expected the job to fail, got status 0"
    failures=1
  fi
  if [[ $status == 124 ]]; then
    echo "$name: expected the job to end by itself, but the launcher had to end it"
    failures=1
  fi
  for line in "$@"; do
    if ! grep -qE -- "$line" <<<"$output"; then
      printf '%s: expected a line with "%s", got:\n%s\n' "$name" "$line" "$output"
      failures=1
    fi
  done
}

for mode in wait compute; do
  command=("$abort_program" $mode)
  check "abort while the others $mode" \
    'rank 0 saw \[.*rank 1 failed: disk full \[noticed by irecv of 8 bytes from rank 1.*aborted 1' \
    'rank 2 saw \[.*rank 1 failed: disk full \[noticed by irecv of 8 bytes from rank 1.*aborted 1'
done
command=("$abort_program" channel)
check "abort while the others wait on a channel" \
  'rank 0 saw \[.*rank 1 failed: disk full \[noticed by channel receive of 8 bytes from rank 1.*aborted 1' \
  'rank 2 saw \[.*rank 1 failed: disk full \[noticed by channel receive of 8 bytes from rank 1.*aborted 1'
command=("$abort_program" finalize)
check "abort while the others finalize" \
  'rank 0 saw \[nothing\] aborted 1' 'rank 2 saw \[nothing\] aborted 1'
command=("$abort_program" kill)
check "a killed rank" "$killed"

command=("$failing_program" --gtest_filter=Failing.LeavesEarly)
check "a fatal failure" 'rank 1 failed: test Failing.LeavesEarly failed:' \
  '\[rank 1\] .*failure in Failing.LeavesEarly' '\[  FAILED  \] Failing.LeavesEarly'
command=("$failing_program" --gtest_filter=Failing.Throws)
check "an exception" 'rank 1 failed: test Failing.Throws failed:.*' 'thrown on purpose'
command=("$failing_program" --gtest_filter=Failing.GoesOn)
check "another failure" 'rank 1 failed in Failing.GoesOn' '\[       OK \] Failing.GoesOn'
exit $failures
