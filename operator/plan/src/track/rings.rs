//! What NCCL has built for the gang, as its ranks tell.

use super::{Happening, Tracker};
use moejob_manifest::job::Venue;
use moejob_protocol::links::Built;

impl Tracker {
    pub(super) fn built(&mut self, name: &str, attempt: u32, built: &Built) -> Vec<Happening> {
        let observed = &mut self.observed;
        let gang = observed.record.gang.as_ref().filter(|gang| gang.ended.is_none());
        let Some(gang) = gang.filter(|gang| gang.attempt == attempt) else { return Vec::new() };
        // A worker speaks of its own ranks alone.
        let member = gang.member_of(built.rank).filter(|member| member.worker == name);
        let world = gang.layout.mesh.world();
        if member.is_none() || built.rank >= world {
            return Vec::new();
        }
        // Workers of one machine are one node to NCCL.
        let local = observed.wanted.venue == Venue::Local;
        let nodes = || {
            let node = |rank| match gang.member_of(rank) {
                Some(member) if !local => member.node.as_str(),
                _ => "",
            };
            (0..world).map(node).collect::<Vec<&str>>()
        };
        let found = observed.rings.heard(attempt, built.clone(), world as usize, nodes);
        found.cloned().map(Happening::Rings).into_iter().collect()
    }
}
