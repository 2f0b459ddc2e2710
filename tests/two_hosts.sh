#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: two_hosts.sh torchrun|mpirun|smprun RANKS_PER_HOST PROGRAM [ARGUMENT...]
# Runs the program on two hosts that this one pretends to be: network, host-name and mount
# namespaces with one wire between them, so that all messages between the two go over TCP, and a
# /dev/shm for each. Needs root. Prints at the end how many bytes went over the wire in each
# direction.
#
# A file "down" in the /dev/shm of the second host keeps all users from starting programs there.
#
# In the environment: SMPRUN, the launcher, if not tools/smprun; SPARE=1 for a third host that
# smprun is told of, and for which the job has no need at first; WAIT_FOR_HOSTS, an option of
# smprun; and HOSTS_MEMORY, a folder of a tmpfs with the hosts' memory, in "first", "second" and
# "third", which outlives this command. It must not lie in /dev/shm, of which each host has another.
set -eu
launcher=$1 ranks=$2
shift 2
if [ "$(id -u)" -ne 0 ]; then
  echo "two_hosts.sh: network namespaces need root" >&2
  exit 2
fi

one=smp$$a two=smp$$b three=smp$$c folder=$(mktemp -d)
memory=${HOSTS_MEMORY:-$folder/memory}
clean() {
  for host in "$one" "$two" "$three"; do ip netns del "$host" 2>/dev/null || true; done
  [ -n "${HOSTS_MEMORY:-}" ] || umount "$memory" 2>/dev/null || true
  rm -rf "$folder"
}
trap clean EXIT

if [ -z "${HOSTS_MEMORY:-}" ]; then
  mkdir "$memory"
  mount -t tmpfs tmpfs "$memory"
fi
mkdir -p "$memory/first" "$memory/second" "$memory/third"

for host in "$one" "$two" "$three"; do
  ip netns add "$host"
  ip -n "$host" link set lo up
done
# The wires of the others end in a bridge of the first, which is its own wire.
ip -n "$one" link add wire type bridge
ip -n "$one" address add 10.77.0.1/24 dev wire
ip -n "$one" link set wire up
for host in 2 3; do
  name=$two
  [ "$host" = 2 ] || name=$three
  ip link add "to$host" netns "$one" type veth peer name wire netns "$name"
  ip -n "$one" link set "to$host" master wire up
  ip -n "$name" address add "10.77.0.$host/24" dev wire
  ip -n "$name" link set wire up
done

# on HOST NAME COMMAND...: the command inside that host.
on() {
  ip netns exec "$1" unshare --uts --mount \
    sh -c 'hostname "$1" && mount --bind "$0/$1" /dev/shm && shift && exec "$@"' "$memory" "${@:2}"
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

# Sets mpirun up for this host, whichever user runs it.
set_up_mpirun() {
  # It starts its daemons on the other hosts by this instead of ssh.
  cat >"$folder/agent" <<AGENT
#!/bin/sh
case \$1 in 10.77.0.3) host=$three name=third ;; *) host=$two name=second ;; esac
shift
[ ! -e "$memory/\$name/down" ] || exit 255
exec ip netns exec \$host unshare --uts --mount \
  sh -c "hostname \$name && mount --bind $memory/\$name /dev/shm && \$*"
AGENT
  chmod +x "$folder/agent"
  export OMPI_MCA_plm_rsh_agent=$folder/agent OMPI_MCA_btl_tcp_if_include=wire
  export OMPI_MCA_oob_tcp_if_include=wire OMPI_MCA_btl_vader_single_copy_mechanism=none
}

run_mpirun() {
  set_up_mpirun
  on "$one" first mpirun --allow-run-as-root --oversubscribe --bind-to none \
    --host "10.77.0.1:$ranks,10.77.0.2:$ranks" -np $((2 * ranks)) \
    ${SM_HP_MP_PARAMETERS:+-x SM_HP_MP_PARAMETERS} "$@"
}

run_smprun() {
  set_up_mpirun
  on "$one" first "${SMPRUN:-tools/smprun}" --np $((2 * ranks)) --wait-for-hosts "${WAIT_FOR_HOSTS:-0}" \
    --hosts "10.77.0.1:$ranks,10.77.0.2:$ranks${SPARE:+,10.77.0.3:$ranks}" -- "$@"
}

status=0
"run_$launcher" "$@" || status=$?
read -r received sent < <(
  ip netns exec "$one" sh -c 'cd /sys/class/net/wire/statistics && echo $(cat rx_bytes tx_bytes)')
echo "two_hosts.sh: $sent bytes from the first host to the second, $received back"
exit $status
