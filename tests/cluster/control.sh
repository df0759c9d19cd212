# The control plane: etcd, API server, controller manager, scheduler, in a network of their own.
# shellcheck shell=bash

# Static tokens, one for each component: they live as long as the cluster.
write_tokens() {
  local nodes=$1 number name
  : >"$state/tokens.csv"
  chmod 600 "$state/tokens.csv"
  add_token admin admin system:masters
  add_token kube-controller-manager system:kube-controller-manager
  add_token kube-scheduler system:kube-scheduler
  for number in $(seq 0 "$nodes"); do
    name=$(node_name "$number")
    add_token "$name" "system:node:$name" system:nodes
  done
}

# add_token FILE USER [GROUP]
add_token() {
  local token
  token=$(openssl rand -hex 16)
  mkdir -p "$state/tokens"
  echo "$token" >"$state/tokens/$1"
  echo "$token,$2,$1${3:+,\"$3\"}" >>"$state/tokens.csv"
}

# write_kubeconfig FILE WHO
write_kubeconfig() {
  (umask 077 && cat >"$1") <<YAML
apiVersion: v1
kind: Config
clusters:
- name: test
  cluster: {server: "https://$control_address", certificate-authority: $state/pki/apiserver.crt}
users:
- name: $2
  user: {token: $(cat "$state/tokens/$2")}
contexts:
- {name: test, context: {cluster: test, user: $2}}
current-context: test
YAML
}

# The writes that the bars of the operator count; reads would fill the disk.
write_audit_policy() {
  cat >"$state/audit.yaml" <<YAML
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, verbs: [get, list, watch]}
- {level: Metadata}
YAML
}

start_apiserver() {
  write_audit_policy
  start control kube-apiserver "$state/kube" kube-apiserver \
    --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=443 \
    --advertise-address="$control_address" --service-cluster-ip-range="${service_address%.*}.0/24" \
    --cert-dir="$state/pki" --token-auth-file="$state/tokens.csv" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file="$state/pki/accounts.key" \
    --service-account-signing-key-file="$state/pki/accounts.key" \
    --kubelet-preferred-address-types=InternalIP \
    --audit-policy-file="$state/audit.yaml" --audit-log-path="$state/logs/audit.log"
}

# start_control_plane NODES FAKE SCHEDULER-RATE. The API server makes its own certificate, for its address and its service's; its file is the
# root that clients and pods trust.
start_control_plane() {
  local nodes=$1 fake=$2 scheduler=(--leader-elect=false) controllers=(--leader-elect=false)
  if [ "$fake" = 0 ]; then
    controllers+=(--node-monitor-period=1s --node-monitor-grace-period=12s)
  else
    # Fake nodes renew their leases every 20 s, to leave the processor to what is measured.
    controllers+=(--kube-api-qps=300 --kube-api-burst=600)
  fi
  [ -z "$3" ] || scheduler+=(--kube-api-qps="$3" --kube-api-burst="$3")
  mkdir -p "$state/pki" "$state/logs"
  write_tokens "$nodes"
  openssl genrsa -out "$state/pki/accounts.key" 2048 2>/dev/null
  # Tests may lose their data with the machine: no fsync.
  start control etcd "$state/kube" etcd --data-dir="$state/etcd" --unsafe-no-fsync \
    --listen-client-urls=http://127.0.0.1:2379 --advertise-client-urls=http://127.0.0.1:2379 \
    --listen-peer-urls=http://127.0.0.1:2380 --log-level=warn
  start_apiserver
  until_true 30 "the API server's certificate" test -s "$state/pki/apiserver.crt"
  write_kubeconfig "$state/admin.kubeconfig" admin
  write_kubeconfig "$state/controllers.kubeconfig" kube-controller-manager
  write_kubeconfig "$state/scheduler.kubeconfig" kube-scheduler
  until_true 60 "the API server is ready" kubectl get --raw /readyz
  start control kube-controller-manager "$state/kube" kube-controller-manager \
    --kubeconfig="$state/controllers.kubeconfig" --use-service-account-credentials \
    --service-account-private-key-file="$state/pki/accounts.key" \
    --root-ca-file="$state/pki/apiserver.crt" --bind-address=127.0.0.1 "${controllers[@]}"
  start control kube-scheduler "$state/kube" kube-scheduler \
    --kubeconfig="$state/scheduler.kubeconfig" --bind-address=127.0.0.1 "${scheduler[@]}"
}

# A class of storage that all nodes share: they are one machine. Whatever claims a test makes, as
# many as there are volumes, are bound at once; `tests/cluster/claim` names a claim's folder.
make_volumes() {
  local number folder
  cat <<YAML
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: shared, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: Immediate
YAML
  for number in $(seq "$1"); do
    folder=$state/shared/$number
    mkdir -p "$folder"
    # Whoever a pod runs as may write: hostPath volumes know no fsGroup.
    chmod 777 "$folder"
    cat <<YAML
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: shared-$number}
spec:
  storageClassName: shared
  capacity: {storage: 1Ti}
  accessModes: [ReadWriteMany, ReadOnlyMany, ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  hostPath: {path: $folder}
YAML
  done
}

# nodes_ready COUNT: so many are Ready, and none is tainted because it was not.
nodes_ready() {
  local ready
  ready=$(kubectl get nodes --no-headers | awk '$2 == "Ready"' | wc -l)
  [ "$ready" = "$1" ] && ! kubectl get nodes -o yaml | grep -q 'key: node.kubernetes.io/'
}
