//! The largest jobs that are valid, as a person is shown them.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "the test takes the time")]

use moejob_manifest::Job;
use moejob_manifest::cost::{Extent, SHOWN_MAX, of_rank};
use moejob_manifest::keys::Keys;

/// What is shown of the largest jobs takes a second of an optimized build: the memory of as many
/// sizes is counted as there is time for, and the plan says so.
#[test]
fn the_largest_jobs_are_shown_with_the_memory_of_some_of_their_sizes() {
    let cases = [
        ("profile: cpu, min: 1, max: 4096", 256, 256, true),
        ("profile: cpu, min: 2, max: 4090, devicesPerNode: 8", 512, 128, true),
        ("profile: cpu, min: 1, max: 1024", 8, 16, false),
        ("profile: nd-h200-v5, min: 1, max: 4096", 512, 128, true),
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
        let outlook = moejob_offline::outlook(&job, None, &Keys::default(), &[]);
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
        let written = moejob_offline::text(&outlook);
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
