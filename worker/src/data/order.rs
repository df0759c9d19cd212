//! The order of samples: a permutation that is computed, not stored.

use super::DataError;
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

/// Samples in which a mixture keeps to its weights exactly.
pub const MIX_BLOCK: u64 = 4096;

/// Keeps the order inside of a block apart from every other use of the seed.
const MIX_SEED: u64 = 0x6d69_785f_6d69_785f;

/// Which source a sample comes from: in each block of 4,096 samples every source has a fixed number
/// of places, and they are shuffled by a permutation of the block's number. So sample `n` knows its
/// source, and how many of that source came before, from `n` alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mix {
    /// Places before those of each source, and `MIX_BLOCK`.
    bounds: Vec<u64>,
}

impl Mix {
    /// Places by largest remainders, so that they add up.
    ///
    /// # Errors
    /// A weight is no positive number, or too small for a place.
    pub fn new(weights: &[f64]) -> Result<Mix, DataError> {
        let refused = |part: usize, why| {
            Err(DataError::Weight { part, weight: weights[part], why })
        };
        if let Some(part) = weights.iter().position(|weight| !(*weight > 0.0 && weight.is_finite()))
        {
            return refused(part, "is no positive number");
        }
        let sum: f64 = weights.iter().sum();
        let exact: Vec<f64> =
            weights.iter().map(|weight| weight / sum * MIX_BLOCK as f64).collect();
        let mut places: Vec<u64> = exact.iter().map(|places| places.floor() as u64).collect();
        let mut by_rest: Vec<usize> = (0..weights.len()).collect();
        by_rest.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()).then(a.cmp(b)));
        let left = MIX_BLOCK.saturating_sub(places.iter().sum());
        by_rest.iter().cycle().take(left as usize).for_each(|part| places[*part] += 1);
        if let Some(part) = places.iter().position(|places| *places == 0) {
            return refused(part, "is below 1/4096 of the sum");
        }
        let mut bounds = vec![0];
        for places in places {
            bounds.push(bounds[bounds.len() - 1] + places);
        }
        Ok(Mix { bounds })
    }

    /// The source of sample `n`, and the sample's number in that source.
    pub fn sample(&self, n: u64, seed: u64) -> (usize, u64) {
        if self.bounds.len() == 2 {
            return (0, n);
        }
        let (block, place) = (n / MIX_BLOCK, n % MIX_BLOCK);
        let place = permute(place, MIX_BLOCK, seed ^ MIX_SEED, block);
        let part = self.bounds.partition_point(|bound| *bound <= place) - 1;
        let places = self.bounds[part + 1] - self.bounds[part];
        (part, block * places + (place - self.bounds[part]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_keeps_its_weights_and_leaves_no_sample_out() {
        let mix = Mix::new(&[0.7, 0.2, 0.1]).expect("weights");
        let mut seen = [Vec::new(), Vec::new(), Vec::new()];
        for n in 0..3 * MIX_BLOCK {
            let (part, sample) = mix.sample(n, 5);
            seen[part].push(sample);
        }
        let counts = seen.each_ref().map(Vec::len);
        assert_eq!(counts, [3 * 2867, 3 * 819, 3 * 410]);
        for mut samples in seen {
            samples.sort_unstable();
            assert!(samples.iter().enumerate().all(|(i, sample)| i as u64 == *sample));
        }
        // In short stretches, too: no source comes in runs.
        let first = (0..100).filter(|n| mix.sample(*n, 5).0 == 0).count();
        assert!((55..85).contains(&first), "{first} of 100");
        assert_eq!(Mix::new(&[2.0]).expect("a weight").sample(99_999, 1), (0, 99_999));
        for wrong in [vec![1.0, 0.0], vec![1.0, -1.0], vec![f64::NAN, 1.0], vec![1.0, 1e-9]] {
            let error = Mix::new(&wrong).expect_err("a wrong weight").to_string();
            assert!(error.contains("of the mixture"), "{error}");
        }
    }

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
