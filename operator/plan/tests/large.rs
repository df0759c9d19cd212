//! A gang of hundreds: what would be little for one member must not be done or kept for each.

mod said;
mod world;

use moejob_plan::check::check;
use moejob_plan::decide::{Action, plan};
use moejob_plan::observed::{Node, Observed, Worker, WorkerState};
use moejob_protocol::config::{Resume, WorkerConfig};
use moejob_protocol::message::{
    Down, FRAME_BYTES_MAX, FRAME_BYTES_MAX_BEFORE, Frame, Held, LeftReason,
};
use std::sync::Arc;
use world::{Setup, World};

#[test]
fn all_members_of_a_gang_share_one_configuration() {
    let nodes = 128;
    let mut world =
        World::new(Setup { min: nodes, max: nodes, nodes, experts: 8, ..Setup::default() });
    world.settle();
    let names: Vec<String> = world.sims.keys().cloned().collect();
    assert_eq!(names.len(), nodes as usize);
    for name in &names {
        assert!(world.connect(name));
    }
    let mut configs = Vec::new();
    for plan in world.settle() {
        configs.extend(plan.actions.into_iter().filter_map(|action| match action {
            Action::Configure { rank, config, .. } => Some((rank, config)),
            _ => None,
        }));
    }
    let ranks: Vec<u32> = configs.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(ranks, Vec::from_iter(0..nodes));
    assert!(configs.iter().all(|(_, config)| Arc::ptr_eq(config, &configs[0].1)));
}

/// The largest gang that is valid, with the longest names that a cluster gives: what each worker is
/// told fits into one frame, at the first attempt and when the gang goes on from its memory.
#[test]
fn the_largest_gang_is_told_in_one_frame() {
    let (nodes, devices) = (4_096, 8);
    let setup = Setup { min: nodes - 1, max: nodes, devices, experts: 64, ..Setup::default() };
    let mut observed = World::new(setup).tracker.observed;
    let idle = |number: u32| {
        let mut worker = Worker::starting(&format!("{number:063}"), &format!("{number:0253}"), 0);
        worker.address = Some(format!("[2001:0db8:0000:0000:0000:0000:0000:{number:04x}]:7777"));
        worker.state = WorkerState::Idle;
        worker
    };
    observed.workers = (0..nodes).map(idle).collect();
    observed.nodes = observed.workers.iter().map(|worker| Node::good(&worker.node)).collect();
    let started = |observed: &Observed| {
        let plan = plan(observed, 1_000);
        assert_eq!(check(observed, &plan), Vec::<String>::new());
        let gang = plan.actions.iter().find_map(|action| match action {
            Action::RecordAttempt(gang) => Some((**gang).clone()),
            _ => None,
        });
        let config = plan.actions.iter().find_map(|action| match action {
            Action::Configure { config, .. } => Some(Arc::clone(config)),
            _ => None,
        });
        (gang.expect("an attempt"), config.expect("a member is told"))
    };
    let (mut gang, config) = started(&observed);
    let bytes = |config: &WorkerConfig| {
        let body = Down::Configure(Box::new(WorkerConfig { rank: Some(0), ..config.clone() }));
        let frame = Frame { v: 1, term: u64::MAX, attempt: 1, body };
        let text = serde_json::to_vec(&frame).expect("JSON");
        let back: Frame<Down> = serde_json::from_slice(&text).expect("a frame");
        assert!(back == frame, "it is read as it was");
        text.len()
    };
    let first = bytes(&config);
    assert!(first > FRAME_BYTES_MAX_BEFORE && first < FRAME_BYTES_MAX / 2, "{first} bytes");
    // Each worker holds the shards of its ranks and of its neighbour's. One is lost, another one
    // comes in its place.
    (gang.stepped, gang.ended) = (true, Some(900));
    observed.record.attempt = gang.attempt;
    observed.record.layouts = vec![(gang.attempt, gang.layout.clone())];
    observed.record.gang = Some(gang);
    for (number, worker) in (0..nodes).zip(&mut observed.workers) {
        worker.state = WorkerState::Left { attempt: 1, reason: LeftReason::Asked };
        let ranks = |of: u32| of * devices..(of + 1) * devices;
        let mut shards: Vec<u32> =
            ranks(number).chain(ranks((number + nodes - 1) % nodes)).collect();
        shards.sort_unstable();
        worker.held = vec![Held { attempt: 1, step: 40, shards }];
    }
    observed.workers[7] = idle(7);
    observed.workers[7].name = "replacement".to_string();
    let (_, config) = started(&observed);
    let Resume::Memory { step: 40, sources, .. } = &config.resume else {
        panic!("{:?}", config.resume.step());
    };
    // Only the shards of the worker that is gone travel.
    let travels = sources.iter().filter(|source| !config.are_near(source.shard, source.from));
    let travels: Vec<u32> = travels.map(|source| source.shard).collect();
    assert_eq!(travels, Vec::from_iter(56..64));
    let again = bytes(&config);
    assert!(again < first + 2_000, "{again} bytes, and {first} at first");
}

/// Every bound of `cost` at its maximum, on each kind of machine: a second of an optimized build.
#[test]
#[allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "the test takes the time")]
fn the_largest_jobs_that_are_valid_are_planned_in_little_time() {
    use moejob_manifest::job::{Job, Venue};
    let cases = [
        ("profile: cpu, min: 1, max: 4096", "numHiddenLayers: 512", "count: 128"),
        ("profile: cpu, min: 4, max: 4096", "numHiddenLayers: 512", "count: 128"),
        ("profile: cpu, min: 4096, max: 4096", "numHiddenLayers: 4", "count: 64"),
        ("profile: nd-h200-v5, min: 1, max: 4096", "numHiddenLayers: 512", "count: 128"),
        ("profile: nd-h200-v5, min: 1, max: 4096", "numHiddenLayers: 16", "count: 4096"),
        (
            "profile: custom, custom: { devices: 64, deviceMemory: 1Gi }, min: 1, max: 512",
            "numHiddenLayers: 16",
            "count: 4096",
        ),
        (
            "profile: custom, custom: { devices: 0, deviceMemory: 64Gi }, min: 1, max: 1",
            "numHiddenLayers: 256",
            "count: 128",
        ),
    ];
    for (nodes, layers, count) in cases {
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ {nodes} }}\n  model: {{ hiddenSize: 64, {layers}, numAttentionHeads: 2, \
             experts: {{ {count}, perToken: 2, intermediateSize: 64 }} }}\n  data: {{ train: {{ \
             text: {{ paths: [a] }} }}, sequenceLength: 128 }}\n  training: {{ steps: 10, \
             globalBatchSize: 1048576 }}\n"
        );
        let began = std::time::Instant::now();
        let job = Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"));
        let (sizes, skipped) = moejob_plan::placement::sizes(&job);
        assert_eq!((sizes.len() + skipped.len()) as u32, job.nodes.max - job.nodes.min + 1);
        let wanted = moejob_plan::launch::wanted(&job, Venue::Kubernetes);
        assert_eq!(wanted.sizes, sizes);
        if job.profile.backend == moejob_manifest::profile::Backend::Cpu {
            let least = sizes.first().unwrap_or_else(|| panic!("{skipped:?}"));
            assert!(moejob_plan::placement::memory(&job, &least.layout, 0).committed > 0);
        }
        let took = began.elapsed();
        // Unoptimized, beside other work: what is not bounded takes hours.
        eprintln!("{nodes} {layers} {count}: {took:?}");
        assert!(took.as_secs_f64() < 60.0, "{nodes}: {took:?}");
    }
}

/// Models of the sizes that are published, on as many nodes as are used for them: nobody is told
/// that such a job costs too much. `MOEJOB_MANIFESTS` says how many are tried.
#[test]
#[allow(clippy::disallowed_methods, reason = "how many are tried is the caller's to say")]
fn no_job_of_a_published_size_costs_too_much() {
    use moejob_manifest::job::Job;
    use moejob_manifest::problem::Code;
    let most = std::env::var("MOEJOB_MANIFESTS").ok().and_then(|text| text.parse().ok());
    let most = most.unwrap_or(2_000u64);
    let mut state = 15u64;
    // An LCG of Knuth's; its upper bits are good enough to choose by.
    let mut below = |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % bound
    };
    let mut valid = 0;
    for _ in 0..most {
        let cpu = below(3) == 0;
        let (layers, experts) = match cpu {
            true => (1 + below(32), 1 << below(7)),
            false => (1 + below(96), 8 << below(7)),
        };
        let (profile, nodes) = if cpu { ("cpu", 256) } else { ("nd-h200-v5", 2_048) };
        let max = 1 + below(nodes);
        let min = 1 + below(max.min(64));
        let (shared, per_token) = (below(3), 1 + below(experts.min(8)));
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ profile: {profile}, min: {min}, max: {max} }}\n  model: {{ hiddenSize: {}, \
             numHiddenLayers: {layers}, numAttentionHeads: 8, experts: {{ count: {experts}, \
             perToken: {per_token}, intermediateSize: {}, shared: {shared} }} }}\n  data: {{ \
             train: {{ text: {{ paths: [a] }} }}, sequenceLength: {} }}\n  training: {{ \
             steps: 10, globalBatchSize: {} }}\n",
            64 << below(8),
            64 << below(7),
            128 << below(8),
            64 << below(9),
        );
        match Job::read(text.as_bytes()) {
            Ok(_) => valid += 1,
            Err(problems) => {
                let of_cost = problems.iter().any(|problem| problem.code == Code::Cost);
                assert!(!of_cost, "{text}{problems:?}");
            }
        }
    }
    eprintln!("{valid} of {most} are valid");
    assert!(valid * 3 > most, "{valid} of {most} are valid: too few to say anything");
}

/// The largest numbers that fields take, all at once: their product fits in no number, and is
/// counted as what no machine has.
#[test]
fn what_no_machine_has_is_counted_and_fits_nowhere() {
    use moejob_manifest::job::Job;
    use moejob_plan::placement::{layout, memory, sizes};
    let read = |nodes: &str| {
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ {nodes} }}\n  model: {{ vocabSize: 2097152, hiddenSize: 65536, \
             numHiddenLayers: 512, numAttentionHeads: 1024, headDim: 1024, experts: {{ count: 128, \
             perToken: 64, intermediateSize: 1048576, shared: 64, routedHeadroom: 64.0 }} }}\n  \
             data: {{ train: {{ text: {{ paths: [a] }} }}, sequenceLength: 1048576 }}\n  \
             training: {{ steps: 9, globalBatchSize: 1048576, microBatchSize: 65536 }}\n"
        );
        Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"))
    };
    for nodes in [
        "profile: nd-h200-v5",
        "profile: gpu, devicesPerNode: 16",
        "profile: cpu, max: 16",
        "profile: custom, custom: { devices: 0, deviceMemory: 1048576Gi }",
    ] {
        let job = read(nodes);
        let most = job.nodes.max * job.profile.ranks;
        for ep in [1, most] {
            let memory = memory(&job, &layout(most, ep), 0);
            assert!(memory.balanced > 1 << 50, "{nodes}: {memory:?}");
            assert!(memory.balanced <= memory.committed && memory.committed <= memory.worst);
        }
        if job.profile.rank_memory.is_some() {
            assert!(sizes(&job).0.is_empty(), "{nodes}");
        }
        assert!(!job.unsupported().is_empty(), "{nodes}");
    }
}
