//! Experts in slices: for one number of slices the same bits whatever the ranks, for another one
//! the same but for the order of sums; and states, weights and files do not know of slices.

mod common;
#[path = "common/hf.rs"]
mod fixture;

use common::{Job, bits, sources, trainers};
use fixture::{Fixture, values};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::attempt::trainer::Trainer;
use moe_worker::checkpoint::{self, Disk, Growth, grow, grown};
use moe_worker::engine::model::Model;
use moe_worker::hf::{self, Options, Weights, export};
use moe_worker::state::snapshot::{cut, initialize, shard_runs};
use moejob_protocol::ModelConfig;
use moejob_protocol::checkpoint::{Part, directory_name};
use moejob_protocol::config::{Precision, Recompute, Resume, TrainingConfig};
use moejob_protocol::layout::{Layout, Placement};
use moejob_protocol::memory::{Shape, rank_memory};
use moejob_protocol::rows::row_counts;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{AuxLossScope, BalanceLoss, RouterKind};
use moejob_protocol::report::StepReport;
use std::collections::BTreeMap;
use std::path::Path;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// A job of so many slices of each expert.
fn job(layout: Layout, slices: u32, change: &impl Fn(&mut Job)) -> Job {
    let mut job = Job::new(layout);
    job.config.training.steps = 3;
    change(&mut job);
    job.config.model.experts.slices = slices;
    job
}

/// For each number of slices: on all of these layouts the bits of one rank.
fn check(name: &str, layouts: &[Layout], change: impl Fn(&mut Job)) {
    for slices in [2, 4] {
        let one = job(layout(1, 1), slices, &change).whole();
        for layout in layouts {
            let what = format!("{name}, {slices} slices, {layout:?}");
            assert!(layout.mesh.ep <= 4 * slices, "{what}: a rank has nothing to hold");
            assert_eq!(job(layout.clone(), slices, &change).whole(), one, "{what}");
        }
    }
}

#[test]
fn one_to_eight_ranks_give_the_same_bits() {
    // Nine micro-batches: uneven for all but one. Four experts in eight slices on eight ranks; on
    // three ranks two have parts of one expert.
    let layouts = [(2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (8, 8)];
    check("plain", &layouts.map(|(dp, ep)| layout(dp, ep)), |job| {
        job.config.training.global_batch_size = 9;
    });
}

#[test]
fn ranks_without_tokens_and_slices_in_any_order() {
    check("idle", &[layout(6, 6)], |job| job.config.training.global_batch_size = 4);
    // The two slices of an expert on one rank, and apart.
    let order = vec![vec![0, 1, 2, 7, 3, 4, 5, 6]; 2];
    let placed = Layout { placement: Placement::Ordered(order), ..layout(4, 4) };
    let one = job(layout(1, 1), 2, &|_| {}).whole();
    assert_eq!(job(placed, 2, &|_| {}).whole(), one);
}

#[test]
fn other_routers_and_what_is_computed_again() {
    let layouts = [layout(3, 3), layout(4, 4)];
    check("capacity", &layouts, |job| {
        let router = &mut job.config.model.router;
        (router.kind, router.capacity_factor) = (RouterKind::Tutel, 1.1);
    });
    check("experts choose", &layouts, |job| {
        let router = &mut job.config.model.router;
        (router.kind, router.balance_loss) = (RouterKind::ExpertChoice, BalanceLoss::Kl);
        router.norm_topk_prob = false;
    });
    check("one balance of all layers", &layouts, |job| {
        job.config.model.router.aux_loss_scope = AuxLossScope::Hf;
    });
    check("like DeepSeek", &layouts, |job| common::route_like_deepseek(&mut job.config.model));
    for recompute in [Recompute::Experts, Recompute::Full] {
        check("again", &layouts, |job| job.config.training.recompute = recompute);
    }
}

/// A rank is lost, and later others come: the bits of an undisturbed run.
#[test]
fn a_lost_rank_and_newcomers_change_nothing() {
    let change = |job: &mut Job| {
        job.config.training.steps = 8;
        job.config.training.global_batch_size = 9;
        job.config.recovery.memory_every_steps = 1;
    };
    let one = job(layout(1, 1), 2, &change).whole().0;
    let was_lost = || {
        let rows = job(layout(8, 8), 2, &change).losing_the_last(layout(7, 7), |_| {});
        rows.map(|rows| assert_eq!(rows, one)).is_some()
    };
    assert!((0..5).any(|_| was_lost()), "never cut off in time");
    // Growing and shrinking, also below the number of experts, from memory.
    for path in [[(2, 2, 2), (8, 8, 5), (7, 7, 8)], [(1, 1, 2), (4, 4, 5), (3, 3, 8)]] {
        let mut job = job(layout(1, 1), 2, &change);
        let (mut group, mut rows) = (Vec::new(), Vec::new());
        for (at, (dp, ep, until)) in path.into_iter().enumerate() {
            let earlier = std::mem::replace(&mut job.config.layout, layout(dp, ep));
            job.config.attempt = at as u32 + 1;
            group.resize_with(dp as usize, Trainer::new);
            if at > 0 {
                let (step, attempt) = (path[at - 1].2, at as u32);
                let sources = sources(&group, attempt, step, earlier.mesh.world());
                job.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
            }
            let (_, reports) = job.run(&mut group, Some(until).filter(|until| *until < 8));
            rows.extend(bits(&reports));
        }
        assert_eq!(rows, one, "{path:?}");
    }
}

fn in_f64(job: &mut Job) {
    job.config.training.precision = Precision::Fp64;
    job.config.training.steps = 10;
}

fn reports(job: &Job) -> Vec<StepReport> {
    let (ends, reports) = job.run(&mut trainers(job.config.layout.mesh.world()), None);
    let completed = AttemptEnd::Completed { step: job.config.training.steps };
    assert!(ends.iter().all(|end| *end == completed), "{ends:?}");
    reports
}

/// Losses, norms and loads of two runs, which differ by the order of sums.
fn near(found: &[StepReport], expected: &[StepReport], limit: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.step, expected.step, "{what}");
        for (found, expected) in [
            (found.loss, expected.loss),
            (found.aux_loss, expected.aux_loss),
            (found.grad_norm, expected.grad_norm),
        ] {
            let away = (found - expected).abs() / expected.abs();
            assert!(away < limit, "{what}: {found} for {expected}: {away:e}");
        }
        let [found, expected] = [found, expected].map(|of| of.expert_imbalance);
        assert_eq!(found, expected, "{what}: what people are told");
    }
}

/// Ten steps in f64: what slices change are last digits.
#[test]
fn losses_are_those_of_whole_experts() {
    // With small weights not even these would change.
    let large = |job: &mut Job| {
        in_f64(job);
        job.config.model.initializer_range = 0.3;
    };
    let whole = reports(&job(layout(2, 2), 1, &large));
    for slices in [2, 4, 8] {
        for (dp, ep) in [(1, 1), (4, 4)] {
            let found = reports(&job(layout(dp, ep), slices, &large));
            near(&found, &whole, 1e-9, &format!("{slices} slices on {dp} {ep}"));
            assert_ne!(bits(&found), bits(&whole), "{slices}: nothing was sliced");
        }
    }
}

/// Numbers of a state by part and by the name of the whole expert's tensor.
type State = BTreeMap<(Part, String), Vec<f64>>;

/// What the ranks of `layout` own, put together as if experts were whole, once `fill` was done.
fn state(
    config: &ModelConfig,
    training: &TrainingConfig,
    layout: &Layout,
    fill: impl Fn(&mut Model),
) -> State {
    let mut all = State::new();
    for rank in 0..layout.mesh.world() {
        let mut model = Model::new(config, layout, rank, training, 1).expect("a small arena");
        fill(&mut model);
        let mut bytes = Vec::new();
        cut(&mut model, &mut bytes).expect("a processor");
        let params = config.params();
        for run in shard_runs(config, &params, layout, rank, 8).0 {
            let param = &params[run.index];
            let of_whole = config.cut(param);
            let name = of_whole.as_ref().map_or(&param.name, |cut| &cut.whole);
            let times = if of_whole.is_some() { config.slices().each } else { 1 };
            let len = (run.elements.end - run.elements.start) as usize;
            let parts = bytes[run.offset..].chunks_exact(8 * len);
            for (part, values) in Part::ALL.into_iter().zip(parts) {
                let whole = all.entry((part, name.clone())).or_insert_with(|| {
                    vec![f64::NAN; (param.numel() * u64::from(times)) as usize]
                });
                for (element, value) in run.elements.clone().zip(values.chunks_exact(8)) {
                    let at = of_whole.as_ref().map_or(element, |cut| cut.element(element));
                    let value = f64::from_le_bytes(value.try_into().expect("eight bytes"));
                    assert!(whole[at as usize].is_nan(), "{name}: element {at} is owned twice");
                    whole[at as usize] = value;
                }
            }
        }
    }
    let missing = all.iter().find(|(_, values)| values.iter().any(|value| value.is_nan()));
    assert_eq!(missing, None, "somebody owns every element");
    all
}

/// Widths of which a rank owns parts: several blocks of 4,096 elements a matrix.
fn wide(job: &mut Job) {
    in_f64(job);
    let model = &mut job.config.model;
    (model.hidden_size, model.head_dim, model.experts.intermediate_size) = (64, 32, 512);
    job.config.training.steps = 4;
}

#[test]
fn initial_weights_are_the_same_numbers() {
    let of = |slices, layout: &Layout| {
        let job = job(layout.clone(), slices, &wide);
        let (model, training) = (&job.config.model, &job.config.training);
        state(model, training, layout, |model| initialize(model, 5))
    };
    let whole = of(1, &layout(1, 1));
    for slices in [2, 4, 8] {
        for layout in [layout(1, 1), layout(4, 2), layout(4, 4), layout(2, 2)] {
            assert!(of(slices, &layout) == whole, "{slices} slices on {layout:?}");
        }
    }
    let name = "model.layers.1.mlp.experts.3.down_proj.weight".to_string();
    let values = &whole[&(Part::Master, name)];
    let mean = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
    assert!((mean.sqrt() - 0.02).abs() < 0.001, "{}", mean.sqrt());
}

/// A checkpoint of any number of slices is that of any other, element by element, moments as well;
/// and training goes on from it.
#[test]
fn checkpoints_are_read_with_any_number_of_slices() {
    for (from, to) in [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (2, 2)] {
        let mut job = job(layout(4, 4), from, &wide);
        reports(&job);
        let directory = job.location().join(directory_name(4));
        let manifest = checkpoint::verify(&Disk::real(), &directory).expect("a checkpoint");
        assert_eq!(manifest.model.slices().each, from);
        let read = |slices, layout: &Layout| {
            let model = job.config.model.in_slices(slices);
            state(&model, &job.config.training, layout, |model| {
                checkpoint::load(&Disk::real(), &directory, &manifest, model).expect("whole");
            })
        };
        let expected = read(from, &layout(1, 1));
        for layout in [layout(1, 1), layout(4, 2), layout(3, 3)] {
            assert!(read(to, &layout) == expected, "{from} to {to} on {layout:?}");
        }
        // Steps 5 and 6, with and without another number.
        (job.config.attempt, job.config.training.steps) = (2, 6);
        job.config.resume = Resume::Checkpoint { step: 4, name: directory_name(4) };
        job.config.layout = layout(2, 2);
        let mut go_on = |slices: u32, place: &str| {
            let run = job.folder.path().join(place);
            let location = run.join("checkpoints");
            copy_files(&directory, &location.join(directory_name(4)));
            job.config.model.experts.slices = slices;
            job.config.checkpoint.location = location.display().to_string();
            job.config.checkpoint.records = run.display().to_string();
            reports(&job)
        };
        let [expected, found] = [go_on(from, "one"), go_on(to, "other")];
        near(&found, &expected, 1e-9, &format!("{from} to {to}"));
    }
}

fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
    }
}

/// Damage is found where slices are put together, too.
#[test]
fn a_damaged_slice_is_not_read() {
    let job = job(layout(2, 2), 2, &wide);
    reports(&job);
    let directory = job.location().join(directory_name(4));
    let manifest = checkpoint::verify(&Disk::real(), &directory).expect("a checkpoint");
    let shard = directory.join(&manifest.files[1].name);
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let last = bytes.len() - 9;
    bytes[last] ^= 1;
    std::fs::write(&shard, bytes).expect("damaged");
    let whole = job.config.model.in_slices(1);
    let mut model = Model::new(&whole, &layout(1, 1), 0, &job.config.training, 1).expect("memory");
    let refusal = checkpoint::load(&Disk::real(), &directory, &manifest, &mut model);
    let refusal = refusal.expect_err("it is damaged").to_string();
    assert!(refusal.contains("BLAKE3"), "{refusal}");
}

fn open(path: &Path) -> Weights {
    Weights::open(path).unwrap_or_else(|refusal| panic!("{refusal}"))
}

/// Parameters and their bytes.
fn stored(weights: &Weights) -> BTreeMap<String, Vec<u8>> {
    let of = |(index, param): (usize, &moejob_protocol::model::Param)| {
        let mut all = Vec::new();
        let mut take = |start: u64, bytes: &[u8]| {
            assert_eq!(start as usize * weights.dtype(index).size(), all.len());
            all.extend_from_slice(bytes);
            Ok(())
        };
        weights.stream(index, &mut take).expect("good weights");
        (param.name.clone(), all)
    };
    weights.params().iter().enumerate().map(of).collect()
}

/// A Hugging Face directory is read into slices, and what is exported of them is whole.
#[test]
fn hugging_face_knows_of_no_slices() {
    let folder = tempfile::tempdir().expect("a folder");
    let change = |job: &mut Job| {
        wide(job);
        job.config.model.tie_word_embeddings = false;
    };
    let whole = job(layout(1, 1), 1, &change);
    let given = folder.path().join("given");
    Fixture::new(&whole.config.model, fixture::Layout::Letters, "BF16").write(&given, 2);
    let expected = stored(&open(&given));
    for slices in [1, 2, 8] {
        let mut job = job(layout(4, 4), slices, &change);
        let training = job.config.training.clone();
        for layout in [layout(1, 1), layout(4, 2)] {
            let found = state(&job.config.model, &training, &layout, |model| {
                hf::load(&open(&given), model).expect("its own model");
            });
            for param in whole.config.model.params() {
                let rounded = |x: f32| half::bf16::from_f32(x).to_f64();
                let values = values(&param).into_iter().map(rounded);
                let found = &found[&(Part::Master, param.name.clone())];
                assert!(values.eq(found.iter().copied()), "{slices} slices: {}", param.name);
            }
        }
        // What a job that learns nothing leaves is what it was given.
        job.config.model_from = Some(given.display().to_string());
        job.config.training.adamw.learning_rate = 0.0;
        job.config.training.steps = 1;
        reports(&job);
        let checkpoint = open(&job.location());
        assert_eq!(checkpoint.params(), open(&given).params(), "{slices} slices");
        let out = folder.path().join(format!("exported-{slices}"));
        let options = Options { dtype: Some(moejob_kernels::DType::Bf16), like: None };
        export(&checkpoint, &out, options, &mut |_, _| {}).expect("room on the disk");
        assert!(fixture::tensors(&out) == fixture::tensors(&given), "{slices} slices");
        assert_eq!(stored(&open(&out)), expected, "{slices} slices");
    }
}

/// Experts are split by copies of their slices, too: the same function, so the same first loss.
#[test]
fn experts_in_slices_grow() {
    let mut first = job(layout(2, 2), 2, &in_f64);
    first.config.training.steps = 4;
    reports(&first);
    let from = first.location().join(directory_name(4));
    let manifest = checkpoint::verify(&Disk::real(), &from).expect("a checkpoint");
    let growth = Growth { noise: 0.0, seed: 1, per_token: None };
    let mut next = job(layout(2, 2), 2, &in_f64);
    next.config.data = first.config.data.clone();
    next.config.model = grown(&first.config.model, &growth);
    assert_eq!(next.config.model.slices().count, 16);
    next.config.checkpoint.spec_hash = "another manifest".to_string();
    grow(&from, &manifest, &growth, &next.location(), &mut |_, _| {}).expect("room");
    let name = directory_name(4);
    next.config.resume = Resume::Checkpoint { step: 4, name: name.clone() };
    first.config.resume = Resume::Checkpoint { step: 4, name };
    (first.config.attempt, first.config.training.steps) = (2, 10);
    let [grown, before] = [&next, &first].map(|job| reports(job)[0].loss);
    assert!((grown - before).abs() < 1e-12 * before, "{grown} for {before}");
}

/// What is planned is what is there: rows, tokens and memory of slices.
#[test]
fn slices_are_counted() {
    let whole = common::model();
    let tokens = 1000;
    let counts = |slices, ep| {
        row_counts(&whole.in_slices(slices), &layout(ep, ep), 0, tokens).0
    };
    // Half of four experts, each token with two of them: the same rows, of half the width.
    assert_eq!(counts(2, 2).routed, 2 * counts(1, 2).routed);
    assert_eq!(counts(2, 2).arrived, counts(1, 2).arrived);
    // One slice of eight: tokens of eight ranks, half of which chose its expert.
    assert_eq!((counts(2, 8).routed, counts(2, 8).arrived), (4000, 4000));
    for (slices, layout) in [(2, layout(4, 4)), (4, layout(8, 8)), (2, layout(2, 2))] {
        let job = job(layout.clone(), slices, &|_| {});
        let (model, training) = (&job.config.model, &job.config.training);
        let recovery = &job.config.recovery;
        let planned = rank_memory(model, &layout, 0, training, recovery, 4, None);
        assert!(planned.worst >= planned.balanced, "{planned:?}");
        let shape = Shape::new(model, &layout, 0, training);
        let held = layout.experts(model, 0, 0).len() as u64;
        let slots = u64::from(model.slices().slots);
        assert_eq!(shape.worst.routed, shape.tokens * shape.expert_parallel * slots.min(held));
    }
}
