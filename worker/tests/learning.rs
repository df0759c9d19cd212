//! Every parameter of every router learns, or the manifest's reader has said which one does not.
//! Whether it learns is seen by the mean of its gradients, which AdamW keeps.

mod common;

use common::Job;
use moe_worker::checkpoint::{Disk, verify};
use moejob_manifest::Job as Manifest;
use moejob_protocol::checkpoint::{CheckpointManifest, Part, directory_name};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use std::path::Path;

const STEPS: u64 = 3;
/// Of a gradient that is zero by algebra rounding is left.
const NOTHING: f32 = 1e-12;

fn manifest(top_k: u32, router: &str) -> Manifest {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
         nodes: {{ profile: cpu }}\n  model: {{ hiddenSize: 16, numHiddenLayers: 2, \
         numAttentionHeads: 2, initializerRange: 0.2, experts: {{ count: 4, perToken: {top_k}, \
         intermediateSize: 8 }}, router: {{ {router} }} }}\n  data: {{ train: {{ text: {{ paths: \
         [a] }} }}, sequenceLength: 16 }}\n  training: {{ steps: {STEPS}, globalBatchSize: 5 }}\n"
    );
    Manifest::read(text.as_bytes()).unwrap_or_else(|found| panic!("{router}: {found:?}"))
}

/// Parameters whose gradient was never anything. Corrections follow loads, and no gradient.
fn stuck(model: &moejob_protocol::ModelConfig) -> Vec<String> {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    job.config.model = model.clone();
    job.config.training.steps = STEPS;
    let _ = job.whole();
    let last = job.location().join(directory_name(STEPS));
    let manifest = verify(&Disk::real(), &last).expect("a whole checkpoint");
    let moments = manifest.tensors.iter().filter(|tensor| tensor.part == Part::Moment1);
    moments
        .filter(|tensor| !tensor.name.ends_with("e_score_correction_bias"))
        .filter(|tensor| largest(&last, &manifest, &tensor.pieces) < NOTHING)
        .map(|tensor| tensor.name.clone())
        .collect()
}

fn largest(
    folder: &Path,
    manifest: &CheckpointManifest,
    pieces: &[moejob_protocol::checkpoint::Piece],
) -> f32 {
    let of = |piece: &moejob_protocol::checkpoint::Piece| {
        let file = &manifest.files[piece.file as usize];
        let bytes = std::fs::read(folder.join(&file.name)).expect("a shard");
        let bytes = &bytes[piece.begin as usize..piece.end as usize];
        let word = |b: &[u8]| f32::from_le_bytes(b.try_into().expect("4 bytes"));
        bytes.chunks_exact(4).map(|b| word(b).abs()).fold(0.0, f32::max)
    };
    pieces.iter().map(of).fold(0.0, f32::max)
}

#[test]
fn what_never_learns_is_told() {
    let none = "auxLossCoef: 0, zLossCoef: 0";
    let (quiet, told) = (&[][..], &["router.normTopkProb"][..]);
    // Experts a token, the router, the fields that are told, and what of the parameters is stuck.
    let cases: &[(u32, &str, &[&str], &str)] = &[
        (2, none, quiet, ""),
        (1, &format!("normTopkProb: false, {none}"), quiet, ""),
        (1, none, told, "gate.weight"),
        (1, "", told, ""),
        (1, "auxLossCoef: 0", told, ""),
        (1, &format!("frozen: true, {none}"), quiet, "gate.weight"),
        (1, &format!("scoring: sigmoid, {none}"), told, "gate.weight"),
        (1, &format!("scoring: sigmoid, normTopkProb: false, {none}"), quiet, ""),
        (2, &format!("scoring: sigmoid, bias: true, groups: 2, topkGroups: 1, {none}"), quiet, ""),
        (1, "kind: switch, capacityFactor: 4, auxLossCoef: 0", quiet, ""),
        (1, "kind: switch, capacityFactor: 4, normTopkProb: true, auxLossCoef: 0", told, "gate"),
        (2, "kind: gshard, capacityFactor: 4, auxLossCoef: 0", quiet, ""),
        (1, "kind: tutel, capacityFactor: 4, cosine: { projectionSize: 6 }", quiet, ""),
        (2, "kind: tutel, gateNoise: 1, balanceLoss: loadImportance", quiet, ""),
        (1, "kind: noisyTopK, auxLossCoef: 0", told, "gate"),
        (1, "kind: noisyTopK, normTopkProb: false, auxLossCoef: 0", quiet, ""),
        (1, "kind: noisyTopK", told, ""),
        (2, "kind: noisyTopK, auxLossCoef: 0", quiet, ""),
        (2, "kind: topP, entropyLossCoef: 0, auxLossCoef: 0", quiet, ""),
        (1, "kind: topP, normTopkProb: true, entropyLossCoef: 0, auxLossCoef: 0", told, "gate"),
        (1, "kind: expertChoice", quiet, ""),
        (1, "kind: hash", quiet, ""),
        (2, "capacityFactor: 0.01, evalCapacityFactor: 0", &["router.capacityFactor"], "expert"),
        (2, "scale: 0", &["router.scale"], "expert"),
        (2, "warmupSteps: 3", &["router.warmupSteps"], "expert"),
        (
            2,
            "cosine: { projectionSize: 6, initialTemperature: 0.01 }",
            &["router.cosine.initialTemperature"],
            "temperature",
        ),
        (2, "cosine: { projectionSize: 6, initialTemperature: 0.0101 }", quiet, ""),
    ];
    for (top_k, router, fields, part) in cases {
        let manifest = manifest(*top_k, router);
        let found: Vec<&str> = (manifest.warnings.iter())
            .map(|of| of.path.strip_prefix("spec.model.").unwrap_or(&of.path))
            .collect();
        assert_eq!(found, *fields, "{top_k} a token, {router}");
        let stuck = stuck(&manifest.model);
        match part.is_empty() {
            true => assert_eq!(stuck, [""; 0], "{top_k} a token, {router}"),
            false => {
                let of_part = stuck.iter().all(|name| name.contains(part));
                assert!(of_part && !stuck.is_empty(), "{top_k} a token, {router}: {stuck:?}");
            }
        }
        let never = "the router never learns";
        let never = manifest.warnings.iter().any(|of| of.advice.contains(never));
        assert_eq!(never, part.starts_with("gate") && !fields.is_empty(), "{router}");
    }
}
