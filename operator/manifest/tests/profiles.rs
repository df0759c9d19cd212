//! Profiles: those shipped are what `docs/ndm-a100.md` says, and what is wrong with one is told.

#![allow(clippy::disallowed_methods, reason = "the test reads the tree")]

use moejob_manifest::Job;
use moejob_manifest::crd;
use moejob_manifest::problem::Problem;
use moejob_manifest::profile::{Backend, CUSTOM_ENV, Profiles, TopologyFile, read};
use std::collections::BTreeSet;

fn problems(found: Vec<Problem>) -> String {
    found.iter().map(|problem| format!("{problem}\n")).collect()
}

fn job(nodes: &str, profiles: &Profiles) -> Result<Job, String> {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ {nodes} }}\n  model: {{ preset: tiny }}\n  data: {{ train: {{ text: {{ paths: [a] }} \
         }}, sequenceLength: 64 }}\n  training: {{ steps: 10, globalBatchSize: 64 }}\n"
    );
    Job::read_with(text.as_bytes(), None, profiles).map_err(problems)
}

fn own(files: &[(&str, &str)]) -> (Profiles, String) {
    let files = files.iter().map(|(name, text)| (name.to_string(), text.as_bytes().to_vec()));
    let (profiles, broken) = Profiles::shipped().with(files);
    let said = broken.into_iter().map(|of| format!("{}\n{}", of.file, problems(of.problems)));
    (profiles, said.collect())
}

#[test]
fn every_file_of_the_folder_is_shipped_and_sound() {
    let folder = format!("{}/../../manifests/profiles", env!("CARGO_MANIFEST_DIR"));
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let text = std::fs::read(&path).unwrap();
        let profile = read(&name, &text).unwrap_or_else(|found| panic!("{}", problems(found)));
        assert_eq!(Some(&profile), Profiles::shipped().get(&name));
        files.insert(name);
    }
    let names: BTreeSet<String> = Profiles::shipped().names().map(str::to_string).collect();
    assert_eq!(names, files);
    let expected =
        ["cpu", "gpu", "nd-a100-v4", "nd-h100-v5", "nd-h200-v5", "ndm-a100-v4"].map(String::from);
    assert_eq!(names, BTreeSet::from(expected));
}

#[test]
fn the_ndm_machine_is_as_azure_describes_it() {
    let ndm = Profiles::shipped().get("ndm-a100-v4").unwrap();
    assert_eq!((ndm.backend, ndm.devices, ndm.ranks), (Backend::Cuda, 8, 8));
    assert_eq!(ndm.rank_memory, Some(76 << 30));
    let row = |index: usize| {
        let node = &ndm.numa[index];
        let short = |all: &[String]| {
            all.iter().map(|pci| pci[..4].to_string()).collect::<Vec<_>>().join(" ")
        };
        let (first, last) = (node.cpus[0], node.cpus[node.cpus.len() - 1]);
        format!("{first}-{last}: {} | {}", short(&node.gpus), short(&node.hcas))
    };
    assert_eq!(
        [0, 1, 2, 3].map(row),
        [
            "0-23: 0003 0004 | 0103 0104",
            "24-47: 0001 0002 | 0101 0102",
            "48-71: 000d 000e | 0107 0108",
            "72-95: 000b 000c | 0105 0106",
        ]
    );
    let limit = ndm.expect["gpuDirectWriteGbps"];
    assert_eq!((limit.fail, limit.warn), (180.0, 189.0));
    assert_eq!(ndm.topology_file, Some(TopologyFile::Generated));
    // It matches nothing on AKS, and NCCL then takes TCP without a word.
    assert!(ndm.env.iter().all(|of| !of.value.contains("mlx5_ib")), "{:?}", ndm.env);
    assert!(ndm.env.iter().all(|of| !of.why.is_empty()));
}

#[test]
fn the_tenants_own_machine_says_no_more_than_it_may() {
    let custom = |more: &str| {
        let nodes =
            format!("profile: custom, custom: {{ devices: 1, deviceMemory: 80Gi, {more} }}");
        job(&nodes, Profiles::shipped())
    };
    let good = custom(
        "rdma: { resource: rdma/ib, count: 8 }, env: [{ name: NCCL_DEBUG, value: INFO }]",
    );
    let profile = good.unwrap().profile;
    assert_eq!(profile.rdma.map(|rdma| rdma.count), Some(8));
    assert_eq!((&*profile.env[0].name, &*profile.env[0].value), ("NCCL_DEBUG", "INFO"));
    for name in ["NCCL_NET_PLUGIN", "LD_PRELOAD", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE"] {
        let refused = custom(&format!("env: [{{ name: {name}, value: x }}]")).unwrap_err();
        assert!(refused.contains("E0107 spec.nodes.custom.env[0].name"), "{refused}");
    }
    let refused = custom("rdma: { resource: everything, count: 1 }").unwrap_err();
    assert!(refused.contains("E0211 spec.nodes.custom.rdma.resource"), "{refused}");
    let names = crd::spec_schema();
    let path = "/properties/nodes/properties/custom/properties/env/items/properties/name/enum";
    assert_eq!(names.pointer(path).unwrap(), &serde_json::json!(CUSTOM_ENV));
}

#[test]
fn a_job_names_a_profile_that_there_is() {
    let refused = job("profile: nd-h200, min: 1", Profiles::shipped()).unwrap_err();
    assert_eq!(
        refused,
        "5:21 E0107 spec.nodes.profile: found `nd-h200`; allowed: cpu, gpu, nd-a100-v4, \
         nd-h100-v5, nd-h200-v5, ndm-a100-v4, custom; did you mean `nd-h200-v5`?\n"
    );
    // One of a shipped name takes its place; a broken one is not stood in for.
    let mine = "version: 1\nbackend: cuda\ndevices: 4\nmemory: 80Gi\n";
    let (profiles, broken) = own(&[("nd-h200-v5.yaml", mine)]);
    assert_eq!((job("profile: nd-h200-v5", &profiles).unwrap().profile.ranks, &*broken), (4, ""));
    let (profiles, broken) = own(&[("nd-h200-v5.yaml", "version: 1\nbackend: cuda\n")]);
    assert!(broken.starts_with("nd-h200-v5.yaml\n1:1 E0104 devices: "), "{broken}");
    let refused = job("profile: nd-h200-v5", &profiles).unwrap_err();
    assert!(refused.contains("mend that profile: 1:1 E0104 devices"), "{refused}");
    let (profiles, broken) = own(&[("cpu", mine), ("Big", mine), ("custom.yaml", mine)]);
    assert_eq!(broken.lines().filter(|line| line.contains("E0201")).count(), 3, "{broken}");
    assert_eq!(profiles.get("cpu"), Profiles::shipped().get("cpu"));
    assert_eq!(profiles.names().count(), Profiles::shipped().names().count());
}

/// Copies of a GPU's state hold steps up, so their number follows from what they cost.
#[test]
fn how_often_a_gpu_saves_its_state_is_automatic_unless_it_is_said() {
    let when = |profile: &str, said: &str| {
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ profile: {profile} }}\n  model: {{ preset: tiny }}\n  data: {{ train: {{ \
             text: {{ paths: [a] }} }}, sequenceLength: 64 }}\n  training: {{ steps: 10, \
             globalBatchSize: 64 }}\n{said}"
        );
        let job = Job::read_with(text.as_bytes(), None, Profiles::shipped()).map_err(problems);
        let job = job.unwrap_or_else(|said| panic!("{said}"));
        let (checkpoint, memory) = (&job.checkpoint, &job.recovery);
        let told = (checkpoint.every_steps, checkpoint.auto, memory.memory_auto);
        let stand_in = job.clone().stand_in();
        assert!(!stand_in.checkpoint.auto && !stand_in.recovery.memory_auto);
        told
    };
    assert_eq!(when("cpu", ""), (200, false, false));
    assert_eq!(when("gpu", ""), (200, true, true));
    assert_eq!(when("ndm-a100-v4", "  checkpoint: { keep: 2 }\n"), (200, true, true));
    assert_eq!(when("gpu", "  checkpoint: { everySteps: 50 }\n"), (50, false, true));
    assert_eq!(when("gpu", "  checkpoint: { keepBest: true }\n"), (200, false, true));
    assert_eq!(when("gpu", "  recovery: { memoryEverySteps: 5 }\n"), (200, true, false));
}

#[test]
fn the_digest_is_of_what_is_said_and_not_of_how() {
    let digest = |text: &str| read("box", text.as_bytes()).unwrap().digest;
    let first = digest("version: 1\nbackend: cpu\ndevices: 2\n");
    assert_eq!(first.len(), 16);
    let other = "# A comment.\ndevices: 2\nabout: a box\nversion: 1\nbackend: cpu\n";
    assert_eq!(first, digest(other));
    assert_ne!(first, digest("version: 1\nbackend: cpu\ndevices: 3\n"));
    let digests: BTreeSet<&str> = Profiles::shipped()
        .names()
        .map(|name| &*Profiles::shipped().get(name).unwrap().digest)
        .collect();
    assert_eq!(digests.len(), 6);
}

#[test]
fn everything_that_is_wrong_is_told_at_once() {
    const BAD: &str = include_str!("profiles/bad.yaml");
    let found = problems(read("bad", BAD.as_bytes()).unwrap_err());
    let path = format!("{}/tests/profiles/bad.txt", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    assert_eq!(found, std::fs::read_to_string(&path).unwrap_or_default());
    // Problems of the shape come first, by themselves.
    for (edit, expected) in [
        ("version: 2", "E0106 version: found `2`; allowed: a whole number, 1 to 1"),
        ("gpus: 8", "E0102 gpus: found the unknown field `gpus`"),
        ("devices: eight", "E0106 devices: found `eight`; allowed: a whole number, 1 to 64, or"),
        ("expect: { speed: { fail: 1 } }", "E0102 expect.speed: found the unknown field"),
        ("rdma: { resource: rdma/ib }", "E0104 rdma.count: found nothing"),
        ("---", "found a second document; allowed: one profile; write one profile a file"),
    ] {
        let field = edit.split(':').next().unwrap();
        let good = "version: 1\nbackend: cuda\ndevices: 8\nmemory: 80Gi\n";
        let lines = good.lines().filter(|line| line.split(':').next() != Some(field));
        let lines = lines.chain([edit, "about: x"]);
        let text: String = lines.map(|line| format!("{line}\n")).collect();
        let found = problems(read("bad", text.as_bytes()).unwrap_err());
        assert!(found.contains(expected), "{edit}: {found}");
    }
}
