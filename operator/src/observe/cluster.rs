//! All that was seen last, and the sums over pods that allocation asks for.

use super::job_text::JobText;
use super::{Change, ClassSeen, JobSeen, Key, Kind, Owner, PodSeen, WorkerPod, key};
use moejob_manifest::resources::Resources;
use moejob_plan::allocate::ClusterNode;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// All that was seen last.
#[derive(Debug, Default)]
pub struct Cluster {
    pub jobs: BTreeMap<Key, JobText>,
    pub pods: HashMap<Key, PodSeen>,
    nodes: BTreeMap<String, ClusterNode>,
    classes: BTreeMap<String, ClassSeen>,
    /// Files of an admin's own profiles, by name.
    pub profiles: BTreeMap<String, String>,
    /// What pods that have not ended ask of each node, workers apart.
    requested: HashMap<Arc<str>, Resources>,
    /// On how many of a node's pods each job's workers are that have not ended.
    held: HashMap<Owner, BTreeMap<Arc<str>, u32>>,
    /// The pods of each job's workers, ended ones, too.
    workers: HashMap<Owner, BTreeSet<Key>>,
    complete: HashSet<Kind>,
}

impl Cluster {
    /// Every kind was listed once.
    pub fn is_complete(&self) -> bool {
        self.complete.len() == 5
    }

    /// What the class of this name is worth, and whether jobs of lower ones stop for its; without a
    /// name that of the cluster's default class.
    pub fn priority(&self, class: &str) -> (i32, bool) {
        let found = match class {
            "" => self.classes.values().find(|class| class.is_default),
            name => self.classes.get(name),
        };
        found.map_or((0, true), |class| (class.value, class.preempts))
    }

    /// The nodes, with what pods ask of them.
    pub fn nodes(&self) -> Vec<ClusterNode> {
        let node = |node: &ClusterNode| ClusterNode {
            requested: self.requested(&node.name),
            ..node.clone()
        };
        self.nodes.values().map(node).collect()
    }

    /// What pods on this node ask for, workers of MoeJobs apart.
    pub fn requested(&self, node: &str) -> Resources {
        self.requested.get(node).cloned().unwrap_or_default()
    }

    /// The nodes of each job's workers that have not ended.
    pub fn held(&self) -> impl Iterator<Item = (&str, BTreeSet<String>)> {
        self.held.iter().map(|(owner, nodes)| {
            (&**owner, nodes.keys().map(|node| node.to_string()).collect())
        })
    }

    /// The pods of the job's workers, by namespace and name.
    pub fn workers(&self, owner: &Owner) -> impl Iterator<Item = &WorkerPod> {
        let keys = self.workers.get(owner).into_iter().flatten();
        keys.filter_map(|key| self.pods.get(key)?.worker.as_deref())
    }

    /// A pod of the job's is there and has not ended.
    pub fn has_workers(&self, owner: &Owner) -> bool {
        self.held.contains_key(owner)
    }

    /// Somebody has to end a pod of the job's: a worker that has not ended, or any placeholder.
    pub fn has_pods(&self, owner: &Owner) -> bool {
        self.has_workers(owner) || self.workers(owner).any(WorkerPod::is_placeholder)
    }

    /// What the change replaces is given back; of a job without spec and status.
    pub fn take(&mut self, change: Change) -> Taken {
        match change {
            Change::Job(job) => Taken::Job(key(&job.namespace, &job.name), self.put_job(*job)),
            Change::JobGone(key) => {
                let before = self.jobs.remove(&key).map(|job| job.facts().clone());
                Taken::Job(key, before)
            }
            Change::Pod(pod) => {
                let key = Arc::clone(&pod.key);
                self.count(&pod, true);
                let owner = pod.worker.as_ref().map(|worker| Arc::clone(&worker.owner));
                let before = self.pods.insert(Arc::clone(&key), pod);
                before.iter().for_each(|before| self.leave(before));
                if let Some(owner) = owner {
                    self.workers.entry(owner).or_default().insert(Arc::clone(&key));
                }
                Taken::Pod(key, before)
            }
            Change::PodGone(key) => {
                let before = self.pods.remove(&key);
                before.iter().for_each(|before| self.leave(before));
                Taken::Pod(key, before)
            }
            Change::Node(node) => {
                let same = self.nodes.get(&node.name) == Some(&node);
                self.nodes.insert(node.name.clone(), node);
                if same { Taken::Nothing } else { Taken::Node }
            }
            Change::NodeGone(key) => {
                self.nodes.remove(&*key);
                Taken::Node
            }
            Change::Class(class) => {
                self.classes.insert(class.name.clone(), class);
                Taken::Node
            }
            Change::ClassGone(key) => {
                self.classes.remove(&*key);
                Taken::Node
            }
            Change::Profiles(profiles) => {
                self.profiles = profiles;
                Taken::Profiles
            }
            Change::Complete(kind) => {
                self.complete.insert(kind);
                Taken::Node
            }
        }
    }

    /// A pod is no longer as it was.
    fn leave(&mut self, before: &PodSeen) {
        self.count(before, false);
        let Some(owner) = before.worker.as_ref().map(|worker| &worker.owner) else { return };
        let Some(keys) = self.workers.get_mut(owner) else { return };
        keys.remove(&before.key);
        if keys.is_empty() {
            self.workers.remove(owner);
        }
    }

    /// Keeps the sums of `requested` and `held`: a pod comes, or is no longer as it was.
    fn count(&mut self, pod: &PodSeen, comes: bool) {
        if pod.finished {
            return;
        }
        let bound = pod.node.clone();
        let Some(worker) = &pod.worker else {
            let Some(node) = bound else { return };
            let sum = self.requested.entry(node).or_default();
            return if comes { sum.add(&pod.requests) } else { sum.subtract(&pod.requests) };
        };
        if worker.is_placeholder() {
            return;
        }
        let Some(node) = bound.or_else(|| worker.meant_for.as_deref().map(Arc::from)) else {
            return;
        };
        let nodes = self.held.entry(Arc::clone(&worker.owner)).or_default();
        let pods = nodes.entry(Arc::clone(&node)).or_insert(0);
        *pods = if comes { *pods + 1 } else { pods.saturating_sub(1) };
        if *pods == 0 {
            nodes.remove(&node);
        }
        if nodes.is_empty() {
            self.held.remove(&worker.owner);
        }
    }

    fn put_job(&mut self, job: JobSeen) -> Option<JobSeen> {
        let key = key(&job.namespace, &job.name);
        self.jobs.insert(key, JobText::of(job)).map(|job| job.facts().clone())
    }
}

/// What a change touched, and what was there before.
#[derive(Debug)]
pub enum Taken {
    Nothing,
    Job(Key, Option<JobSeen>),
    Pod(Key, Option<PodSeen>),
    Node,
    Profiles,
}

#[cfg(test)]
mod tests {
    use super::super::tests::reduced;
    use super::*;
    use moejob_identity::Keyring;
    use moejob_plan::pods::{ANNOTATION_SEAL, LABEL_JOB_UID};
    use serde_json::json;

    #[test]
    fn changes_build_the_cluster() {
        let mut cluster = Cluster::default();
        let node = ClusterNode { name: "a".into(), ..ClusterNode::default() };
        assert!(matches!(cluster.take(Change::Node(node.clone())), Taken::Node));
        assert!(matches!(cluster.take(Change::Node(node)), Taken::Nothing));
        for kind in [Kind::Jobs, Kind::Pods, Kind::Nodes, Kind::Classes, Kind::Profiles] {
            assert!(!cluster.is_complete());
            cluster.take(Change::Complete(kind));
        }
        assert!(cluster.is_complete());
    }

    #[test]
    fn a_class_is_worth_its_value_and_no_class_the_default() {
        let mut cluster = Cluster::default();
        assert_eq!((cluster.priority("high"), cluster.priority("")), ((0, true), (0, true)));
        for (name, value, is_default) in [("high", 1000, false), ("usual", 10, true)] {
            let (name, preempts) = (name.into(), is_default);
            cluster.take(Change::Class(ClassSeen { name, value, preempts, is_default }));
        }
        let known = (cluster.priority("high"), cluster.priority(""));
        assert_eq!(known, ((1000, false), (10, true)));
        cluster.take(Change::ClassGone("usual".into()));
        assert_eq!((cluster.priority("usual"), cluster.priority("")), ((0, true), (0, true)));
    }

    #[test]
    fn sums_follow_the_pods() {
        let mut cluster = Cluster::default();
        let keyring = Keyring::new().expect("keys");
        let pod = |name: &str, node: Option<&str>, phase: &str, seal: bool| {
            let seal = if seal { keyring.seal("n", "u", name) } else { String::new() };
            let requests = json!({"cpu": "2"});
            let container = json!({"name": "x", "resources": {"requests": requests}});
            reduced(
                json!({
                    "metadata": {"name": name, "namespace": "n", "labels": {LABEL_JOB_UID: "u"},
                        "annotations": {ANNOTATION_SEAL: seal}},
                    "spec": {"nodeName": node, "containers": [container]},
                    "status": {"phase": phase},
                }),
                &keyring,
            )
        };
        let cpu = |cluster: &Cluster| cluster.requested("a").0.get("cpu").copied().unwrap_or(0);
        let held = |cluster: &Cluster| -> Vec<(String, Vec<String>)> {
            let all = cluster.held();
            all.map(|(owner, nodes)| (owner.to_string(), nodes.into_iter().collect())).collect()
        };
        for (name, node, phase, seal, expected) in [
            ("other", None, "Pending", false, (0, vec![])),
            ("other", Some("a"), "Pending", false, (2000, vec![])),
            ("other", Some("a"), "Running", false, (2000, vec![])),
            ("u-0", Some("a"), "Running", true, (2000, vec!["a"])),
            ("u-1", Some("a"), "Running", true, (2000, vec!["a"])),
            ("u-0", Some("a"), "Succeeded", true, (2000, vec!["a"])),
            ("u-1", Some("a"), "Failed", true, (2000, vec![])),
            ("other", Some("a"), "Failed", false, (0, vec![])),
        ] {
            cluster.take(Change::Pod(pod(name, node, phase, seal)));
            let (sum, nodes) = expected;
            assert_eq!(cpu(&cluster), sum, "{name} {phase}");
            let expected = (!nodes.is_empty()).then(|| {
                ("u@n".to_string(), nodes.into_iter().map(str::to_string).collect())
            });
            assert_eq!(held(&cluster), Vec::from_iter(expected), "{name} {phase}");
        }
        let owner: Owner = Arc::from("u@n");
        let names = |cluster: &Cluster| -> Vec<String> {
            cluster.workers(&owner).map(|worker| worker.name.clone()).collect()
        };
        assert_eq!(names(&cluster), ["u-0", "u-1"], "ended ones, too");
        assert!(!cluster.has_workers(&owner) && !cluster.has_pods(&owner));
        cluster.take(Change::PodGone(key("n", "u-0")));
        assert_eq!(names(&cluster), ["u-1"]);
        // A pod of its name that nobody has sealed is nobody's worker.
        cluster.take(Change::Pod(pod("u-1", Some("a"), "Running", false)));
        assert!(names(&cluster).is_empty() && cluster.workers.is_empty());
        cluster.take(Change::PodGone(key("n", "u-1")));
        cluster.take(Change::PodGone(key("n", "other")));
        assert_eq!(cpu(&cluster), 0, "it had ended before it went");
        // A placeholder takes nothing of the node that it is put on.
        let placeholder = pod("u-placeholder-0", Some("a"), "Pending", true);
        assert_eq!(placeholder.weight(), None);
        cluster.take(Change::Pod(placeholder));
        assert_eq!((cpu(&cluster), held(&cluster)), (0, vec![]));
        assert!(cluster.has_pods(&owner) && !cluster.has_workers(&owner));
    }
}
