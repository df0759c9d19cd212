//! The control stream between the leader and each worker.
//!
//! A frame is a 4-byte little-endian length and that many bytes of JSON: `{"v":1,"term":..,
//! "attempt":..,"body":{..}}`. The leader dials; the worker's listener answers. See
//! docs/architecture/wire.md, "The control stream".

use crate::config::WorkerConfig;
use crate::links::Built;
use crate::pair::{PairAnswer, PairOrder};
use crate::preflight::{Answer, Order};
use crate::seat::Seated;
use crate::report::{Event, StepReport};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Versions of the control stream that this build speaks, the newest first. Both sides name them
/// when they connect (`alpn`), and speak the newest that both have. A version comes with a release
/// that still writes the one before.
pub const CONTROL_VERSIONS: &[u32] = &[4, 3, 2, 1];

/// From this version on a worker knows [`Down::Preflight`] and [`Down::Pair`], and a leader their
/// answers, [`Up::Built`] and [`Up::Seated`]. Nobody sends them to a side that speaks an older one,
/// which would take the frame for nonsense and close the stream.
pub const CONTROL_PREFLIGHT: u32 = 2;

/// From this version on a worker knows [`Down::Patience`].
pub const CONTROL_PATIENCE: u32 = 3;

/// From this version on a configuration names each worker once, and sources in runs. A worker that
/// speaks an older one is told of each rank and each shard ([`WorkerConfig::by_rank`]).
pub const CONTROL_RUNS: u32 = 4;

/// What every control stream's name begins with.
pub const ALPN_CONTROL_PREFIX: &str = "moejob-control/";

/// The version that a name of TLS (ALPN) stands for.
pub fn version_of(alpn: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(alpn).ok()?;
    text.strip_prefix(ALPN_CONTROL_PREFIX)?.parse().ok()
}

/// The names of these versions for TLS (ALPN).
pub fn alpn(versions: &[u32]) -> Vec<Vec<u8>> {
    versions.iter().map(|of| format!("{ALPN_CONTROL_PREFIX}{of}").into_bytes()).collect()
}

/// A longer frame of a leader is refused before it is read. The configuration of the largest gang
/// that is valid has room in it, whatever its nodes are called (`operator/plan/tests/large.rs`).
pub const FRAME_BYTES_MAX: usize = 4 << 20;
/// What a worker reads that speaks a version before [`CONTROL_RUNS`].
pub const FRAME_BYTES_MAX_BEFORE: usize = 1 << 20;

/// What one side of the control stream says.
pub trait FrameBody: Serialize + DeserializeOwned {
    /// A longer frame of this side is refused before it is read.
    const BYTES_MAX: usize;
}

impl FrameBody for Down {
    const BYTES_MAX: usize = FRAME_BYTES_MAX;
}

/// A leader reads from thousands of workers, each of which may run any image. What a worker has to
/// say is far shorter, see [`crate::bounds`].
impl FrameBody for Up {
    const BYTES_MAX: usize = 128 << 10;
}

/// Ranks that a gang has at most.
pub const GANG_RANKS_MAX: u32 = 32_768;
/// A worker's heartbeat, also the leader's.
pub const HEARTBEAT_MS: u64 = 500;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Frame<Body> {
    pub v: u32,
    /// Of the leader; workers obey the highest alone. A worker repeats the one it obeys.
    pub term: u64,
    /// The sender's attempt, 0 before the first.
    pub attempt: u32,
    pub body: Body,
}

/// From the leader to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Down {
    /// A certificate for the key of `Hello`, valid for the attempt of this frame; PEM. `authority`
    /// is whom to trust from now on, where that is more than the worker's pod was given.
    Leaf {
        certificate: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        authority: Option<String>,
    },
    /// Join this attempt (its certificate comes before it).
    Configure(Box<WorkerConfig>),
    /// Abort the collectives of this attempt, keep the state, answer `Left`.
    Leave { reason: String },
    /// Set bits of the control word.
    Request(Request),
    /// A machine of this attempt may stand still for so long: a step that takes longer by that is
    /// not given up.
    Patience { seconds: u32 },
    /// Measure the node, and answer with `Up::Preflight`. For a worker without a rank.
    Preflight(Box<Order>),
    /// Measure with another worker, and answer with `Up::Pair`. For a worker without a rank.
    Pair(Box<PairOrder>),
    Heartbeat,
    /// End with exit code 0 once nothing is left to write.
    Shutdown,
}

/// Bits that take effect after the step with which a rank first said them to the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    pub checkpoint_now: bool,
    pub stop_after_this_step: bool,
}

/// From a worker to the leader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Up {
    Hello(Hello),
    Heartbeat(Heartbeat),
    Step(StepReport),
    Event(Event),
    /// This worker no longer takes part in the frame's attempt.
    Left { reason: LeftReason, held: Vec<Held> },
    /// What was asked for by `Down::Preflight`.
    Preflight(Answer),
    /// What was asked for by `Down::Pair`.
    Pair(PairAnswer),
    /// What a rank's NCCL has built for the frame's attempt.
    Built(Built),
    /// Where an engine of the frame's attempt runs.
    Seated(Seated),
    /// The job's last step is done and its last checkpoint committed.
    Completed { step: u64 },
    /// Before the worker exits by itself.
    Failed {
        exit_code: i32,
        message: String,
        /// Steps done, where it ended in one. A leader that does not know it passes it over.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        step: Option<u64>,
    },
}

impl Up {
    /// The version of the control stream from which on a leader knows it.
    pub fn since(&self) -> u32 {
        match self {
            Up::Preflight(_) | Up::Pair(_) | Up::Built(_) | Up::Seated(_) => {
                CONTROL_PREFLIGHT
            }
            Up::Hello(_)
            | Up::Heartbeat(_)
            | Up::Step(_)
            | Up::Event(_)
            | Up::Left { .. }
            | Up::Completed { .. }
            | Up::Failed { .. } => 1,
        }
    }
}

/// First frame of a connection: who this is and what it has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hello {
    /// Of the control stream, as the two sides have agreed on it.
    pub version: u32,
    /// Pod uid, locally the worker's id.
    pub worker: String,
    /// Proof: a projected service-account token, locally the secret handed over at spawn.
    pub token: String,
    /// PEM of the certificate signing request.
    pub signing_request: String,
    pub attempt: u32,
    pub digest: String,
    pub rank: Option<u32>,
    pub held: Vec<Held>,
}

/// A snapshot generation in a worker's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Held {
    /// Attempt under whose layout it was cut.
    pub attempt: u32,
    /// Steps done in it.
    pub step: u64,
    /// Ranks of that layout whose shards are here, ascending.
    pub shards: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LeftReason {
    /// As asked.
    Asked,
    /// A peer's stream closed or was refused.
    PeerLost { rank: u32 },
    /// The step reduced `stopAfterThisStep`; a snapshot of it is held.
    Stopped { step: u64 },
    Error { message: String },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Heartbeat {
    pub phase: Phase,
    pub step: u64,
    /// Number of the collective it is in, since the attempt began.
    pub collective: u64,
    pub held: Vec<Held>,
    /// From the beginning of an attempt on. A leader of an earlier release looks at it before the
    /// first step alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loading: Option<Loading>,
}

/// How far a worker is with opening its data, and with the checkpoint that it begins with. Bytes of
/// files that an index knows count as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Loading {
    pub bytes_done: u64,
    pub bytes: u64,
    /// Grows whenever this worker, or another that it waits for, has done something, and while one
    /// of its ranks waits for storage, as long as its patience lasts.
    pub life: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    Idle,
    Joining,
    Loading,
    Training,
    Validating,
    Stopping,
}
