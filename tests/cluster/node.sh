# A node: a network namespace with a containerd and a kubelet of its own.
# shellcheck shell=bash

cgroups_unified() { [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; }

# CAP_SYS_RESOURCE is bit 24. Without it a process may not lower its own OOM score.
may_lower_oom_score() {
  local rights
  rights=$(awk '/^CapEff/ {print $2}' /proc/self/status)
  (((16#$rights >> 24) & 1))
}

# Overlays do not stack on every kernel: within a container, layers are copied.
snapshotter() {
  if [ "$(stat -fc %T "$state")" = overlayfs ]; then echo native; else echo overlayfs; fi
}

make_control_network() {
  ip netns add "${namespace_prefix}control"
  local in="ip -n ${namespace_prefix}control"
  $in link set lo up
  $in link add nodes type bridge
  $in addr add "$control_address/24" dev nodes
  # The API server answers at its service's address itself: no kube-proxy is needed to reach it.
  $in addr add "$service_address/32" dev lo
  $in link set nodes up
  inside control sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
}

make_node_network() {
  local number=$1 name
  name=$(node_name "$number")
  ip netns add "$namespace_prefix$name"
  local in="ip -n $namespace_prefix$name"
  $in link set lo up
  ip -n "${namespace_prefix}control" link add "$name" type veth \
    peer name eth0 netns "$namespace_prefix$name"
  ip -n "${namespace_prefix}control" link set "$name" master nodes up
  $in addr add "$(node_address "$number")/24" dev eth0
  $in link set eth0 up
  $in route add default via "$control_address"
  ip -n "${namespace_prefix}control" route add "$(pod_subnet "$number")" \
    via "$(node_address "$number")"
  inside "$name" sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
}

# All fake nodes share one network; every address of their pods is its own.
make_fake_network() {
  ip netns add "${namespace_prefix}fake"
  local in="ip -n ${namespace_prefix}fake"
  $in link set lo up
  ip -n "${namespace_prefix}control" link add fake type veth \
    peer name eth0 netns "${namespace_prefix}fake"
  ip -n "${namespace_prefix}control" link set fake master nodes up
  $in addr add "$fake_address/24" dev eth0
  $in link set eth0 up
  $in route add default via "$control_address"
  $in route add local "$fake_pods/16" dev lo
  ip -n "${namespace_prefix}control" route add "$fake_pods/16" via "$fake_address"
}

# start_fake_nodes COUNT PROGRAM
start_fake_nodes() {
  mkdir -p "$state/fake"
  make_fake_network
  KUBECONFIG=$state/admin.kubeconfig start fake fake-nodes \
    "$2" "$1" "$state/fake" "$fake_pods" --step-ms "${MOEJOB_FAKE_STEP_MS:-100}"
}

write_containerd_config() {
  local number=$1 home=$2 restrict=true
  may_lower_oom_score && restrict=false
  mkdir -p "$home/cni"
  cat >"$home/containerd.toml" <<TOML
version = 2
root = "$home/containerd"
state = "$home/run"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "$home/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$home/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:test"
  restrict_oom_score_adj = $restrict
  # The namespaces of pods stay in this folder, so that what made them can remove them.
  netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "$(snapshotter)"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "$home/cni"
TOML
  cat >"$home/cni/pods.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "pods", "isDefaultGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$home/addresses",
            "ranges": [[{"subnet": "$(pod_subnet "$number")"}]]}}]}
JSON
}

write_kubelet_config() {
  local home=$1
  cat >"$home/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://$home/containerd.sock
podLogsDir: $home/logs
volumePluginDir: $home/plugins
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
failCgroupV1: $(if cgroups_unified; then echo true; else echo false; fi)
cgroupDriver: cgroupfs
# Several kubelets share one machine: none may own the tree of cgroups or count the disk.
cgroupsPerQOS: false
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
failSwapOn: false
oomScoreAdj: 0
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%",
  imagefs.available: "0%"}
imageGCHighThresholdPercent: 100
# A lost node is seen in seconds; the controller manager's grace period fits this.
nodeLeaseDurationSeconds: 8
nodeStatusUpdateFrequency: 2s
YAML
}

start_containerd() {
  local name=$1 home=$state/nodes/$1
  start "$name" "$name-containerd" containerd --config "$home/containerd.toml"
}

start_kubelet() {
  local name=$1 home=$state/nodes/$1 number taint=()
  number=$(node_number "$name")
  [ "$name" != operator ] || taint=(--register-with-taints=moejob.dev/operator=:NoSchedule)
  start "$name" "$name-kubelet" "$state/kube" kubelet \
    --config="$home/kubelet.yaml" --kubeconfig="$home/kubeconfig" --root-dir="$home/kubelet" \
    --cert-dir="$home/kubelet/pki" --hostname-override="$name" \
    --node-ip="$(node_address "$number")" \
    --node-labels="moejob.dev/node=$([ "$name" = operator ] && echo operator || echo worker)" \
    "${taint[@]}"
}

images_of() { ctr --address "$state/nodes/$1/containerd.sock" -n k8s.io images "${@:2}"; }

# start_node NUMBER: its network, containerd with our images, and a kubelet that registers it.
start_node() {
  local number=$1 name home image
  name=$(node_name "$number")
  home=$state/nodes/$name
  mkdir -p "$home"
  make_node_network "$number"
  write_containerd_config "$number" "$home"
  write_kubelet_config "$home"
  write_kubeconfig "$home/kubeconfig" "$name"
  start_containerd "$name"
  until_true 20 "containerd of $name answers" images_of "$name" ls
  for image in "$state"/images/*.tar; do
    images_of "$name" import --snapshotter "$(snapshotter)" "$image" >/dev/null
  done
  start_kubelet "$name"
}

# The shims name our socket on their command lines, and their children are the containers.
shims_of() {
  local socket=$state/nodes/$1/containerd.sock path
  for path in /proc/[0-9]*; do
    tr '\0' ' ' 2>/dev/null <"$path/cmdline" | grep -q "^[^ ]*containerd-shim.* -address $socket " \
      && echo "${path#/proc/}"
  done
  return 0
}

list_containers() {
  local shim child
  for shim in $(shims_of "$1"); do
    for child in $(cat /proc/"$shim"/task/*/children 2>/dev/null); do
      echo "$child $(awk '/^VmRSS/ {print $2}' "/proc/$child/status")" \
        "$(tr '\0' ' ' <"/proc/$child/cmdline")"
    done
  done
}

# end_containers NODE: kills them and their shims, whether or not containerd is still there.
end_containers() {
  local shim child
  for shim in $(shims_of "$1"); do
    for child in $(cat /proc/"$shim"/task/*/children 2>/dev/null); do
      kill -KILL "$child" 2>/dev/null || true
    done
    kill -KILL "$shim" 2>/dev/null || true
  done
}

# unmount_under FOLDER: the last mounted first.
unmount_under() {
  local point
  awk -v under="$1/" 'index($5, under) == 1 {print $5}' /proc/self/mountinfo | tac |
    while read -r point; do umount -l "$point" 2>/dev/null || true; done
}

# Not asked but killed: nothing of the node is used again, and a kubelet takes its time to leave.
end_node() {
  local name=$1
  stop "$name-kubelet" KILL
  stop "$name-containerd" KILL
  end_containers "$name"
}
