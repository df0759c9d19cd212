//! Anything at any moment, to one job's loop: what must hold at every moment holds, and once
//! nothing fails any more the job trains. `PROPTEST_CASES` makes it more, `PROPTEST_RNG_SEED` tries
//! others, and `MOEJOB_STORY='1 2: 88 7, 0 6'` plays one again and tells all that is said: from one
//! node to two, then what happens, as a failure prints it.

#[path = "lead_world/mod.rs"]
#[allow(dead_code, reason = "what other tests of the loop ask of it")]
mod lead_world;
mod said;

use lead_world::wild::Wild;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// The longest patience is that of a job whose pods were refused, and it grows with each time.
const SECONDS: u64 = 3_000;

/// What happens, one after the other.
struct Story(Vec<(u8, u32)>);

impl std::fmt::Debug for Story {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = |(what, luck): &(u8, u32)| format!("{what} {luck}");
        f.write_str(&self.0.iter().map(word).collect::<Vec<_>>().join(", "))
    }
}

fn played(min: &str, max: &str, story: &Story) -> Result<(), String> {
    let mut wild = Wild::new(&[&format!("min={min}"), &format!("max={max}"), "spares=1"]);
    for (what, luck) in &story.0 {
        wild.happen(*what, *luck);
    }
    wild.calm(SECONDS)
}

/// One that somebody has asked for.
#[test]
fn a_story_again() {
    let Ok(text) = std::env::var("MOEJOB_STORY") else { return };
    let (sizes, story) = text.split_once(':').expect("MIN MAX: what happens");
    let (min, max) = sizes.trim().split_once(' ').expect("MIN MAX");
    let happens = |words: &str| {
        let (what, luck) = words.trim().split_once(' ').expect("two numbers");
        (what.parse().expect("a number"), luck.parse().expect("a number"))
    };
    let story = Story(story.split(',').map(happens).collect());
    played(min, max, &story).expect("it trains again");
}

fn stories() -> impl Strategy<Value = Story> {
    prop::collection::vec((0..100u8, any::<u32>()), 0..400).prop_map(Story)
}

fn asked<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(asked("PROPTEST_RNG_SEED").unwrap_or(15)),
        max_shrink_iters: 4_000,
        max_shrink_time: 40_000,
        ..ProptestConfig::with_cases(asked("PROPTEST_CASES").unwrap_or(40))
    })]

    #[test]
    fn whatever_happens_the_job_trains_again(
        sizes in prop::sample::select(vec![("1", "1"), ("1", "2"), ("2", "2"), ("1", "3")]),
        story in stories(),
    ) {
        let (min, max) = sizes;
        let outcome = played(min, max, &story);
        prop_assert!(outcome.is_ok(), "{}", outcome.unwrap_err());
    }
}
