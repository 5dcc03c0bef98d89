#!/usr/bin/env bash
# Runs a command as if on the first of two hosts: two network namespaces with an address, a host name and a loopback
# each, joined by one cable. Needs root and iproute2. mpirun finds the other "host" through `$MPIRUN_TWO_HOSTS`:
#
#   benches/ranks/two_hosts.sh python3 benches/ranks/same.py target/release/pagemill MODEL --mpirun '$MPIRUN_TWO_HOSTS'
#   benches/ranks/two_hosts.sh python3 benches/ranks/kill.py target/release/pagemill MODEL --mpirun '$MPIRUN_TWO_HOSTS'
#
# (in single quotes: the variable is put in here). Two ranks run on each.
set -euo pipefail
a=pagemill-a b=pagemill-b
agent=$(mktemp)
clean() {
  rm -f "$agent"
  ip netns delete $a 2>/dev/null || true
  ip netns delete $b 2>/dev/null || true
}
trap clean EXIT
ip netns add $a
ip netns add $b
ip -n $a link add cable type veth peer name cable netns $b
ip -n $a address add 10.77.0.1/24 dev cable
ip -n $b address add 10.77.0.2/24 dev cable
for host in $a $b; do
  ip -n $host link set lo up
  ip -n $host link set cable up
done

# What mpirun calls instead of ssh: HOST COMMAND...
cat >"$agent" <<EOF
#!/bin/sh
shift
exec ip netns exec $b unshare --uts sh -c 'hostname $b; exec sh -c "\$*"' sh "\$@"
EOF
chmod +x "$agent"
export MPIRUN_TWO_HOSTS="--host 10.77.0.1:2,10.77.0.2:2 --mca plm_rsh_agent $agent --mca btl tcp,self \
--mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24"
words=()
for word in "$@"; do
  [ "$word" = '$MPIRUN_TWO_HOSTS' ] && word=$MPIRUN_TWO_HOSTS
  words+=("$word")
done
ip netns exec $a unshare --uts sh -c "hostname $a; exec \"\$@\"" sh "${words[@]}"
