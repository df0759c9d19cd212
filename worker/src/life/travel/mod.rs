//! How fast bytes travel between the GPUs of this machine, by link and by verb.
//!
//! ```text
//! measure(Wanted) -> a rank a GPU, each a process as engines are (party.rs, rank.rs, bed.rs)
//!   -> reads of each other's memory    -> Link
//!   -> NCCL, windows: what of the two there is, and why not
//!   -> verb by verb, size by size (verb.rs): rounds of both ways in turn, then every word is
//!      looked at (truth.rs)            -> Reading
//! ```
//! Rounds of the two ways alternate, so that what slows the machine slows both. A round takes as
//! long as its slowest rank, and the median of the rounds counts. What is expected of the links is
//! not known here.

mod party;
pub(crate) mod rank;
mod bed;
mod truth;
mod verb;

pub use verb::{Call, Verb, Way, in_units};

use crate::life::part::Part;
use party::Party;
use rank::{ENV_PART, Reply};
use std::io;

/// What is to be measured.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The GPU of each rank among those that the driver shows. The same one for all: ranks share
    /// it, which NCCL does not know.
    pub ordinals: Vec<usize>,
    /// Of the larger buffer of a rank.
    pub bytes: Vec<usize>,
    /// Calls are launched as one graph, which leaves out what the host takes for each.
    pub captured: bool,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Found {
    /// Names, by rank.
    pub gpus: Vec<String>,
    /// The version; or why there is none.
    pub nccl: Result<String, String>,
    /// With how many blocks at most; or why there are none.
    pub windows: Result<usize, String>,
    /// None where ranks share a GPU.
    pub links: Vec<Link>,
    /// By verb, size and way.
    pub readings: Vec<Reading>,
}

/// From the memory of one GPU to another one, by its copy engines.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    pub from: u32,
    pub to: u32,
    /// Bytes a second; or why they cannot be copied so.
    pub rate: Result<f64, String>,
}

/// The time of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    pub call: Call,
    /// The median of the rounds.
    pub seconds: f64,
    pub fastest: f64,
    pub slowest: f64,
}

impl Wanted {
    fn world(&self) -> u32 {
        self.ordinals.len() as u32
    }

    fn is_shared(&self) -> bool {
        self.ordinals.iter().skip(1).any(|ordinal| *ordinal == self.ordinals[0])
    }

    /// All results of a rank.
    fn sizes(&self) -> Vec<usize> {
        Verb::ALL.iter().flat_map(|verb| verb.sizes(&self.bytes, self.world())).collect()
    }
}

/// Ranks that can be measured at once.
pub const WORLD_MAX: u32 = truth::WORLD_MAX;

/// Measures all of it.
///
/// # Errors
/// In words, with the GPU and the call: a GPU is missing, has no memory or says nothing in time;
/// neither way can be had; or a word of a result is wrong.
///
/// # Panics
/// There are fewer than two ranks, or more than [`WORLD_MAX`].
pub fn measure(wanted: &Wanted) -> Result<Found, String> {
    measured(wanted, |which| Part::start((ENV_PART, which), &[]))
}

/// By ranks that `start` starts, by the number of their GPU.
fn measured(
    wanted: &Wanted,
    start: impl FnMut(&str) -> io::Result<Part<Reply>>,
) -> Result<Found, String> {
    assert!((2..=WORLD_MAX).contains(&wanted.world()), "{wanted:?}");
    let (mut party, gpus) = Party::start(wanted, start)?;
    let links = if wanted.is_shared() { Vec::new() } else { party.links(&wanted.ordinals)? };
    party.fill(wanted)?;
    let nccl = match wanted.is_shared() {
        true => Err("ranks that share a GPU have no communicator".to_string()),
        false => party.nccl()?,
    };
    let windows = party.windows()?;
    if let (Err(nccl), Err(windows)) = (&nccl, &windows) {
        return Err(format!("nothing can travel here. NCCL: {nccl}. Windows: {windows}"));
    }
    let has = |way| match way {
        Way::Nccl => nccl.is_ok(),
        Way::Windows => windows.is_ok(),
    };
    let readings = party.readings(wanted, has)?;
    Ok(Found { gpus, nccl, windows, links, readings })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a rank says to everything that it is asked; `other` stands before that.
    fn rank(which: &str, other: &str) -> io::Result<Part<Reply>> {
        let script = format!(
            r#"echo '{{"Ready":{{"name":"GPU","free":9000000000}}}}'
            while read line; do case "$line" in
            {other}
            *Read*) echo '{{"Rate":4e11}}';;
            *Id*) echo '{{"Id":"00"}}';;
            *Meet*) echo '{{"Met":{{"version":"2.28.9"}}}}';;
            *Window\"*) echo '{{"At":{{"place":"here","name":"a","secret":"b"}}}}';;
            *Time*nccl*) echo '{{"Took":0.00{which}2}}';;
            *Time*) echo '{{"Took":0.001}}';;
            *) echo '"Done"';;
            esac; done"#
        );
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &script]);
        Part::of(command, which)
    }

    fn two() -> Wanted {
        Wanted { ordinals: vec![0, 1], bytes: vec![64 << 10, 1 << 20], captured: false }
    }

    /// Of two ranks, of which the second one says `other`.
    fn with(other: &str) -> Result<Found, String> {
        measured(&two(), |which| rank(which, if which == "1" { other } else { "" }))
    }

    /// Says so where it is asked for `what`.
    fn failed(what: &str, why: &str) -> String {
        format!(r#"*{what}*) echo '{{"Failed":{{"why":"{why}","waited":false}}}}';;"#)
    }

    #[test]
    fn all_that_two_gpus_can_is_measured() {
        let found = with("").expect("all is there");
        assert_eq!(found.gpus, ["GPU", "GPU"]);
        assert_eq!(found.nccl, Ok("2.28.9".to_string()));
        let link = |from, to| Link { from, to, rate: Ok(4e11) };
        assert_eq!(found.links, [link(1, 0), link(0, 1)]);
        assert!(found.windows.is_ok());
        // Two sizes of four verbs and one of counts by NCCL; all but two of them by windows.
        assert_eq!(found.readings.len(), 9 + 7);
        for Reading { call, seconds, .. } in found.readings {
            let expected = if call.way == Way::Nccl { 0.0012 } else { 0.001 };
            assert_eq!(seconds, expected, "{call}: as long as the slowest rank takes");
        }
    }

    #[test]
    fn what_is_missing_is_left_out() {
        let found = with(&failed("Meet", "no NCCL")).expect("windows");
        let why = "rank 1 (GPU 1), meeting: no NCCL".to_string();
        assert_eq!(found.nccl, Err(why));
        assert!(found.readings.iter().all(|reading| reading.call.way == Way::Windows));
        let found = with(&failed("Connect", "no peer access")).expect("NCCL");
        let why = "rank 1 (GPU 1), mapping the windows of the others: no peer access".to_string();
        assert_eq!(found.windows, Err(why));
        assert_eq!(found.readings.len(), 9);
        let found = with(&failed("Read", "no peer access")).expect("the rest");
        assert_eq!(found.links[1].rate, Err("no peer access".to_string()));
        let both = [failed("Meet", "no NCCL"), failed("Window", "no room")].concat();
        let why = with(&both).expect_err("nothing is there");
        assert_eq!(
            why,
            "nothing can travel here. NCCL: rank 1 (GPU 1), meeting: no NCCL. Windows: rank 1 \
             (GPU 1), making a window: no room"
        );
    }

    #[test]
    fn failures_say_of_which_verb_size_and_rank() {
        let why = with(&failed("Check*all-reduce", "word 5 is 3")).expect_err("a wrong word");
        assert_eq!(why, "rank 1 (GPU 1), all-reduce of 64 KiB by NCCL: word 5 is 3");
        let why = with("*Time*all-gather*windows*) exit 3;;").expect_err("it is gone");
        let expected = "rank 1 (GPU 1), all-gather of 64 KiB by windows: its process ended: exit";
        assert!(why.starts_with(expected), "{why}");
        let why = with(r#"*Fill*) echo '"Rubbish"'; exit 1;;"#).expect_err("it is no rank");
        assert!(why.starts_with("rank 1 (GPU 1), memory for the numbers"), "{why}");
        // Who waits knows less than whom it waits for.
        let late = r#"*Time*) echo '{"Failed":{"why":"late","waited":true}}';;"#;
        let dead = failed("Time", "Xid 79");
        let both = measured(&two(), |which| rank(which, if which == "0" { late } else { &dead }));
        assert_eq!(both.expect_err("dead"), "rank 1 (GPU 1), all-to-all of 1 MiB by NCCL: Xid 79");
    }

    #[test]
    fn there_is_room_for_the_results_of_all_verbs() {
        let wanted = Wanted { ordinals: vec![0, 1], bytes: vec![512], captured: false };
        let largest = wanted.sizes().into_iter().max();
        assert_eq!(largest, Some(1024), "counts are larger than what is wanted");
    }
}
