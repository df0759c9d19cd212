//! Both sides of the edge of each rule about a number, and what the steps then do.

use moejob_manifest::Job;

const BASE: &str = include_str!("../manifests/base.yaml");

fn read(edits: &[(&str, &str)]) -> Result<Job, Vec<String>> {
    let edited = edits.iter().fold(BASE.to_string(), |text, (old, new)| {
        assert!(text.contains(old), "{old}");
        text.replacen(old, new, 1)
    });
    let paths = |problems: Vec<moejob_manifest::problem::Problem>| {
        problems.into_iter().map(|problem| problem.path).collect()
    };
    Job::read(edited.as_bytes()).map_err(paths)
}

/// What is replaced, by what is allowed just so, by what no longer is, and the field that is named.
const EDGES: &[(&str, &str, &str, &str)] = &[
    ("max: 4", "max: 1", "max: 0", "spec.nodes.max"),
    ("min: 1, max: 4", "min: 4, max: 4", "min: 4, max: 3", "spec.nodes.min"),
    // A step has 4 micro-batches.
    ("max: 4", "max: 4", "max: 5", "spec.nodes.max"),
    ("perToken: 2", "perToken: 8", "perToken: 9", "spec.model.experts.perToken"),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    numKeyValueHeads: 2",
        "hiddenSize: 64\n    numKeyValueHeads: 4",
        "spec.model.numKeyValueHeads",
    ),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { groups: 8, topkGroups: 8 }",
        "hiddenSize: 64\n    router: { groups: 8, topkGroups: 9 }",
        "spec.model.router.topkGroups",
    ),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { groups: 4, topkGroups: 1 }",
        "hiddenSize: 64\n    router: { groups: 8, topkGroups: 1 }",
        "spec.model.router.topkGroups",
    ),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    denseLayers: [1]\n    denseIntermediateSize: 8",
        "hiddenSize: 64\n    denseLayers: [2]\n    denseIntermediateSize: 8",
        "spec.model.denseLayers",
    ),
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    vocabSize: 256",
        "hiddenSize: 64\n    vocabSize: 255",
        "spec.model.vocabSize",
    ),
    (
        "tokenizer: bytes",
        "tokenizer: bytes\n    endOfDocument: 255",
        "tokenizer: bytes\n    endOfDocument: 256",
        "spec.data.endOfDocument",
    ),
    (
        "  checkpoint:",
        "  parallelism: { expert: 4 }\n  checkpoint:",
        "  parallelism: { expert: 5 }\n  checkpoint:",
        "spec.parallelism.expert",
    ),
    (
        "  checkpoint:",
        "  recovery: { heartbeatTimeout: 1s }\n  checkpoint:",
        "  recovery: { heartbeatTimeout: 999ms }\n  checkpoint:",
        "spec.recovery.heartbeatTimeout",
    ),
    (
        "  checkpoint:",
        "  recovery: { window: 720h }\n  checkpoint:",
        "  recovery: { window: 721h }\n  checkpoint:",
        "spec.recovery.window",
    ),
    ("warmupSteps: 10", "warmupSteps: 99", "warmupSteps: 100", WARMUP),
    (
        "minLearningRate: 3.0e-4",
        "minLearningRate: 3.0e-3",
        "minLearningRate: 3.1e-3",
        "spec.training.schedule.cosine.minLearningRate",
    ),
];
const WARMUP: &str = "spec.training.schedule.cosine.warmupSteps";

#[test]
fn every_rule_about_a_number_holds_from_its_edge_on() {
    for (old, inside, outside, path) in EDGES {
        assert!(read(&[(old, inside)]).is_ok(), "{inside}: {:?}", read(&[(old, inside)]));
        assert_eq!(read(&[(old, outside)]).expect_err(outside), [*path], "{outside}");
    }
}

/// A warmup is allowed if and only if some step has the peak.
#[test]
fn the_rate_reaches_its_peak_wherever_a_warmup_is_allowed() {
    for kind in ["constant", "linear", "cosine"] {
        for steps in [1_u64, 2, 3, 20] {
            for warmup in 0..=steps + 1 {
                let schedule = format!("schedule: {{ {kind}: {{ warmupSteps: {warmup} }} }}");
                let typed = "schedule: { cosine: { warmupSteps: 10, minLearningRate: 3.0e-4 } }";
                let steps_typed = format!("steps: {steps}");
                let edits = [("steps: 100", &steps_typed[..]), (typed, &schedule[..])];
                // What the steps do is asked of a job that is valid in any case.
                let mut job = read(&[]).expect("the base");
                job.training.steps = steps;
                let allowed = read(&edits);
                if let Ok(allowed) = &allowed {
                    job = allowed.clone();
                } else {
                    use moejob_protocol::config::Schedule;
                    job.training.schedule = Schedule::Constant { warmup_steps: warmup };
                }
                let peak = job.training.adamw.learning_rate;
                let rates: Vec<f64> =
                    (0..steps).map(|step| job.training.learning_rate(step)).collect();
                let reaches = rates.iter().any(|rate| (rate / peak - 1.0).abs() < 1e-12);
                assert_eq!(allowed.is_ok(), reaches, "{kind}, {warmup} of {steps}: {rates:?}");
                // Where nothing is said, the last step has the minimum, too.
                if let Ok(job) = allowed
                    && kind != "constant"
                    && steps > 1
                {
                    let last = rates.last().copied().unwrap_or(peak);
                    let least = peak / 10.0;
                    let falls = (last - least).abs() < 1e-12;
                    let warned = job.warnings.iter().any(|of| of.path.ends_with(".warmupSteps"));
                    assert_eq!(falls, !warned, "{kind}, {warmup} of {steps}: {rates:?}");
                }
            }
        }
    }
}

/// What is replaced, by what happens as it is asked for, by what does not, and what is said of it.
const UNWISE: &[(&str, &str, &str, &str)] = &[
    (
        "hiddenSize: 64",
        "hiddenSize: 64\n    router: { warmupSteps: 99 }",
        "hiddenSize: 64\n    router: { warmupSteps: 100 }",
        "spec.model.router.warmupSteps",
    ),
    (
        "microBatchSize: 2",
        "microBatchSize: 2\n    recompute: full\n    recomputeLayers: 2",
        "microBatchSize: 2\n    recompute: full\n    recomputeLayers: 3",
        "spec.training.recomputeLayers",
    ),
    (
        "everySteps: 20, keep: 3",
        "everySteps: 50, keep: 3, keepBest: true",
        "everySteps: 20, keep: 3, keepBest: true",
        "spec.checkpoint.everySteps",
    ),
    (
        "tokenizer: bytes",
        "tokenizer: bytes\n    validation: { everySteps: 0 }",
        "tokenizer: bytes\n    validation: { everySteps: 0 }\n    # keepBest",
        "spec.checkpoint.keepBest",
    ),
    (
        "  checkpoint:",
        "  recovery: { memoryEverySteps: 100 }\n  checkpoint:",
        "  recovery: { memoryEverySteps: 101 }\n  checkpoint:",
        "spec.recovery.memoryEverySteps",
    ),
];

#[test]
fn what_never_happens_is_said_from_its_edge_on() {
    let said = |old: &str, new: &str| -> Vec<String> {
        let best = ("keep: 3 }", "keep: 3, keepBest: true }");
        let edits = match new.contains("# keepBest") {
            true => vec![(old, new), best],
            false => vec![(old, new)],
        };
        let job = read(&edits).unwrap_or_else(|problems| panic!("{new}: {problems:?}"));
        job.warnings.into_iter().map(|warning| warning.path).collect()
    };
    for (old, wise, unwise, path) in UNWISE {
        assert_eq!(said(old, wise), [""; 0], "{wise}");
        assert_eq!(said(old, unwise), [*path], "{unwise}");
    }
}
