//! Checkpoints that all ranks verify, each its share, and whose result all of them wait for.
//!
//! ```text
//! rank 0: which? -- its name --> every rank reads its share -- what is wrong --> rank 0: usable?
//!            `-------------- it is enough, and what follows from it --> every rank goes on
//! ```
//! Rank 0 alone chooses, so what is usable, and which one is the newest, does not depend on how
//! many have looked.

use crate::attempt::api::{Control, Wait};
use crate::checkpoint::{Cause, Disk, Problem, verify_share};
use crate::gang::comm::{AbortHandle, Comm, CommError};
use moejob_protocol::CheckpointManifest;
use std::path::Path;

/// An order: `+` and a name, or `=` and what follows from all that was found.
const ORDER_BYTES_MAX: usize = 256;
/// Problems of one rank that are told, and their length: the first ones say enough.
const PROBLEMS_MAX: usize = 16;
const PROBLEM_CHARS_MAX: usize = 256;
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// The manifest of a checkpoint, or everything that is wrong with it.
type Verified = Result<CheckpointManifest, Vec<Problem>>;

/// The ranks of an attempt, as one that verifies.
pub(crate) struct Verifiers<'a> {
    pub comm: &'a mut Comm,
    pub disk: &'a Disk,
    pub control: &'a Control,
    pub location: &'a Path,
    /// A peer was lost on the way.
    pub failed: Option<CommError>,
}

impl Verifiers<'_> {
    pub fn abort(&self) -> AbortHandle {
        self.comm.abort_handle()
    }

    /// Rank 0's: every byte of the checkpoint `name`, by all ranks.
    ///
    /// # Errors
    /// Everything that is wrong with it; or a peer was lost, which `failed` says.
    pub fn verify(&mut self, name: &str) -> Verified {
        let order = self.comm.gather_all(format!("+{name}").as_bytes(), ORDER_BYTES_MAX);
        let answered = order.and_then(|_| self.work(name));
        let (own, all) = match answered {
            Ok(answered) => answered,
            Err(error) => {
                let problem = Problem::new(name, &error.to_string());
                self.failed = Some(error);
                return Err(vec![Problem { cause: Cause::Storage, ..problem }]);
            }
        };
        match (own, all.is_empty()) {
            (Ok(manifest), true) => Ok(manifest),
            _ => Err(all),
        }
    }

    /// Rank 0's: nothing more is verified, and `word` follows from it.
    pub fn end(self, word: bool) -> Result<bool, CommError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let order = if word { b"=1" } else { b"=0" };
        self.comm.gather_all(order, ORDER_BYTES_MAX)?;
        Ok(word)
    }

    /// The other ranks': verifies what rank 0 asks for, until that is enough. What follows from it.
    pub fn help(mut self) -> Result<bool, CommError> {
        loop {
            let orders = self.comm.gather_all(&[], ORDER_BYTES_MAX)?;
            let order = std::str::from_utf8(&orders[0]).unwrap_or_default();
            match order.strip_prefix('+') {
                Some(name) => _ = self.work(name)?,
                None => return Ok(order == "=1"),
            }
        }
    }

    /// This rank's share, and what is wrong by the word of all.
    fn work(&mut self, name: &str) -> Result<(Verified, Vec<Problem>), CommError> {
        let share = (self.comm.rank() as usize, self.comm.world() as usize);
        let (disk, directory) = (self.disk, self.location.join(name));
        let verify = || verify_share(disk, &directory, share);
        let own = self.control.waiting(Wait::Storage, verify);
        let problems = own.as_ref().err().map_or(&[][..], |problems| &problems[..]);
        let all = self.comm.gather_all(&encode(problems), ANSWER_BYTES_MAX)?;
        let mut found: Vec<Problem> = Vec::new();
        for (bytes, rank) in all.iter().zip(0..) {
            for problem in decode(rank, bytes)? {
                // What stands in the manifest each rank has found.
                if !found.contains(&problem) {
                    found.push(problem);
                }
            }
        }
        Ok((own, found))
    }
}

type Told = (String, String, u8);

const CAUSES: [Cause; 3] = [Cause::Damage, Cause::Newer, Cause::Storage];

fn encode(problems: &[Problem]) -> Vec<u8> {
    let short = |text: &str| text.chars().take(PROBLEM_CHARS_MAX).collect::<String>();
    let told: Vec<Told> = (problems.iter().take(PROBLEMS_MAX))
        .map(|problem| (short(&problem.what), short(&problem.why), number(problem.cause)))
        .collect();
    if told.is_empty() { Vec::new() } else { serde_json::to_vec(&told).unwrap_or_default() }
}

fn decode(rank: u32, bytes: &[u8]) -> Result<Vec<Problem>, CommError> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    let told: Vec<Told> = serde_json::from_slice(bytes).map_err(|error| CommError::Protocol {
        rank,
        found: error.to_string(),
        expected: "what is wrong with a checkpoint".to_string(),
    })?;
    let problem = |(what, why, cause): Told| {
        let cause = CAUSES.get(usize::from(cause)).copied().unwrap_or(Cause::Damage);
        Problem { what, why, cause }
    };
    Ok(told.into_iter().map(problem).collect())
}

fn number(cause: Cause) -> u8 {
    CAUSES.iter().position(|of| *of == cause).unwrap_or(0) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_has_found_comes_back_within_its_bounds() {
        let problem = |number: usize, why: &str| Problem {
            cause: CAUSES[number % 3],
            ..Problem::new(&format!("a1-r{number}-0.safetensors"), why)
        };
        assert_eq!(encode(&[]), b"");
        let few: Vec<Problem> = (0..3).map(|number| problem(number, "damaged")).collect();
        assert_eq!(decode(1, &encode(&few)), Ok(few));
        let long = "ü".repeat(999);
        let many: Vec<Problem> = (0..1000).map(|number| problem(number, &long)).collect();
        let bytes = encode(&many);
        assert!(bytes.len() <= ANSWER_BYTES_MAX, "{}", bytes.len());
        assert_eq!(decode(1, &bytes).expect("its own").len(), PROBLEMS_MAX);
        assert!(decode(1, b"nonsense").is_err());
    }
}
