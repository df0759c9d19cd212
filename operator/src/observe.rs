//! The only reader of the cluster: watches, reduced on arrival to what decisions need.
//!
//! ```text
//! watch of MoeJobs, pods, nodes, PriorityClasses
//!     -> bytes -> Sieve -> reduce -> Change -> the controller's loop -> Cluster
//! ```
//!
//! What is not in these types is never kept: a foreign pod is a node, its requests and a phase.
//! What nobody asks for is left out of the bytes before they are parsed, and so is what is too much
//! of one object: it hinders the reading of no other.

mod answers;
mod cluster;
mod job_text;
mod light;
mod relay;
mod shared;
mod sieve;

pub use cluster::{Cluster, Taken};
pub use job_text::JobText;
pub use moejob_plan::lead::{JobSeen, Owner, WorkerPod, owner};

use crate::metrics::Metrics;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    self, ConfigMap, ContainerStatus, Node, Pod, ResourceRequirements, Secret,
};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::watcher::{self, watcher};
use kube::{Client, ResourceExt};
use light::LightPod;
use moejob_identity::Keyring;
use moejob_manifest::crd;
use moejob_manifest::resources::Resources;
use moejob_manifest::spec::MoeJob;
use moejob_manifest::workspace::CONTAINER;
use relay::{Lists, allowed, relay};
use shared::Shared;
use sieve::UNREAD;
use moejob_plan::allocate::{ClusterNode, Taint, is_pause, unhealthy, unhealthy_label};
use moejob_plan::lead::OUT_OF_MEMORY;
use moejob_plan::observed::Millis;
use moejob_plan::pods::{ANNOTATION_SEAL, LABEL_JOB_UID};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Objects of one page of a list: what a watch that begins holds in memory at once.
const PAGE: u32 = 250;
/// A job may be as large as the API server takes, which is a hundred times what is kept of it.
const PAGE_JOBS: u32 = 16;

/// The ConfigMap of an admin's own profiles, in the operator's namespace.
pub const PROFILES: &str = "moejob-profiles";

/// `namespace/name`; of a node its name alone.
pub type Key = Arc<str>;

#[derive(Clone, Debug, PartialEq)]
pub struct PodSeen {
    pub key: Key,
    /// None until it is bound.
    pub node: Option<Arc<str>>,
    pub requests: Arc<Resources>,
    /// Succeeded or Failed: it holds nothing any more.
    pub finished: bool,
    /// What is known of a worker's pod beside that.
    pub worker: Option<Box<WorkerPod>>,
    /// Whose it says it is, without a seal that proves it.
    pub claims: Option<Owner>,
}

impl PodSeen {
    /// What allocation sees of it: its node, and whose worker it is or what else it asks for.
    pub fn weight(&self) -> Option<(&str, Weight<'_>)> {
        let node = self.node.as_deref();
        match &self.worker {
            _ if self.finished => None,
            None => Some((node?, Weight::Other(&self.requests))),
            // It gives its node back at once.
            Some(worker) if worker.is_placeholder() => None,
            Some(worker) => {
                Some((node.or(worker.meant_for.as_deref())?, Weight::Worker(&worker.owner)))
            }
        }
    }
}

/// What a pod means to the allocation of its node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weight<'a> {
    Worker(&'a str),
    Other(&'a Resources),
}

/// A PriorityClass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassSeen {
    pub name: String,
    pub value: i32,
    /// Jobs of lower ones stop for those of this one.
    pub preempts: bool,
    /// It is that of pods which name none.
    pub is_default: bool,
}

/// Something is otherwise than before.
#[derive(Debug)]
pub enum Change {
    Job(Box<JobSeen>),
    JobGone(Key),
    Pod(PodSeen),
    PodGone(Key),
    Node(ClusterNode),
    NodeGone(Key),
    Class(ClassSeen),
    ClassGone(Key),
    /// The files of an admin's own kinds of machine, all of them.
    Profiles(BTreeMap<String, String>),
    /// The first list of this kind is complete.
    Complete(Kind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Jobs,
    Pods,
    Nodes,
    Classes,
    Profiles,
}

impl Kind {
    /// As people know them.
    pub fn words(self) -> &'static str {
        match self {
            Kind::Jobs => "MoeJobs",
            Kind::Pods => "pods",
            Kind::Nodes => "nodes",
            Kind::Classes => "PriorityClasses",
            Kind::Profiles => "profiles",
        }
    }
}

/// How many there are.
const KINDS: u32 = Kind::Profiles as u32 + 1;

pub fn key(namespace: &str, name: &str) -> Key {
    Arc::from(format!("{namespace}/{name}"))
}

/// Follows everything for as long as the receiver is there. Errors of the API are logged, and the
/// watches begin again with growing pauses. One that ends all the same leaves the operator blind:
/// whoever called looks after them.
///
/// A watch that has lost an event does not know it, and its object may never change again. So each
/// kind is listed anew every so often (`lists`), one kind after the other. A kind that is not heard
/// of makes the process unready.
pub fn follow(
    client: &Client,
    keyring: &Arc<Keyring>,
    namespace: &str,
    (lists, metrics): (Duration, &Metrics),
    to: &mpsc::Sender<Change>,
) -> JoinSet<()> {
    let mut watches = JoinSet::new();
    let client = &answers::sieved(client);
    let config = || watcher::Config::default().page_size(PAGE);
    let times = |kind: Kind| Lists {
        first: lists * (kind as u32 + 1) / KINDS,
        every: lists,
        metrics: metrics.clone(),
    };
    let resource = ApiResource::erase::<MoeJob>(&());
    let jobs: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let jobs = move || watcher(jobs.clone(), config().page_size(PAGE_JOBS));
    watches.spawn(relay(Kind::Jobs, jobs, times(Kind::Jobs), to.clone(), job_seen, |job| {
        (key(&job.namespace, &job.name), Change::Job(Box::new(job)))
    }));
    let pods: Api<LightPod> = Api::all(client.clone());
    let keyring = Arc::clone(keyring);
    let pods = move || watcher(pods.clone(), config());
    let mut shared = Shared::default();
    let reduce = move |pod: LightPod| pod_seen(pod, &keyring, &mut shared);
    watches.spawn(relay(Kind::Pods, pods, times(Kind::Pods), to.clone(), reduce, |pod| {
        (Arc::clone(&pod.key), Change::Pod(pod))
    }));
    let nodes: Api<Node> = Api::all(client.clone());
    let nodes = move || watcher(nodes.clone(), config());
    watches.spawn(relay(Kind::Nodes, nodes, times(Kind::Nodes), to.clone(), node_seen, |node| {
        (Arc::from(node.name.as_str()), Change::Node(node))
    }));
    let classes: Api<PriorityClass> = Api::all(client.clone());
    let classes = move || watcher(classes.clone(), config());
    let seen = class_seen;
    watches.spawn(relay(Kind::Classes, classes, times(Kind::Classes), to.clone(), seen, |class| {
        (Arc::from(class.name.as_str()), Change::Class(class))
    }));
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let named = format!("metadata.name={PROFILES}");
    let maps = move || allowed(watcher(maps.clone(), config().fields(&named)));
    watches.spawn(relay(Kind::Profiles, maps, times(Kind::Profiles), to.clone(), files, |files| {
        (Arc::from(PROFILES), Change::Profiles(files))
    }));
    watches
}

/// Its texts by their keys.
fn files(map: ConfigMap) -> BTreeMap<String, String> {
    map.data.unwrap_or_default()
}

fn millis(time: Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>) -> Option<Millis> {
    time.map(|time| time.0.as_millisecond().max(0) as Millis)
}

fn job_seen(object: DynamicObject) -> JobSeen {
    let DynamicObject { metadata, mut data, .. } = object;
    JobSeen {
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
        generation: metadata.generation.unwrap_or_default(),
        resource_version: metadata.resource_version.unwrap_or_default(),
        created_at: millis(metadata.creation_timestamp.as_ref()).unwrap_or_default(),
        deleted: metadata.deletion_timestamp.is_some(),
        spec: data["spec"].take(),
        unread: data[UNREAD].as_str().map(str::to_string),
        status: data["status"].take(),
    }
}

fn pod_seen(pod: LightPod, keyring: &Keyring, shared: &mut Shared) -> PodSeen {
    let (pod, unread) = pod.pod();
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let requests = shared.requests(requests(&pod));
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let node = node.map(|node| shared.text(node));
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let finished = matches!(phase, Some("Succeeded" | "Failed"));
    let job_uid = pod.labels().get(LABEL_JOB_UID).cloned();
    let seal = pod.annotations().get(ANNOTATION_SEAL);
    let is_sealed =
        |uid: &String| seal.is_some_and(|seal| keyring.is_sealed(seal, &namespace, uid, &name));
    let claims = job_uid.as_ref().map(|uid| shared.text(&owner(&namespace, uid)));
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let own = containers.into_iter().find(|of| of.name == CONTAINER);
    let image = own.and_then(|container| container.image.as_ref());
    let ours = claims.clone().filter(|_| job_uid.is_some_and(|uid| is_sealed(&uid)));
    let key = key(&namespace, &name);
    if let Some(what) = unread {
        shared.unread(&key, &what);
    }
    let worker = ours.map(|owner| {
        let image = image.map(|image| shared.text(image));
        Box::new(worker_pod(&pod, node.clone(), image, (namespace, name), owner))
    });
    PodSeen { key, node, requests, finished, worker, claims }
}

fn worker_pod(
    pod: &Pod,
    node: Option<Arc<str>>,
    image: Option<Arc<str>>,
    (namespace, name): (String, String),
    owner: Owner,
) -> WorkerPod {
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let container = containers.iter().find(|of| of.name == CONTAINER);
    let conditions = status.conditions.unwrap_or_default();
    let unbound = conditions.iter().find(|of| of.type_ == "PodScheduled" && of.status == "False");
    let how = status.reason.into_iter().chain(status.message).collect::<Vec<_>>().join(": ");
    let phase = status.phase.unwrap_or_default();
    let ended = match (container.and_then(terminated), phase.as_str()) {
        (Some(end), _) => Some(end),
        // Evicted before it ran, or its kubelet never told.
        (None, "Failed" | "Succeeded") => Some((None, format!("its pod {phase}: {how}"))),
        (None, _) => None,
    };
    WorkerPod {
        uid: pod.uid().unwrap_or_default(),
        node,
        meant_for: meant_for(pod),
        address: status.pod_ip.filter(|ip| !ip.is_empty()),
        started: container.is_some_and(|of| {
            of.state.as_ref().is_some_and(|state| state.waiting.is_none())
        }),
        mounting: conditions.iter().any(|of| {
            of.type_ == "PodReadyToStartContainers" && of.status == "False"
        }),
        trouble: container.and_then(trouble),
        image,
        ended,
        deletion: millis(pod.metadata.deletion_timestamp.as_ref()),
        unschedulable: unbound.and_then(|condition| condition.message.clone()),
        namespace,
        name,
        owner,
    }
}

fn terminated(container: &ContainerStatus) -> Option<(Option<i32>, String)> {
    let end = container.state.as_ref()?.terminated.as_ref()?;
    let reason = end.reason.as_deref().filter(|reason| !matches!(*reason, "Error" | "Completed"));
    let words = match (end.signal, reason) {
        (_, Some(OUT_OF_MEMORY)) => format!(
            "its container took more memory than its limit and was killed ({OUT_OF_MEMORY})"
        ),
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, Some(reason)) => format!("exit code {} ({reason})", end.exit_code),
        (None, None) => format!("exit code {}", end.exit_code),
    };
    // 128 + signal, as the runtime writes the end of a killed process.
    let code = (end.exit_code < 128).then_some(end.exit_code);
    Some((code.filter(|_| end.signal.is_none()), words))
}

/// Words of the kubelet that mean more than "not yet".
fn trouble(container: &ContainerStatus) -> Option<String> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    let usual = matches!(reason, "ContainerCreating" | "PodInitializing");
    let message = waiting.message.as_deref().unwrap_or("no message");
    (!usual).then(|| format!("{reason}: {message}"))
}

/// The node of our own affinity by name.
fn meant_for(pod: &Pod) -> Option<String> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let terms = affinity.required_during_scheduling_ignored_during_execution.as_ref()?;
    let term = terms.node_selector_terms.first()?;
    let field = term.match_fields.as_ref()?.iter().find(|field| field.key == "metadata.name")?;
    field.values.as_ref()?.first().cloned()
}

pub(crate) fn requests(pod: &Pod) -> Resources {
    let Some(spec) = &pod.spec else { return Resources::default() };
    let asked = |resources: &Option<ResourceRequirements>| {
        amounts(resources.as_ref().and_then(|of| of.requests.as_ref()))
    };
    let init = spec.init_containers.iter().flatten();
    Resources::together(
        spec.containers.iter().map(|of| asked(&of.resources)),
        init.map(|of| (asked(&of.resources), of.restart_policy.as_deref() == Some("Always"))),
        &asked(&spec.resources),
        &amounts(spec.overhead.as_ref()),
    )
}

fn amounts(quantities: Option<&BTreeMap<String, Quantity>>) -> Resources {
    let mut all = Resources::default();
    for (name, quantity) in quantities.into_iter().flatten() {
        all.put(name, &quantity.0);
    }
    all
}

/// As allocation judges it, but for what pods ask of it.
pub(crate) fn node_seen(node: Node) -> ClusterNode {
    let name = node.name_any();
    let labels = node.metadata.labels.unwrap_or_default();
    let spec = node.spec.unwrap_or_default();
    let status = node.status.unwrap_or_default();
    let text = |of: &Option<String>| of.clone().unwrap_or_default();
    let mut conditions = status.conditions.unwrap_or_default();
    let is_pause = |of: &v1::NodeCondition| {
        is_pause(&of.type_, &text(&of.reason), &text(&of.message))
    };
    let freezes = conditions.iter().any(|of| is_pause(of) && of.status == "True");
    conditions.retain(|of| !is_pause(of));
    let said = || conditions.iter().map(|of| (of.type_.as_str(), of.status.as_str()));
    let taint = |taint: v1::Taint| Taint {
        key: taint.key,
        value: taint.value.unwrap_or_default(),
        effect: taint.effect,
    };
    ClusterNode {
        ready: said().any(|of| of == ("Ready", "True")),
        cordoned: spec.unschedulable == Some(true),
        unhealthy: unhealthy(said()).or_else(|| unhealthy_label(&labels)),
        freezes,
        taints: spec.taints.unwrap_or_default().into_iter().map(taint).collect(),
        allocatable: amounts(status.allocatable.as_ref()),
        requested: Resources::default(),
        name,
        labels,
    }
}

fn class_seen(class: PriorityClass) -> ClassSeen {
    ClassSeen {
        name: class.metadata.name.unwrap_or_default(),
        value: class.value,
        preempts: class.preemption_policy.as_deref() != Some("Never"),
        is_default: class.global_default == Some(true),
    }
}

/// The operator's Secret.
pub async fn secret(client: &Client, namespace: &str, name: &str) -> kube::Result<Option<Secret>> {
    Api::<Secret>::namespaced(client.clone(), namespace).get_opt(name).await
}

/// The definition of MoeJobs as the API server has it.
pub async fn definition(client: &Client) -> kube::Result<Option<serde_json::Value>> {
    let resource = ApiResource {
        group: "apiextensions.k8s.io".to_string(),
        version: "v1".to_string(),
        api_version: "apiextensions.k8s.io/v1".to_string(),
        kind: "CustomResourceDefinition".to_string(),
        plural: "customresourcedefinitions".to_string(),
    };
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    Ok(api.get_opt(crd::NAME).await?.map(|of| of.data))
}

/// The lease of leadership.
pub async fn lease(client: &Client, namespace: &str, name: &str) -> kube::Result<Option<Lease>> {
    Api::<Lease>::namespaced(client.clone(), namespace).get_opt(name).await
}

/// What the manifests call the operator's own container.
const OPERATOR_CONTAINER: &str = "operator";

/// Image and pull policy of the operator's own container.
pub async fn own_image(
    client: &Client,
    namespace: &str,
    pod: &str,
) -> kube::Result<Option<(String, Option<String>)>> {
    let pod = Api::<Pod>::namespaced(client.clone(), namespace).get_opt(pod).await?;
    let containers = pod.and_then(|pod| pod.spec).map(|spec| spec.containers).unwrap_or_default();
    // Whoever injects containers may put theirs first.
    let named = containers.iter().find(|of| of.name == OPERATOR_CONTAINER).cloned();
    let own = named.or_else(|| containers.into_iter().next());
    Ok(own.and_then(|own| Some((own.image?, own.image_pull_policy))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    pub(super) fn reduced(pod: serde_json::Value, keyring: &Keyring) -> PodSeen {
        let pod: LightPod = serde_json::from_value(pod).expect("a pod");
        pod_seen(pod, keyring, &mut Shared::default())
    }

    #[test]
    fn a_foreign_pod_is_a_node_its_requests_and_a_phase() {
        let keyring = Keyring::new().expect("keys");
        let seen = reduced(
            json!({
                "metadata": {"name": "p", "namespace": "n", "labels": {LABEL_JOB_UID: "u"},
                    "annotations": {ANNOTATION_SEAL: "copied"}},
                "spec": {
                    "nodeName": "a",
                    "containers": [
                        {"name": "x", "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}},
                        {"name": "y", "resources": {"requests": {"cpu": "2"}}},
                    ],
                    "initContainers": [
                        {"name": "i", "resources": {"requests": {"cpu": "1", "memory": "2Gi"}}},
                    ],
                },
                "status": {"phase": "Running"},
            }),
            &keyring,
        );
        assert_eq!(&*seen.key, "n/p");
        assert_eq!(seen.worker, None, "the label alone does not make it ours");
        let expected = [("cpu", 2100), ("memory", 2 * (1 << 30) * 1000), ("pods", 1000)];
        let expected = expected.map(|(name, amount)| (name.to_string(), amount));
        assert_eq!(*seen.requests, Resources(expected.into()));
        assert_eq!((seen.node.as_deref(), seen.finished), (Some("a"), false));
    }

    #[test]
    fn a_copy_in_another_namespace_is_nobodys_worker() {
        let keyring = Keyring::new().expect("keys");
        let pod = |namespace: &str, seal: &str| {
            let pod = json!({
                "metadata": {"name": "job-a1-0", "namespace": namespace, "uid": "pu",
                    "labels": {LABEL_JOB_UID: "u"}, "annotations": {ANNOTATION_SEAL: seal}},
                "spec": {"containers": []},
                "status": {},
            });
            reduced(pod, &keyring).worker.map(|worker| worker.owner.to_string())
        };
        let seal = keyring.seal("victim", "u", "job-a1-0");
        assert_eq!(pod("victim", &seal).as_deref(), Some("u@victim"));
        assert_eq!(pod("other", &seal), None);
    }

    #[test]
    fn what_the_kubelet_says_of_a_worker_is_kept() {
        let keyring = Keyring::new().expect("keys");
        let pod = |status: serde_json::Value| {
            let pod = json!({
                "metadata": {"name": "job-a1-0", "namespace": "n", "uid": "pu",
                    "labels": {LABEL_JOB_UID: "u"},
                    "annotations": {ANNOTATION_SEAL: keyring.seal("n", "u", "job-a1-0")}},
                "spec": {"containers": []},
                "status": status,
            });
            *reduced(pod, &keyring).worker.expect("ours")
        };
        let state = |state: serde_json::Value| {
            pod(json!({"phase": "Pending", "podIP": "10.0.0.1", "containerStatuses": [
                {"name": "worker", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                 "state": state}]}))
        };
        assert_eq!(&*pod(json!({})).owner, "u@n");
        let seen = state(json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}}));
        assert_eq!(seen.trouble.as_deref(), Some("ErrImagePull: not found"));
        assert!(!seen.started && seen.ended.is_none());
        let seen = state(json!({"waiting": {"reason": "ContainerCreating"}}));
        assert_eq!(seen.trouble, None);
        let seen = state(json!({"terminated": {"exitCode": 3, "reason": "Error"}}));
        assert_eq!(seen.ended, Some((Some(3), "exit code 3".to_string())));
        let seen = state(json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}));
        let words = "its container took more memory than its limit and was killed (OOMKilled)";
        assert_eq!(seen.ended, Some((None, words.to_string())));
        let seen = pod(json!({"phase": "Failed", "reason": "Evicted", "message": "disk"}));
        assert_eq!(seen.ended, Some((None, "its pod Failed: Evicted: disk".to_string())));
    }
}
