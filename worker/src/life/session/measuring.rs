//! What a worker measures while it has no rank, and what it tells of it.

use super::{Effect, Session, State};
use moejob_protocol::Up;
use moejob_protocol::pair::{PairAnswer, PairOrder, PairSaid};
use moejob_protocol::preflight::{Answer, Order};

impl Session {
    pub(super) fn on_preflight(&mut self, order: Box<Order>, out: &mut Vec<Effect>) {
        if self.may_measure(order.number, out) {
            out.push(Effect::Measure(order));
        }
    }

    pub(super) fn on_pair(&mut self, order: Box<PairOrder>, out: &mut Vec<Effect>) {
        if self.may_measure(order.number, out) {
            out.push(Effect::MeasurePair(order));
        }
    }

    /// The newest order counts: what was measured by now is given up.
    fn may_measure(&mut self, number: u64, out: &mut Vec<Effect>) -> bool {
        let idle = matches!(self.state, State::Idle { .. });
        match idle {
            true => self.measuring = Some(number),
            // What else runs on a node would be measured with it.
            false => out.push(Effect::Log("not measured: it has a rank".to_string())),
        }
        idle
    }

    pub(super) fn on_measured(&mut self, answer: Answer, out: &mut Vec<Effect>) {
        if self.measuring.take_if(|number| *number == answer.number).is_some() {
            self.send(Up::Preflight(answer), out);
        }
    }

    /// A place to meet is told first, and what was measured there ends it.
    pub(super) fn on_paired(&mut self, answer: PairAnswer, out: &mut Vec<Effect>) {
        if self.measuring != Some(answer.number) {
            return;
        }
        if matches!(answer.said, PairSaid::Measured(_)) {
            self.measuring = None;
        }
        self.send(Up::Pair(answer), out);
    }
}
