#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: lost_host_test.sh TWO_HOSTS SMPRUN SMP_CKPT STEP
# Two hosts of two ranks that share no folder for copies: one of them, and then the other, loses its
# memory and its ranks, and comes back or does not. Under smprun, which starts the ranks again, and
# under a launcher that sets torchrun's variables, the job ends with the tensors of one that nothing
# disturbs, and leaves nothing in any memory. A job of which one rank is asked to stop does so.
# Skipped where network namespaces cannot be made, which needs root.
set -eu
two_hosts=$PWD/$1 ckpt=$PWD/$3 step=$PWD/$4
export SMPRUN=$PWD/$2

source tests/needs_namespaces.sh LostHost

work=$(mktemp -d)
export HOSTS_MEMORY=$work/memory OMP_NUM_THREADS=1
export SM_HP_MP_PARAMETERS='{"recovery": "restart", "recovery_interval": 1, "partitions": 2,
  "microbatches": 2, "ddp": true, "gradient_shards": 2, "timeout_seconds": 60}'
returning='' others=''
clean() {
  [ -z "$returning" ] || kill "$returning" || true
  [ -z "$others" ] || wait "$others" || true
  umount "$work"/memory*
  rm -rf "$work"
}
trap clean EXIT
for folder in "$HOSTS_MEMORY" "$HOSTS_MEMORY-of-others"; do
  mkdir "$folder"
  mount -t tmpfs tmpfs "$folder"
done

fail() {
  echo "lost_host_test: $1"
  cat "$work"/*.log
  exit 1
}

# same NAME: its last checkpoint has the tensors of the undisturbed job.
same() {
  "$ckpt" hashes "$work/$1/step_8_partial" >"$work/$1.hashes"
  cmp "$work/undisturbed.hashes" "$work/$1.hashes" || fail "$1: other tensors"
}

"$two_hosts" smprun 2 "$step" "$work/undisturbed" >"$work/undisturbed.log" 2>&1 ||
  fail "the undisturbed job failed"
"$ckpt" hashes "$work/undisturbed/step_8_partial" >"$work/undisturbed.hashes"
[ -s "$work/undisturbed.hashes" ] || fail "no tensors"

# lost NAME MARK...: a job under smprun that goes on twice.
lost() {
  local name=$1 host
  shift
  "$two_hosts" smprun 2 "$step" "$work/$name" "$@" >"$work/$name.log" 2>&1 ||
    fail "$name: the job under smprun did not go on"
  for restart in 1 2; do
    grep -q "restart $restart: goes on from step [1-9]" "$work/$name.log" ||
      fail "$name: no restart $restart"
  done
  for host in first second third; do
    rm -f "$HOSTS_MEMORY/$host/down"
    [ -z "$(ls "$HOSTS_MEMORY/$host")" ] || fail "$name: left in the memory of the $host host: $(ls "$HOSTS_MEMORY/$host")"
  done
}

# A rank of the second host is asked to stop: the job stops, and the next one goes on.
asked() {
  local status=0 preemptible
  preemptible=${SM_HP_MP_PARAMETERS/\"restart\"/\"off\", \"preempt_seconds\": 200}
  SM_HP_MP_PARAMETERS=$preemptible "$two_hosts" smprun 2 "$step" "$work/asked" asked:3:3:1 \
    >"$work/asked.log" 2>&1 || status=$?
  [ "$status" = 75 ] || fail "asked: status $status"
  grep -qx "smprun: preempted: checkpoint $work/asked/asked_partial of step 4" "$work/asked.log" ||
    fail "asked: another last line"
  SM_HP_MP_PARAMETERS=$preemptible RESUME=1 "$two_hosts" smprun 2 "$step" "$work/asked" \
    >"$work/asked_again.log" 2>&1 || fail "asked: does not go on"
  same asked
}

under_torchrun() {
  local start
  export SMP_RECOVERY_DIR=/dev/shm/kept
  for start in 0 1 2; do
    TORCHELASTIC_RESTART_COUNT=$start "$two_hosts" torchrun 2 "$step" "$work/torchrun" \
      lose:0:3:0 lose:3:5:0 >"$work/torchrun$start.log" 2>&1 && [ "$start" != 2 ] &&
      fail "start $start lost nothing"
  done
  same torchrun
  for start in 1 2; do
    grep -q "restart $start: goes on from step" "$work/torchrun$start.log" || fail "no restart $start"
  done
}

# Each waits more than it computes, and goes beside those under smprun.
(
  export HOSTS_MEMORY=$HOSTS_MEMORY-of-others
  asked
  under_torchrun
) &
others=$!

# Rank 3 is on the second host, rank 0 on the first, which is that of the launcher.
lost smprun lose:3:3:0 lose:0:5:0
same smprun

# The first try has shown the work of other ranks in the second that mpirun lets pass before it ends
# them.
export OMPI_MCA_odls_base_sigkill_timeout=0

# The third takes the place of the second.
SPARE=1 lost spare down:3:3:0 lose:0:5:0
same spare
grep -qx "smprun: host 10.77.0.2 does not answer, and is left out" "$work/spare.log" ||
  fail "spare: nothing said of the second host"

# Fewer ranks, on the hosts that are left.
SM_HP_MP_PARAMETERS=${SM_HP_MP_PARAMETERS/restart/shrink} \
  lost shrink down:3:3:0 action:0:5:0
same shrink
grep -q "smprun: goes on with 2 ranks: 2 stages x 1 replica" "$work/shrink.log" ||
  fail "shrink: not on 2 ranks"

# The second comes back, without its memory.
(
  until grep -qsx "smprun: waits for hosts that do not answer, up to 300 s" "$work/waits.log"; do
    sleep 0.1
  done
  rm "$HOSTS_MEMORY/second/down"
) &
returning=$!
WAIT_FOR_HOSTS=300 lost waits down:3:3:0 lose:0:5:0
same waits
wait "$returning"
returning=

# Two hosts are too many: none is left to take their places.
if "$two_hosts" smprun 2 "$step" "$work/few" down:3:3:0 >"$work/few.log" 2>&1; then
  fail "few: the job went on"
fi
grep -qx "smprun: not started again: 4 ranks need as many places, and the hosts that answer have 2. Name more hosts with --hosts than --np needs." \
  "$work/few.log" || fail "few: another reason"
rm -rf "$HOSTS_MEMORY"/*/*

wait "$others" || fail "one of those beside"
others=
echo "two hosts, each lost once under two launchers: the same tensors"
