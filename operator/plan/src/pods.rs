//! Job + birth -> Pod; Job -> NetworkPolicy and PodDisruptionBudget. Infallible: whatever could be
//! wrong with a job or its overlay is refused before (`rules`, `pod`).
//!
//! ```text
//! ours (worker's container, restricted, bound to a node)
//!   + spec.podTemplate (strategic merge: `overlay`)
//!   + the guarantees again (`assert_guarantees`), so that no overlay can take them away
//! ```

use crate::launch::Places;
use crate::observed::Size;
use crate::overlay::merge;
use crate::placement;
use moejob_manifest::job::Job;
use moejob_manifest::profile::{Backend, TopologyFile};
use moejob_manifest::workspace::{CONTAINER, PROGRAM, WORKSPACE, in_workspace, volume_of};
use moejob_protocol::pod::{
    ENV_ADDRESS, ENV_AUTHORITY, ENV_HCAS, ENV_JOB_UID, ENV_WORKER, PORT, TOKEN_AUDIENCE,
    TOKEN_FOLDER,
};
use moejob_protocol::topology::ENV_TOPOLOGY;
use moejob_protocol::Layout;
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

/// The name of the job, on every object of ours.
pub const LABEL_JOB: &str = "moejob.dev/job";
/// The job's uid: what the operator selects by.
pub const LABEL_JOB_UID: &str = "moejob.dev/job-uid";
/// The attempt at whose time the pod was made; the one it takes part in stands nowhere but in its
/// configuration.
pub const LABEL_ATTEMPT: &str = "moejob.dev/attempt";
pub const LABEL_SLOT: &str = "moejob.dev/slot";
/// HMAC over namespace, job uid and pod name: without it a pod does not count as ours.
pub const ANNOTATION_SEAL: &str = "moejob.dev/seal";
/// Who drains a node waits so long for a last checkpoint, whatever its size; the worker ends once
/// it is written. Autoscalers wait no longer by default.
pub const TERMINATION_GRACE_S: u64 = 600;

/// What stands between a job's name and the number of a placeholder.
const PLACEHOLDER: &str = "-placeholder-";
/// The label of a node by which pods are kept from it.
pub const LABEL_HOST: &str = "kubernetes.io/hostname";

/// The user that a worker runs as, the same as the operator's and as in our image.
const USER: u64 = 65_532;
/// Memory that a worker takes beside its arena: the program, its threads' stacks, TLS buffers.
const PROCESS_BYTES: u64 = 256 << 20;
/// Where compiled kernels are kept (`moejob_kernels::cuda::default_cache_dir`).
const ENV_CUBINS: &str = "MOEJOB_CUBIN_CACHE";
/// What NCCL shares between the ranks of a node, at most.
const SHM_CUDA_MIB: u64 = 16 << 10;
const SHM_CPU_MIB: u64 = 64;
/// Scratch on the node's disk. In the working folder only mounts lie; tokens of the corpus go to
/// `TMPDIR`, which is `/tmp` unless the job says otherwise.
const WORKSPACE_SIZE: &str = "1Gi";
const TMP: &str = "/tmp";
const TMP_SIZE: &str = "64Gi";

/// What all pods of a job have in common beside its spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The job's.
    pub namespace: String,
    pub job_uid: String,
    /// `spec.image`, or else the operator's own.
    pub image: String,
    /// None leaves it to Kubernetes.
    pub image_pull_policy: Option<String>,
    /// PEM of the authority, and of its successor when there is one.
    pub authority: String,
    /// Where the operator's own pods are, from which workers are dialled.
    pub operator_namespace: String,
    /// What each worker of the job asks for, and what it may take: counting it for hundreds of
    /// ranks takes milliseconds, so the first pod counts it for all. Leave it empty.
    pub memory: OnceLock<MemoryMib>,
}

/// Of one worker, in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMib {
    pub request: u64,
    pub limit: u64,
}

/// One pod to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Birth {
    /// As the plan named it: `JOB-aATTEMPT-SLOT`, or `JOB-placeholder-NUMBER`.
    pub name: String,
    /// A placeholder has none: whatever node fits may come for it.
    pub node: String,
    /// Of a placeholder host names of nodes that are there already.
    pub there: Vec<String>,
    /// HMAC over namespace, job uid and pod name, as text.
    pub seal: String,
}

/// Attempt and slot of a pod's name, `JOB-aATTEMPT-SLOT`.
pub fn attempt_and_slot(name: &str) -> Option<(u32, u32)> {
    let (rest, slot) = name.rsplit_once('-')?;
    let (_, attempt) = rest.rsplit_once("-a")?;
    Some((attempt.parse().ok()?, slot.parse().ok()?))
}

/// The name of a pod that stands for a node which is missing.
pub fn placeholder_name(job: &str, number: u32) -> String {
    format!("{job}{PLACEHOLDER}{number}")
}

/// The number of a placeholder; None of any other pod.
pub fn placeholder_number(name: &str) -> Option<u32> {
    name.rsplit_once(PLACEHOLDER)?.1.parse().ok()
}

/// The pod of one worker, or a placeholder by its name. Equal inputs give equal pods.
pub fn pod(job: &Job, around: &Surroundings, birth: &Birth) -> Value {
    let pod = worker(job, around, birth);
    match placeholder_number(&birth.name) {
        Some(_) => placeholder(pod, job, &birth.there),
        None => pod,
    }
}

fn worker(job: &Job, around: &Surroundings, birth: &Birth) -> Value {
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(job, around, Some(birth)),
        "spec": {
            "containers": [container(job, around, birth)],
            "volumes": volumes(job),
            "tolerations": tolerations(job),
            "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
            "enableServiceLinks": false,
            "securityContext": {
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
            },
        },
    });
    for (field, value) in [
        ("priorityClassName", &job.kubernetes.priority_class_name),
        ("schedulerName", &job.kubernetes.scheduler_name),
    ] {
        if !value.is_empty() {
            pod["spec"][field] = json!(value);
        }
    }
    let mut overlay = job.kubernetes.pod_template.clone();
    let containers = overlay.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
    for container in containers.into_iter().flatten() {
        // There is only one that it can mean.
        if container.is_object() && container["name"].is_null() {
            container["name"] = json!(CONTAINER);
        }
    }
    // Who asks for another amount of memory also says what it may take, or leaves that open.
    if overlay.pointer("/spec/containers/0/resources/requests/memory").is_some()
        && let Some(limits) = pod.pointer_mut("/spec/containers/0/resources/limits")
    {
        limits.as_object_mut().map(|limits| limits.remove("memory"));
    }
    merge(&mut pod, &overlay);
    assert_guarantees(&mut pod, job, around, birth);
    pod
}

/// What a worker asks of its node, and nothing that it does there. An autoscaler sees that no node
/// takes the pod, and brings one. Its program ends at once, so that a placeholder gives back the
/// node that it is put on, also where no operator is left to delete it. It has no priority: the
/// scheduler would end others' pods for it. On nodes that are `there` it would show nothing.
fn placeholder(mut pod: Value, job: &Job, there: &[String]) -> Value {
    let labels = object(object(&mut pod, "metadata"), "labels");
    labels["app.kubernetes.io/name"] = json!("moejob-placeholder");
    if let Some(labels) = labels.as_object_mut() {
        [LABEL_ATTEMPT, LABEL_SLOT].iter().for_each(|label| drop(labels.remove(*label)));
    }
    let spec = object(&mut pod, "spec");
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("priorityClassName");
        spec.remove("preemptionPolicy");
    }
    spec["terminationGracePeriodSeconds"] = json!(1);
    let selector = object(spec, "nodeSelector");
    for (key, value) in &job.profile.node_selector {
        if selector[key].is_null() {
            selector[key] = json!(value);
        }
    }
    let affinity = object(spec, "affinity");
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    if let Some(of_node) = object(affinity, "nodeAffinity").as_object_mut() {
        of_node.remove(required);
        if !there.is_empty() {
            let elsewhere = json!({ "key": LABEL_HOST, "operator": "NotIn", "values": there });
            let terms = json!([{ "matchExpressions": [elsewhere] }]);
            of_node.insert(required.to_string(), json!({ "nodeSelectorTerms": terms }));
        }
    }
    // Whole nodes are given: one that has a worker of whichever job is of no use.
    let alone = json!({
        "topologyKey": LABEL_HOST,
        "namespaceSelector": {},
        "labelSelector": { "matchExpressions": [{ "key": LABEL_JOB_UID, "operator": "Exists" }] },
    });
    let apart = &mut object(affinity, "podAntiAffinity")[required];
    match apart.as_array_mut() {
        Some(terms) => terms.push(alone),
        None => *apart = json!([alone]),
    }
    let claims = spec["volumes"].as_array().into_iter().flatten();
    let claims = claims.filter(|volume| volume["persistentVolumeClaim"].is_object());
    spec["volumes"] = claims.cloned().collect();
    let container = &mut spec["containers"][0];
    container["args"] = json!(["--version"]);
    if let Some(container) = container.as_object_mut() {
        for field in ["env", "envFrom", "volumeMounts", "volumeDevices", "ports", "workingDir"] {
            container.remove(field);
        }
        for field in ["livenessProbe", "readinessProbe", "startupProbe", "lifecycle"] {
            container.remove(field);
        }
    }
    pod
}

/// Not of our pods, whatever an overlay says. `pod::problems` refuses them by name.
const NEVER: &[&str] = &[
    "hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers", "nodeName",
    "serviceAccountName", "serviceAccount", "hostname", "subdomain", "activeDeadlineSeconds",
];

/// What no overlay changes, set once more after it.
fn assert_guarantees(pod: &mut Value, job: &Job, around: &Surroundings, birth: &Birth) {
    let ours = metadata(job, around, Some(birth));
    for part in ["labels", "annotations"] {
        let theirs = object(object(pod, "metadata"), part);
        for (name, value) in ours[part].as_object().into_iter().flatten() {
            theirs[name] = value.clone();
        }
    }
    for field in ["name", "namespace", "ownerReferences"] {
        pod["metadata"][field] = ours[field].clone();
    }
    let spec = object(pod, "spec");
    if let Value::Object(fields) = spec {
        NEVER.iter().for_each(|field| drop(fields.remove(*field)));
    }
    spec["restartPolicy"] = json!("Never");
    spec["automountServiceAccountToken"] = json!(false);
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    object(object(spec, "affinity"), "nodeAffinity")[required] = json!({
        "nodeSelectorTerms": [{
            "matchFields": [
                { "key": "metadata.name", "operator": "In", "values": [birth.node] },
            ],
        }],
    });
    let security = object(spec, "securityContext");
    security["runAsNonRoot"] = json!(true);
    security["seccompProfile"] = json!({ "type": "RuntimeDefault" });
    replace(spec, "tolerations", &tolerations(job), &["key", "effect"]);
    replace(spec, "volumes", &volumes(job), &["name"]);
    let ours = container(job, around, birth);
    let containers = spec["containers"].as_array_mut();
    let worker = containers.and_then(|all| all.iter_mut().find(|one| one["name"] == CONTAINER));
    let mut worker = worker.map_or_else(|| ours.clone(), Value::take);
    for field in ["image", "command", "args", "workingDir", "ports", "securityContext"] {
        worker[field] = ours[field].clone();
    }
    replace(&mut worker, "env", &ours["env"], &["name"]);
    replace(&mut worker, "volumeMounts", &ours["volumeMounts"], &["mountPath"]);
    if job.profile.devices > 0 {
        // Whole nodes: every device of it is asked for.
        let devices = json!(job.profile.devices.to_string());
        let resources = object(&mut worker, "resources");
        object(resources, "limits")["nvidia.com/gpu"] = devices.clone();
        object(resources, "requests")["nvidia.com/gpu"] = devices;
    }
    spec["containers"] = json!([worker]);
}

/// The object at `field`, which is made if there is none.
fn object<'v>(value: &'v mut Value, field: &str) -> &'v mut Value {
    if !value.is_object() {
        *value = json!({});
    }
    let inner = &mut value[field];
    if !inner.is_object() {
        *inner = json!({});
    }
    inner
}

/// Ours stand in the list at `field` in place of entries that agree in all `keys`.
fn replace(value: &mut Value, field: &str, ours: &Value, keys: &[&str]) {
    if !value[field].is_array() {
        value[field] = json!([]);
    }
    let Value::Array(list) = &mut value[field] else { return };
    for one in ours.as_array().into_iter().flatten() {
        match list.iter_mut().find(|other| keys.iter().all(|key| other[*key] == one[*key])) {
            Some(other) => *other = one.clone(),
            None => list.push(one.clone()),
        }
    }
}

/// Of a job's NetworkPolicy and PodDisruptionBudget.
pub fn object_name(job: &str) -> String {
    format!("moejob-{job}")
}

fn metadata(job: &Job, around: &Surroundings, birth: Option<&Birth>) -> Value {
    let mut metadata = json!({
        // Of policy and budget: no name that somebody else's object is likely to have.
        "name": object_name(&job.name),
        "namespace": around.namespace,
        "labels": {
            "app.kubernetes.io/name": "moejob-worker",
            "app.kubernetes.io/managed-by": "moejob",
            LABEL_JOB: job.name,
            LABEL_JOB_UID: around.job_uid,
        },
        "ownerReferences": [{
            "apiVersion": "moejob.dev/v1alpha1",
            "kind": "MoeJob",
            "name": job.name,
            "uid": around.job_uid,
            "controller": true,
            "blockOwnerDeletion": true,
        }],
    });
    if let Some(birth) = birth {
        let (attempt, slot) = attempt_and_slot(&birth.name).unwrap_or_default();
        metadata["name"] = json!(birth.name);
        metadata["labels"][LABEL_ATTEMPT] = json!(attempt.to_string());
        metadata["labels"][LABEL_SLOT] = json!(slot.to_string());
        metadata["annotations"] = json!({ ANNOTATION_SEAL: birth.seal });
    }
    metadata
}

fn container(job: &Job, around: &Surroundings, birth: &Birth) -> Value {
    let mut container = json!({
        "name": CONTAINER,
        "image": around.image,
        "command": [PROGRAM],
        "args": ["worker"],
        "workingDir": WORKSPACE,
        "ports": [{ "name": "moejob", "containerPort": PORT, "protocol": "TCP" }],
        "env": env(job, around, birth),
        "resources": resources(job, around),
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "runAsNonRoot": true,
            "capabilities": { "drop": ["ALL"] },
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "volumeMounts": volume_mounts(job),
    });
    if let Some(policy) = &around.image_pull_policy {
        container["imagePullPolicy"] = json!(policy);
    }
    container
}

fn env(job: &Job, around: &Surroundings, birth: &Birth) -> Value {
    let mut env = vec![
        json!({ "name": ENV_WORKER, "value": birth.name }),
        json!({ "name": ENV_JOB_UID, "value": around.job_uid }),
        json!({ "name": ENV_AUTHORITY, "value": around.authority }),
        json!({
            "name": ENV_ADDRESS,
            "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } },
        }),
    ];
    if job.profile.backend == Backend::Cuda {
        // The root of a pod's files cannot be written, and its user has no home.
        env.push(json!({ "name": ENV_CUBINS, "value": format!("{TMP}/cubins") }));
    }
    if job.profile.backend == Backend::Cuda && job.profile.rdma.is_some() {
        let cards = job.profile.numa.iter().flat_map(|node| node.hcas.iter().map(String::as_str));
        let cards: Vec<&str> = cards.collect();
        env.push(json!({ "name": ENV_HCAS, "value": cards.join(",") }));
    }
    let settings = job.profile.env.iter();
    env.extend(settings.map(|of| json!({ "name": of.name, "value": of.value })));
    match &job.profile.topology_file {
        Some(TopologyFile::Path(path)) => {
            env.push(json!({ "name": "NCCL_TOPO_FILE", "value": path }));
        }
        Some(TopologyFile::Generated) => {
            let of = json!(job.profile.topology()).to_string();
            env.push(json!({ "name": ENV_TOPOLOGY, "value": of }));
        }
        None => {}
    }
    json!(env)
}

/// A GPU node is asked for as a whole. On processors the memory that the plan announces; that
/// nobody else's worker comes is the allocation's doing.
fn resources(job: &Job, around: &Surroundings) -> Value {
    let profile = &job.profile;
    let mut requests = Map::new();
    let mut limits = Map::new();
    match profile.backend {
        Backend::Cpu => {
            requests.insert("cpu".into(), json!("1"));
        }
        Backend::Cuda => {
            requests.insert("cpu".into(), json!((profile.devices * CPUS_PER_DEVICE).to_string()));
            let rdma = profile.rdma.as_ref().map(|rdma| (&*rdma.resource, rdma.count));
            for (name, count) in [("nvidia.com/gpu", profile.devices)].into_iter().chain(rdma) {
                if count > 0 {
                    requests.insert(name.into(), json!(count.to_string()));
                    limits.insert(name.into(), json!(count.to_string()));
                }
            }
        }
    }
    let memory = around.memory.get_or_init(|| memory_mib(job));
    requests.insert("memory".into(), json!(format!("{}Mi", memory.request)));
    limits.insert("memory".into(), json!(format!("{}Mi", memory.limit)));
    // What the profile says of the machine counts for more than what is usual.
    if profile.requests.contains_key("memory") {
        limits.remove("memory");
    }
    for (name, quantity) in &profile.requests {
        requests.insert(name.clone(), json!(quantity));
        // Of extended resources a pod may take no more and no less than it asks for.
        if name.contains('/') {
            limits.insert(name.clone(), json!(quantity));
        }
    }
    match limits.is_empty() {
        true => json!({ "requests": requests }),
        false => json!({ "requests": requests, "limits": limits }),
    }
}

/// Cores beside each GPU where the profile does not say.
const CPUS_PER_DEVICE: u32 = 8;

/// On processors a worker asks for what the plan commits, and may take what the worst routing
/// takes: beyond that something is amiss, and it is ended before its neighbours are. Beside GPUs
/// nothing depends on the routing: it asks for what it may take, and shares memory beyond that.
fn memory_mib(job: &Job) -> MemoryMib {
    let (sizes, _) = placement::sizes(job);
    if job.training.compute.backend == Backend::Cuda {
        // Of each degree of expert parallelism the smallest gang has the largest shards, the
        // largest most ranks to speak to.
        let ends = |of: &[Size]| [&of[0], &of[of.len() - 1]].map(|size| size.layout.clone());
        let mut by_degree = sizes.clone();
        by_degree.sort_by_key(|size| size.layout.mesh.ep);
        let alike = by_degree.chunk_by(|one, other| one.layout.mesh.ep == other.layout.mesh.ep);
        let of = |layout: Layout| -> u64 {
            placement::host_memory(job, &layout).iter().map(|part| part.bytes).sum()
        };
        let bytes = alike.flat_map(ends).map(of);
        let request = bytes.max().unwrap_or(0).div_ceil(1 << 20);
        return MemoryMib { request, limit: request + SHM_CUDA_MIB };
    }
    let ranks = u64::from(job.profile.ranks);
    // Several ranks are processes beside the worker's own.
    let processes = if ranks > 1 { ranks + 1 } else { 1 };
    let mib = |bytes: u64| (ranks * bytes + processes * PROCESS_BYTES).div_ceil(1 << 20);
    // The fewer the ranks, the more each holds, so the smallest gang needs most; the more ranks
    // share the experts, the more rows the worst routing may send to one of them; and the more
    // ranks there are, the more a bucket that ends in even parts is padded.
    let widest = sizes.iter().rev().max_by_key(|size| size.layout.mesh.ep);
    let of = |size: &Size| placement::memory(job, &size.layout, 0);
    let smallest = sizes.first().map(of);
    let request = smallest.as_ref().map_or(0, |memory| memory.committed);
    let others = widest.into_iter().chain(sizes.last()).map(of);
    let worst = smallest.into_iter().chain(others).map(|memory| memory.worst).max();
    let limit = mib(worst.unwrap_or(0)) + SHM_CPU_MIB;
    MemoryMib { request: mib(request), limit }
}

/// The job's own volumes `v0`, `v1`, ... and those that every pod has.
fn volumes(job: &Job) -> Value {
    let shm = match job.profile.backend {
        Backend::Cuda => SHM_CUDA_MIB,
        Backend::Cpu => SHM_CPU_MIB,
    };
    let shm = format!("{shm}Mi");
    let mut volumes = vec![
        json!({ "name": "workspace", "emptyDir": { "sizeLimit": WORKSPACE_SIZE } }),
        json!({ "name": "tmp", "emptyDir": { "sizeLimit": TMP_SIZE } }),
        json!({ "name": "shm", "emptyDir": { "medium": "Memory", "sizeLimit": shm } }),
        json!({
            "name": "token",
            "projected": {
                "defaultMode": 0o440,
                "sources": [{
                    "serviceAccountToken": {
                        "audience": TOKEN_AUDIENCE,
                        "expirationSeconds": 3600,
                        "path": "token",
                    },
                }],
            },
        }),
    ];
    volumes.extend(job.kubernetes.volumes.iter().enumerate().map(|(index, volume)| {
        let name = format!("v{index}");
        match (&volume.claim, &volume.config_map) {
            (Some(claim), _) => json!({
                "name": name,
                "persistentVolumeClaim": {
                    "claimName": claim,
                    "readOnly": volume.read_only.unwrap_or(false),
                },
            }),
            (None, config_map) => json!({ "name": name, "configMap": { "name": config_map } }),
        }
    }));
    json!(volumes)
}

fn volume_mounts(job: &Job) -> Value {
    let mut mounts = vec![
        json!({ "name": "workspace", "mountPath": WORKSPACE }),
        json!({ "name": "tmp", "mountPath": TMP }),
        json!({ "name": "shm", "mountPath": "/dev/shm" }),
        json!({ "name": "token", "mountPath": TOKEN_FOLDER, "readOnly": true }),
    ];
    mounts.extend(job.kubernetes.volumes.iter().enumerate().map(|(index, volume)| {
        let path = volume.mount_path.as_deref().unwrap_or_default();
        json!({
            "name": format!("v{index}"),
            "mountPath": in_workspace(path),
            "readOnly": volume.read_only.unwrap_or(false) || volume.config_map.is_some(),
        })
    }));
    json!(mounts)
}

/// Heartbeats tell whether a worker lives, not the node's condition: the kubelet's silence alone
/// evicts nobody.
fn tolerations(job: &Job) -> Value {
    let tolerate = |key: &str, effect: &str| {
        json!({ "key": key, "operator": "Exists", "effect": effect })
    };
    let mut all = vec![
        tolerate("node.kubernetes.io/not-ready", "NoExecute"),
        tolerate("node.kubernetes.io/unreachable", "NoExecute"),
    ];
    if job.profile.devices > 0 {
        all.push(tolerate("nvidia.com/gpu", "NoSchedule"));
    }
    json!(all)
}

/// Admits the job's own pods and the operator to the listener; a GPU job's pods reach each other
/// on every port, as NCCL chooses its own. Ingress alone, where the cluster's network enforces it.
pub fn network_policy(job: &Job, around: &Surroundings) -> Value {
    let own = json!({ "podSelector": { "matchLabels": { LABEL_JOB_UID: around.job_uid } } });
    let operator = json!({
        "namespaceSelector": {
            "matchLabels": { "kubernetes.io/metadata.name": around.operator_namespace },
        },
        "podSelector": { "matchLabels": { "app.kubernetes.io/name": "moejob" } },
    });
    let listener = json!([{ "protocol": "TCP", "port": PORT }]);
    let ingress = match job.profile.backend {
        Backend::Cpu => json!([{ "from": [own, operator], "ports": listener }]),
        Backend::Cuda => json!([
            { "from": [own] },
            { "from": [operator], "ports": listener },
        ]),
    };
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, around, None),
        "spec": {
            "podSelector": { "matchLabels": { LABEL_JOB_UID: around.job_uid } },
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    })
}

/// Evictions leave at least `nodes.min` pods. A number, not a share: Kubernetes computes shares
/// from controllers that it knows, and ours is none of them.
pub fn disruption_budget(job: &Job, around: &Surroundings) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, around, None),
        "spec": {
            "minAvailable": job.nodes.min,
            "selector": { "matchLabels": { LABEL_JOB_UID: around.job_uid } },
        },
    })
}

/// Where the job's files lie in its pods: the records beside the checkpoints, on the same claim.
pub fn places(job: &Job) -> Places {
    let checkpoints = in_workspace(job.checkpoint.location.as_deref().unwrap_or("checkpoints"));
    Places {
        root: WORKSPACE.to_string(),
        records: checkpoints.clone(),
        exclude: vec![checkpoints.clone()],
        checkpoints,
    }
}

/// Why checkpoints would not outlive the pods: they must lie on a claim that all nodes can write.
/// The condition is `Planned=False, NoDurableCheckpoint`.
pub fn not_durable(job: &Job) -> Option<String> {
    let Some(location) = &job.checkpoint.location else {
        return Some(
            "spec.checkpoint.location is not set; set it to a folder of a volume with a \
             ReadWriteMany claim, and list that under spec.volumes"
                .to_string(),
        );
    };
    let location = in_workspace(location);
    let what = match volume_of(job, &location) {
        Some((volume, _)) if volume.claim.is_none() => "on a configMap",
        Some((volume, _)) if volume.read_only == Some(true) => "on a volume that is readOnly",
        Some(_) => return None,
        None => "on no volume of spec.volumes",
    };
    Some(format!(
        "spec.checkpoint.location is {location}, which lies {what}; let it lie on a claim that \
         all nodes can write (ReadWriteMany)"
    ))
}
