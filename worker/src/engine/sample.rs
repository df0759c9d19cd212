//! Logits -> the next token.

use moejob_kernels::philox::philox4x32_10;

/// How a token is chosen. The same logits, seed and place give the same token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f64,
    /// The likeliest tokens alone, so many; 0: all.
    pub top_k: u32,
    /// Of those the fewest likeliest ones whose probabilities sum to at least this; 1: all.
    pub top_p: f64,
    pub seed: u64,
}

impl Sampling {
    /// The likeliest token every time.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// The token `at` a place of the text. `logits` [V] are finite, V at least 1; ties go to the
    /// lowest id.
    pub fn choose(&self, logits: &[f64], at: u64) -> u32 {
        let mut ranked: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |id: u32| logits[id as usize];
        let better = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
        let best = ranked.iter().copied().min_by(better).unwrap_or(0);
        if self.temperature <= 0.0 {
            return best;
        }
        if self.top_k > 0 && (self.top_k as usize) < ranked.len() {
            ranked.select_nth_unstable_by(self.top_k as usize, better);
            ranked.truncate(self.top_k as usize);
            ranked.sort_unstable();
        }
        let share = |id: &u32| ((logit(*id) - logit(best)) / self.temperature).exp();
        let all: f64 = ranked.iter().map(share).sum();
        // Most of a vocabulary is hardly ever looked at, so only what is looked at is put in order.
        let (mut shares, mut reached, mut enough) = (Vec::new(), 0.0, false);
        while shares.len() < ranked.len() && !enough {
            let (first, rest) = (shares.len(), &mut ranked[shares.len()..]);
            let count = rest.len().min(ORDERED_FIRST.max(first));
            if count < rest.len() {
                rest.select_nth_unstable_by(count, better);
            }
            rest[..count].sort_unstable_by(better);
            for share in rest[..count].iter().map(share) {
                shares.push(share);
                reached += share;
                enough = reached >= self.top_p * all;
                if enough {
                    break;
                }
            }
        }
        let mut left = uniform(self.seed, at) * reached;
        let chosen = shares.iter().position(|share| {
            left -= share;
            left < 0.0
        });
        // Rounding may leave a little behind the last one.
        ranked[chosen.unwrap_or(shares.len() - 1)]
    }
}

/// Tokens that are put in order at first; then as many as there are already.
const ORDERED_FIRST: usize = 64;

/// In [0, 1), a multiple of 2^-53.
fn uniform(seed: u64, at: u64) -> f64 {
    /// Apart from the numbers that training draws.
    const SITE: u32 = 64;
    let [low, high, ..] = philox4x32_10(seed, [SITE, 0, at as u32, (at >> 32) as u32]);
    ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f64; 5] = [0.0, 2.0, 1.0, 2.0, -30.0];

    fn shares(sampling: Sampling) -> [f64; 5] {
        let mut counts = [0.0; 5];
        for at in 0..20_000 {
            counts[sampling.choose(&LOGITS, at) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn tokens_come_as_often_as_their_probability() {
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7 };
        let exp = LOGITS.map(f64::exp);
        let sum: f64 = exp.iter().sum();
        let found = shares(all);
        for (found, expected) in found.iter().zip(exp.map(|x| x / sum)) {
            assert!((found - expected).abs() < 0.015, "{found} of {expected}");
        }
        assert_ne!(shares(Sampling { seed: 8, ..all }), found);
        // The colder, the more often the best ones.
        let cold = shares(Sampling { temperature: 0.1, ..all });
        assert!(cold[1] + cold[3] > 0.999 && cold[1] > 0.4 && cold[3] > 0.4, "{cold:?}");
    }

    /// Of a vocabulary of which little is put in order.
    #[test]
    fn a_large_vocabulary_is_cut_where_all_of_it_in_order_would_be() {
        let logit = |id: u32| f64::from(id * 7_919 % 4_001) / 200.0;
        let logits: Vec<f64> = (0..5_000).map(logit).collect();
        let mut ranked: Vec<usize> = (0..logits.len()).collect();
        ranked.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let cuts = [(0, 0.9), (0, 1.0), (300, 0.99), (300, 1.0), (70, 0.5), (6_000, 0.8)];
        for (top_k, top_p) in cuts {
            let sampling = Sampling { temperature: 1.5, top_k, top_p, seed: 3 };
            let kept = if top_k == 0 { ranked.len() } else { ranked.len().min(top_k as usize) };
            let share = |id: &usize| (logits[*id] / 1.5).exp();
            let shares: Vec<f64> = ranked[..kept].iter().map(share).collect();
            let all: f64 = shares.iter().sum();
            let mut reached = 0.0;
            let cut = shares.iter().position(|share| {
                reached += share;
                reached >= top_p * all
            });
            let cut = cut.map_or(kept, |last| last + 1);
            let of_cut: f64 = shares[..cut].iter().sum();
            for at in 0..300 {
                let mut left = uniform(3, at) * of_cut;
                let place = shares[..cut].iter().position(|share| {
                    left -= share;
                    left < 0.0
                });
                let expected = ranked[place.unwrap_or(cut - 1)];
                let chosen = sampling.choose(&logits, at) as usize;
                assert_eq!(chosen, expected, "{top_k} {top_p} {at}");
            }
        }
    }

    #[test]
    fn what_is_cut_off_never_comes() {
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7 };
        let one = shares(Sampling { top_k: 1, ..all });
        assert!(one[1] > 0.999, "the lowest id of two equal ones: {one:?}");
        assert_eq!(shares(Sampling { top_k: 3, ..all })[0], 0.0);
        // 0.39 + 0.39 reach 0.6, and 0.39 reaches 0.3.
        assert_eq!(shares(Sampling { top_p: 0.6, ..all })[2], 0.0);
        assert!(shares(Sampling { top_p: 0.3, ..all })[1] > 0.999);
        assert!(shares(Sampling { top_p: 0.0, ..all })[1] > 0.999, "one always stays");
        assert_eq!(Sampling::GREEDY.choose(&LOGITS, 3), 1);
    }
}
