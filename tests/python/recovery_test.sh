#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: recovery_test.sh LIBTORCH PACKAGES SMDDP GPT
# Trains the GPT on 4 ranks of torchrun (torch.distributed.run) twice, with "recovery", and kills a rank
# of the second job. torchrun's agent starts all ranks again, they go on from the copy in memory, and
# both jobs leave the same bytes. The first three arguments are those of with_torch.sh.
set -u
where=("${@:1:3}") gpt=$4
work=$(mktemp -d) agent=
export HOME=$work SMP_RECOVERY_DIR=$work/kept OMP_NUM_THREADS=1
# Without measured times, by which another start may get another plan, and with it other files.
export SM_HP_MP_PARAMETERS='{"recovery": "restart", "recovery_interval": 1, "partitions": 2, "microbatches": 2, "ddp": true,
  "gradient_shards": 2, "skip_tracing": true}'
mkdir "$SMP_RECOVERY_DIR"
trap '[ -z "$agent" ] || kill "$agent" 2>/dev/null; rm -rf "$work"' EXIT

fail() {
  echo "recovery_test: $1"
  cat "$work"/*.log
  exit 1
}

# job NAME: becomes torchrun's agent
job() {
  exec bash tests/python/with_torch.sh "${where[@]}" "$work/python" \
    python3 -m torch.distributed.run --standalone --no-python --max-restarts 3 --nproc-per-node 4 \
    "$gpt" --steps 320 --layers 2 --width 16 --heads 2 --sequence 16 --sample 0 --save-every 0 \
    --checkpoint-dir "$work/$1" --losses "$work/$1.losses" >"$work/$1.log" 2>&1
}

(job undisturbed) || fail "the undisturbed job failed"
rm -rf "${SMP_RECOVERY_DIR:?}"/*

job disturbed &
agent=$!
until [ -e "$work/disturbed.losses" ] && [ "$(wc -l <"$work/disturbed.losses")" -ge 40 ]; do
  kill -0 "$agent" 2>/dev/null || fail "the job ended before a rank was killed"
  sleep 0.02
done
for process in $(cat "/proc/$agent/task/$agent/children"); do
  if tr '\0' '\n' <"/proc/$process/environ" | grep -qx RANK=2; then killed=$process; fi
done
kill -9 "${killed:?rank 2 is no child of torchrun}"
wait "$agent" || fail "the job did not go on"
agent=
grep -q "restart 1: goes on from step" "$work/disturbed.log" || fail "the job was not started again"

for file in "$work"/undisturbed/* "$work/undisturbed.losses"; do
  cmp "$file" "${file/undisturbed/disturbed}" || fail "other bytes in $file"
done
echo "a rank of torchrun was killed: the same bytes"
