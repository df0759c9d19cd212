//! What one attempt tells of itself: on rank 0 a report of each step, and what happened between.

use crate::attempt::api::{TrainerEvent, Wait};
use crate::attempt::recorder::Recorder;
use crate::attempt::records::{event, now};
use crate::attempt::saves::News;
use crate::attempt::steps::Run;
use crate::attempt::stop::Stop;
use crate::data::{DocumentOverlap, Doubled, Feeder, Overlaps};
use crate::engine::step::StepSummary;
use crate::engine::validate::Validation;
use moejob_kernels::StepPhase;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::Resume;
use moejob_protocol::report::{
    Detail, EventKind, Phases, RoutingReport, Stalls, StepReport, TOKENS_PER_EXPERT_EVER,
    TOKENS_PER_EXPERT_MAX, Timing,
};
use std::time::Instant;

/// What of the time since the last report was no step.
pub(crate) struct Clock {
    since: Instant,
    pub(super) stalls: Stalls,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { since: Instant::now(), stalls: Stalls::default() }
    }

    /// Of the time since the last report, in which `tokens` were trained on; `parts` are the
    /// seconds of the steps' phases.
    fn report(&mut self, tokens: u64, parts: [f64; StepPhase::COUNT]) -> Timing {
        let Clock { since, stalls } = std::mem::replace(self, Clock::start());
        let wall = since.elapsed().as_secs_f64();
        let of = |phase| parts[phase as usize];
        let mut phases = Phases {
            data: of(StepPhase::Data),
            forward: of(StepPhase::Forward),
            backward: of(StepPhase::Backward),
            communication: of(StepPhase::Communication),
            numbers: of(StepPhase::Numbers),
            update: of(StepPhase::Update),
            validation: stalls.validation,
            snapshot: stalls.snapshot,
            checkpoint: stalls.checkpoint,
            other: 0.0,
        };
        let told: f64 = phases.parts().iter().map(|(_, seconds)| seconds).sum();
        phases.other = (wall - told).max(0.0);
        Timing { wall_tokens_per_second: tokens as f64 / wall, stalls, phases }
    }
}

impl Run<'_> {
    pub(super) fn report(
        &mut self,
        summary: &StepSummary,
        validation: Option<Validation>,
        seconds: f64,
    ) -> Result<(), Stop> {
        let phases = self.engine.take_phases();
        self.tell_of_device();
        if self.records.is_none() {
            return Ok(());
        }
        if let Some(Err(error)) = self.engine.take_traced() {
            let message = format!("the trace could not be written: {error}");
            self.tell(EventKind::Warning, "TraceFailed", message, self.step)?;
        }
        let routing = self.routing(summary, validation);
        let tokens = self.config.training.tokens_per_step();
        let tokens_per_second = tokens as f64 / seconds;
        let gauge = self.gauge.as_mut();
        let report = StepReport {
            step: self.step,
            loss: summary.loss,
            aux_loss: summary.aux_loss,
            z_loss: summary.z_loss,
            grad_norm: summary.grad_norm,
            loss_scale: summary.loss_scale,
            learning_rate: summary.learning_rate,
            tokens: self.step * tokens,
            tokens_per_second,
            timing: self.clock.report(tokens, phases),
            world_size: self.engine.links.world(),
            attempt: self.config.attempt,
            expert_imbalance: summary.expert_imbalance,
            routing,
            communication: self.engine.take_communication(),
            device: gauge.map(|gauge| gauge.report(&self.engine.model.device, tokens_per_second)),
            validation_loss: validation.map(|validation| validation.loss),
            time: now(),
        };
        if let Some(records) = &self.records {
            records.step(&report);
        }
        (self.out)(TrainerEvent::Step(report));
        self.tell_records()
    }

    /// On rank 0: lines that wait for storage.
    pub(super) fn tell_records(&mut self) -> Result<(), Stop> {
        match self.records.as_ref().and_then(Recorder::take_news) {
            Some(news) => self.tell(EventKind::Warning, "Records", news, self.step),
            None => Ok(()),
        }
    }

    fn routing(&self, summary: &StepSummary, validation: Option<Validation>) -> RoutingReport {
        let experts = (self.engine.model.config.experts.count as usize).max(1);
        let layers = summary.loads.len() / experts;
        let share = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
        let tokens = self.config.training.tokens_per_step() * layers as u64;
        let mut computed = summary.loads.clone();
        computed.iter_mut().zip(&summary.dropped).for_each(|(load, dropped)| *load -= dropped);
        let most = match validation {
            Some(_) => TOKENS_PER_EXPERT_EVER,
            None => TOKENS_PER_EXPERT_MAX,
        };
        let told = computed.len() <= most;
        RoutingReport {
            router_entropy: summary.router_entropy,
            dropped_tokens: share(summary.dropped.iter().sum(), summary.loads.iter().sum()),
            unrouted_tokens: share(summary.unrouted, tokens),
            expert_switches: (summary.followed > 0)
                .then(|| share(summary.switched, summary.followed)),
            churn: validation.and_then(|validation| validation.churn),
            tokens_per_expert: match told {
                true => computed.chunks_exact(experts).map(<[u64]>::to_vec).collect(),
                false => Vec::new(),
            },
        }
    }

    /// What there is to tell of this rank's GPU, by its node.
    fn tell_of_device(&mut self) {
        let Some(gauge) = &mut self.gauge else { return };
        let news = gauge.news();
        if news.is_empty() {
            return;
        }
        let (named, uuid) = (gauge.named(), gauge.uuid().to_string());
        let rank = self.engine.model.rank;
        let node = self.config.member_of(rank);
        let node = node.map_or(String::new(), |member| member.node.clone());
        for told in news {
            let message = format!("{named}, rank {rank} on {node}: {}", told.message);
            let details = [
                ("step", Detail::Number(self.step)),
                ("rank", Detail::Number(rank.into())),
                ("node", Detail::Text(node.clone())),
                ("uuid", Detail::Text(uuid.clone())),
            ];
            let attempt = self.config.attempt;
            let told = event(attempt, EventKind::Warning, told.reason, message, details);
            if let Some(records) = &self.records {
                records.event(&told);
            }
            (self.out)(TrainerEvent::Event(told));
        }
    }

    pub(super) fn tell_resumed(&mut self) -> Result<(), Stop> {
        let (reason, message) = match &self.config.resume {
            Resume::Fresh => ("Fresh", String::new()),
            Resume::Checkpoint { name, .. } => ("Checkpoint", name.clone()),
            Resume::Memory { attempt, .. } => ("Memory", format!("snapshots of attempt {attempt}")),
        };
        let Some(records) = &self.records else { return Ok(()) };
        let details = [("step", Detail::Number(self.step))].into_iter().chain(self.start.details());
        let told = event(self.config.attempt, EventKind::Resumed, reason, message, details);
        records.event(&told);
        (self.out)(TrainerEvent::Event(told));
        Ok(())
    }

    /// On rank 0, once a job: held-out data that are trained on.
    pub(super) fn tell_overlaps(&mut self, feeder: &Feeder) -> Result<(), Stop> {
        if self.step > 0 || self.records.is_none() {
            return Ok(());
        }
        let found = self.control.waiting(Wait::Data, || feeder.corpus().all_overlaps());
        let Overlaps { files, named, documents, doubts } =
            found.map_err(|error| Stop::Failed(error.failure()))?;
        for doubt in doubts {
            self.tell(EventKind::Warning, "DataDoubtful", doubt, self.step)?;
        }
        self.tell_doubled_documents(&documents)?;
        if files == 0 {
            return Ok(());
        }
        let pairs: Vec<String> = (named.iter())
            .map(|(held, trained)| match held == trained {
                true => held.clone(),
                false => format!("{held} (as {trained})"),
            })
            .collect();
        let more = files - named.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let message = format!(
            "held-out data are trained on, too: {}{more}. The held-out loss will look too good; \
             leave them out of data.train",
            pairs.join(", ")
        );
        self.tell(EventKind::Warning, "HeldOutOverlaps", message, self.step)
    }

    /// The same of documents.
    fn tell_doubled_documents(&mut self, found: &DocumentOverlap) -> Result<(), Stop> {
        let DocumentOverlap { compared, doubled, first } = found;
        if *doubled == 0 {
            return Ok(());
        }
        let place = |(name, number): &(String, u64)| format!("{name}, document {}", number + 1);
        let shown: Vec<String> = (first.iter())
            .map(|Doubled { held_out, trained }| {
                format!("{} (as {})", place(held_out), place(trained))
            })
            .collect();
        let message = format!(
            "{doubled} of {compared} held-out documents are trained on, too: {}. The held-out \
             loss will look too good; leave out what is there twice",
            shown.join(", ")
        );
        self.tell(EventKind::Warning, "HeldOutOverlaps", message, self.step)
    }

    /// On rank 0: what became of storage.
    pub(super) fn tell_storage(&mut self, news: News) -> Result<(), Stop> {
        let step = self.step;
        match news {
            News::Committed(step) => {
                let name = directory_name(step);
                self.tell(EventKind::CheckpointCommitted, "Committed", name, step)?;
                self.tell_removed()
            }
            News::Degraded(reason, why) => {
                self.tell(EventKind::CheckpointDegraded, reason, why, step)
            }
            News::Recovered => {
                let message = "checkpoints are committed as they are due again".to_string();
                self.tell(EventKind::CheckpointRecovered, "Committed", message, step)
            }
        }
    }

    /// On rank 0: all is trained, or the attempt is to stop, and storage holds its end up.
    pub(super) fn tell_waits(&mut self, until: Instant) -> Result<(), Stop> {
        let (step, why) = (self.step, self.saves.trouble());
        let why = if why.is_empty() { "it is slow" } else { why };
        let left = until.saturating_duration_since(Instant::now()).as_secs();
        let message = format!(
            "step {step} is done, and its checkpoint waits for storage: {why}. It is tried again \
             for {left} s; make room, or mend what it says"
        );
        self.tell(EventKind::CheckpointDegraded, "EndWaits", message, step)
    }

    /// On rank 0: checkpoints that made room for newer ones.
    pub(super) fn tell_removed(&mut self) -> Result<(), Stop> {
        for step in self.saves.take_removed() {
            self.tell(EventKind::CheckpointRemoved, "MoreThanKeep", directory_name(step), step)?;
        }
        Ok(())
    }

    pub(super) fn tell(
        &mut self,
        kind: EventKind,
        reason: &str,
        message: String,
        step: u64,
    ) -> Result<(), Stop> {
        let Some(records) = &self.records else { return Ok(()) };
        let details = [("step", Detail::Number(step))];
        let told = event(self.config.attempt, kind, reason, message, details);
        records.event(&told);
        (self.out)(TrainerEvent::Event(told));
        Ok(())
    }
}
