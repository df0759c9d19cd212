//! Random numbers that are functions: Philox4x32-10 (Salmon et al. 2011, Random123).

use crate::cpu::float::{ln, sin_cos};

/// Four random words of a key and a counter. No state: equal arguments give equal words.
pub fn philox4x32_10(key: u64, counter: [u32; 4]) -> [u32; 4] {
    const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let mut key = [key as u32, (key >> 32) as u32];
    let mut c = counter;
    for _ in 0..10 {
        let low = MULTIPLIERS[0] * u64::from(c[0]);
        let high = MULTIPLIERS[1] * u64::from(c[2]);
        c = [
            (high >> 32) as u32 ^ c[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ c[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

/// The standard normal numbers 2 * pair and 2 * pair + 1 of the tensor that `name_hash` names.
///
/// Box-Muller over two uniform numbers of 53 bits, the first in (0, 1], the second in [0, 1);
/// counter = (name_hash, pair), each as two words, low first.
pub fn normals(seed: u64, name_hash: u64, pair: u64) -> [f64; 2] {
    let words = |x: u64| [x as u32, (x >> 32) as u32];
    let ([n0, n1], [p0, p1]) = (words(name_hash), words(pair));
    box_muller(philox4x32_10(seed, [n0, n1, p0, p1]))
}

/// Two standard normal numbers of four random words.
fn box_muller([a, b, c, d]: [u32; 4]) -> [f64; 2] {
    let bits = |low: u32, high: u32| ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64;
    const UNIT: f64 = 1.0 / (1_u64 << 53) as f64;
    let radius = (-2.0 * ln((bits(a, b) + 1.0) * UNIT)).sqrt();
    let (sin, cos) = sin_cos(std::f64::consts::TAU * (bits(c, d) * UNIT));
    [radius * cos, radius * sin]
}

/// What the numbers of one kind of noise are for: no two kinds share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// Multiplies the router's input.
    Jitter = 1,
    /// Drops elements of the layer's input.
    Dropout = 2,
    /// Added to the logits.
    Logits = 3,
    /// Decides whether a token takes its second expert.
    Second = 4,
    /// The table of hash routing.
    Table = 5,
}

/// The random numbers of one layer and micro-batch: functions of (seed, step, layer, token of the
/// step, element), so that a step that is done again, elsewhere or by another number of ranks,
/// draws the same.
///
/// Philox4x32-10, key = seed, counter = (site | layer << 8 | bits of the step above 2^32 << 20;
/// step; token; element / numbers of a block).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub seed: u64,
    /// Steps done before this one.
    pub step: u64,
    /// Below 4096.
    pub layer: u32,
    /// Tokens of the step before this micro-batch.
    pub first_token: u64,
}

impl Draw {
    fn words(&self, site: Site, token: usize, block: usize) -> [u32; 4] {
        let (place, step, token) = self.counter(site, token);
        philox4x32_10(self.seed, [place, step, token, block as u32])
    }

    /// The counter's first three words.
    pub(crate) fn counter(&self, site: Site, token: usize) -> (u32, u32, u32) {
        let place = site as u32 | self.layer << 8 | ((self.step >> 32) as u32) << 20;
        (place, self.step as u32, self.first_token.wrapping_add(token as u64) as u32)
    }

    /// Uniform in [0, 1), a multiple of 2^-24, so that f32 holds it exactly.
    pub fn uniform(&self, site: Site, token: usize, element: usize) -> f64 {
        unit(self.words(site, token, element / 4)[element % 4])
    }

    /// The uniform numbers of elements 4 * block and the three after it.
    pub fn uniforms(&self, site: Site, token: usize, block: usize) -> [f64; 4] {
        self.words(site, token, block).map(unit)
    }

    /// Standard normal.
    pub fn normal(&self, site: Site, token: usize, element: usize) -> f64 {
        box_muller(self.words(site, token, element / 2))[element % 2]
    }
}

fn unit(word: u32) -> f64 {
    f64::from(word >> 8) / f64::from(1 << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors that Random123 publishes (kat_vectors, philox4x32 10).
    #[test]
    fn philox_gives_the_published_words() {
        let check = |key: [u32; 2], counter, expected| {
            let key = u64::from(key[1]) << 32 | u64::from(key[0]);
            assert_eq!(philox4x32_10(key, counter), expected);
        };
        check([0; 2], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check(
            [u32::MAX; 2],
            [u32::MAX; 4],
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
        );
        check(
            [0xa409_3822, 0x299f_31d0],
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn normals_have_the_moments_of_a_normal() {
        const PAIRS: u64 = 100_000;
        let z: Vec<f64> = (0..PAIRS).flat_map(|pair| normals(7, 99, pair)).collect();
        let moment = |power: i32| z.iter().map(|z| z.powi(power)).sum::<f64>() / z.len() as f64;
        let moments = [1, 2, 3, 4].map(moment);
        for (found, expected) in moments.iter().zip([0.0, 1.0, 0.0, 3.0]) {
            assert!((found - expected).abs() < 0.05, "{moments:?}");
        }
        let neighbours = z.windows(2).map(|z| z[0] * z[1]).sum::<f64>() / z.len() as f64;
        assert!(neighbours.abs() < 0.01, "neighbours correlate by {neighbours}");
        assert_ne!(normals(7, 99, 0), normals(7, 100, 0));
        assert_ne!(normals(7, 99, 0), normals(8, 99, 0));
    }

    #[test]
    fn draws_differ_in_everything_they_depend_on() {
        let draw = Draw { seed: 5, step: 7, layer: 2, first_token: 100 };
        let mut seen = std::collections::BTreeSet::new();
        for site in [Site::Jitter, Site::Dropout, Site::Logits, Site::Second, Site::Table] {
            for other in [
                draw,
                Draw { seed: 6, ..draw },
                Draw { step: 8, ..draw },
                Draw { step: 7 + (1 << 32), ..draw },
                Draw { layer: 3, ..draw },
                Draw { first_token: 200, ..draw },
            ] {
                for (token, element) in [(0, 0), (0, 1), (0, 4), (1, 0)] {
                    seen.insert((other.normal(site, token, element) * 1e15) as i64);
                }
            }
        }
        assert_eq!(seen.len(), 5 * 6 * 4);
        let moved = Draw { first_token: 103, ..draw };
        assert_eq!(moved.uniform(Site::Jitter, 1, 9), draw.uniform(Site::Jitter, 4, 9));
        assert_eq!(draw.uniforms(Site::Jitter, 1, 2)[1], draw.uniform(Site::Jitter, 1, 9));
        let mean = (0..4000).map(|i| draw.uniform(Site::Second, i, 0)).sum::<f64>() / 4000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}
