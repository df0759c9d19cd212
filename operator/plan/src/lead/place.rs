//! Where a job runs: what there is in such a place, and how patient its leader is there.
//!
//! The loop is one for both. What differs is a value that it reads, never another path through it.

use super::Operator;
use super::outbox::RETRY_MAX;
use crate::launch::{self, Places};
use crate::observed::Millis;
use crate::pods;
use moejob_manifest::job::{Job, Venue};
use moejob_protocol::config::WorkerConfig;
use std::sync::Arc;

/// Where a job runs.
#[derive(Clone, Debug)]
pub enum Place {
    /// Pods among those of others, led through an API server from which the leader may be cut off.
    Cluster(Arc<Operator>),
    /// Processes of this machine, whose nodes are all the job's own. Its pods carry no seal and
    /// need no policy, and of its status only what must outlive the run is written.
    Machine(Box<Local>),
}

/// A job of a machine. It is valid: a person was told otherwise before.
#[derive(Clone, Debug)]
pub struct Local {
    pub job: Job,
    pub places: Places,
    /// Kernel threads of a worker.
    pub threads: u32,
}

/// How long this and that is waited for.
#[derive(Debug)]
pub(super) struct Patience {
    /// A pod that is not ended is deleted with this grace. The kubelet is still asked, which tells
    /// when it is really over; a process is simply killed.
    pub kill_grace_s: u32,
    /// A process whose stream has closed is ending. Its pod is left alone for so long, so that its
    /// exit code and its log are not lost; the end of a process is told whatever ends it.
    pub ending: Millis,
    /// A node on which a worker failed rests for so long, doubled with each failure ...
    pub rest: Millis,
    /// ... up to this. Pods of others may take the node of a cluster meanwhile.
    pub rest_max: Millis,
    /// The longest pause before a write that failed is tried again.
    pub retry_max: Millis,
}

const OF_CLUSTERS: Patience = Patience {
    kill_grace_s: 1,
    ending: 5_000,
    rest: 5_000,
    rest_max: 600_000,
    retry_max: RETRY_MAX,
};
const OF_MACHINES: Patience =
    Patience { kill_grace_s: 0, ending: 0, rest: 200, rest_max: 10_000, retry_max: 4_000 };

impl Place {
    /// There is an API server: with strangers, others who read the status, and a way to it.
    pub(super) fn has_api(&self) -> bool {
        matches!(self, Place::Cluster(_))
    }

    pub(super) fn patience(&self) -> &'static Patience {
        match self {
            Place::Cluster(_) => &OF_CLUSTERS,
            Place::Machine(_) => &OF_MACHINES,
        }
    }

    pub(super) fn venue(&self) -> Venue {
        match self {
            Place::Cluster(_) => Venue::Kubernetes,
            Place::Machine(_) => Venue::Local,
        }
    }

    /// What all configurations of an accepted job have in common.
    pub(super) fn template(&self, job: &Job, uid: &str) -> WorkerConfig {
        match self {
            Place::Cluster(_) => launch::template(job, self.venue(), uid, &pods::places(job)),
            Place::Machine(local) => WorkerConfig {
                threads: local.threads,
                ..launch::template(job, self.venue(), uid, &local.places)
            },
        }
    }
}
