//! The ways in which rows travel between the ranks of an expert group, and between which of them
//! the first steps of an attempt choose.

use serde::{Deserialize, Serialize};

/// How rows travel between the ranks of an expert group. Between processors no bit depends on it;
/// between GPUs sums are made in another order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Exchange {
    /// Each rank sends a message to each other one.
    #[default]
    Flat,
    /// In two stages: processors first within the workers, then between them ([`crate::stages`]);
    /// GPUs first between workers and then within them, and back in the other order
    /// ([`crate::rails`]).
    Hierarchical,
}

impl Exchange {
    pub fn is_flat(&self) -> bool {
        *self == Exchange::Flat
    }
}

/// One way to exchange. Between processors all of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Way {
    pub exchange: Exchange,
    /// In which the tokens of a micro-batch travel; at least 1.
    pub chunks: u32,
}

/// A job has no more: both exchanges, with the planned number of chunks and with one.
pub const WAYS_MAX: usize = 4;

impl Way {
    /// `flat`, `hierarchicalIn2Chunks`: a name for tools.
    pub fn name(&self) -> String {
        let exchange = match self.exchange {
            Exchange::Flat => "flat",
            Exchange::Hierarchical => "hierarchical",
        };
        match self.chunks {
            1 => exchange.to_string(),
            chunks => format!("{exchange}In{chunks}Chunks"),
        }
    }

    /// `at once`, `in two stages and 2 chunks`: for a person.
    pub fn words(&self) -> String {
        match (self.exchange, self.chunks) {
            (Exchange::Flat, 1) => "at once".to_string(),
            (Exchange::Flat, chunks) => format!("in {chunks} chunks"),
            (Exchange::Hierarchical, 1) => "in two stages".to_string(),
            (Exchange::Hierarchical, chunks) => format!("in two stages and {chunks} chunks"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_has_a_name_of_its_own() {
        let way = |exchange, chunks| Way { exchange, chunks };
        let said = |way: Way| format!("{}: {}", way.name(), way.words());
        assert_eq!(said(way(Exchange::Flat, 1)), "flat: at once");
        assert_eq!(said(way(Exchange::Flat, 4)), "flatIn4Chunks: in 4 chunks");
        assert_eq!(said(way(Exchange::Hierarchical, 1)), "hierarchical: in two stages");
        let both = said(way(Exchange::Hierarchical, 2));
        assert_eq!(both, "hierarchicalIn2Chunks: in two stages and 2 chunks");
    }

    #[test]
    fn a_way_is_a_short_line() {
        let way = Way { exchange: Exchange::Hierarchical, chunks: 2 };
        let line = serde_json::to_string(&way).expect("JSON");
        assert_eq!(line, r#"{"exchange":"hierarchical","chunks":2}"#);
        assert_eq!(serde_json::from_str::<Way>(&line).expect("a way"), way);
        assert!(serde_json::from_str::<Way>(r#"{"exchange":"tree","chunks":2}"#).is_err());
    }
}
