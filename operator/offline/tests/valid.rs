//! Valid manifests of all sizes up to the limits, each planned as `moejob plan` does: in little
//! time and little memory, whatever is asked for.
//!
//! ```sh
//! MOEJOB_PLANNED=100000 PROPTEST_RNG_SEED=1 \
//!     cargo test --release -p moejob-offline --test valid -- --nocapture
//! ```

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "it measures itself")]

#[path = "../../plan/tests/measured/mod.rs"]
mod measured;

use measured::{Most, asked};
use moejob_manifest::Job;
use moejob_manifest::keys::Keys;
use moejob_manifest::problem::{Code, Problem};
use std::sync::Mutex;

/// Numbers of a seed, by an LCG of Knuth's: its upper bits are good enough to choose by.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }

    /// From 1 to `most`, each order of magnitude as often as the others.
    fn of_all_sizes(&mut self, most: u64) -> u64 {
        let digits = u64::from(most.ilog2()) + 1;
        let below = 1 << self.below(digits + 1);
        (1 + self.below(below)).min(most)
    }

    /// `name: word`, with one of the words, or in three of four cases nothing.
    fn maybe(&mut self, name: &str, words: &[&str]) -> String {
        let word = self.one_of(words);
        match self.below(4) {
            0 => format!(", {name}: {word}"),
            _ => String::new(),
        }
    }

    fn one_of<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len() as u64) as usize]
    }
}

/// A manifest that is often valid, one in eight of as many nodes and layers as there may be.
/// Bounds and rules of several fields together refuse the others.
fn manifest(dice: &mut Dice) -> String {
    let large = dice.below(8) == 0;
    let max = if large { 4_096 } else { dice.of_all_sizes(4_096) };
    let min = dice.of_all_sizes(if large { 64 } else { max });
    let nodes = match dice.below(5) {
        0 => "profile: cpu".to_string(),
        1 => format!("profile: cpu, devicesPerNode: {}", dice.of_all_sizes(64)),
        2 => "profile: nd-h200-v5".to_string(),
        3 => "profile: ndm-a100-v4".to_string(),
        _ => {
            let (devices, memory) = (dice.of_all_sizes(64), dice.of_all_sizes(192));
            format!("profile: custom, custom: {{ devices: {devices}, deviceMemory: {memory}Gi }}")
        }
    };
    let experts = dice.of_all_sizes(4_096);
    let layers_max = (65_536 / experts).min(512);
    let layers = if large { layers_max } else { dice.of_all_sizes(layers_max) };
    let per_token = dice.of_all_sizes(experts.min(32));
    let (shared, spares) = (dice.below(3), dice.below(3));
    let heads = 1 << dice.below(6);
    let optimizer = match dice.one_of(&["adamw", "none"]) {
        "adamw" => ", optimizer: { adamw: { learningRate: 1.0e-3 } }",
        _ => "",
    };
    let router = ["{ kind: switch }", "{ kind: expertChoice }", "{ bias: true }", "{ cosine: {} }"];
    let router = dice.maybe("router", &router);
    let dense = dice.maybe("denseLayers", &["[0], denseIntermediateSize: 4096"]);
    let training = [
        dice.maybe("recompute", &["selective", "experts", "full"]),
        dice.maybe("offload", &["none", "host"]),
        dice.maybe("microBatchSize", &["2", "8"]),
    ];
    let parallelism = [
        dice.maybe("expert", &["auto", "2", "8", "64"]),
        dice.maybe("expertSlices", &["2", "8"]),
        dice.maybe("exchange", &["flat", "hierarchical"]),
        dice.maybe("overlapDegree", &["1", "2", "4"]),
        dice.maybe("combinePreReduce", &["true", "false"]),
        dice.maybe("zero", &["2", "3"]),
    ];
    format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ {nodes}, min: {min}, max: {max}, spares: {spares} }}\n  model: {{ hiddenSize: {}, \
         numHiddenLayers: {layers}, numAttentionHeads: {heads}, experts: {{ count: {experts}, \
         perToken: {per_token}, intermediateSize: {}, shared: {shared} }}{router}{dense} }}\n  \
         data: {{ train: {{ text: {{ paths: [a] }} }}, sequenceLength: {} }}\n  training: {{ \
         steps: {}, globalBatchSize: {}{optimizer}{} }}\n  parallelism: {{ tensor: 1{} }}\n",
        64 << dice.below(8),
        16 << dice.below(9),
        128 << dice.below(8),
        dice.of_all_sizes(1 << 30),
        1 << dice.below(21),
        training.concat(),
        parallelism.concat(),
    )
}

/// What once took 194 MB: each of thousands of buckets had its own list of 32,768 ranks.
const MANY_BUCKETS: &str = "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: { name: a }\n\
    spec:\n  nodes: { profile: ndm-a100-v4, min: 4, max: 4096 }\n  model: { hiddenSize: 512, \
    numHiddenLayers: 512, numAttentionHeads: 4, experts: { count: 128, perToken: 3, \
    intermediateSize: 256 } }\n  data: { train: { text: { paths: [a] } }, sequenceLength: 2048 \
    }\n  training: { steps: 60000000, globalBatchSize: 131072 }\n";

/// What must hold of a plan that is shown is for other tests: here it is made, and not too dear.
#[test]
fn every_valid_manifest_is_planned_at_little_cost() {
    let (wanted, seed) = (asked("MOEJOB_PLANNED", 20), asked("PROPTEST_RNG_SEED", 1));
    let mut dice = Dice(seed);
    let (mut valid, mut drawn, mut too_dear) = (0u64, 0u64, 0u64);
    let most = Mutex::new(Most::NOTHING);
    while valid < wanted {
        drawn += 1;
        assert!(drawn < 100 + 50 * wanted, "{valid} of {drawn} are valid: too few");
        let text = if drawn == 1 { MANY_BUCKETS.into() } else { manifest(&mut dice) };
        let planned = measured::within(&most, "MOEJOB_PLANNED", text.as_bytes(), || {
            let job = Job::read(text.as_bytes())?;
            Ok(moejob_offline::text(&moejob_offline::outlook(&job, None, &Keys::default(), &[])))
        });
        let cost = |problems: Vec<Problem>| problems.iter().any(|one| one.code == Code::Cost);
        match planned {
            Ok(written) => {
                assert!(written.contains("parameters"), "{written}");
                valid += 1;
            }
            Err(problems) => too_dear += u64::from(cost(problems)),
        }
    }
    eprintln!("seed {seed}: {valid} planned of {drawn}; {too_dear} of the others cost too much");
    most.into_inner().expect("nobody else has it").tell();
}
