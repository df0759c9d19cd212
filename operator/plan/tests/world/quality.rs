//! What nodes are like, and what is measured of them.

use super::World;
use super::sim::Message;
use moejob_plan::decide::Action;
use moejob_protocol::message::Up;
use moejob_protocol::pair::{Meeting, PAIR_CHECK, PairAnswer, PairOrder, PairSaid};
use moejob_protocol::preflight::{Answer, Check, Grade, Measured, Order, Value};

/// What a node is like that is measured.
#[derive(Clone, Debug, Default)]
pub struct Quality {
    pub measured: Vec<Measured>,
    pub boot: u32,
    /// It says nothing.
    pub mute: bool,
    /// How often it was measured.
    pub times: u32,
    /// Bus bandwidth that it reaches with another node, GB/s; none: what a good one does.
    pub link: Option<f64>,
    /// So often; then it is mended. None: always.
    pub slow_times: Option<u32>,
    /// NCCL takes TCP there.
    pub tcp: bool,
    /// It measures with others, and tells nothing of it.
    pub holds: bool,
}

/// Of a good node with another one, GB/s.
const LINK: f64 = 190.0;

impl World {
    /// As `JobLoop::measure_pairs` does.
    pub(super) fn order_pairs(&mut self, action: &Action) {
        let observed = self.observed();
        let Some(standard) = &observed.wanted.preflight else { return };
        let preflight = &observed.preflight;
        let mut orders = Vec::new();
        match action {
            Action::MeasurePairs(round) => orders.extend(round.pairs.iter().map(|pair| {
                let order = preflight.pair_order(standard, pair.number, None);
                (pair.sides[0].0.clone(), order)
            })),
            Action::RelayPair { number, name } => {
                let open = preflight.pairs.open().iter().find(|open| open.number == *number);
                let (to, meeting) = open.and_then(|open| open.relay()).expect("it is to be told");
                assert_eq!(to, name);
                let order = preflight.pair_order(standard, *number, Some(meeting.clone()));
                orders.push((name.clone(), order));
            }
            _ => {}
        }
        for (name, order) in orders {
            self.send(&name, Message::Pair(order));
        }
    }

    /// Both sides tell once the second one has come to where the first one waits.
    pub(super) fn measure_pair(&mut self, name: &str, order: PairOrder) {
        let Some(sim) = self.sims.get_mut(name).filter(|sim| sim.run.is_none()) else { return };
        let number = order.number;
        if self.qualities.get(&sim.node).is_some_and(|quality| quality.mute) {
            return;
        }
        let Some(meeting) = order.meeting else {
            let meeting = Meeting { id: format!("{number:0256x}"), bytes: 1 << 33 };
            self.places.insert(meeting.id.clone(), (name.to_string(), number));
            let said = PairSaid::Meets(meeting);
            sim.up.push_back((sim.attempt, Up::Pair(PairAnswer { number, said })));
            return;
        };
        let (first, of) = self.places.remove(&meeting.id).expect("somebody waits there");
        assert_eq!(of, number, "one order of both");
        let node = |name: &String| self.sims.get(name).map(|sim| sim.node.clone());
        let nodes: Vec<String> = [&first, &name.to_string()].into_iter().filter_map(node).collect();
        let quality = |node: &String| self.qualities.get(node).cloned().unwrap_or_default();
        let rates = nodes.iter().map(|node| quality(node).link.unwrap_or(LINK));
        let rate = rates.fold(f64::INFINITY, f64::min);
        for node in &nodes {
            let Some(quality) = self.qualities.get_mut(node) else { continue };
            quality.slow_times = quality.slow_times.map(|times| times.saturating_sub(1));
            if quality.slow_times == Some(0) {
                quality.link = None;
            }
        }
        let quality = |node: &String| self.qualities.get(node).cloned().unwrap_or_default();
        let there = self.sims.get(&first).is_some_and(|sim| sim.answers() && sim.run.is_none());
        for (name, node) in [first, name.to_string()].into_iter().zip(nodes) {
            let Quality { tcp, holds, .. } = quality(&node);
            let Some(sim) = self.sims.get_mut(&name).filter(|sim| sim.answers()) else { continue };
            if holds || !there {
                continue;
            }
            let mut measured = vec![Measured::number(PAIR_CHECK, rate)];
            if tcp {
                let what = "NCCL goes by TCP".to_string();
                let value = Value::Wrong { grade: Grade::Fail, what };
                measured.push(Measured::of_check(Check::Transport, value));
            }
            let said = PairSaid::Measured(measured);
            sim.up.push_back((sim.attempt, Up::Pair(PairAnswer { number, said })));
        }
    }

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
