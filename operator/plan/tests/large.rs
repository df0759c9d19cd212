//! A gang of hundreds: what would be little for one member must not be done or kept for each.

mod said;
mod world;

use moejob_plan::keys::Keys;
use moejob_plan::decide::Action;
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

/// Every bound of `cost` at its maximum, on each kind of machine: a second of an optimized build.
#[test]
#[allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "the test takes the time")]
fn the_largest_jobs_that_are_valid_are_planned_in_little_time() {
    use moejob_plan::job::{Job, Venue};
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
        if job.profile.backend == moejob_plan::profile::Backend::Cpu {
            let least = sizes.first().unwrap_or_else(|| panic!("{skipped:?}"));
            assert!(moejob_plan::placement::memory(&job, &least.layout, 0).committed > 0);
        }
        let took = began.elapsed();
        // Unoptimized, beside other work: what is not bounded takes hours.
        eprintln!("{nodes} {layers} {count}: {took:?}");
        assert!(took.as_secs_f64() < 60.0, "{nodes}: {took:?}");
    }
}

/// What is shown of the largest jobs takes a second of an optimized build: the memory of as many
/// sizes is counted as there is time for, and the plan says so.
#[test]
#[allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "the test takes the time")]
fn the_largest_jobs_are_shown_with_the_memory_of_some_of_their_sizes() {
    use moejob_plan::cost::{Extent, SHOWN_MAX, of_rank};
    use moejob_plan::job::Job;
    use moejob_plan::offline;
    let cases = [
        ("profile: cpu, min: 1, max: 4096", 256, 256, true),
        ("profile: cpu, min: 2, max: 4090, devicesPerNode: 8", 512, 128, true),
        ("profile: cpu, min: 1, max: 1024", 8, 16, false),
        ("profile: nd-h200-v5, min: 1, max: 4096", 512, 128, false),
        ("profile: gpu, min: 1, max: 4096", 256, 256, true),
    ];
    for (nodes, layers, experts, some) in cases {
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ {nodes} }}\n  model: {{ hiddenSize: 64, numHiddenLayers: {layers}, \
             numAttentionHeads: 2, experts: {{ count: {experts}, perToken: 2, intermediateSize: \
             64 }} }}\n  data: {{ train: {{ text: {{ paths: [a] }} }}, sequenceLength: 128 }}\n  \
             training: {{ steps: 10, globalBatchSize: 1048576 }}\n"
        );
        let began = std::time::Instant::now();
        let job = Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"));
        let outlook = offline::outlook(&job, None, &Keys::default(), &[]);
        let took = began.elapsed();
        eprintln!("{nodes}, {layers} layers of {experts}: {took:?}");
        assert!(took.as_secs_f64() < 60.0, "{nodes}: {took:?}");
        let sizes = &outlook.sizes;
        let counted = || sizes.iter().filter(|size| size.memory.is_some());
        // The smallest, the largest and that of the gang are there whatever they cost.
        let extent = Extent::of(&job.model);
        let steps = sizes.iter().map(|size| {
            of_rank(&job, extent, moejob_protocol::Mesh::data_parallel(size.dp, size.ep))
        });
        let one = steps.sum::<u64>() / sizes.len() as u64;
        let most = counted().count().saturating_sub(3) as u64;
        assert!(one * most <= SHOWN_MAX, "{nodes}: {most} of {one}");
        assert!(sizes[0].memory.is_some() && sizes[sizes.len() - 1].memory.is_some(), "{nodes}");
        let written = offline::text(&outlook);
        let told = written.lines().find_map(|line| line.strip_prefix("memory was counted "));
        let told = told.map_or("", |told| told.split(',').next().unwrap_or_default());
        let counted = counted().count();
        let words = format!("for {counted} of {} sizes", sizes.len());
        assert_eq!(told, if some { &words } else { "" }, "{nodes}");
        assert_eq!(counted < sizes.len(), some, "{nodes}: {counted}");
        assert!(written.contains("memory of rank 0, even routing"), "{nodes}");
        // As even as whole numbers are.
        let at = sizes.iter().enumerate().filter(|(_, size)| size.memory.is_some());
        let places: Vec<usize> = at.map(|(at, _)| at).collect();
        let gaps = places.windows(2).map(|pair| pair[1] - pair[0]);
        let (least, most) = (gaps.clone().min(), gaps.max());
        assert!(most.zip(least).is_some_and(|(most, least)| most <= least + 1), "{places:?}");
    }
}

/// Models of the sizes that are published, on as many nodes as are used for them: nobody is told
/// that such a job costs too much. `MOEJOB_MANIFESTS` says how many are tried.
#[test]
#[allow(clippy::disallowed_methods, reason = "how many are tried is the caller's to say")]
fn no_job_of_a_published_size_costs_too_much() {
    use moejob_plan::job::Job;
    use moejob_plan::problem::Code;
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
