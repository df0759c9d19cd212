//! Members that wait for storage, or read what they begin with: no hang, as long as they show life.
//! Gangs that wait for nodes, and what is known late of a loss.

use super::Tracker;
use crate::observed::{Millis, Worker};
use moejob_protocol::report::{Event, EventKind};
use std::collections::BTreeSet;

impl Tracker {
    /// A member that opens its data or a checkpoint goes on, and one that waits for storage is no
    /// hang, before the first step and later: that is progress, too. Its count of life is bounded
    /// by what there is to read, and by its own patience, so this cannot go on for ever.
    pub(super) fn loaded(&mut self, name: &str, attempt: u32, life: u64, now: Millis) {
        let gang = self.observed.gang().filter(|gang| gang.attempt == attempt);
        if !gang.is_some_and(|gang| self.present.loading.contains_key(name) || gang.has(name)) {
            return;
        }
        let seen = self.present.loading.entry(name.to_string()).or_default();
        if life > *seen {
            *seen = life;
            self.observed.record.progressed_at = now;
        }
    }

    /// Which members wait for their data, or for the storage of checkpoints.
    pub(super) fn late(&mut self, name: &str, attempt: u32, event: &Event) {
        let gang = self.observed.gang().filter(|gang| gang.attempt == attempt);
        if !gang.is_some_and(|gang| gang.has(name)) {
            return;
        }
        let (reason, message) = (event.reason.clone(), event.message.clone());
        let late = &mut self.observed.late_data;
        match event.event {
            EventKind::DataDegraded => _ = late.insert(name.to_string(), (reason, message)),
            EventKind::DataRecovered => _ = late.remove(name),
            EventKind::CheckpointDegraded => {
                self.observed.late_checkpoints.insert(name.to_string());
            }
            EventKind::CheckpointRecovered => _ = self.observed.late_checkpoints.remove(name),
            _ => {}
        }
    }

    /// After their last step the members exchange empty ones until their last checkpoint is
    /// committed. While those go on the job does, too, however long storage is away: the members
    /// give up by themselves after an hour.
    pub(super) fn waits(&mut self, name: &str, attempt: u32, collective: u64, now: Millis) {
        let gang = self.observed.gang().filter(|gang| gang.attempt == attempt);
        if !gang.is_some_and(|gang| self.present.waiting.contains_key(name) || gang.has(name)) {
            return;
        }
        let seen = self.present.waiting.insert(name.to_string(), collective);
        if seen.is_some_and(|seen| collective > seen) {
            self.observed.record.progressed_at = now;
        }
    }

    /// The workers that stay, and others on the nodes that are free, are too few for a gang.
    pub fn waits_for_nodes(&self) -> bool {
        let observed = &self.observed;
        let stays = |worker: &&Worker| !worker.is_dead() && !worker.stopping;
        let busy: BTreeSet<&str> = (observed.workers.iter())
            .filter(|worker| !worker.is_dead())
            .map(|worker| worker.node.as_str())
            .collect();
        let free = observed.nodes.iter().filter(|node| {
            node.usable && !busy.contains(node.name.as_str())
        });
        let possible = observed.workers.iter().filter(stays).count() + free.count();
        let range = observed.wanted.nodes_min..=observed.wanted.nodes_max;
        let sizes = observed.wanted.sizes.iter().map(|size| size.nodes);
        let least = sizes.filter(|nodes| range.contains(nodes)).min();
        least.is_some_and(|least| possible < least as usize)
    }

    /// Why a worker ended that was lost before, as the kubelet knows it: that is why the gang was
    /// lost with it.
    pub fn explained(&mut self, name: &str, how: &str) {
        let recovery = self.recoveries.last_mut().filter(|of| of.first_step_at.is_none());
        if let Some(recovery) = recovery.filter(|of| of.cause.contains(name)) {
            recovery.cause = format!("{name}: {how}");
        }
    }
}
