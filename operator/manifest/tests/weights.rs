//! A job that starts from weights: what is not typed stands in them.

use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_protocol::ModelConfig;

const MANIFEST: &str = "\
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: from-weights }
spec:
  nodes: { min: 1, max: 1 }
  model:
    from: { path: weights/small }
MODEL  data:
    train: { text: { paths: [a.txt] } }
    sequenceLength: 16
  training: { steps: 3 }
";

fn read(typed: &str, weights: Option<&ModelConfig>) -> Result<Job, String> {
    let text = MANIFEST.replace("MODEL", typed);
    Job::read_with(text.as_bytes(), weights, Profiles::shipped()).map_err(|problems| {
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    })
}

/// Every field differs from its default.
fn weights() -> ModelConfig {
    let preset =
        "    preset: deepseek-v3\n    vocabSize: 512\n    clipQkv: 2.5\n    attentionBias: true\n";
    let mut model = read(preset, None).expect("a preset has all").model;
    model.rms_norm_eps = 1e-3;
    model.rope_theta = 5e5;
    model.tie_word_embeddings = true;
    model.initializer_range = 0.3;
    model.experts.routed_headroom = 2.0;
    model.router.bias_update_rate = 0.5;
    model.router.norm_topk_prob = false;
    model
}

#[test]
fn what_is_not_typed_is_taken_from_the_weights() {
    let weights = weights();
    let job = read("", Some(&weights)).expect("the weights have all");
    assert_eq!(job.model, weights);
    assert_eq!(job.model_from.as_deref(), Some("weights/small"));
    let typed = "    router: { auxLossCoef: 0.25 }\n    ropeTheta: 777.0\n";
    let job = read(typed, Some(&weights)).expect("good");
    let mut expected = weights.clone();
    expected.router.aux_loss_coef = 0.25;
    expected.rope_theta = 777.0;
    assert_eq!(job.model, expected);
}

#[test]
fn without_the_weights_the_dimensions_are_needed() {
    let problems = read("", None).expect_err("nothing says the dimensions");
    for field in ["spec.model.hiddenSize", "spec.model.experts.count"] {
        assert!(problems.contains(field), "{problems}");
    }
    assert!(read("    preset: tiny\n", None).is_ok());
}
