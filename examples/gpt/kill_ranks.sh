#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: examples/gpt/kill_ranks.sh [--steps N] [ARGUMENTS OF GPT...]
#
# Trains the GPT on 4 ranks twice, the second time under `smprun --restarts 3`, and kills three of
# its ranks (kill -9), one after the other. Each must have been named, and both jobs must have left
# the same bytes. (Without measured times, by which another start may get another plan, and other
# files.) In the environment: SMPRUN, GPT, CONFIG and SMP_CKPT, the launcher, the program, its
# configuration and the printer of a checkpoint's hashes. With RECOVERY=restart the second job goes
# on from its copy in memory instead, and saves at the end only; with RECOVERY=shrink it loses two
# ranks and goes on with fewer, so that others write the files. RECOVERY="off restart shrink" makes a
# second job of each kind.
set -euo pipefail
steps=400
if [ "${1:-}" = --steps ]; then steps=$2 && shift 2; fi
smprun=${SMPRUN:-tools/smprun} gpt=${GPT:-bazel-bin/examples/gpt/gpt} config=${CONFIG:-examples/gpt/2x2.json}
recoveries=${RECOVERY:-off} smp_ckpt=$(realpath "${SMP_CKPT:-bazel-bin/tools/smp_ckpt}")
work=$(mktemp -d)
launcher=
trap '[ -z "$launcher" ] || kill "$launcher" 2>/dev/null || true; rm -rf "$work"' EXIT
export TERM=dumb

# job NAME CONFIG SAVE_EVERY [OPTIONS OF SMPRUN...]: becomes the launcher
job() {
  exec "$smprun" --np 4 --config "$2" "${@:4}" "$gpt" --steps "$steps" --sample 0 \
    --save-every "$3" --checkpoint-dir "$work/$1" --losses "$work/$1.losses" "${arguments[@]}"
}
arguments=("$@")
sed '1s/{/{"skip_tracing": true,/' "$config" >"$work/config.json"
config=$work/config.json save_every=$((steps / 16))

lines() { if [ -e "$work/disturbed.losses" ]; then wc -l <"$work/disturbed.losses"; else echo 0; fi; }

# pid_of RANK: of the processes that mpirun has started
pid_of() {
  local mpirun rank
  for mpirun in $(cat "/proc/$launcher/task/$launcher/children"); do
    for rank in $(cat "/proc/$mpirun/task/$mpirun/children"); do
      if tr '\0' '\n' <"/proc/$rank/environ" | grep -qx "OMPI_COMM_WORLD_RANK=$1"; then echo "$rank"; fi
    done
  done
}

# disturb RECOVERY: the second job, whose ranks are killed.
disturb() {
  local own=$config every=$save_every restarts=(--restarts 3) killed=(3 0 1) count=0 rank
  local part=$((steps / 8)) # more than half of the job is left after the last one
  if [ "$1" != off ]; then
    own=$work/$1.json every=0 restarts=()
    sed "1s/{/{\"recovery\": \"$1\", \"recovery_interval\": 1,/" "$config" >"$own"
  fi
  [ "$1" != shrink ] || killed=(3 1)
  echo "again, recovery $1, and a rank is killed ${#killed[@]} times"
  rm -rf "$work"/disturbed*
  job disturbed "$own" "$every" "${restarts[@]}" >"$work/disturbed.log" 2>&1 &
  launcher=$!
  for rank in "${killed[@]}"; do
    count=$((count + 1))
    # A little later than a checkpoint, so that there is something to train again.
    until [ "$(lines)" -ge $((count * part + steps / 40)) ]; do
      kill -0 "$launcher" || { cat "$work/disturbed.log"; exit 1; }
      sleep 0.02
    done
    kill -9 "$(pid_of "$rank")"
    echo "  rank $rank was killed"
  done
  wait "$launcher" || { cat "$work/disturbed.log"; exit 1; }
  launcher=
  for rank in "${killed[@]}"; do
    grep -q "^smprun: first cause: rank $rank: .*ended" "$work/disturbed.log" || { cat "$work/disturbed.log"; exit 1; }
  done
  grep -o '^smprun: .*\|restart [0-9]*: goes on.*' "$work/disturbed.log" | grep -v noticed | sed "s|$work/||; s/^/  /"
}

# compare RECOVERY: both jobs have left the same.
compare() {
  local name
  cd "$work"
  if [ "$1" = shrink ]; then
    for name in undisturbed disturbed; do "$smp_ckpt" hashes "$name" >"$name.hashes"; done
    [ -s undisturbed.hashes ]
    cmp undisturbed.hashes disturbed.hashes
    echo "same hashes: all $(wc -l <disturbed.hashes) tensors $(sha256sum <disturbed.hashes | cut -c1-16)"
  else
    for name in $(cd undisturbed && ls); do
      cmp "undisturbed/$name" "disturbed/$name"
      echo "same bytes: $name $(sha256sum <"disturbed/$name" | cut -c1-16)"
    done
  fi
  cmp undisturbed.losses disturbed.losses
  echo "same bytes: the losses of all $(wc -l <disturbed.losses) steps"
}

echo "undisturbed: $steps steps on 4 ranks"
(job undisturbed "$config" "$save_every") >"$work/undisturbed.log" 2>&1 || { cat "$work/undisturbed.log"; exit 1; }
for recovery in $recoveries; do
  disturb "$recovery"
  (compare "$recovery")
done
