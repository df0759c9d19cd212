# What up, down, kubectl and node share: where things are, and how processes start and end.
# shellcheck shell=bash

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
# A second cluster on the same machine needs a folder and a prefix of its own, and nothing else:
# its addresses are in its own networks.
state=${MOEJOB_CLUSTER_STATE:-/var/lib/moejob-cluster}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/moejob-cluster
namespace_prefix=${MOEJOB_CLUSTER_PREFIX:-moejob-}
kubernetes_version=v1.35.4
# Where Go's own archive is unpacked, whether or not a login shell has said so.
command -v go >/dev/null || PATH=$PATH:/usr/local/go/bin

# The control plane's namespace holds the bridge that all nodes hang on. Nothing listens on,
# routes through, or gives an address to the machine's own namespace.
control_address=10.77.0.1
service_address=10.76.0.1
node_address() { echo "10.77.0.$((10 + $1))"; }
pod_subnet() { echo "10.77.$((10 + $1)).0/24"; }
# Node 0 is the operator's, nodes 1 to N are workers.
node_name() { if [ "$1" = 0 ]; then echo operator; else echo "worker-$1"; fi; }
# The namespace of all fake nodes, and the addresses of their pods.
fake_address=10.77.0.250
fake_pods=10.78.0.0
node_number() { if [ "$1" = operator ]; then echo 0; else echo "${1#worker-}"; fi; }

say() { echo "cluster: $*" >&2; }
die() { say "$*"; exit 1; }

# inside NAME COMMAND...: in the network of a node, or of 'control'. Not by `ip netns exec`, which
# mounts a new /sys over the old one and so hides the cgroups.
inside() {
  local name=$1
  shift
  nsenter --net="/run/netns/$namespace_prefix$name" -- "$@"
}

# The moment that a process started, in clock ticks since boot: with it a process id is unique.
started_at() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# start NAMESPACE COMPONENT COMMAND...: in the background, its output in a log, its id in a file.
start() {
  local name=$1 component=$2
  shift 2
  mkdir -p "$state/pids" "$state/logs"
  # nsenter and setsid both become the command: the id is the component's own.
  setsid nsenter --net="/run/netns/$namespace_prefix$name" -- "$@" \
    >>"$state/logs/$component.log" 2>&1 </dev/null &
  echo "$! $(started_at $!)" >"$state/pids/$component"
}

alive() {
  local pid at
  read -r pid at 2>/dev/null <"$state/pids/$1" && [ "$(started_at "$pid")" = "$at" ]
}

# A test run that brings up a cluster says who it is, `MOEJOB_CLUSTER_OWNER="PID STARTED"`, so that
# what is left of one that was killed is known as such. A cluster of a person's has no owner.
note_owner() {
  [ -z "${MOEJOB_CLUSTER_OWNER:-}" ] ||
    echo "$MOEJOB_CLUSTER_OWNER $namespace_prefix" >"$state/owner"
}

# is_left FOLDER: the cluster there was brought up by a test run that is no more.
is_left() {
  local pid at
  read -r pid at _ 2>/dev/null <"$1/owner" && [ "$(started_at "$pid")" != "$at" ]
}

# stop COMPONENT [SIGNAL]: ends a process that `start` started, and no other that has got its id.
stop() {
  local pid at i
  alive "$1" || { rm -f "$state/pids/$1"; return 0; }
  read -r pid at <"$state/pids/$1"
  kill -"${2:-TERM}" "$pid" 2>/dev/null || true
  for i in $(seq 50); do
    alive "$1" || break
    [ "$i" != 40 ] || kill -KILL "$pid" 2>/dev/null || true
    sleep 0.1
  done
  rm -f "$state/pids/$1"
}

# until_true SECONDS WHAT COMMAND...: polls, and says what it waited for when time is up.
until_true() {
  local limit=$1 what=$2 end
  shift 2
  end=$(($(date +%s) + limit))
  until "$@" >/dev/null 2>&1; do
    if [ "$(date +%s)" -ge "$end" ]; then
      say "not within $limit s: $what"
      return 1
    fi
    sleep 0.3
  done
}

kubectl() { inside control "$state/kube" kubectl --kubeconfig="$state/admin.kubeconfig" "$@"; }
