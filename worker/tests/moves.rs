//! The plan by which state moves from one layout into another.

mod common;

use common::{Job, bits, member, model, route_like_deepseek, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::attempt::trainer::Trainer;
use moe_worker::gang::comm::CommError;
use moe_worker::state::moves::Moves;
use moe_worker::state::rank::{StateTable, needed};
use moe_worker::state::checksum::Soundness;
use moe_worker::state::slots::Memory;
use moe_worker::state::snapshot::shard_runs;
use moejob_kernels::DType;
use moejob_protocol::ModelConfig;
use moejob_protocol::checkpoint::Part;
use moejob_protocol::config::{Member, Resume, ShardSource};
use moejob_protocol::layout::{Layout, Placement};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{QkNorm, Role};
use moejob_protocol::owners::Owners;
use moejob_protocol::zero::Zero;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

const STORED: DType = DType::F32;
const FLOAT: u64 = 4;

fn even(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

fn plans(
    model: &ModelConfig,
    earlier: &Layout,
    layout: &Layout,
    sources: &[ShardSource],
    zero: Zero,
) -> Vec<Moves> {
    let (params, owners) = (model.params(), Owners::new(model, layout).in_stage(zero));
    let owners = &owners;
    let plan = |rank| {
        let table = StateTable { model, params: &params, layout, owners, rank, stored: STORED };
        Moves::plan(&table, earlier, sources)
    };
    (0..layout.mesh.world()).map(plan).collect()
}

/// What every rank needs comes once, from where it lies, and both ends agree on the order.
fn check(model: &ModelConfig, earlier: &Layout, layout: &Layout, sources: &[ShardSource]) {
    for zero in [Zero::Optimizer, Zero::Weights] {
        check_stage(model, earlier, layout, sources, zero);
    }
}

fn check_stage(
    model: &ModelConfig,
    earlier: &Layout,
    layout: &Layout,
    sources: &[ShardSource],
    zero: Zero,
) {
    let (params, owners) = (model.params(), Owners::new(model, layout).in_stage(zero));
    let all = plans(model, earlier, layout, sources, zero);
    for (me, moves) in (0..).zip(&all) {
        let mut got: BTreeMap<(usize, Part), Vec<(u64, u64)>> = BTreeMap::new();
        for (number, exchange) in moves.exchanges.iter().enumerate() {
            for (from, pieces) in &exchange.incoming {
                let sent = &all[*from as usize].exchanges[number].outgoing[&me];
                assert_eq!(sent, pieces, "exchange {number}, from {from} to {me}");
                for piece in pieces {
                    let source = sources.iter().find(|source| source.shard == piece.shard);
                    assert_eq!(source.expect("a source").from, *from);
                    let (runs, _) =
                        shard_runs(model, &params, earlier, piece.shard, FLOAT as usize);
                    let run = runs.iter().find(|run| run.index == piece.index).expect("owned");
                    let len = run.elements.end - run.elements.start;
                    let first = piece.part as u64 * len + piece.elements.start - run.elements.start;
                    let begin = run.offset as u64 + first * FLOAT;
                    let end = begin + (piece.elements.end - piece.elements.start) * FLOAT;
                    assert_eq!(piece.bytes, begin as usize..end as usize);
                    let key = (piece.index, piece.part);
                    got.entry(key).or_default().push((piece.elements.start, piece.elements.end));
                }
            }
            for (to, pieces) in &exchange.outgoing {
                let received = &all[*to as usize].exchanges[number].incoming[&me];
                assert_eq!(received, pieces, "exchange {number}, from {me} to {to}");
            }
        }
        for (index, param) in params.iter().enumerate() {
            for part in Part::ALL {
                let needed = needed(&owners, index, param, me, part);
                let mut runs = got.remove(&(index, part)).unwrap_or_default();
                runs.sort_unstable();
                let mut next = needed.start;
                for (start, end) in runs {
                    assert_eq!(start, next, "{} {part:?} of rank {me}", param.name);
                    next = end;
                }
                assert!(next == needed.end || needed.is_empty(), "{} of {me}", param.name);
            }
        }
        assert!(got.is_empty(), "rank {me} gets what it does not need: {got:?}");
    }
}

#[test]
fn everything_that_is_needed_comes_once() {
    let mut model = model();
    route_like_deepseek(&mut model);
    let order = vec![vec![5, 0, 3, 1, 4, 2], vec![0, 1, 2, 3, 4, 5]];
    let ordered = Layout { placement: Placement::Ordered(order), ..even(4, 2) };
    let layouts = [even(1, 1), even(2, 1), even(3, 3), even(4, 2), ordered];
    for earlier in &layouts {
        for layout in &layouts {
            let (shards, world) = (earlier.mesh.world(), layout.mesh.world());
            // In an order of their own, from wherever they may lie.
            let source = |at: u32| {
                let shard = (at * 3 + 1) % shards;
                ShardSource { shard, from: (shard * 5 + 2) % world }
            };
            let mut sources: Vec<ShardSource> = (0..shards).map(source).collect();
            sources.sort_by_key(|source| source.shard);
            sources.dedup_by_key(|source| source.shard);
            if sources.len() == shards as usize {
                sources.reverse();
                check(&model, earlier, layout, &sources);
            } else {
                let all = (0..shards).map(|shard| ShardSource { shard, from: shard % world });
                check(&model, earlier, layout, &all.collect::<Vec<_>>());
            }
        }
    }
}

/// The table of Qwen3-30B-A3B.
fn qwen3() -> ModelConfig {
    let mut model = model();
    model.vocab_size = 151_936;
    model.hidden_size = 2048;
    model.num_hidden_layers = 48;
    model.num_attention_heads = 32;
    model.num_key_value_heads = 4;
    model.head_dim = 128;
    model.tie_word_embeddings = false;
    model.qk_norm = QkNorm::PerHead;
    model.experts.count = 128;
    model.experts.per_token = 8;
    model.experts.intermediate_size = 768;
    model
}

/// Work, not time: the table is walked once, whatever the number of exchanges.
#[test]
fn a_large_table_is_walked_once() {
    let model = qwen3();
    let params = model.params();
    let (earlier, layout) = (even(8, 8), even(8, 4));
    let owners = Owners::new(&model, &layout);
    let sources: Vec<ShardSource> =
        (0..8).map(|shard| ShardSource { shard, from: (shard + 1) % 8 }).collect();
    let started = std::time::Instant::now();
    let table = StateTable {
        model: &model,
        params: &params,
        layout: &layout,
        owners: &owners,
        rank: 3,
        stored: STORED,
    };
    let moves = Moves::plan(&table, &earlier, &sources);
    eprintln!("{} parameters in {:?}", params.len(), started.elapsed());
    assert!(moves.exchanges.len() > 5_000, "{} exchanges", moves.exchanges.len());
    // A look for each run of a shard, and for what this rank sends of it one a rank and part.
    let experts = params.iter().filter(|param| matches!(param.role, Role::Expert { .. })).count();
    let dense = params.len() - experts;
    let most = experts + dense * 8 + (experts / 8 + dense) * (8 + 8);
    assert!(moves.looks <= most as u64, "{} looks, at most {most}", moves.looks);
}

/// Of shard 0 after step 5.
fn damage(memory: &Memory) {
    let sound = memory.shard(1, 5, 0).is_some_and(|slot| slot.soundness() == Soundness::Sound);
    assert!(sound, "its checksum was made");
    let files = memory.files(1, 5, &[0]).expect("descriptors");
    let slot = std::fs::File::from(files.into_iter().next().expect("a slot"));
    let at = slot.metadata().expect("memory").len() - 100;
    let mut byte = [0];
    slot.read_exact_at(&mut byte, at).expect("memory");
    slot.write_all_at(&[byte[0] ^ 1], at).expect("memory");
}

/// Where steps are begun ahead, the first ones may be done before it is known; but nothing that
/// outlives the attempt is made of them.
#[test]
fn a_damaged_snapshot_ends_an_attempt_whose_first_steps_did_not_wait() {
    let mut job = Job::new(even(2, 2));
    // Of one worker: no rank keeps a copy for another, and each goes on with its own.
    let seat = |rank| Member { rank, ..member(0) };
    job.config.members = (0..2).map(seat).collect();
    let memory = Memory::default();
    let trainer = || Trainer::with_memory(memory.clone());
    let (ends, _) = job.run(&mut [trainer(), trainer()], Some(5));
    assert_eq!(ends, [AttemptEnd::Stopped { step: 5 }, AttemptEnd::Stopped { step: 5 }]);
    damage(&memory);
    let mut group = [trainer().with_steps_ahead(), trainer().with_steps_ahead()];

    let sources = (0..2).map(|shard| ShardSource { shard, from: shard }).collect();
    let resume = Resume::Memory { step: 5, attempt: 1, layout: even(2, 2), sources };
    (job.config.attempt, job.config.resume) = (2, resume);
    let (ends, reports) = job.run(&mut group, None);
    let why = "shard 0 of step 5 of attempt 1 was damaged in memory and is not used";
    assert_eq!(ends[0], AttemptEnd::Aborted(CommError::Aborted { reason: why.to_string() }));
    assert!(matches!(ends[1], AttemptEnd::Aborted(_)), "{ends:?}");
    assert!(reports.len() < 5, "{} steps of an attempt that was to do five", reports.len());
    let held = memory.held();
    assert!(held.iter().all(|held| held.attempt == 1 && held.shards == [1]), "{held:?}");
    assert!(!job.location().join("step-00000010").exists(), "it wrote no checkpoint");
}

/// A byte of a snapshot changes in memory, as a device that writes where it should not does it.
#[test]
fn a_damaged_snapshot_is_not_resumed_from() {
    let mut job = Job::new(even(2, 2));
    let (_, undisturbed) = job.run(&mut trainers(2), None);
    job.config.checkpoint.location = job.folder.path().join("again").display().to_string();
    let memories = [Memory::default(), Memory::default()];
    let mut group = memories.clone().map(Trainer::with_memory);
    let (ends, _) = job.run(&mut group, Some(5));
    assert_eq!(ends, [AttemptEnd::Stopped { step: 5 }, AttemptEnd::Stopped { step: 5 }]);
    let all = vec![0, 1];
    let holds = |memory: &Memory, shards: &Vec<u32>| {
        let mut held = memory.held().into_iter().filter(|held| held.step == 5);
        held.next().map(|held| held.shards).as_ref() == Some(shards)
    };
    assert!(memories.iter().all(|memory| holds(memory, &all)), "each has its buddy's, too");

    damage(&memories[0]);

    let resume = |from: [u32; 2]| {
        let source = |shard: u32| ShardSource { shard, from: from[shard as usize] };
        let (layout, sources) = (even(2, 2), (0..2).map(source).collect());
        Resume::Memory { step: 5, attempt: 1, layout, sources }
    };
    (job.config.attempt, job.config.resume) = (2, resume([0, 1]));
    let (ends, reports) = job.run(&mut group, None);
    let why = "shard 0 of step 5 of attempt 1 was damaged in memory and is not used";
    assert_eq!(ends[0], AttemptEnd::Aborted(CommError::Aborted { reason: why.to_string() }));
    assert!(matches!(ends[1], AttemptEnd::Aborted(_)), "{ends:?}");
    assert!(reports.is_empty(), "no step was done");
    assert!(holds(&memories[0], &vec![1]) && holds(&memories[1], &all));

    (job.config.attempt, job.config.resume) = (3, resume([1, 1]));
    let (ends, reports) = job.run(&mut group, None);
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }, AttemptEnd::Completed { step: 10 }]);
    assert_eq!(bits(&reports), bits(&undisturbed)[5..]);
}
