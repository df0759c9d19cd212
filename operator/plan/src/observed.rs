//! What the plan sees: one value, put together by whoever observes (processes or pods).

use crate::preflight::{Checked, Results, Standard};
use crate::record;
use crate::repeat::Repeat;
use crate::seats::Seats;
use moejob_fabric::{FabricFacts, Rings};
use moejob_manifest::job::Venue;
use moejob_protocol::config::{Exchange, Member, WorkerConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::message::{Held, LeftReason};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A committed checkpoint.
pub use moejob_manifest::status::CheckpointStatus as Stored;

/// Milliseconds on the leader's clock.
pub type Millis = u64;

/// Everything that a decision about one job depends on, beside the time.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    pub wanted: Wanted,
    /// The attempt's configuration without attempt, digest, rank, layout, members and resume.
    pub template: WorkerConfig,
    /// In the order in which they are to be used. Between two attempts a worker on a node that is
    /// not here gives it back.
    pub nodes: Vec<Node>,
    /// What the best order of the gang that these make costs the network.
    pub fabric: Option<FabricFacts>,
    /// In order of birth.
    pub workers: Vec<Worker>,
    pub record: Record,
    /// The newest usable checkpoint.
    pub stored: Option<Stored>,
    /// What nodes were found to be like.
    pub preflight: Results,
    /// What NCCL has built for the gang.
    pub rings: Rings,
    /// Where the gang's engines run.
    pub seats: Seats,
    /// Members that wait for their data, or cannot read them at present: reason and message.
    pub late_data: BTreeMap<String, (String, String)>,
    /// Members whose checkpoints the storage does not take at present.
    pub late_checkpoints: BTreeSet<String>,
    /// Somebody asked the whole job to end now (Ctrl-C, deletion).
    pub interrupt: bool,
}

/// What the plan needs of a job's spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    pub nodes_min: u32,
    pub nodes_max: u32,
    pub spares: u32,
    /// Gang sizes that work (divisors, memory), ascending by nodes. Never empty for a valid job.
    pub sizes: Vec<Size>,
    pub restarts_max: u32,
    pub restart_window: Millis,
    pub growth_interval: Millis,
    pub gang_timeout: Millis,
    /// 0: 20 times the median step, at least 60 s.
    pub step_timeout: Millis,
    pub suspend: bool,
    /// What nodes are measured against before they get a rank; none: they are not.
    pub preflight: Option<Box<Standard>>,
    /// Says how workers are named: `JOB-3` here, `JOB-a2-3` for pods.
    pub venue: Venue,
}

/// A gang of `nodes` nodes and how it is laid out.
#[derive(Clone, Debug, PartialEq)]
pub struct Size {
    pub nodes: u32,
    pub layout: Layout,
    pub exchange: Exchange,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    /// Ready, not cordoned, and free for this job. Where a worker of this job runs: not cordoned
    /// (its stream says whether it is alive).
    pub usable: bool,
    /// A job before this one waits for it: the gang is to do without it.
    pub called_back: bool,
    /// No new worker before this time: a worker has just failed there.
    pub avoid_until: Millis,
    /// Its machine is to stand still for seconds and to go on.
    pub freezes: bool,
    /// The number of its leaf switch among those of the cluster; all are on one where nobody knows.
    pub leaf: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    /// Unique, never reused.
    pub name: String,
    pub node: String,
    /// `address:port` of its listener, once known.
    pub address: Option<String>,
    pub state: WorkerState,
    /// Snapshots in its memory.
    pub held: Vec<Held>,
    /// Number of the collective it was last seen in.
    pub collective: u64,
    /// It has been told to stop (or killed); its end is near.
    pub stopping: bool,
    /// Its pod is there, and the scheduler has put it on no node yet.
    pub unplaced: bool,
    /// The version of the control stream that it has agreed to; 0 before it was heard.
    pub speaks: u32,
    pub checked: Checked,
    /// Its node need not measure with others any more.
    pub paired: bool,
    /// The boot of its node, as it was measured; empty before.
    pub boot: String,
    /// Since when nothing is heard of it, where its node freezes.
    pub quiet_since: Option<Millis>,
    /// The attempt in which it knows that steps may take as long as a machine may freeze.
    pub patient_in: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum WorkerState {
    /// The process or pod exists; nothing has been heard of it.
    Starting { since: Millis },
    /// Connected, in no attempt: a newcomer or a spare.
    Idle,
    /// Configured for this attempt with that digest; `leaving` since it has been asked to leave.
    Member { attempt: u32, digest: String, rank: u32, leaving: Option<Millis> },
    /// Was a member of this attempt, is no longer, and is connected.
    Left { attempt: u32, reason: LeftReason },
    /// The last step is done and its checkpoint committed.
    Completed { attempt: u32, step: u64 },
    /// Nothing heard within the heartbeat timeout, or its stream closed while it may live on.
    Silent,
    /// Known to have ended.
    Dead { exit_code: Option<i32>, message: String },
}

/// What survives the leader: it stands in the job's status, in version 1 of `record`. Fields that
/// are as they were at first are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The job that it speaks of; empty before its first attempt.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job_uid: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// The newest attempt; 0 before the first.
    pub attempt: u32,
    /// The attempt that is under way or ended last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<Gang>,
    /// Layouts of earlier attempts whose snapshots may still be held, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layouts: Vec<(u32, Layout)>,
    /// When unplanned losses ended an attempt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restarts: Vec<Millis>,
    /// When the job was asked to stop, unless that has been taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopping_since: Option<Millis>,
    /// Newest step that any attempt has done, and when.
    pub step: u64,
    pub progressed_at: Millis,
    /// Median duration of a step; 0 while unknown.
    pub step_median: Millis,
    /// Workers started so far: the next slot's number.
    pub births: u32,
    /// When workers ended before any attempt had begun with them, since the newest attempt, and
    /// how the last of them did.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub start_failures: Vec<Millis>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub start_failure: String,
    /// Pairs of nodes, both alive, of which one lost the other, and when.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partings: Vec<(String, String, Millis)>,
    /// Devices that gave up their engines, oldest first. Not in the status: a new leader counts
    /// anew.
    #[serde(skip)]
    pub device_failures: Vec<DeviceFailure>,
    /// The member of the present gang that was lost first, or that lost an engine first: all other
    /// losses of its attempt may follow from that one. Not in the status either.
    #[serde(skip)]
    pub first_lost: Option<String>,
    /// Attempts that ended with the same words before their first step. Not in the status either.
    #[serde(skip)]
    pub repeat: Repeat,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFailure {
    pub node: String,
    /// Its number on the node.
    pub device: u64,
    /// What people know it by: with its node, and its uuid where it has one.
    pub name: String,
    /// How its engine ended, and what it said last.
    pub words: String,
    pub at: Millis,
}

/// One incarnation of the gang.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gang {
    pub attempt: u32,
    pub digest: String,
    pub layout: Layout,
    /// One a worker, with its first rank; ascending.
    #[serde(with = "record::members")]
    pub members: Vec<Member>,
    pub resumed_at: u64,
    pub started_at: Millis,
    /// A step of this attempt is done.
    pub stepped: bool,
    /// What was requested of it, and when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_requested: Option<(StopCause, Millis)>,
    /// When it was found that it can make no more steps, and why. Never taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broken: Option<(Millis, String)>,
    /// When it was over: no member takes part any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Millis>,
    /// A leader before this one began it, and may not have told everybody. Not in the record.
    #[serde(skip)]
    pub inherited: bool,
}

impl Gang {
    /// Ranks of each worker: one a device.
    pub fn ranks_a_worker(&self) -> u32 {
        let workers = u32::try_from(self.members.len()).unwrap_or(u32::MAX);
        self.layout.mesh.world().checked_div(workers).unwrap_or(1).max(1)
    }

    /// Whether this worker is a member.
    pub fn has(&self, worker: &str) -> bool {
        self.members.iter().any(|member| member.worker == worker)
    }

    /// Whose rank this is.
    pub fn member_of(&self, rank: u32) -> Option<&Member> {
        self.members.get((rank / self.ranks_a_worker()) as usize)
    }
}

/// Why a gang was asked to stop at the end of a step. It stands in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StopCause {
    Growth,
    /// A member's node is cordoned or drained, and another is free.
    Move,
    /// `nodes.max` is less than the members, or a job before this one needs nodes of theirs.
    Shrink,
    Suspend,
    Interrupt,
    /// A suspend that was taken back. The gang may stop all the same, and the next one goes on.
    Withdrawn,
}

impl StopCause {
    /// No gang follows this one.
    pub fn halts(self) -> bool {
        matches!(self, StopCause::Suspend | StopCause::Interrupt)
    }
}

/// A stable word in CamelCase.
pub type Reason = &'static str;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Complete { step: u64 },
    Failed {
        exit_code: i32,
        #[serde(deserialize_with = "record::reason")]
        reason: Reason,
        message: String,
    },
    Suspended,
    Interrupted,
}

/// Of a list whose oldest entries come first, the newest alone.
pub fn keep_newest<T>(list: &mut Vec<T>, most: usize) {
    let surplus = list.len().saturating_sub(most);
    list.drain(..surplus);
}

impl Node {
    /// Nothing is against it.
    pub fn good(name: &str) -> Node {
        let (avoid_until, called_back, freezes, leaf) = (0, false, false, 0);
        Node { name: name.to_string(), usable: true, called_back, avoid_until, freezes, leaf }
    }
}

impl Worker {
    /// Nothing has been heard of it yet.
    pub fn starting(name: &str, node: &str, since: Millis) -> Worker {
        Worker {
            name: name.to_string(),
            node: node.to_string(),
            address: None,
            state: WorkerState::Starting { since },
            held: Vec::new(),
            collective: 0,
            stopping: false,
            unplaced: false,
            speaks: 0,
            checked: Checked::No,
            paired: false,
            boot: String::new(),
            quiet_since: None,
            patient_in: None,
        }
    }

    pub fn is_dead(&self) -> bool {
        matches!(self.state, WorkerState::Dead { .. })
    }

    /// Connected, not on its way out, and in no attempt: it can be given a rank.
    pub fn is_available(&self) -> bool {
        !self.stopping
            && self.quiet_since.is_none()
            && matches!(self.state, WorkerState::Idle | WorkerState::Left { .. })
    }
}

impl Observed {
    /// Nothing has been seen yet.
    pub fn new(wanted: Wanted, template: WorkerConfig) -> Observed {
        Observed {
            wanted,
            template,
            nodes: Vec::new(),
            fabric: None,
            workers: Vec::new(),
            record: Record::default(),
            stored: None,
            preflight: Results::default(),
            rings: Rings::default(),
            seats: Seats::default(),
            late_data: BTreeMap::new(),
            late_checkpoints: BTreeSet::new(),
            interrupt: false,
        }
    }

    pub fn worker(&self, name: &str) -> Option<&Worker> {
        self.position(name).map(|at| &self.workers[at])
    }

    pub fn worker_mut(&mut self, name: &str) -> Option<&mut Worker> {
        self.position(name).map(|at| &mut self.workers[at])
    }

    /// Names end in a number that rises with the births, so that a heartbeat of one of hundreds
    /// compares a few of them.
    fn position(&self, name: &str) -> Option<usize> {
        let number = |name: &str| name.rsplit('-').next().and_then(|of| of.parse::<u32>().ok());
        let slot = number(name);
        let at = self.workers.partition_point(|worker| number(&worker.name) < slot);
        let found = self.workers.get(at).filter(|worker| worker.name == name).map(|_| at);
        found.or_else(|| self.workers.iter().position(|worker| worker.name == name))
    }

    /// Whether ranks may be put on this node.
    pub fn is_usable(&self, node: &str) -> bool {
        self.nodes.iter().any(|of| of.name == node && of.usable)
    }

    /// Jobs before this one need all nodes that it has: it stops, and waits for others.
    pub fn is_preempted(&self) -> bool {
        let mut nodes = self.nodes.iter();
        !nodes.clone().any(|node| node.usable) && nodes.any(|node| node.called_back)
    }

    /// Why the job is to stop, if it is.
    pub fn halting(&self) -> Option<StopCause> {
        match (self.interrupt, self.wanted.suspend) {
            (true, _) => Some(StopCause::Interrupt),
            (_, true) => Some(StopCause::Suspend),
            _ => None,
        }
    }

    /// The gang that is under way.
    pub fn gang(&self) -> Option<&Gang> {
        self.record.gang.as_ref().filter(|gang| gang.ended.is_none())
    }

    /// Ranks that the job has at most, of now or of gangs whose snapshots may still be held.
    pub fn ranks_max(&self) -> u32 {
        let sizes = self.wanted.sizes.iter().map(|size| &size.layout);
        let earlier = self.record.layouts.iter().map(|(_, layout)| layout);
        let layouts = sizes.chain(earlier).chain(self.record.gang.iter().map(|gang| &gang.layout));
        layouts.map(|layout| layout.mesh.world()).max().unwrap_or(0)
    }

    pub fn layout_of(&self, attempt: u32) -> Option<&Layout> {
        let of_gang = self.record.gang.iter().map(|gang| (gang.attempt, &gang.layout));
        let earlier = self.record.layouts.iter().map(|(attempt, layout)| (*attempt, layout));
        of_gang.chain(earlier).find(|(of, _)| *of == attempt).map(|(_, layout)| layout)
    }
}
