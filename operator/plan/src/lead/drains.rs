//! Nodes that are to be drained and whose worker cannot leave: the job has no other node, and its
//! disruption budget refuses to end the pod. Whoever drains sees an eviction that is tried again
//! and again.

use super::{ByName, JobLoop};
use crate::observed::Millis;
use moejob_manifest::status::Condition;

/// A gang that can do without the node, or has another one, leaves within a checkpoint's time.
const TOLD_AFTER: Millis = 120_000;

#[derive(Debug, Default)]
pub(super) struct Drains {
    /// Since when each node takes no workers, and whether people were told.
    since: ByName<(Millis, bool)>,
}

impl Drains {
    pub fn due(&self) -> Option<Millis> {
        let untold = self.since.values().filter(|(_, told)| !told);
        untold.map(|(since, _)| since + TOLD_AFTER).min()
    }

    fn told(&self) -> Vec<&str> {
        let told = self.since.iter().filter(|(_, (_, told))| *told);
        told.map(|(node, _)| node.as_str()).collect()
    }
}

impl JobLoop {
    /// Tells once of each node that waits in vain for a member of the gang to leave it.
    pub(super) fn watch_drains(&mut self, now: Millis) {
        let observed = &self.tracker.observed;
        let gang = observed.gang().filter(|_| self.place.has_api());
        let members = gang.map_or(&[][..], |gang| &gang.members).iter();
        let stays = |name: &str| observed.worker(name).is_some_and(|worker| !worker.stopping);
        let closed = |node: &str| {
            let granted = self.granted.nodes.iter().find(|of| of.name == node);
            granted.is_some_and(|of| !of.usable && !of.called_back)
        };
        let waiting = members.filter(|of| closed(&of.node) && stays(&of.worker));
        let mut since: ByName<(Millis, bool)> = ByName::new();
        let mut news = Vec::new();
        for member in waiting {
            let known = self.drains.since.get(&member.node);
            let (began, told) = known.copied().unwrap_or((now, false));
            let is_due = now >= began + TOLD_AFTER;
            if is_due && !told {
                news.push(member.node.clone());
            }
            since.insert(member.node.clone(), (began, told || is_due));
        }
        self.drains.since = since;
        for node in news {
            let note = format!(
                "{node} takes no workers any more (it is cordoned, tainted or unhealthy), and the \
                 job has no other node for the one that is there: a drain of it is refused by the \
                 PodDisruptionBudget until another node is free. spec.suspend lets the job go at \
                 once, with a checkpoint"
            );
            self.event(true, "DrainWaits", note, now);
        }
    }

    /// What people read of it for as long as it lasts.
    pub(super) fn tell_of_drains(&self, conditions: &mut [Condition]) {
        let nodes = self.drains.told();
        let degraded = conditions.iter_mut().find(|of| of.type_ == "Degraded");
        let Some(degraded) = degraded.filter(|_| !nodes.is_empty()) else { return };
        if degraded.status != "True" {
            (degraded.status, degraded.reason) = ("True".to_string(), "DrainWaits".to_string());
        }
        let more = format!("a drain waits for another node than {}", nodes.join(", "));
        degraded.message = match degraded.message.as_str() {
            "" => more,
            message => format!("{message}; {more}"),
        };
    }
}
