//! What the streams of the workers say, and what becomes of one that ends.
//!
//! A stream that breaks says little of its worker: a switch that restarts breaks all of them at
//! once. It is dialled again until nothing was heard for the heartbeat timeout. A listener that
//! refuses twice is gone, and so is its process: that is a loss at once.

use super::event_log::plain;
use super::outbox::Waiting;
use super::{Effect, Ending, Event, JobLoop, Link, Said};
use crate::decide::FREEZE_PATIENCE;
use crate::observed::{Millis, WorkerState};
use crate::preflight::Grade;
use crate::reasons;
use crate::track::Happening;
use moejob_manifest::problem::printable;
use moejob_protocol::message::{Held, LeftReason, Up};
use moejob_protocol::pair::{PairAnswer, PairSaid};
use moejob_protocol::report::{Detail, Event as Line, EventKind};

/// No job begins so many attempts.
const ATTEMPTS_MAX: u32 = u32::MAX / 2;

/// Of frames that wait: the newer one says all that the older one said.
pub(super) fn replaces(newer: &Said, older: &Said) -> bool {
    matches!(
        (newer, older),
        (Said::Up { attempt: a, up: Up::Step(_) }, Said::Up { attempt: b, up: Up::Step(_) })
            if a == b
    )
}

impl JobLoop {
    /// Something has happened. What follows of it the next turn says.
    pub fn on(&mut self, event: Event, now: Millis) {
        if let Event::Api { heard } = event {
            self.heard_of_api = self.heard_of_api.max(heard);
            return;
        }
        if let (Event::Spec(seen), Some(_)) = (&event, &self.fence) {
            self.hear_while_fenced(seen, now);
        }
        // What happens to a fenced job changes nothing, but for the results of its own event.
        if self.fence.is_some() && !matches!(event, Event::Done { .. }) {
            return;
        }
        match event {
            Event::Spec(seen) => self.on_spec(&seen, now),
            Event::Granted(granted) => {
                let same = granted.nodes == self.granted.nodes
                    && granted.why == self.granted.why
                    && granted.missing == self.granted.missing;
                self.dirty |= !same;
                self.granted = granted;
            }
            Event::Pod(mut pod) => {
                self.dirty = true;
                if self.place.has_api() {
                    let how = pod.ended.as_mut().map(|(_, how)| how);
                    let kubelets = pod.trouble.as_mut().into_iter().chain(&mut pod.unschedulable);
                    kubelets.chain(how).for_each(plain);
                }
                if pod.is_placeholder() {
                    return self.placeholders.see(*pod, now);
                }
                let name = pod.name.clone();
                self.pods.see(*pod, now);
                self.pod_or_wait(name, now);
            }
            Event::PodGone(name) => {
                self.dirty = true;
                if self.placeholders.lose(&name) {
                    return;
                }
                self.pods.lose(&name);
                self.pod_or_wait(name, now);
            }
            Event::Stream { name, said } => self.on_stream(name, said, now),
            Event::Done { aside, results } => self.on_written(aside, results, now),
            Event::Stop => {
                self.dirty = true;
                self.tracker.observed.interrupt = true;
            }
            Event::Profiles(profiles) => self.on_profiles(profiles),
            Event::Passes(passes) => {
                let namespace = self.id.namespace.clone();
                self.tracker.observed.preflight.take_over(&namespace, passes);
            }
            Event::Crowd(crowd) => self.on_crowd(crowd),
            Event::Api { .. } => {}
        }
    }

    fn pod_or_wait(&mut self, name: String, now: Millis) {
        match self.outbox.busy {
            // Bounded by the job's pods.
            true => drop(self.outbox.wait(Waiting::Pod(name))),
            false => self.pod(&name, now),
        }
    }

    fn on_stream(&mut self, name: String, mut said: Said, now: Millis) {
        // What was closed says nothing more.
        if !self.pods.is_linked(&name) {
            return;
        }
        if self.place.has_api() {
            words(&mut said).into_iter().for_each(plain);
        }
        if let Some(why) = self.excess(&said) {
            let note = format!("{name}: its stream is closed: {why}");
            self.event(true, "WorkerTalksNonsense", note, now);
            said = self.refuse(&name, why);
        }
        self.pods.heard(&name, &said, now);
        if !self.outbox.busy {
            return self.stream(&name, said, now);
        }
        // Each heartbeat repeats what the one before said.
        if matches!(said, Said::Up { up: Up::Heartbeat(_), .. }) {
            return;
        }
        if !self.outbox.wait(Waiting::Stream(name, said)) {
            self.silence_the_loudest(now);
        }
    }

    /// One worker says more than all others together could: it is not listened to any more.
    fn silence_the_loudest(&mut self, now: Millis) {
        let Some(name) = self.outbox.loudest() else { return };
        self.outbox.forget_stream(&name);
        let reason = "it says more than can be listened to".to_string();
        self.event(true, "WorkerTooLoud", format!("{name}: its stream is closed: {reason}"), now);
        let said = self.refuse(&name, reason);
        self.outbox.wait(Waiting::Stream(name, said));
    }

    /// It is not listened to any more: the end of its stream, as its last word.
    fn refuse(&mut self, name: &str, reason: String) -> Said {
        self.pods.unlinked(name);
        self.effects.push(Effect::Link(Link::Close { name: name.to_string() }));
        Said::Ended { why: Ending::Refused, reason }
    }

    /// A step or an attempt that the job cannot have: a plan would go on from there.
    fn excess(&self, said: &Said) -> Option<String> {
        let held = said_held(said);
        let steps = match said {
            Said::Up { up: Up::Step(report), .. } => Some(report.step),
            Said::Up { up: Up::Completed { step }, .. } => Some(*step),
            Said::Up { up: Up::Left { reason: LeftReason::Stopped { step }, .. }, .. } => {
                Some(*step)
            }
            Said::Up { up: Up::Heartbeat(heartbeat), .. } => Some(heartbeat.step),
            _ => None,
        };
        let attempts = match said {
            Said::Opened(hello) => Some(hello.attempt),
            Said::Up { attempt, .. } => Some(*attempt),
            _ => None,
        };
        let attempts = attempts.into_iter().chain(held.iter().map(|held| held.attempt));
        if let Some(attempt) = attempts.max().filter(|of| *of > ATTEMPTS_MAX) {
            return Some(format!("it names attempt {attempt}, and none is above {ATTEMPTS_MAX}"));
        }
        let step = steps.into_iter().chain(held.iter().map(|held| held.step)).max()?;
        let most = self.steps_max()?;
        (step > most).then(|| format!("it names step {step}, and the job has {most}"))
    }

    /// By its spec, which may have been more before an edit. None while it has no spec.
    fn steps_max(&self) -> Option<u64> {
        let observed = &self.tracker.observed;
        let stored = observed.stored.as_ref().map_or(0, |stored| stored.step);
        let steps = self.spec.plannable()?.training.steps;
        Some(steps.max(observed.record.step).max(stored))
    }

    /// What waited for the end of the batch.
    pub(super) fn catch_up(&mut self, now: Millis) {
        while let Some(waiting) = self.outbox.next_waiting() {
            match waiting {
                Waiting::Stream(name, said) => self.stream(&name, said, now),
                Waiting::Pod(name) => self.pod(&name, now),
            }
        }
    }

    fn stream(&mut self, name: &str, said: Said, now: Millis) {
        // What NCCL has built says something once all ranks have told.
        let quiet = matches!(
            said,
            Said::Up { up: Up::Heartbeat(_) | Up::Built(_) | Up::Seated(_), .. }
        );
        self.dirty |= !quiet;
        let happenings = match said {
            Said::Opened(hello) => {
                self.pods.opened(name, hello.version);
                self.tracker.thawed(name, now);
                if self.tracker.counts_on(hello.attempt) {
                    let note = format!(
                        "{name} is of attempt {}, and the record of the job ends before it: \
                         somebody has emptied it or put an older one back. What only memory had is \
                         lost with it; the next attempt is a later one",
                        hello.attempt
                    );
                    self.event(true, "RecordLost", note, now);
                }
                let address = self.pods.address(name).unwrap_or_default();
                self.tracker.connected(name, &address, &hello);
                if let Some(worker) = self.tracker.observed.worker(name) {
                    self.pods.came_up(&worker.node);
                }
                Vec::new()
            }
            Said::Up { attempt, up } => {
                self.hear(&up, now);
                self.tracker.heard(name, attempt, &up, now)
            }
            Said::Silent => self.tracker.waits_out(name, now).unwrap_or_else(|| {
                self.pods.silent(name, now);
                self.tracker.silent(name, "nothing heard of it")
            }),
            Said::Ended { why, reason } => self.stream_ended(name, why, &reason, now),
        };
        self.dirty |= !happenings.is_empty();
        self.tell(happenings, now);
    }

    fn hear(&mut self, up: &Up, now: Millis) {
        match up {
            Up::Step(report) => {
                self.hear_of_links(report, now);
                self.report.newest = Some(report.clone());
            }
            Up::Event(event) => self.hear_event(event, now),
            _ => {}
        }
    }

    fn hear_event(&mut self, event: &Line, now: Millis) {
        let message = event.message.clone();
        match event.event {
            EventKind::CheckpointRefused => self.event(true, "CheckpointRefused", message, now),
            EventKind::CheckpointDegraded => self.event(true, "CheckpointDegraded", message, now),
            EventKind::CheckpointRecovered => {
                self.event(false, "CheckpointRecovered", message, now);
            }
            EventKind::DataDegraded => self.event(true, "DataDegraded", message, now),
            EventKind::DataRecovered => self.event(false, "DataRecovered", message, now),
            EventKind::AttemptsClaimed => self.event(false, "EarlierJob", message, now),
            _ if event.reason == "Found" => {
                let note = format!("the storage has {message}: it is resumed from");
                self.event(false, "CheckpointFound", note, now);
            }
            EventKind::Warning => self.event(true, &reason(&event.reason), message, now),
            EventKind::Resumed => {
                let text = printable(&message);
                self.note(false, format!("attempt {}: {text}", event.attempt));
            }
            _ => {}
        }
    }

    fn stream_ended(
        &mut self,
        name: &str,
        why: Ending,
        reason: &str,
        now: Millis,
    ) -> Vec<Happening> {
        self.pods.unlinked(name);
        let Some(worker) = self.tracker.observed.worker(name) else { return Vec::new() };
        let starting = matches!(worker.state, WorkerState::Starting { .. });
        let gang = self.tracker.observed.gang();
        let member = gang.is_some_and(|gang| gang.has(name));
        let patience = self.spec.heartbeat_timeout();
        let over = self.pods.broken(name, reason, now) + patience <= now;
        let ends = match why {
            Ending::Unjudged => false,
            Ending::Refused => !starting,
            // One that was never heard may take its time, unless others wait for it.
            Ending::Broken | Ending::Unspoken if starting => member && over,
            Ending::Broken | Ending::Unspoken => over,
        };
        if why == Ending::Unspoken {
            self.event(true, "ProtocolMismatch", format!("{name}: {reason}"), now);
        }
        // A machine that stands still answers to nobody. One that refuses does answer.
        let waited = ends && why != Ending::Refused;
        let frozen = waited.then(|| self.tracker.waits_out(name, now)).flatten();
        if ends && frozen.is_none() {
            if !starting {
                self.pods.closed(name);
            }
            self.pods.silent(name, now);
            return self.tracker.silent(name, reason);
        }
        self.note(false, format!("{name} is not reached: {reason}"));
        self.pods.redial(name, starting, now);
        frozen.unwrap_or_default()
    }

    /// What people and metrics hear of it.
    pub(super) fn tell(&mut self, happenings: Vec<Happening>, now: Millis) {
        for happening in happenings {
            match happening {
                Happening::WorkerLost { name, cause } => {
                    let worker = self.tracker.observed.worker(&name);
                    let node = worker.map(|worker| worker.node.clone()).unwrap_or_default();
                    let text = format!("{name} on {node}: {cause}");
                    self.effects.push(Effect::Lost { name, node, cause });
                    self.event(true, "WorkerLost", text, now);
                }
                Happening::Freezes { name, node } => {
                    let seconds = FREEZE_PATIENCE / 1000;
                    let note = format!(
                        "nothing is heard of {name}, and its node {node} is to freeze: it is \
                         waited for, {seconds} s at most"
                    );
                    self.event(false, "NodeFreezes", note, now);
                }
                Happening::EngineLost(loss) => {
                    let (rank, place) = (loss.rank, loss.place());
                    let follows = if loss.victim { ", behind another loss" } else { "" };
                    let cause = &loss.cause;
                    let note = format!("the engine of rank {rank} on {place}{follows}: {cause}");
                    self.event(true, "EngineLost", note, now);
                }
                Happening::Measured { node, grade, text } => {
                    let reason = match grade {
                        Grade::Fail => reasons::PREFLIGHT_FAILED,
                        _ => "PreflightWarned",
                    };
                    self.event(true, reason, format!("{node}: {text}"), now);
                }
                Happening::Rings(found) => {
                    let differs = found.differences();
                    match differs.is_empty() {
                        true => self.note(false, found.in_words()),
                        false => self.event(true, "RingsDiffer", differs.join("; "), now),
                    }
                }
                Happening::Recovered(recovery) => self.recovered(recovery, now),
            }
        }
    }

    /// A worker that ended speaks against its node, unless it had trained there.
    pub(super) fn back_off(&mut self, name: &str, how: &str, now: Millis) {
        let Some(worker) = self.tracker.observed.worker(name) else { return };
        let (node, stopping) = (worker.node.clone(), worker.stopping);
        // One that had trained was lost; one that had not will likely fail again.
        if self.pods.has_trained(name) {
            self.praise(&node);
        } else if !stopping {
            self.blame(&node, how, now);
        }
    }
}

fn said_held(said: &Said) -> &[Held] {
    match said {
        Said::Opened(hello) => &hello.held,
        Said::Up { up: Up::Heartbeat(heartbeat), .. } => &heartbeat.held,
        Said::Up { up: Up::Left { held, .. }, .. } => held,
        _ => &[],
    }
}

/// What a frame that waits takes of the memory, in KiB and one at least.
pub(super) fn weight(said: &mut Said) -> usize {
    let held = said_held(said);
    let snapshots = size_of_val(held);
    let shards: usize = held.iter().map(|held| size_of_val(&held.shards[..])).sum();
    let texts: usize = words(said).iter().map(|text| text.len()).sum();
    1 + (snapshots + shards + texts) / 1024
}

/// All text of a worker's choice that is kept; of a reason only letters are.
fn words(said: &mut Said) -> Vec<&mut String> {
    match said {
        Said::Ended { reason, .. } => vec![reason],
        Said::Up { up: Up::Failed { message, .. }, .. }
        | Said::Up { up: Up::Left { reason: LeftReason::Error { message }, .. }, .. } => {
            vec![message]
        }
        Said::Up { up: Up::Event(event), .. } => {
            let details = event.details.values_mut().filter_map(|detail| match detail {
                Detail::Text(text) => Some(text),
                _ => None,
            });
            details.chain([&mut event.message]).collect()
        }
        Said::Up { up: Up::Preflight(answer), .. } => {
            let mut texts = vec![&mut answer.boot_id];
            if let Some(measured) = &mut answer.measured {
                texts.extend(measured.iter_mut().flat_map(|one| one.texts()));
            }
            texts
        }
        Said::Up { up: Up::Pair(PairAnswer { said, .. }), .. } => match said {
            // It is passed on only where it is nothing but digits.
            PairSaid::Meets(_) => Vec::new(),
            PairSaid::Measured(all) => all.iter_mut().flat_map(|one| one.texts()).collect(),
        },
        Said::Up { up: Up::Seated(seated), .. } => {
            seated.differences.iter_mut().chain([&mut seated.unknown]).collect()
        }
        Said::Up { up: Up::Built(built), .. } => vec![&mut built.version, &mut built.unknown],
        Said::Opened(_) | Said::Silent | Said::Up { .. } => Vec::new(),
    }
}

/// A reason is one word in CamelCase; a worker may say anything.
fn reason(word: &str) -> String {
    let plain: String = word.chars().filter(char::is_ascii_alphanumeric).take(64).collect();
    if plain.is_empty() { "Warning".to_string() } else { plain }
}
