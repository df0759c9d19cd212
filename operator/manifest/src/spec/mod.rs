//! The MoeJob exactly as its user typed it. Doc comments here become `kubectl explain`.
//!
//! Every field is an `Option`: what is missing is filled in once, by `job.rs`. Nobody writes a
//! spec, so none of them says how it is left out. Fields marked `required` are so in the schema.
//! Rules that need one object alone stand beside it as CEL, and `job.rs` checks the same offline (a
//! test holds the two together).

/// In CEL: these fields are there or not as they were, and have the same values.
macro_rules! unchanged {
    ($field:literal) => {
        concat!(
            "has(self.", $field, ") == has(oldSelf.", $field, ") && (!has(self.", $field,
            ") || self.", $field, " == oldSelf.", $field, ")"
        )
    };
    ($field:literal, $($more:literal),+) => {
        concat!(unchanged!($field), " && ", unchanged!($($more),+))
    };
}

/// In CEL: the same, while the job is not suspended.
macro_rules! unless_suspended {
    ($field:literal) => {
        concat!(
            "(has(oldSelf.suspend) && oldSelf.suspend) || (has(self.suspend) && self.suspend) || (",
            unchanged!($field),
            ")"
        )
    };
}

mod cluster;
mod model;
mod router;
mod training;
mod word;

pub use cluster::*;
pub use model::*;
pub use router::*;
pub use training::*;
pub use word::{Word, as_typed};

use crate::status::MoeJobStatus;
use kube_derive::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A mixture-of-experts training job: how many nodes, which model, which data, how long. Everything
/// but nodes, model, data and training.steps has a default.
// Each `printcolumn` has its own `type_` and `json_path`.
#[allow(clippy::duplicated_attributes)]
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "moejob.dev",
    version = "v1alpha1",
    kind = "MoeJob",
    plural = "moejobs",
    shortname = "mj",
    category = "all",
    namespaced,
    status = "MoeJobStatus",
    derive = "PartialEq",
    crates(kube_core = "::kube_core"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Nodes", type_ = "string", json_path = ".status.nodes.summary"),
    printcolumn(name = "Experts", type_ = "string", json_path = ".status.placement.summary"),
    printcolumn(name = "Step", type_ = "integer", json_path = ".status.step"),
    printcolumn(name = "Loss", type_ = "number", json_path = ".status.loss"),
    printcolumn(name = "Tok/s", type_ = "number", json_path = ".status.tokensPerSecond"),
    printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restarts"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("!has(self.training) || (has(self.nodes) && has(self.nodes.profile) && \
        self.nodes.profile != 'cpu' && (self.nodes.profile != 'custom' || \
        !has(self.nodes.custom) || ((!has(self.nodes.custom.backend) || \
        self.nodes.custom.backend == 'cuda') && (!has(self.nodes.custom.devices) || \
        self.nodes.custom.devices > 0)))) || \
        ((!has(self.training.precision) || self.training.precision == 'fp32') && \
        (!has(self.training.momentDtype) || self.training.momentDtype == 'fp32') && \
        (!has(self.training.gradientDtype) || self.training.gradientDtype != 'bf16') && \
        (!has(self.training.attention) || self.training.attention == 'deterministic'))")
        .message("training: processors compute in fp32 and in one order alone"),
    // A field's own rule sees a change of its value; these see it come and go.
    validation = Rule::new("has(self.parallelism) == has(oldSelf.parallelism) && \
        has(self.volumes) == has(oldSelf.volumes) && \
        has(self.priorityClassName) == has(oldSelf.priorityClassName) && \
        has(self.schedulerName) == has(oldSelf.schedulerName)")
        .message("parallelism, volumes, priorityClassName and schedulerName are immutable"),
    validation = Rule::new(unless_suspended!("image"))
        .message("image changes only while the job is suspended"),
    validation = Rule::new(unless_suspended!("podTemplate"))
        .message("podTemplate changes only while the job is suspended")
)]
pub struct MoeJobSpec {
    /// Stops the job after a checkpoint and gives its nodes back; false goes on where it stopped.
    /// Queues such as Kueue start and stop a job by this.
    pub suspend: Option<bool>,

    /// The container image of the workers, with a tag or, better, a digest. Used on Kubernetes
    /// only.
    #[schemars(length(max = 512))]
    pub image: Option<String>,

    /// What the job runs on: a kind of machine, and how many of it.
    #[schemars(required)]
    pub nodes: Option<NodesSpec>,

    /// The model: a preset, or its dimensions, or a preset of which some fields are overridden.
    #[schemars(required)]
    #[x_kube(validation = Rule::new("self == oldSelf").message("model is immutable"))]
    pub model: Option<ModelSpec>,

    /// What the model is trained on.
    #[schemars(required)]
    #[x_kube(validation = Rule::new("self == oldSelf").message("data is immutable"))]
    pub data: Option<DataSpec>,

    /// How it is trained: steps, batch, optimizer, schedule.
    #[schemars(required)]
    pub training: Option<TrainingSpec>,

    /// How ranks divide the work. `moejob plan` shows what `auto` chooses.
    #[x_kube(validation = Rule::new("self == oldSelf").message("parallelism is immutable"))]
    pub parallelism: Option<ParallelismSpec>,

    /// When state is saved, how many of the saved are kept, and where.
    pub checkpoint: Option<CheckpointSpec>,

    /// When a worker counts as lost, and how often the job may be restarted.
    pub recovery: Option<RecoverySpec>,

    /// What is mounted into the pods. Used on Kubernetes only.
    #[schemars(length(max = 16))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("volumes are immutable"))]
    pub volumes: Option<Vec<VolumeSpec>>,

    /// An overlay on the workers' pods: tolerations, affinity, env, pull secrets, resources; at
    /// most 32 KiB as JSON. What would widen a pod's rights is refused. Used on Kubernetes only.
    #[schemars(schema_with = "any_object")]
    // Else the schema, which knows no `Option` here, would ask for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_template: Option<serde_json::Value>,

    /// The PriorityClass of the pods; also orders jobs that wait for nodes. A job of a lower one
    /// stops with a checkpoint where its nodes are needed, if the class's `preemptionPolicy` is not
    /// `Never`. Default: the cluster's.
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("priorityClassName is immutable"))]
    pub priority_class_name: Option<String>,

    /// The scheduler of the pods; empty is the cluster's default.
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("schedulerName is immutable"))]
    pub scheduler_name: Option<String>,

    /// Seconds after which a finished job is deleted; absent keeps it.
    #[schemars(range(max = 2147483647))]
    pub ttl_seconds_after_finished: Option<u32>,
}

fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// A number or the word `auto`.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(untagged)]
pub enum NumberOrAuto {
    Number(i64),
    Word(String),
}

impl JsonSchema for NumberOrAuto {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "NumberOrAuto".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "x-kubernetes-int-or-string": true,
            "x-kubernetes-validations": [{
                "rule": "string(self).matches('^(auto|[1-9][0-9]{0,4})$')",
                "message": "a number from 1 to 99999, or auto",
            }],
        })
    }
}

/// 1, 2, 4 or the word `auto`.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(transparent)]
pub struct OverlapDegree(pub NumberOrAuto);

impl JsonSchema for OverlapDegree {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "OverlapDegree".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "x-kubernetes-int-or-string": true,
            "enum": [1, 2, 4, "auto"],
        })
    }
}
