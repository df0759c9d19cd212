//! Where the gang's engines run, as their workers tell.

use super::Tracker;
use moejob_protocol::seat::Seated;

impl Tracker {
    pub(super) fn seated(&mut self, name: &str, attempt: u32, seated: &Seated) {
        let observed = &mut self.observed;
        let gang = observed.record.gang.as_ref().filter(|gang| gang.ended.is_none());
        let Some(gang) = gang.filter(|gang| gang.attempt == attempt) else { return };
        // A worker speaks of its own ranks alone.
        let is_own = gang.member_of(seated.rank).is_some_and(|member| member.worker == name);
        if is_own && seated.rank < gang.layout.mesh.world() {
            observed.seats.heard(attempt, seated.clone());
        }
    }
}
