//! Whether a node does for a job.

use super::ClusterNode;
use crate::pods::{self, Birth, Surroundings};
use moejob_manifest::job::Job;
use moejob_manifest::resources::Resources;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// What a job's pod asks of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Needs {
    pub requests: Resources,
    /// Labels that the node must have: the profile's and the overlay's.
    pub selector: BTreeMap<String, String>,
    pub tolerations: Vec<Toleration>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    pub key: String,
    pub value: String,
    /// NoSchedule, PreferNoSchedule or NoExecute.
    pub effect: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toleration {
    /// None tolerates every key.
    pub key: Option<String>,
    /// None is the operator Exists.
    pub value: Option<String>,
    /// None tolerates every effect.
    pub effect: Option<String>,
}

/// Why a job cannot have a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Against<'n> {
    InUse,
    /// After a failure of this job there.
    Avoided,
    NotReady,
    Cordoned,
    Condition(&'n str),
    /// It is not there, or has another value.
    Label(&'n str, &'n str),
    Taint(&'n str),
    Lacks(&'n str),
}

impl fmt::Display for Against<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Against::InUse => f.write_str("in use by a MoeJob"),
            Against::Avoided => f.write_str("avoided after a failure"),
            Against::NotReady => f.write_str("not ready"),
            Against::Cordoned => f.write_str("cordoned"),
            Against::Condition(condition) => write!(f, "with the condition {condition}"),
            Against::Label(key, value) => write!(f, "without the label {key}={value}"),
            Against::Taint(key) => write!(f, "with the taint {key}"),
            Against::Lacks(resource) => write!(f, "with too little {resource}"),
        }
    }
}

impl Needs {
    /// Of a job, its overlay included.
    pub fn of(job: &Job) -> Needs {
        let pod = pods::pod(job, &Surroundings::default(), &Birth::default());
        let mut selector = job.profile.node_selector.clone();
        for (key, value) in pod["spec"]["nodeSelector"].as_object().into_iter().flatten() {
            selector.insert(key.clone(), value.as_str().unwrap_or_default().to_string());
        }
        let tolerations = pod["spec"]["tolerations"].as_array().into_iter().flatten();
        Needs {
            requests: Resources::of_pod(&pod),
            selector,
            tolerations: tolerations.map(Toleration::read).collect(),
        }
    }

    /// What is against a new pod of the job on this node.
    pub fn refuses<'n>(&'n self, node: &'n ClusterNode) -> Option<Against<'n>> {
        if !node.ready {
            return Some(Against::NotReady);
        }
        if node.cordoned {
            return Some(Against::Cordoned);
        }
        if let Some(condition) = &node.unhealthy {
            return Some(Against::Condition(condition));
        }
        let other = self.selector.iter().find(|(key, value)| node.labels.get(*key) != Some(value));
        if let Some((key, value)) = other {
            return Some(Against::Label(key, value));
        }
        let repels = |taint: &&Taint| {
            taint.effect != "PreferNoSchedule" && !self.tolerates(taint)
        };
        if let Some(taint) = node.taints.iter().find(repels) {
            return Some(Against::Taint(&taint.key));
        }
        self.requests.lacking(&node.allocatable, &node.requested).map(Against::Lacks)
    }

    /// Whether a worker that is there already may stay. Its stream says whether it lives, so a
    /// node that is not ready is no reason to leave it.
    pub fn keeps(&self, node: &ClusterNode) -> bool {
        let drains = |taint: &Taint| taint.effect == "NoExecute" && !self.tolerates(taint);
        !node.cordoned && node.unhealthy.is_none() && !node.taints.iter().any(drains)
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        self.tolerations.iter().any(|one| {
            one.key.as_ref().is_none_or(|key| *key == taint.key)
                && one.value.as_ref().is_none_or(|value| *value == taint.value)
                && one.effect.as_ref().is_none_or(|effect| *effect == taint.effect)
        })
    }
}

impl Toleration {
    /// As it stands in a pod.
    pub fn read(value: &Value) -> Toleration {
        let text = |field: &str| value[field].as_str().map(str::to_string);
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        let exists = value["operator"] == "Exists";
        Toleration {
            key: filled(text("key")),
            value: if exists { None } else { Some(text("value").unwrap_or_default()) },
            effect: filled(text("effect")),
        }
    }
}

/// Conditions of the kubelet's own: Ready is `ClusterNode::ready`, the others come with taints.
const KUBELETS: &[&str] =
    &["Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"];

/// What the conditions of a node (type, status) that health monitors set say against it, as
/// `XIDHardwareErrors=True` or `AcceleratedHardwareReady=False`.
pub fn unhealthy<'c>(conditions: impl IntoIterator<Item = (&'c str, &'c str)>) -> Option<String> {
    let is_bad = |(name, status): &(&str, &str)| {
        let good_when_true = ["Ready", "Healthy"].iter().any(|end| name.ends_with(end));
        let bad = if good_when_true { "False" } else { "True" };
        !KUBELETS.contains(name) && *status == bad
    };
    let bad: Vec<(&str, &str)> = conditions.into_iter().filter(is_bad).collect();
    bad.iter().map(|(name, status)| format!("{name}={status}")).min()
}

/// An event of the virtual machine that is planned; True on AKS.
const VM_EVENT: &str = "VMEventScheduled";

/// Whether the condition tells of a freeze: the machine stands still for seconds and goes on, so
/// nobody leaves it. Any other word, also one that is not known, may be a reboot.
pub fn is_pause(condition: &str, reason: &str, message: &str) -> bool {
    let words = format!("{reason} {message}").to_lowercase();
    let ends = ["reboot", "redeploy", "terminate", "preempt"];
    condition == VM_EVENT && words.contains("freeze") && !ends.iter().any(|end| words.contains(end))
}

/// What labels that health monitors set say against a node: IBM Autopilot's, and SageMaker
/// HyperPod's.
pub fn unhealthy_label(labels: &BTreeMap<String, String>) -> Option<String> {
    const AUTOPILOT: &str = "autopilot.ibm.com/gpuhealth";
    const HYPERPOD: &str = "sagemaker.amazonaws.com/node-health-status";
    let of = |key: &str| labels.get(key).map(String::as_str);
    let said = |key: &str| of(key).map(|value| format!("{key}={value}"));
    match (of(AUTOPILOT), of(HYPERPOD)) {
        (Some("EVICT"), _) => said(AUTOPILOT),
        (_, Some(value)) if value.starts_with("Unschedulable") => said(HYPERPOD),
        _ => None,
    }
}
