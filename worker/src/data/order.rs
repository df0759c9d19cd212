//! The order of samples: a permutation that is computed, not stored.

use moejob_kernels::philox::philox4x32_10;

/// Rounds of the Feistel network. Four make it indistinguishable from random in theory; two more
/// cost nothing here.
const ROUNDS: u32 = 6;

/// Keeps the counters of this permutation apart from every other use of the seed.
const SITE: u32 = 0x6461_7461;

/// Where sample `index` of `count` lies in epoch `epoch`: a bijection of `0..count` for each
/// (seed, epoch), by a balanced Feistel network over the next power of four, walked until it
/// falls below `count` (Black and Rogaway 2002).
pub fn permute(index: u64, count: u64, seed: u64, epoch: u64) -> u64 {
    assert!(index < count, "sample {index} of {count}");
    if count == 1 {
        return 0;
    }
    let bits = 64 - (count - 1).leading_zeros();
    let half = bits.div_ceil(2);
    let mask = (1_u64 << half) - 1;
    let mut at = index;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for round in 0..ROUNDS {
            let words = philox4x32_10(
                seed,
                [right as u32, round << 24 ^ SITE, epoch as u32, (epoch >> 32) as u32],
            );
            (left, right) = (right, (left ^ u64::from(words[0])) & mask);
        }
        at = left << half | right;
        if at < count {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_comes_once_an_epoch() {
        for count in [1, 2, 3, 5, 16, 17, 100, 1000, 4097] {
            let mut seen = vec![false; count as usize];
            for index in 0..count {
                let at = permute(index, count, 7, 3) as usize;
                assert!(!std::mem::replace(&mut seen[at], true), "{at} twice of {count}");
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_neighbours_part() {
        let order = |seed, epoch| (0..1000).map(|i| permute(i, 1000, seed, epoch)).collect();
        let first: Vec<u64> = order(1, 0);
        let neighbours = first.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!(neighbours < 10, "{neighbours} neighbours stayed together");
        let same = |other: &Vec<u64>| first.iter().zip(other).filter(|(a, b)| a == b).count();
        assert!(same(&order(1, 1)) < 10 && same(&order(2, 0)) < 10);
    }
}
