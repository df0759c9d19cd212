//! What a worker is asked to measure of its node before it gets a rank, and what it answers.
//!
//! ```text
//! Down::Preflight(Order) --a worker without a rank--> Up::Preflight(Answer)
//! ```
//! A worker tells what it finds. Whether a number is good enough is the leader's to say.

use crate::config::Backend;
use serde::{Deserialize, Serialize};

/// Bus bandwidth of an all-reduce of a node's GPUs that goes by its InfiniBand cards.
pub const LOOPBACK_CHECK: &str = "ibLoopbackGBps";
/// Things that are measured of one node, at most: 64 GPUs have some checks each.
pub const MEASURED_MAX: usize = 1_024;

/// From the leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Order {
    /// The leader's; the answer repeats it.
    pub number: u64,
    pub expected: Expected,
    /// The boot of the node at which it passed not long ago. Where the node has not started again
    /// since, nothing is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed_at_boot: Option<String>,
}

/// What the profile says of the machine, as far as the machine itself can be compared with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Expected {
    pub backend: Backend,
    /// GPUs of a node.
    pub devices: u32,
    /// The profile, not the job, says how many those are.
    pub counts: bool,
    /// Ascending by processor; empty where the profile does not say.
    pub numa: Vec<Numa>,
    /// The profile has network cards that do RDMA.
    pub rdma: bool,
    /// The GPUs of the node are also to reduce by those cards.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub loopback: bool,
}

/// A NUMA node and what hangs on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Numa {
    /// Ascending.
    pub cpus: Vec<u32>,
    /// PCI addresses of its GPUs, as `0001:00:00.0`.
    pub gpus: Vec<String>,
    /// Of its InfiniBand cards; the i-th is meant for the i-th GPU.
    pub hcas: Vec<String>,
}

/// From the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    pub number: u64,
    /// The kernel's, a new one each time that it starts; empty where it does not tell.
    pub boot_id: String,
    /// None: the node has not started again since it passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Vec<Measured>>,
}

/// From good to bad.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "camelCase")]
pub enum Grade {
    Good,
    /// It was not measured, or there is no limit to hold it against.
    Unknown,
    /// A person is told; the node is used.
    Warn,
    /// The node is not used.
    Fail,
}

/// A check that gives no number, beside those of a profile's `expect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Check {
    /// GPUs of the profile that are not there.
    Gpus,
    /// Processors and NUMA nodes are as the profile has them.
    Numa,
    /// Cards of the profile that are not there.
    Cards,
    /// A port is not up, or not InfiniBand.
    Links,
    /// A port runs below the rate of the others.
    Rates,
    /// Threads run where they are bound.
    Binding,
    /// Memory that may be locked.
    LockedMemory,
    /// Why a GPU's clock is low.
    Clocks,
    /// Errors of a GPU's memory that could not be corrected.
    Ecc,
    /// A GPU is slower than the others of its node.
    Even,
    /// NCCL took TCP (`NET/Socket`) on a profile with RDMA.
    Transport,
}

impl Check {
    pub fn name(self) -> &'static str {
        match self {
            Check::Gpus => "gpus",
            Check::Numa => "numa",
            Check::Cards => "cards",
            Check::Links => "links",
            Check::Rates => "rates",
            Check::Binding => "binding",
            Check::LockedMemory => "lockedMemory",
            Check::Clocks => "clocks",
            Check::Ecc => "ecc",
            Check::Even => "even",
            Check::Transport => "transport",
        }
    }
}

/// What a node says of one check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    /// Of `expect`, or a [`Check`]'s name.
    pub check: String,
    /// Which of the node's devices, for a person; empty: the node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub of: String,
    pub value: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Value {
    /// In the unit that the check's name ends with; more is better. Finite, as JSON knows no other.
    Number(f64),
    /// Found in order, and what.
    Fine(String),
    /// What is wrong, and whether the node can be used all the same.
    Wrong { grade: Grade, what: String },
    /// Why it could not be measured.
    Unmeasured(String),
}

impl Measured {
    pub fn of_check(check: Check, value: Value) -> Measured {
        Measured { check: check.name().to_string(), of: String::new(), value }
    }

    /// Of one of the node's devices.
    pub fn on(self, of: impl Into<String>) -> Measured {
        Measured { of: of.into(), ..self }
    }

    /// A number of `check`, or that it is none.
    pub fn number(check: &str, number: f64) -> Measured {
        let value = match number.is_finite() {
            true => Value::Number(number),
            false => Value::Unmeasured(format!("{number} is no measurement")),
        };
        Measured { check: check.to_string(), of: String::new(), value }
    }

    /// All text that the worker has chosen.
    pub fn texts(&mut self) -> impl Iterator<Item = &mut String> {
        let value = match &mut self.value {
            Value::Number(_) => None,
            Value::Fine(text) | Value::Wrong { what: text, .. } | Value::Unmeasured(text) => {
                Some(text)
            }
        };
        [&mut self.check, &mut self.of].into_iter().chain(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Down, Up};

    #[test]
    fn an_order_and_its_answer_are_what_the_page_on_the_wire_shows() {
        let expected = Expected { devices: 8, counts: true, ..Expected::default() };
        let order = Order { number: 3, expected, passed_at_boot: None };
        let text = serde_json::to_string(&Down::Preflight(Box::new(order))).expect("JSON");
        let shown = r#"{"preflight":{"number":3,"expected":{"backend":"cpu","devices":8,"#;
        assert!(text.starts_with(shown), "{text}");
        let rate = Measured::number("peerReadGBps", 240.5).on("GPU 0");
        let none = Measured::number("peerReadGBps", f64::NAN);
        assert!(matches!(none.value, Value::Unmeasured(_)), "JSON has no such number");
        let measured = Some(vec![rate]);
        let up = Up::Preflight(Answer { number: 3, boot_id: "b".into(), measured });
        let text = serde_json::to_string(&up).expect("JSON");
        let shown = r#"{"preflight":{"number":3,"bootId":"b","measured":[{"check":"peerReadGBps","#;
        assert!(text.starts_with(shown), "{text}");
        assert_eq!(serde_json::from_str::<Up>(&text).expect("the same"), up);
    }
}
