//! What nodes are like, and what is measured of them.

use super::World;
use moejob_protocol::message::Up;
use moejob_protocol::preflight::{Answer, Measured, Order};

/// What a node is like that is measured.
#[derive(Clone, Debug, Default)]
pub struct Quality {
    pub measured: Vec<Measured>,
    pub boot: u32,
    /// It says nothing.
    pub mute: bool,
    /// How often it was measured.
    pub times: u32,
}

impl World {
    pub(super) fn measure(&mut self, name: &str, order: Order) {
        let Some(sim) = self.sims.get_mut(name).filter(|sim| sim.run.is_none()) else { return };
        let quality = self.qualities.entry(sim.node.clone()).or_default();
        if quality.mute {
            return;
        }
        let boot_id = format!("boot-{}", quality.boot);
        let same = order.passed_at_boot.as_ref() == Some(&boot_id);
        quality.times += u32::from(!same);
        let measured = (!same).then(|| quality.measured.clone());
        let answer = Answer { number: order.number, boot_id, measured };
        sim.up.push_back((sim.attempt, Up::Preflight(answer)));
    }
}
