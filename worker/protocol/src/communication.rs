//! What the ranks of a job send each other in a step: by which verb, by which link, and how long
//! it took. Rank 0 tells it of some steps, in `metrics.jsonl`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the engine calls for to move something between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Verb {
    /// Tokens and choices to the ranks that have their experts; in backward gradients.
    Dispatch,
    /// What the experts made of them back to the tokens' ranks; in backward gradients of them.
    Combine,
    /// Sums of buckets of gradients.
    ReduceScatter,
    /// New weights to their holders; between processors also the numbers of a step.
    AllGather,
    /// The numbers of a step between GPUs.
    AllReduce,
    /// Tokens, and what became of them, between nodes.
    SendRecv,
}

/// By what it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Link {
    /// Memory that GPUs of one node map from each other.
    Window,
    Nccl,
    /// The connections between workers, through the hosts' memory.
    Host,
}

impl Verb {
    pub const ALL: [Verb; 6] = [
        Verb::Dispatch,
        Verb::Combine,
        Verb::ReduceScatter,
        Verb::AllGather,
        Verb::AllReduce,
        Verb::SendRecv,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Verb::Dispatch => "dispatch",
            Verb::Combine => "combine",
            Verb::ReduceScatter => "reduceScatter",
            Verb::AllGather => "allGather",
            Verb::AllReduce => "allReduce",
            Verb::SendRecv => "sendRecv",
        }
    }
}

impl Link {
    pub const ALL: [Link; 3] = [Link::Window, Link::Nccl, Link::Host];

    pub fn name(self) -> &'static str {
        match self {
            Link::Window => "window",
            Link::Nccl => "nccl",
            Link::Host => "host",
        }
    }
}

/// What a rank of `ranks` sends in a reduce-scatter or an all-gather of a buffer whose chunks are
/// of so many bytes: a chunk for each of the others, as nccl-tests count it.
pub fn ring_bytes(ranks: usize, chunk: usize) -> u64 {
    (ranks.saturating_sub(1) * chunk) as u64
}

/// The same in an all-reduce of a buffer of so many bytes by NCCL: its sum in pieces, and these to
/// all, `2 (n - 1) / n` of it.
pub fn all_reduce_bytes(ranks: usize, bytes: usize) -> u64 {
    match ranks as u64 {
        0 | 1 => 0,
        ranks => (2 * (ranks - 1) * bytes as u64).div_ceil(ranks),
    }
}

/// What travelled in one step, as rank 0 saw it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CommunicationReport {
    /// The step that it is of: what travels beside the next step's ops is told with the next line.
    pub step: u64,
    /// The ops stood still for it.
    pub exposed_seconds: f64,
    /// Over the seconds of the step.
    pub exposed_share: f64,
    /// Of the exposed seconds those that `phases` counts as `forward`, `backward` or `numbers`,
    /// since the verbs lie within these.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub within: BTreeMap<String, f64>,
    /// By [`Verb::name`].
    pub verbs: BTreeMap<String, VerbReport>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VerbReport {
    /// [`Link::name`]
    pub link: String,
    /// That this rank sent; through windows, that it took from others and brought to them.
    pub bytes: u64,
    /// From begin to end, on the device's clock, with the wait for other ranks.
    pub seconds: f64,
    /// It travelled beside the ops, which may have waited for less of it, or for nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beside: bool,
}

impl VerbReport {
    /// None: it took no time.
    pub fn bytes_per_second(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.bytes as f64 / self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_json() {
        let of_json = |value: serde_json::Value| value.as_str().map(str::to_string);
        for verb in Verb::ALL {
            let json = serde_json::to_value(verb).expect("a word");
            assert_eq!(of_json(json).as_deref(), Some(verb.name()));
        }
        for link in Link::ALL {
            let json = serde_json::to_value(link).expect("a word");
            assert_eq!(of_json(json).as_deref(), Some(link.name()));
        }
    }

    #[test]
    fn bytes_are_those_of_nccl_tests() {
        // 8 ranks, 64 MiB in all: 7/8 of it; of an all-reduce twice that.
        assert_eq!(ring_bytes(8, 8 << 20), 56 << 20);
        assert_eq!(all_reduce_bytes(8, 64 << 20), 112 << 20);
        assert_eq!([ring_bytes(1, 9), all_reduce_bytes(1, 9), all_reduce_bytes(0, 9)], [0; 3]);
        assert_eq!(all_reduce_bytes(3, 8), 11);
    }

    /// A reader of another release: what it does not know it leaves, what is missing is nothing.
    #[test]
    fn unknown_verbs_and_missing_fields_are_read() {
        let text = r#"{"exposedSeconds":0.5,"later":1,
            "verbs":{"teleport":{"link":"ether","bytes":3,"seconds":0.1}}}"#;
        let read: CommunicationReport = serde_json::from_str(text).expect("it is read");
        assert_eq!((read.exposed_seconds, read.step), (0.5, 0));
        assert_eq!(read.verbs["teleport"].bytes_per_second(), Some(3.0 / 0.1));
        assert_eq!(VerbReport::default().bytes_per_second(), None);
    }
}
