//! Nodes, parallelism, checkpoints, recovery and volumes as typed.

use super::{NumberOrAuto, OverlapDegree, Word};
use kube_derive::KubeSchema;
use moejob_protocol::config::{Backend, Wire};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the job runs on.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("!has(self.max) || (has(self.min) ? self.min : 1) <= self.max")
        .message("nodes.min must be at most nodes.max"),
    validation = Rule::new("has(self.custom) == (has(self.profile) && self.profile == 'custom')")
        .message("nodes.custom describes the profile custom, and only that one"),
    validation = Rule::new("!has(self.devicesPerNode) || !has(self.profile) || \
        self.profile in ['cpu', 'gpu']")
        .message("nodes.devicesPerNode goes with the profiles cpu and gpu"),
    validation = Rule::new("(has(self.devicesPerNode) ? self.devicesPerNode : 1) == \
        (has(oldSelf.devicesPerNode) ? oldSelf.devicesPerNode : 1)")
        .message("nodes.devicesPerNode is immutable"),
    validation = Rule::new("!has(self.custom) || !has(self.custom.devices) || \
        (has(self.max) ? self.max : (has(self.min) ? self.min : 1)) * self.custom.devices <= 32768")
        .message("nodes.max times custom.devices must be at most 32768"),
    validation = Rule::new(unchanged!("profile"))
        .message("nodes.profile is immutable"),
    validation = Rule::new(unchanged!("topology"))
        .message("nodes.topology is immutable"),
    validation = Rule::new("!has(self.custom) || !has(oldSelf.custom) || \
        self.custom == oldSelf.custom")
        .message("nodes.custom is immutable")
)]
pub struct NodesSpec {
    /// The kind of machine: it says how many devices a node has, what memory they have, how they
    /// are connected, and which settings the network wants. gpu is the GPUs that the machine of
    /// `moejob run` shows. Shipped are cpu, gpu, ndm-a100-v4, nd-a100-v4, nd-h100-v5 and
    /// nd-h200-v5; the operator's admin may add others. Default: cpu.
    #[schemars(length(min = 1, max = 63))]
    pub profile: Option<String>,
    /// The job runs on no fewer nodes. Default: 1.
    #[schemars(range(min = 1, max = 4096))]
    pub min: Option<u32>,
    /// The job runs on no more nodes, spares aside. Default: min.
    #[schemars(range(min = 1, max = 4096))]
    pub max: Option<u32>,
    /// Nodes beyond max that are kept connected and warm, to take the place of a lost one.
    /// Default: 0.
    #[schemars(range(max = 256))]
    pub spares: Option<u32>,
    /// Ranks of a node with the profile cpu, a process each, which share its processors; GPUs of a
    /// node with the profile gpu. Other profiles have one for each of their devices. Default: 1.
    #[schemars(range(min = 1, max = 64))]
    pub devices_per_node: Option<u32>,
    /// Whether a node is measured before it gets a rank: copies, links between its GPUs, clocks and
    /// errors, against the limits of its profile. One that fails is avoided and replaced. auto:
    /// where the profile has limits. Default: auto.
    pub preflight: Option<PreflightWhen>,
    /// How close to each other the nodes shall be.
    pub topology: Option<TopologySpec>,
    /// The machine of profile custom.
    pub custom: Option<CustomProfileSpec>,
}

/// When nodes are measured.
#[derive(
    JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, Hash,
)]
#[serde(rename_all = "kebab-case")]
pub enum PreflightWhen {
    #[default]
    Auto,
    Always,
    Never,
}

/// A machine that no profile describes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct CustomProfileSpec {
    /// Devices of a node: GPUs, or with backend cpu ranks that share its processors. 0 is a
    /// machine that trains on its processors with one rank.
    #[schemars(required, range(max = 64))]
    pub devices: Option<u32>,
    /// What the devices are. Default: cuda where there are devices, else cpu.
    pub backend: Option<Word<Backend>>,
    /// Memory of a device (of the node, when it has none) that a rank may use, as 80Gi.
    #[schemars(required, length(max = 32))]
    pub device_memory: Option<String>,
    /// Devices that reach each other by NVLink. Default: devices.
    #[schemars(range(min = 1, max = 1024))]
    pub nvlink_domain: Option<u32>,
    /// Labels of the nodes that are meant. Default: all nodes.
    #[schemars(extend("maxProperties" = 32))]
    pub node_selector: Option<std::collections::BTreeMap<String, String>>,
    /// What a pod asks for so that it may use the network cards. Default: nothing.
    pub rdma: Option<RdmaSpec>,
    /// Settings of NCCL and UCX that the network wants.
    #[schemars(length(max = 32))]
    pub env: Option<Vec<SettingSpec>>,
}

/// An extended resource of Kubernetes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct RdmaSpec {
    /// Its name, as rdma/ib or rdma/shared_ib.
    #[schemars(required, length(min = 3, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9.-]+/[A-Za-z0-9._-]+$')")
        .message("rdma.resource: an extended resource, as rdma/ib"))]
    pub resource: Option<String>,
    /// How many of it a pod asks for.
    #[schemars(required, range(min = 1, max = 64))]
    pub count: Option<u32>,
}

/// A variable of the workers' environment.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct SettingSpec {
    /// One of those that say how links are used; none of them loads a program or writes a file.
    #[schemars(required, extend("enum" = crate::profile::CUSTOM_ENV))]
    pub name: Option<String>,
    /// Its value, in quotes where it is a number.
    #[schemars(required, length(min = 1, max = 256))]
    pub value: Option<String>,
}

/// A level of the topology that holds all nodes, wished for or required.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("has(self.prefer) != has(self.require)")
        .message("nodes.topology: prefer or require, one of the two")
)]
pub struct TopologySpec {
    /// Nodes of one such part are taken where possible.
    pub prefer: Option<Level>,
    /// The job waits rather than reach beyond one such part. Default: it may reach anywhere.
    pub require: Option<Level>,
}

/// A level of the topology, from wide to narrow. tier-0 is the switch next to the nodes; leaf and
/// rack are other words for it.
#[derive(
    JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash,
)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    Zone,
    #[serde(rename = "tier-9")]
    Tier9,
    #[serde(rename = "tier-8")]
    Tier8,
    #[serde(rename = "tier-7")]
    Tier7,
    #[serde(rename = "tier-6")]
    Tier6,
    #[serde(rename = "tier-5")]
    Tier5,
    #[serde(rename = "tier-4")]
    Tier4,
    #[serde(rename = "tier-3")]
    Tier3,
    #[serde(rename = "tier-2")]
    Tier2,
    #[serde(rename = "tier-1")]
    Tier1,
    #[serde(rename = "tier-0")]
    Tier0,
    Leaf,
    Rack,
    NvlinkDomain,
    Host,
}

/// How ranks divide the work.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct ParallelismSpec {
    /// Ranks that share the experts among them (ep), or auto. Default: auto.
    pub expert: Option<NumberOrAuto>,
    /// Slices of each expert, by its hidden width: 1, 2, 4 or 8. Ranks hold, compute and exchange
    /// slices as experts of their own, so that up to as many times the ranks share the experts, and
    /// loads of ranks are more even. A token is sent to all slices of its experts. On GPUs slices
    /// are a multiple of 64 wide. Sums have another order for each number. Checkpoints of any
    /// number go on with any other. Default: 1.
    #[schemars(extend("enum" = moejob_protocol::slices::SLICES))]
    pub expert_slices: Option<u32>,
    /// How tokens travel to their experts: flat, hierarchical (in two stages, between nodes and
    /// within them), or auto. Between GPUs that is flat, since sums are rounded in another order.
    /// Between processors it is hierarchical, so that a token crosses to a node once. Default:
    /// auto.
    pub exchange: Option<ExchangeName>,
    /// 1, 2, 4 or auto. It has no effect: the tokens of a micro-batch travel at once. Default:
    /// auto.
    pub overlap_degree: Option<OverlapDegree>,
    /// As what tokens travel between GPUs that share experts: auto, as they are computed; fp32, the
    /// same, and sums over experts are not rounded before they are added; bf16, of precision fp32
    /// or tf32; or fp8, which rounds what experts read to three bits behind the first one (e4m3
    /// with a scale for each 128 elements), halves what is sent to them, and leaves sums and
    /// gradients alone. Processors have auto and fp32, which are the same there. Default: auto.
    pub wire: Option<Word<Wire>>,
    /// Whether a GPU sums up what its experts make of a token before that goes back: true, one row
    /// comes back from each GPU; false, one of each expert, which takes as many times the bytes and
    /// the memory, and the token's own GPU sums them in the order of experts. Processors do the
    /// latter, and GPUs in fp32, so that no bit depends on their number. Default: true with
    /// precision bf16 and fp16, else false.
    pub combine_pre_reduce: Option<bool>,
    /// Ranks that share each matrix (tp). Only 1 yet. Default: 1.
    #[schemars(range(min = 1, max = 1024))]
    pub tensor: Option<u32>,
    /// Ranks that share the layers (pp). Only 1 yet. Default: 1.
    #[schemars(range(min = 1, max = 1024))]
    pub pipeline: Option<u32>,
    /// The stage of ZeRO for dense parameters (all but experts and vectors). A rank keeps of its
    /// own share alone: 1, the optimizer's state; 2, gradients, too; 3, weights, too, which are
    /// gathered ahead of each use. Each stage takes less memory and sends more. In precisions other
    /// than fp32, with several micro-batches of a rank in a step, 2 and 3 add up gradients in
    /// another order than 1. Default: 1.
    #[schemars(range(min = 1, max = 3))]
    pub zero: Option<u32>,
}

/// How the ranks that share experts exchange tokens.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub enum ExchangeName {
    Auto,
    Flat,
    Hierarchical,
}

/// When state is saved.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("has(self.location) == has(oldSelf.location)")
        .message("checkpoint.location is immutable")
)]
pub struct CheckpointSpec {
    /// A checkpoint is written after every so many steps, and after the last. Default: 200; on
    /// GPUs at least 200 steps apart, as often as its copy costs half a percent of the time.
    #[schemars(range(min = 1, max = 1000000000))]
    pub every_steps: Option<u64>,
    /// So many of the newest checkpoints are kept. Default: 3.
    #[schemars(range(min = 1, max = 10000))]
    pub keep: Option<u32>,
    /// The checkpoint with the least held-out loss is kept beside the newest ones, of those taken
    /// at a step with a held-out loss: let everySteps be a multiple of data.validation.everySteps
    /// (200 by default then, on GPUs, too). Default: false.
    pub keep_best: Option<bool>,
    /// The directory of the checkpoints. Default on one machine: DIR/NAME/checkpoints. On
    /// Kubernetes it must lie on a claim that all nodes can write.
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("checkpoint.location is immutable"))]
    pub location: Option<String>,
}

/// When a worker counts as lost, and what follows. Durations are written as 500ms, 3s, 10m or 1h.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct RecoverySpec {
    /// A worker that is silent for this long is lost. Default: 3s.
    #[schemars(length(max = 32))]
    pub heartbeat_timeout: Option<String>,
    /// A gang that finishes no step for this long is restarted; auto is 20 times the median step,
    /// at least 60s. Default: auto.
    #[schemars(length(max = 32))]
    pub step_timeout: Option<String>,
    /// Unplanned losses within the window after which the job fails; simultaneous ones count once.
    /// Default: 20.
    #[schemars(range(max = 100000))]
    pub max_restarts: Option<u32>,
    /// The window in which restarts are counted. Default: 1h.
    #[schemars(length(max = 32))]
    pub window: Option<String>,
    /// Each rank keeps a snapshot in memory after every so many steps. Default: 10; on GPUs as
    /// often as it costs half a percent of the time.
    #[schemars(range(min = 1, max = 1000000))]
    pub memory_every_steps: Option<u64>,
    /// The job grows at most once in this time. Default: 60s, on one machine 2s.
    #[schemars(length(max = 32))]
    pub growth_interval: Option<String>,
    /// A disturbed gang waits this long for an absent operator. Default: 10m, on one machine 0s.
    #[schemars(length(max = 32))]
    pub orphan_timeout: Option<String>,
    /// A gang that has not come together in this time gives its nodes back. Default: 30s.
    #[schemars(length(max = 32))]
    pub gang_timeout: Option<String>,
}

/// Something mounted into every pod of the job.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("has(self.claim) != has(self.configMap)")
        .message("volumes[]: claim or configMap, one of the two")
)]
pub struct VolumeSpec {
    /// Where it appears; a relative path lies in /workspace.
    #[schemars(required, length(min = 1, max = 1024))]
    pub mount_path: Option<String>,
    /// A PersistentVolumeClaim of the job's own namespace, if that is what is mounted.
    #[schemars(length(min = 1, max = 253))]
    pub claim: Option<String>,
    /// A ConfigMap of the job's own namespace, if that is what is mounted.
    #[schemars(length(min = 1, max = 253))]
    pub config_map: Option<String>,
    /// Nothing is written there. Default: false.
    pub read_only: Option<bool>,
}
