//! The job of the tests.

use super::Setup;
use moejob_manifest::job::{Job, Venue};
use moejob_manifest::profile::Profiles;
use moejob_plan::launch::{self, Places};
use moejob_plan::preflight::Standard;
use moejob_protocol::config::WorkerConfig;
use moejob_protocol::pair::PAIR_CHECK;

/// A real job's configuration, from a manifest.
pub fn template(setup: &Setup) -> WorkerConfig {
    let manifest = format!(
        "apiVersion: moejob.dev/v1alpha1\n\
         kind: MoeJob\n\
         metadata: {{ name: j }}\n\
         spec:\n\
         \x20 nodes: {{ profile: cpu, min: 1, max: 1 }}\n\
         \x20 model: {{ hiddenSize: {}, numHiddenLayers: 2, numAttentionHeads: {}, \
         experts: {{ count: {}, perToken: 1, intermediateSize: {} }} }}\n\
         \x20 data: {{ train: {{ text: {{ paths: [a.txt] }} }}, tokenizer: bytes, \
         sequenceLength: 64 }}\n\
         \x20 training: {{ steps: {}, globalBatchSize: 64 }}\n",
        64 * setup.width,
        2 * setup.width,
        setup.experts,
        64 * setup.width,
        setup.steps
    );
    let job = Job::read(manifest.as_bytes()).expect("the manifest of the tests is valid");
    let places = Places {
        root: "/".to_string(),
        checkpoints: "/c".to_string(),
        records: "/r".to_string(),
        exclude: Vec::new(),
    };
    launch::template(&job, Venue::Local, "uid", &places)
}

/// What nodes are measured against where they are; `pairs`: also beside each other.
pub fn standard(pairs: bool) -> Box<Standard> {
    let profile = Profiles::shipped().get("ndm-a100-v4").expect("a profile");
    let mut standard = Standard::of(profile);
    if !pairs {
        standard.expect.remove(PAIR_CHECK);
    }
    Box::new(standard)
}
