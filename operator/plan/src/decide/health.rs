//! What became of the gang that is under way.

use super::{
    FIRST_STEP_TIMEOUT, Planner, STEP_TIMEOUT_MEDIANS, STEP_TIMEOUT_MIN, STOP_TIMEOUT,
};
use crate::observed::{Gang, Worker, WorkerState};
use moejob_protocol::config::Member;
use moejob_protocol::message::LeftReason;

pub(super) enum Health {
    Well,
    /// Some members have stopped as they were asked to, the others are about to.
    Stopping,
    /// It can make no more steps.
    Broken { unplanned: bool, cause: String },
}

/// What one member has to do with the state of its gang; the last of these explain the others.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Standing {
    /// Takes part, as far as is known.
    In,
    Stopped,
    /// Left because another had stopped and closed its streams.
    AfterStop(String),
    /// Left because of another's loss, or because it was asked to.
    Dragged(String),
    /// The attempt never reached it: the leader before was lost in between.
    Outside(String),
    /// Exit code 75.
    Fenced(String),
    Lost(String),
}

impl<'o> Planner<'o> {
    pub(super) fn health(&mut self, gang: &'o Gang) -> Health {
        let standings: Vec<(&Member, Standing)> = (gang.members.iter().zip(self.members(gang)))
            .map(|(member, worker)| (member, self.standing(gang, worker)))
            .collect();
        if standings.iter().all(|(_, standing)| *standing == Standing::Stopped) {
            let cause = match gang.stepped || gang.stop_requested.is_some() {
                true => "it stopped as asked".to_string(),
                false => format!("the storage has another state than step {}", gang.resumed_at),
            };
            return Health::Broken { unplanned: false, cause };
        }
        // Of the worst the one that was lost first, as far as that is known.
        let first = self.observed.record.first_lost.as_deref();
        let worst = standings.iter().rev().max_by_key(|(member, standing)| {
            (weight(standing), Some(member.worker.as_str()) == first)
        });
        let (unplanned, what) = match worst.map(|(_, standing)| standing) {
            None | Some(Standing::In) if gang.broken.is_none() => return self.progress(gang),
            Some(Standing::Stopped) if gang.broken.is_none() => return self.stopping(gang),
            None | Some(Standing::In | Standing::Stopped) => (true, None),
            Some(Standing::AfterStop(what)) => (false, Some(what)),
            // Without a step in between, trying again for ever must end some day.
            Some(Standing::Fenced(what)) => (!gang.stepped, Some(what)),
            // No worker's fault: its leader was lost before it had told everybody.
            Some(Standing::Outside(what)) if gang.inherited && !gang.stepped => (false, Some(what)),
            Some(Standing::Dragged(what) | Standing::Outside(what) | Standing::Lost(what)) => {
                (true, Some(what))
            }
        };
        let found = worst.zip(what).map(|((member, _), what)| {
            format!("rank {} ({}) {what}", member.rank, member.worker)
        });
        // What was noticed first explains more than the leaving that follows from it, and more
        // than the end of those that were ended for it.
        let follows = worst.is_some_and(|(member, standing)| {
            let worker = self.index.worker(&member.worker);
            weight(standing) < weight(&Standing::Outside(String::new()))
                || worker.is_some_and(|worker| worker.stopping)
        });
        let noticed = gang.broken.as_ref().map(|(_, cause)| cause.clone());
        let cause = if follows { noticed.or(found) } else { found.or(noticed) };
        Health::Broken { unplanned, cause: cause.unwrap_or_default() }
    }

    fn standing(&self, gang: &Gang, worker: Option<&Worker>) -> Standing {
        let Some(worker) = worker else {
            return Standing::Lost("is gone".to_string());
        };
        match &worker.state {
            WorkerState::Dead { exit_code: Some(75), .. } => {
                Standing::Fenced("ended with exit code 75".to_string())
            }
            WorkerState::Dead { exit_code: Some(code), .. } => {
                Standing::Lost(format!("ended with exit code {code}"))
            }
            WorkerState::Dead { exit_code: None, .. } => Standing::Lost("was killed".to_string()),
            WorkerState::Silent => Standing::Lost("went silent".to_string()),
            WorkerState::Left { attempt, reason } if *attempt == gang.attempt => {
                self.left(gang, reason)
            }
            WorkerState::Member { attempt, digest, .. } if *attempt == gang.attempt => {
                if *digest == gang.digest {
                    Standing::In
                } else {
                    Standing::Lost("has another configuration of this attempt".to_string())
                }
            }
            WorkerState::Idle | WorkerState::Left { .. } | WorkerState::Member { .. } => {
                Standing::Outside("was never told of this attempt".to_string())
            }
            WorkerState::Starting { .. } | WorkerState::Completed { .. } => Standing::In,
        }
    }

    fn left(&self, gang: &Gang, reason: &LeftReason) -> Standing {
        match reason {
            LeftReason::Stopped { .. } => Standing::Stopped,
            LeftReason::Asked => Standing::Dragged("has left".to_string()),
            LeftReason::Error { message } => Standing::Lost(format!("left: {message}")),
            LeftReason::PeerLost { rank } => {
                let what = format!("lost rank {rank}");
                let state = gang
                    .member_of(*rank)
                    .and_then(|member| self.index.worker(&member.worker))
                    .map(|worker| &worker.state);
                match state {
                    // One that stopped in an earlier attempt stands outside: that explains more.
                    Some(WorkerState::Left { reason: LeftReason::Stopped { .. }, .. }) => {
                        Standing::AfterStop(what)
                    }
                    _ => Standing::Dragged(what),
                }
            }
        }
    }

    /// Members stop at the end of the same step; one that does not is waited for, within a bound.
    fn stopping(&mut self, gang: &'o Gang) -> Health {
        let progressed_at = self.observed.record.progressed_at;
        let asked_at = gang.stop_requested.map_or(0, |(_, at)| at);
        let due = progressed_at.max(asked_at) + STOP_TIMEOUT;
        if self.now < due {
            self.look_again_at(due);
            return Health::Stopping;
        }
        Health::Broken { unplanned: true, cause: "not all members stopped".to_string() }
    }

    /// The second clock: members are alive, but does the job go on?
    fn progress(&mut self, gang: &'o Gang) -> Health {
        // How long at most `give_up_the_frozen` says.
        if self.waits_for_the_frozen(gang) {
            return Health::Well;
        }
        let record = &self.observed.record;
        let limit = match (gang.stepped, self.observed.wanted.step_timeout) {
            (false, _) => FIRST_STEP_TIMEOUT,
            (true, 0) => STEP_TIMEOUT_MIN.max(STEP_TIMEOUT_MEDIANS * record.step_median),
            (true, set) => set,
        };
        let due = record.progressed_at.max(gang.started_at) + limit;
        if self.now < due {
            self.look_again_at(due);
            return Health::Well;
        }
        let cause = format!("no step for {limit} ms");
        let members: Vec<&Worker> = self.members(gang).flatten().collect();
        let least = members.iter().map(|worker| worker.collective).min();
        let mut behind = members.iter().filter(|worker| Some(worker.collective) == least);
        // Those that all wait in the same collective are equally suspect: none is ended for it.
        if let (Some(laggard), None, true) = (behind.next(), behind.next(), members.len() > 1)
            && !laggard.stopping
        {
            self.stop(laggard, 0, &format!("{cause}, and the others wait for it"));
        }
        Health::Broken { unplanned: true, cause }
    }
}

fn weight(standing: &Standing) -> u32 {
    match standing {
        Standing::In => 0,
        Standing::Stopped => 1,
        Standing::AfterStop(_) => 2,
        Standing::Dragged(_) => 3,
        Standing::Outside(_) => 4,
        Standing::Fenced(_) => 5,
        Standing::Lost(_) => 6,
    }
}
