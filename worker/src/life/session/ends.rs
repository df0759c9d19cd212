//! How a worker's process comes to its end.

use super::{
    DRAIN_MS_MAX, EXIT_INTERRUPTED, EXIT_TRY_AGAIN, Effect, LEAVE_MS_MAX, Leader, Session, State,
    Then,
};
use crate::failure::Failure;
use crate::gang::comm::CommError;
use moejob_protocol::Up;
use moejob_protocol::message::{LeftReason, Request};
use std::time::Duration;

/// A worker that is to end saves what it has first.
pub(super) const DRAIN: Request = Request { checkpoint_now: true, stop_after_this_step: true };

impl Session {
    pub(super) fn on_signal(&mut self, now: Duration, out: &mut Vec<Effect>) {
        if self.drain_until.is_some() {
            out.push(Effect::Log("a second signal: ending at once".to_string()));
            self.done(EXIT_INTERRUPTED, out);
            return;
        }
        self.drain_until = Some(now + Duration::from_millis(DRAIN_MS_MAX));
        match self.state {
            State::Joining | State::Running => out.push(Effect::Request(DRAIN)),
            State::Idle { .. } if self.is_orphan() => self.done(EXIT_INTERRUPTED, out),
            // The leader knows what is left to do with what this worker holds.
            State::Idle { .. } | State::Leaving { .. } | State::Done => {}
        }
    }

    pub(super) fn on_tick(&mut self, now: Duration, out: &mut Vec<Effect>) {
        if !self.is_orphan() {
            out.push(Effect::Heartbeat);
        }
        if self.drain_until.is_some_and(|until| now >= until) {
            out.push(Effect::Log(format!("still here {DRAIN_MS_MAX} ms after the signal")));
            return self.done(EXIT_INTERRUPTED, out);
        }
        if let State::Leaving { then: Then::Exit { code, until } } = self.state
            && now >= until
        {
            out.push(Effect::Log(format!("the step goes on {LEAVE_MS_MAX} ms after its abort")));
            return self.done(code, out);
        }
        self.check_orphan(now, out);
    }

    /// An orphan without an attempt waits no longer than `orphanTimeout`, and not at all when it
    /// drains. One whose gang is undisturbed trains on.
    pub(super) fn check_orphan(&mut self, now: Duration, out: &mut Vec<Effect>) {
        let (State::Idle { since: idle }, Leader::Gone { since: alone }) =
            (&self.state, &self.leader)
        else {
            return;
        };
        if self.drain_until.is_some() {
            self.done(EXIT_INTERRUPTED, out);
        } else if now.saturating_sub(*idle.max(alone)) >= self.orphan_timeout {
            out.push(Effect::Log("no leader came back".to_string()));
            self.done(EXIT_TRY_AGAIN, out);
        }
    }

    /// Ends the process once the attempt has been left.
    pub(super) fn exit(&mut self, code: i32, now: Duration, out: &mut Vec<Effect>) {
        let until = now + Duration::from_millis(LEAVE_MS_MAX);
        match &mut self.state {
            State::Idle { .. } => self.done(code, out),
            State::Joining => {
                out.push(Effect::CancelJoin);
                self.done(code, out);
            }
            State::Running => {
                out.push(Effect::Abort { reason: "this worker ends".to_string() });
                self.state = State::Leaving { then: Then::Exit { code, until } };
            }
            State::Leaving { then: Then::Exit { .. } } | State::Done => {}
            State::Leaving { then } => *then = Then::Exit { code, until },
        }
    }

    pub(super) fn done(&mut self, code: i32, out: &mut Vec<Effect>) {
        self.state = State::Done;
        out.push(Effect::Exit(code));
    }

    pub(super) fn fail(&mut self, failure: Failure, out: &mut Vec<Effect>) {
        let message = failure.to_string();
        let Failure { exit_code, step, .. } = failure;
        self.send(Up::Failed { exit_code, message, step }, out);
        self.done(exit_code, out);
    }
}

pub(super) fn reason_of(error: CommError, asked: bool) -> LeftReason {
    match error {
        _ if asked => LeftReason::Asked,
        CommError::PeerLost { rank, .. } | CommError::Protocol { rank, .. } => {
            LeftReason::PeerLost { rank }
        }
        CommError::Aborted { reason } => LeftReason::Error { message: reason },
    }
}
