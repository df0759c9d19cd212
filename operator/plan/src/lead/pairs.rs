//! Pairs of nodes that measure together, and what jobs tell each other of nodes that passed.

use super::{JobLoop, Memo};
use crate::decide::Action;
use crate::observed::Millis;
use moejob_protocol::message::Down;

impl JobLoop {
    /// Orders to the workers of pairs; what is known of nodes after it is told.
    pub(super) fn measure_pairs(&mut self, action: &Action, now: Millis) {
        let observed = &self.tracker.observed;
        let mut orders = Vec::new();
        if let Some(standard) = &observed.wanted.preflight {
            let preflight = &observed.preflight;
            match action {
                Action::MeasurePairs(round) => {
                    orders.extend(round.pairs.iter().map(|pair| {
                        let [(first, _), _] = &pair.sides;
                        (first.clone(), preflight.pair_order(standard, pair.number, None))
                    }));
                }
                Action::RelayPair { number, .. } => {
                    let open = preflight.pairs.open().iter().find(|open| open.number == *number);
                    let relay = open.and_then(|open| open.relay());
                    orders.extend(relay.map(|(name, meeting)| {
                        let meeting = Some(meeting.clone());
                        (name.to_string(), preflight.pair_order(standard, *number, meeting))
                    }));
                }
                _ => {}
            }
        }
        for (name, order) in orders {
            self.send(&name, 0, Down::Pair(Box::new(order)));
        }
        self.tracker.done(action, now);
        let news = self.tracker.take_news();
        self.tell(news, now);
    }

    /// Other jobs of the namespace need not measure again what this one has.
    pub(super) fn tell_passes(&mut self) {
        let news = self.tracker.observed.preflight.take_news();
        if !news.is_empty() {
            self.memo(Memo::Passed(news));
        }
    }
}
