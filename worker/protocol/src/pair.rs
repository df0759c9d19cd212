//! What two workers are asked to measure together, before either gets a rank.
//!
//! ```text
//! leader --Down::Pair, side 0--> worker --Up::Pair(Meets)--> leader --Down::Pair, side 1--> worker
//! both: the GPUs of two nodes meet, and reduce ---> Up::Pair(Measured) of each
//! ```
//! Workers without a rank do not know each other, so the leader passes on where to meet.

use crate::preflight::Measured;
use serde::{Deserialize, Serialize};

/// The check that a pair is judged by; bus bandwidth of an all-reduce of both nodes' GPUs.
pub const PAIR_CHECK: &str = "pairAllReduceGBps";
/// Hexadecimal digits of an id by which the ranks of NCCL meet.
pub const ID_DIGITS: usize = 256;

/// From the leader, to each of the two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PairOrder {
    /// The leader's, of this pair; answers repeat it. No other order has it.
    pub number: u64,
    /// 0 makes a place to meet, 1 comes there.
    pub side: u32,
    /// GPUs of each node.
    pub devices: u32,
    /// The profile has network cards that do RDMA.
    pub rdma: bool,
    /// For side 1: where side 0 is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meeting: Option<Meeting>,
}

/// A place where the GPUs of two nodes meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Meeting {
    /// NCCL's, [`ID_DIGITS`] hexadecimal digits.
    pub id: String,
    /// What is reduced; each GPU has to have so much free.
    pub bytes: u64,
}

impl Meeting {
    /// A worker may say anything, and this goes on to another one.
    pub fn is_valid(&self) -> bool {
        self.id.len() == ID_DIGITS && self.id.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

/// From each of the two.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PairAnswer {
    pub number: u64,
    pub said: PairSaid,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PairSaid {
    /// Side 0 waits there.
    Meets(Meeting),
    /// [`PAIR_CHECK`], and by which way the bytes went.
    Measured(Vec<Measured>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Down, Up};

    #[test]
    fn a_pair_is_asked_and_answers_as_the_page_on_the_wire_shows() {
        let order = PairOrder { number: 4, side: 0, devices: 8, rdma: true, meeting: None };
        let down = Down::Pair(Box::new(order));
        let text = serde_json::to_string(&down).expect("JSON");
        assert_eq!(text, r#"{"pair":{"number":4,"side":0,"devices":8,"rdma":true}}"#);
        assert_eq!(serde_json::from_str::<Down>(&text).expect("the same"), down);
        let meeting = Meeting { id: "0f".repeat(128), bytes: 1 << 33 };
        assert!(meeting.is_valid());
        let up = Up::Pair(PairAnswer { number: 4, said: PairSaid::Meets(meeting) });
        let text = serde_json::to_string(&up).expect("JSON");
        assert!(text.starts_with(r#"{"pair":{"number":4,"said":{"meets":{"id":"0f0f"#), "{text}");
        assert_eq!(serde_json::from_str::<Up>(&text).expect("the same"), up);
    }

    #[test]
    fn a_place_is_passed_on_only_as_hexadecimal_digits() {
        for id in ["", "0f", &"0g".repeat(128), &"é".repeat(128), &"0f".repeat(129)] {
            assert!(!Meeting { id: id.to_string(), bytes: 1 }.is_valid(), "{id}");
        }
    }
}
