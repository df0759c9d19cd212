//! The numbers that travel, and which of them belong where.
//!
//! Numbers are whole, from 1 to 15, in bf16: sums over sixteen ranks are exact in any order, and
//! none is zero. Which one lies at a place follows from the place and the rank, so that what went
//! to a wrong place, or came from a wrong rank, is another pattern.

use super::verb::Verb;
use half::bf16;

/// Ranks at most: sums stay below 256, up to which bf16 has every whole number.
pub(super) const WORLD_MAX: u32 = 16;
/// Patterns; the rank chooses where in them it begins.
const KINDS: usize = 4096;
const LARGEST: u32 = 15;

/// The numbers of one rank, or their sums over all, by kind.
#[derive(Debug)]
pub(super) struct Numbers(Vec<bf16>);

/// What a result consists of, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// Whose numbers; none: the sums.
    of: Option<u32>,
    /// From which place on.
    start: usize,
    len: usize,
}

/// A number that does not belong where it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Wrong {
    pub at: usize,
    pub found: bf16,
    pub expected: bf16,
}

impl Numbers {
    pub fn of(rank: u32) -> Numbers {
        Numbers((0..KINDS).map(|kind| bf16::from_f32(value(kind, rank) as f32)).collect())
    }

    fn sums(world: u32) -> Numbers {
        let sum = |kind| (0..world).map(|rank| value(kind, rank)).sum::<u32>();
        Numbers((0..KINDS).map(|kind| bf16::from_f32(sum(kind) as f32)).collect())
    }

    /// Those from the place `start` on.
    pub fn fill(&self, start: usize, into: &mut [bf16]) {
        for (place, number) in (start..).zip(into) {
            *number = self.0[kind(place)];
        }
    }

    /// # Errors
    /// The first that is not as it was.
    fn check(&self, start: usize, found: &[bf16]) -> Result<(), Wrong> {
        for (at, found) in found.iter().enumerate() {
            let expected = self.0[kind(start + at)];
            if found.to_bits() != expected.to_bits() {
                return Err(Wrong { at, found: *found, expected });
            }
        }
        Ok(())
    }
}

/// The top bits of a product with an odd number: shifts by any length that parts have are seen.
fn kind(place: usize) -> usize {
    ((place as u32).wrapping_mul(0x9e37_79b1) >> 20) as usize
}

fn value(kind: usize, rank: u32) -> u32 {
    let turned = (kind + rank as usize * (KINDS / WORLD_MAX as usize)) % KINDS;
    // Any numbers that are not the same for neighbours.
    let mixed = (turned as u32 + 1).wrapping_mul(0x85eb_ca6b);
    1 + ((mixed ^ mixed >> 15).wrapping_mul(0xc2b2_ae35) >> 16) % LARGEST
}

/// What `rank` of `world` has after `verb`, where each rank has `part` numbers for each.
fn segments(verb: Verb, (rank, world): (u32, u32), part: usize) -> Vec<Segment> {
    let own = rank as usize * part;
    let all = 0..world;
    match verb {
        Verb::AllToAll | Verb::Counts => {
            all.map(|from| Segment { of: Some(from), start: own, len: part }).collect()
        }
        Verb::AllGather => {
            all.map(|from| Segment { of: Some(from), start: 0, len: part }).collect()
        }
        Verb::ReduceScatter => vec![Segment { of: None, start: own, len: part }],
        Verb::AllReduce => vec![Segment { of: None, start: 0, len: part * world as usize }],
    }
}

/// Numbers of the result of `verb`.
pub(super) fn result_len(verb: Verb, world: u32, part: usize) -> usize {
    segments(verb, (0, world), part).iter().map(|segment| segment.len).sum()
}

/// Looks at what `rank` has after `verb`: `read` gives so many numbers from a place of the result
/// on, at most [`READ_MAX`] at once.
///
/// # Errors
/// The first number that does not belong there, or what reading fails with.
pub(super) fn check<E>(
    verb: Verb,
    (rank, world): (u32, u32),
    part: usize,
    mut read: impl FnMut(usize, usize) -> Result<Vec<bf16>, E>,
) -> Result<Option<Wrong>, E> {
    let mut at = 0;
    for Segment { of, start, len } in segments(verb, (rank, world), part) {
        let numbers = of.map_or_else(|| Numbers::sums(world), Numbers::of);
        let mut done = 0;
        while done < len {
            let found = read(at + done, READ_MAX.min(len - done))?;
            if let Err(wrong) = numbers.check(start + done, &found) {
                return Ok(Some(Wrong { at: at + done + wrong.at, ..wrong }));
            }
            done += found.len().max(1);
        }
        at += len;
    }
    Ok(None)
}

/// Of the host's memory for one look.
pub(super) const READ_MAX: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn numbers(rank: u32, len: usize) -> Vec<bf16> {
        let mut all = vec![bf16::ZERO; len];
        Numbers::of(rank).fill(0, &mut all);
        all
    }

    /// As the verbs are defined, number by number.
    fn reference(verb: Verb, (rank, world): (u32, u32), part: usize) -> Vec<bf16> {
        let all: Vec<Vec<bf16>> =
            (0..world).map(|of| numbers(of, part * world as usize)).collect();
        let sum = |at: usize| bf16::from_f32(all.iter().map(|of| of[at].to_f32()).sum());
        let own = rank as usize * part;
        match verb {
            Verb::AllReduce => (0..part * world as usize).map(sum).collect(),
            Verb::ReduceScatter => (own..own + part).map(sum).collect(),
            Verb::AllGather => all.iter().flat_map(|of| of[..part].to_vec()).collect(),
            Verb::AllToAll | Verb::Counts => {
                all.iter().flat_map(|of| of[own..own + part].to_vec()).collect()
            }
        }
    }

    fn checked(verb: Verb, seat: (u32, u32), part: usize, result: &[bf16]) -> Option<Wrong> {
        let read = |at: usize, len: usize| Ok::<_, Infallible>(result[at..at + len].to_vec());
        match check(verb, seat, part, read) {
            Ok(wrong) => wrong,
        }
    }

    #[test]
    fn what_verbs_bring_is_right_and_a_wrong_word_is_found() {
        for verb in Verb::ALL {
            for world in [2, 3, 8, 16] {
                for rank in [0, world - 1] {
                    let part = 384;
                    let mut result = reference(verb, (rank, world), part);
                    assert_eq!(result.len(), result_len(verb, world, part), "{verb:?} {world}");
                    assert_eq!(checked(verb, (rank, world), part, &result), None, "{verb:?}");
                    let at = result.len() - 1;
                    let expected = result[at];
                    result[at] = bf16::from_f32(expected.to_f32() + 1.0);
                    let wrong = Wrong { at, found: result[at], expected };
                    assert_eq!(checked(verb, (rank, world), part, &result), Some(wrong));
                }
            }
        }
    }

    /// What came from another rank, or lies elsewhere, is another pattern, by whatever length.
    #[test]
    fn what_is_not_there_is_noticed() {
        let part = 1 << 13;
        let right = reference(Verb::AllToAll, (0, 4), part);
        for other in [
            reference(Verb::AllToAll, (1, 4), part),
            reference(Verb::AllGather, (1, 4), part).into_iter().rev().collect(),
            vec![bf16::from_bits(0xffff); 4 * part],
            vec![bf16::ZERO; 4 * part],
        ] {
            assert!(checked(Verb::AllToAll, (0, 4), part, &other).is_some());
        }
        for shift in 0..27 {
            let same = (0..4096).filter(|at| kind(*at) == kind(at + (1 << shift))).count();
            assert!(same < 8, "a shift by 2^{shift}: {same} of 4096 are alike");
        }
        assert!(right.iter().all(|number| (1.0..=15.0).contains(&number.to_f32())));
    }

    /// A long result is read in pieces.
    #[test]
    fn long_results_are_read_piece_by_piece() {
        let mut lens = Vec::new();
        let part = READ_MAX + 256;
        let read = |at: usize, len: usize| {
            lens.push(len);
            let mut piece = vec![bf16::ZERO; len];
            let from = (at / part) as u32;
            Numbers::of(from).fill(at % part, &mut piece);
            Ok::<_, Infallible>(piece)
        };
        assert!(matches!(check(Verb::AllGather, (1, 2), part, read), Ok(None)));
        assert_eq!(lens, [READ_MAX, 256, READ_MAX, 256]);
    }
}
