//! Routers that hold on to the experts of the position before: what a step's choices are, however
//! the step is cut; documents; what a user sees; where weights may go.

mod common;

use common::{Job, trainers};
use moe_worker::engine::forward::Pass;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::round::Round;
use moe_worker::state::snapshot::initialize;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{RouterConfig, RouterKind, Scoring};
use moejob_protocol::report::StepReport;

fn one() -> Layout {
    Layout::contiguous(Mesh::data_parallel(1, 1))
}

fn job(hysteresis: f64, change: impl Fn(&mut Job)) -> Job {
    let mut job = Job::new(one());
    job.config.model.initializer_range = 0.2;
    job.config.model.router.hysteresis = hysteresis;
    change(&mut job);
    job
}

fn train(job: &Job) -> Vec<StepReport> {
    let reports = job.run(&mut trainers(1), None).1;
    assert_eq!(reports.len() as u64, job.config.training.steps);
    reports
}

/// The first step of the same five sequences, one or five at a time: the same experts.
#[test]
fn a_step_chooses_the_same_however_it_is_cut() {
    let mut all = Vec::new();
    for kind in [RouterKind::TopK, RouterKind::Tutel] {
        for micro_batch in [1, 5] {
            let job = job(0.1, |job| {
                job.config.model.router.kind = kind;
                job.config.training.steps = 1;
                job.config.training.micro_batch_size = micro_batch;
            });
            let report = train(&job).remove(0);
            let switches = report.routing.expert_switches.expect("measured on processors");
            assert!(switches > 0.0 && switches < 1.0, "{switches}");
            all.push((report.routing.tokens_per_expert, switches));
        }
    }
    assert!(all.iter().all(|told| *told == all[0]), "{all:?}");
}

/// Switches along a text fall with the margin, to none, and training goes on.
#[test]
fn a_user_sees_fewer_switches() {
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        let measure = |hysteresis| {
            let job = job(hysteresis, |job| {
                job.config.model.router.scoring = scoring;
                job.config.training.steps = 30;
            });
            let reports = train(&job);
            assert!(reports[29].loss < reports[0].loss - 0.5, "{scoring:?}: {:?}", reports[29]);
            let last = reports[20..].iter().filter_map(|report| report.routing.expert_switches);
            last.sum::<f64>() / 10.0
        };
        let found = [0.0, 0.1, 0.3, 1000.0].map(measure);
        assert!(found[0] > 0.1, "{scoring:?}: {found:?}");
        assert!(found.windows(2).all(|pair| pair[1] < pair[0]), "{scoring:?}: {found:?}");
        println!("{scoring:?}: switches {found:.4?}");
        assert_eq!(found[3], 0.0, "{scoring:?}: the first position's experts stay");
    }
}

/// Two documents in one sequence, kept apart: the second is routed as it is alone.
#[test]
fn a_document_begins_anew() {
    let mut config = common::model();
    config.initializer_range = 0.3;
    config.router.hysteresis = 1000.0;
    let mut training = common::training();
    (training.global_batch_size, training.micro_batch_size) = (1, 1);
    let tokens = training.sequence_length as usize;
    let mut model = Model::new(&config, &one(), 0, &training, 1).expect("a small arena");
    initialize(&mut model, 3);
    let mut choices = |ids: &[u32], starts: Option<&[u32]>| -> Vec<Vec<u32>> {
        model.load_documents(ids, ids, starts);
        Pass::new(&mut model, &mut Links::solo(), &Round::alone(tokens)).forward();
        let layers = model.buffers.layers.iter().filter_map(|layer| layer.fused.as_ref());
        let chosen = layers.map(|moe| moe.router.gate.as_ref().expect("a gate").chosen);
        chosen.map(|chosen| model.device.read_vec(chosen)).collect()
    };
    let cut = 7;
    let mut parted = 0;
    for n in 0..20 {
        let ids: Vec<u32> = (0..tokens as u32).map(|id| (id * id + 31 * n) % 256).collect();
        let start = |at: usize| if at < cut { 0 } else { cut as u32 };
        let starts: Vec<u32> = (0..tokens).map(start).collect();
        // The second document first, whatever is behind it.
        let alone = [&ids[cut..], &ids[..cut]].concat();
        let (packed, alone) = (choices(&ids, Some(&starts)), choices(&alone, None));
        for (packed, alone) in packed.iter().zip(&alone) {
            let (first, second) = packed.split_at(2 * cut);
            assert_eq!(second, &alone[..second.len()], "text {n}");
            for document in [first, second] {
                let held = document.chunks(2).all(|experts| *experts == document[..2]);
                assert!(held, "text {n}: {document:?}");
            }
            parted += usize::from(first[..2] != second[..2]);
        }
    }
    assert!(parted > 5, "{parted} of 40 pairs of documents differ");
}

#[test]
fn weights_tell_whether_they_were_trained_with_it() {
    let model = |hysteresis| {
        let mut model = common::model();
        model.router.hysteresis = hysteresis;
        model
    };
    let differences = |theirs, ours| -> Vec<String> {
        let problems = moe_worker::hf::differences(&model(theirs), &model(ours));
        problems.into_iter().map(|problem| format!("{}: {}", problem.what, problem.why)).collect()
    };
    assert!(differences(0.0, 0.2).is_empty(), "a job may begin to hold");
    assert!(differences(0.2, 0.2).is_empty());
    let told = "model.router.hysteresis: 0.2 in the weights, null in the job";
    assert_eq!(differences(0.2, 0.0), [told]);
    // A field that stands on one side alone is a difference whichever side it is.
    let hash = |seed| {
        let mut model = model(0.0);
        model.router =
            RouterConfig { kind: RouterKind::Hash, hash_seed: seed, ..RouterConfig::default() };
        model
    };
    for (theirs, ours) in [(0, 5), (5, 0)] {
        let problems = moe_worker::hf::differences(&hash(theirs), &hash(ours));
        assert_eq!(problems.len(), 1, "{theirs}, {ours}: {problems:?}");
        assert_eq!(problems[0].what, "model.router.hashSeed");
    }
}

/// Specs of before this option read as they did.
#[test]
fn earlier_configurations_have_none() {
    let config = RouterConfig::default();
    let text = serde_json::to_string(&config).expect("json");
    assert!(!text.contains("hysteresis"), "{text}");
    let read: RouterConfig = serde_json::from_str(&text).expect("its own text");
    assert_eq!(read, config);
    let with = RouterConfig { hysteresis: 0.5, ..config };
    let text = serde_json::to_string(&with).expect("json");
    assert_eq!(serde_json::from_str::<RouterConfig>(&text).expect("its own text"), with);
    assert_eq!(with.beyond_plain(), Some("hysteresis"));
}
