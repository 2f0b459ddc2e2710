#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: two_hosts.sh torchrun|mpirun RANKS_PER_HOST PROGRAM [ARGUMENT...]
# Runs the program on two hosts that this one pretends to be: network and host-name namespaces with
# one wire between them, so that all messages between the two go over TCP. Needs root. Prints at the
# end how many bytes went over the wire in each direction.
set -eu
launcher=$1 ranks=$2
shift 2
if [ "$(id -u)" -ne 0 ]; then
  echo "two_hosts.sh: network namespaces need root" >&2
  exit 2
fi

one=smp$$a two=smp$$b folder=$(mktemp -d)
clean() {
  ip netns del "$one" 2>/dev/null || true
  ip netns del "$two" 2>/dev/null || true
  rm -rf "$folder"
}
trap clean EXIT

for host in "$one" "$two"; do
  ip netns add "$host"
  ip -n "$host" link set lo up
done
ip link add wire netns "$one" type veth peer name wire netns "$two"
ip -n "$one" address add 10.77.0.1/24 dev wire
ip -n "$two" address add 10.77.0.2/24 dev wire
ip -n "$one" link set wire up
ip -n "$two" link set wire up

# on HOST NAME COMMAND...: the command inside that host.
on() {
  ip netns exec "$1" unshare --uts sh -c 'hostname "$0" && exec "$@"' "${@:2}"
}

run_torchrun() {
  export WORLD_SIZE=$((2 * ranks)) LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
  local processes=() status=0 rank
  for ((rank = 0; rank < WORLD_SIZE; ++rank)); do
    if ((rank < ranks)); then host=$one name=first; else host=$two name=second; fi
    RANK=$rank LOCAL_RANK=$((rank % ranks)) on "$host" "$name" "$@" &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || status=$?; done
  return $status
}

# mpirun starts its daemon on the second host by this instead of ssh.
run_mpirun() {
  cat >"$folder/agent" <<AGENT
#!/bin/sh
shift
exec ip netns exec $two unshare --uts sh -c "hostname second && \$*"
AGENT
  chmod +x "$folder/agent"
  on "$one" first mpirun --allow-run-as-root --oversubscribe --bind-to none \
    --host "10.77.0.1:$ranks,10.77.0.2:$ranks" -np $((2 * ranks)) \
    --mca plm_rsh_agent "$folder/agent" --mca btl_vader_single_copy_mechanism none \
    --mca btl_tcp_if_include wire --mca oob_tcp_if_include wire \
    ${SM_HP_MP_PARAMETERS:+-x SM_HP_MP_PARAMETERS} "$@"
}

status=0
"run_$launcher" "$@" || status=$?
read -r received sent < <(
  ip netns exec "$one" sh -c 'cd /sys/class/net/wire/statistics && echo $(cat rx_bytes tx_bytes)')
echo "two_hosts.sh: $sent bytes from the first host to the second, $received back"
exit $status
