//! The estimate of exchanges: closed forms, readings on two GPUs, and the page that shows it.

#![allow(clippy::disallowed_methods, reason = "the test reads the page")]

use moejob_fabric::travel::{Load, Machines, choice, fastest, rows, text};
use moejob_manifest::Job;
use moejob_manifest::profile::{Line, LinkFigures, Profile, Profiles, read};
use moejob_offline::{outlook, text as outlook_text};
use moejob_plan::observed::Size;
use moejob_plan::placement::sizes;
use moejob_protocol::config::{Exchange, Wire};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{window_bytes, window_rooms};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::rails::Rails;

const MIB: f64 = 1048576.0;

/// Microseconds of NCCL in a graph between two H200, by the bytes of a rank's buffer, half of which
/// travel: all-to-all, reduce-scatter, all-gather (`docs/benchmarks/links.md`,
/// "NCCL, beside torch.distributed").
const READ: [(f64, f64, f64, f64); 8] = [
    (512.0, 5.9, 5.1, 5.1),
    (65536.0, 7.6, 6.0, 6.2),
    (MIB, 12.3, 9.7, 10.4),
    (4.0 * MIB, 19.3, 22.5, 25.2),
    (16.0 * MIB, 50.3, 49.4, 52.6),
    (32.0 * MIB, 78.8, 92.2, 89.2),
    (64.0 * MIB, 136.0, 165.0, 156.0),
    (256.0 * MIB, 476.0, 585.0, 549.0),
];

fn shipped(name: &str) -> &'static Profile {
    Profiles::shipped().get(name).expect("a shipped profile")
}

#[test]
fn two_gpus_are_estimated_within_fifteen_percent() {
    let of = Machines::of(shipped("nd-h200-v5")).expect("its links");
    let two = Machines { gpus_per_node: 2, ..of };
    for (bytes, all_to_all, reduce_scatter, all_gather) in READ {
        let pairs = [
            ("flat", two.flat(2, bytes), all_to_all),
            ("hierarchical", two.hierarchical(2, bytes), all_to_all),
            ("reduce-scatter", two.ring(2, bytes), reduce_scatter),
            ("all-gather", two.ring(2, bytes), all_gather),
        ];
        for (what, estimate, read) in pairs {
            let ratio = estimate * 1e6 / read;
            assert!((0.85..=1.15).contains(&ratio), "{what} of {bytes}: {ratio:.2} of {read} us");
        }
    }
}

/// Numbers that can be added up by hand: 1 us and 100 bytes/us within a node, 10 us, 2 us a message
/// and 10 bytes/us between nodes, copies of 1,000 bytes/us.
fn by_hand() -> LinkFigures {
    let line = |us: f64, rate: f64| Line { seconds: us * 1e-6, rate: rate * 1e6 };
    LinkFigures {
        all_to_all: vec![line(1.0, 100.0)],
        ring: vec![line(1.0, 100.0)],
        network: line(10.0, 10.0),
        message_seconds: 2e-6,
        copy_rate: 1e9,
    }
}

#[track_caller]
fn is(seconds: f64, us: f64) {
    assert!((seconds * 1e6 - us).abs() < 1e-9 * us.max(1.0), "{} us, not {us}", seconds * 1e6);
}

#[test]
fn times_are_those_of_the_closed_forms() {
    let figures = by_hand();
    let machines = Machines { gpus_per_node: 4, figures: &figures };
    // 16 GPUs send 1,600 bytes, 100 to each. Flat: 12 messages.
    is(machines.flat(16, 1600.0), 10.0 + 12.0 * 2.0 + 1200.0 / 10.0);
    // Hierarchical: 1,200 bytes within the node, three messages of 400, and 1,600 bytes are read
    // and written twice.
    let within = 1.0 + 1200.0 / 100.0;
    let between = 10.0 + 3.0 * 2.0 + 1200.0 / 10.0;
    is(machines.hierarchical(16, 1600.0), within + between + 4.0 * 1600.0 / 1000.0);
    // A node alone has nothing to send to others, and one GPU nothing at all.
    is(machines.flat(4, 400.0), 1.0 + 300.0 / 100.0);
    assert_eq!(machines.hierarchical(4, 400.0), machines.flat(4, 400.0));
    assert_eq!([machines.flat(1, 400.0), machines.ring(1, 400.0)], [0.0, 0.0]);
    // Nodes of one GPU have nothing to gain: the same messages, and copies on top.
    let single = Machines { gpus_per_node: 1, figures: &figures };
    let copies = 4.0 * 800.0 / 1000.0;
    is(single.hierarchical(8, 800.0), single.flat(8, 800.0) * 1e6 + copies);
    // A ring of four nodes: three hops, and 15 of 16 parts by four adapters.
    is(machines.ring(16, 16e4), (3.0 * 12.0 + 15e4 / 40.0_f64).max(1.0 + 15e4 / 100.0));
    is(machines.ring(4, 400.0), 1.0 + 300.0 / 100.0);
    // What is slower of links and adapter counts.
    let load = Load { near: 1e4, messages: 1.0, far: 10.0 };
    is(machines.stage(load), 1.0 + 100.0);
    is(machines.stage(Load { near: 0.0, ..load }), 10.0 + 2.0 + 1.0);
    assert_eq!(machines.stage(Load::default()), 0.0);
    let lines = [Line { seconds: 1e-6, rate: 1e6 }, Line { seconds: 3e-6, rate: 2e6 }];
    is(fastest(&lines, 2.0), 3.0);
    is(fastest(&lines, 8.0), 7.0);
}

/// Where both ways take equally long: the messages that the hierarchy saves cost what its copies
/// and the way within the node do.
#[test]
fn the_ways_meet_where_the_closed_form_says() {
    let mut figures = by_hand();
    figures.all_to_all[0].seconds = 0.0;
    let machines = Machines { gpus_per_node: 4, figures: &figures };
    for nodes in [2.0, 16.0, 128.0] {
        let gpus = 4.0 * nodes;
        // A byte costs 3/4 of 1/100 us within the node, four copies of 1/1000 us, and 1/10 us for
        // the adapter, which sends as much in both ways.
        let saved = 2.0 * ((gpus - 4.0) - (nodes - 1.0));
        let bytes = saved / (0.75 / 100.0 + 4.0 / 1000.0);
        let all = gpus as u32;
        let times = |bytes| (machines.flat(all, bytes), machines.hierarchical(all, bytes));
        let (flat, two) = times(bytes);
        is(flat, two * 1e6);
        let (flat, two) = times(0.9 * bytes);
        assert!(two < flat, "{nodes} nodes, fewer bytes");
        let (flat, two) = times(1.1 * bytes);
        assert!(flat < two, "{nodes} nodes, more bytes");
    }
}

/// Few large messages gain nothing by a second copy; many small ones do.
#[test]
fn the_hierarchy_pays_where_messages_are_small_and_many() {
    for name in ["nd-h200-v5", "nd-h100-v5", "ndm-a100-v4", "nd-a100-v4"] {
        let machines = Machines::of(shipped(name)).expect("its links");
        let gain = |gpus, mib: f64| {
            machines.flat(gpus, mib * MIB) / machines.hierarchical(gpus, mib * MIB)
        };
        assert!(gain(16, 256.0) < 1.0, "{name}");
        assert!(gain(2048, 1.0) > 3.0, "{name}");
        let gains: Vec<f64> = [16, 64, 512, 2048].iter().map(|gpus| gain(*gpus, 16.0)).collect();
        assert!(gains.is_sorted(), "{name}: {gains:?}");
    }
}

#[test]
fn the_page_says_what_is_computed() {
    let profiles = [shipped("nd-h200-v5"), shipped("ndm-a100-v4")];
    let table = text(&rows(&profiles, &[16, 64, 512, 2048], &[1, 16, 64, 256]).expect("rows"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/exchange.md");
    let page = std::fs::read_to_string(path).expect("docs/exchange.md");
    assert!(page.contains(&table), "docs/exchange.md is to hold\n{table}");
}

#[test]
fn a_profile_without_figures_or_with_bad_ones_is_told() {
    let refused = rows(&[shipped("cpu")], &[8], &[1]).unwrap_err();
    assert_eq!(refused, "profile cpu says nothing of its links: add `links` to it");
    let refused = rows(&[shipped("nd-h200-v5")], &[8, 12], &[1]).unwrap_err();
    assert_eq!(refused, "12 GPUs: a node of nd-h200-v5 has 8, so a multiple of it");
    let with = |links: &str| {
        let text = format!(
            "version: 1\nbackend: cuda\ndevices: 4\nmemory: 80Gi\nlinks: {{ allToAll: [{links}], \
             ring: [{{ us: 1, GBps: 9 }}], network: {{ us: 8, GBps: 46 }}, messageUs: 2, \
             copyGBps: 1900 }}\n"
        );
        read("box", text.as_bytes())
    };
    let good = with("{ us: 5, GBps: 100 }").expect("a profile");
    let line = Line { seconds: 5.0 * 1e-6, rate: 100.0 * 1e9 };
    assert_eq!(good.links.as_ref().expect("figures").all_to_all, [line]);
    // They change no pod, so a record of before still holds.
    let other = with("{ us: 6, GBps: 100 }").expect("a profile");
    assert_eq!(good.digest, other.digest);
    for (links, expected) in [
        ("", "links.allToAll: found no line; allowed: 1 or more"),
        ("{ us: 0, GBps: 1 }", "links.allToAll[0].us: found `0`"),
        ("{ us: 1 }", "links.allToAll[0].GBps: found nothing"),
        ("{ us: 1, GBps: -3 }", "links.allToAll[0].GBps: found `-3`"),
    ] {
        let problems = with(links).expect_err(links);
        let said: String = problems.iter().map(|problem| format!("{problem}\n")).collect();
        assert!(said.contains(expected), "{links}: {said}");
    }
}

/// A job of nine experts on so many machines of four ranks, whose profile says `links`.
fn job(more: &str, links: &str) -> Result<Job, String> {
    let profile = format!("version: 1\nbackend: cpu\ndevices: 4\n{links}");
    let file = ("box.yaml".to_string(), profile.into_bytes());
    let (profiles, broken) = Profiles::shipped().with([file]);
    assert_eq!(broken, []);
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ profile: box, min: 1, max: 32 }}\n  model: {{ preset: tiny, experts: {{ count: 128, \
         perToken: 2 }} }}\n  data: {{ train: {{ text: {{ paths: [a] }} }}, sequenceLength: 64 \
         }}\n  training: {{ steps: 10, globalBatchSize: 128 }}\n{more}"
    );
    Job::read_with(text.as_bytes(), None, &profiles)
        .map_err(|problems| problems.iter().map(|problem| format!("{problem}\n")).collect())
}

const LINKS: &str = "links: { allToAll: [{ us: 1, GBps: 50 }], ring: [{ us: 1, GBps: 50 }], \
                     network: { us: 20, GBps: 10 }, messageUs: 5, copyGBps: 20 }\n";

/// A token goes to another node of processors once, unless the manifest says otherwise; where each
/// node has one rank of a group there is nothing to pass on. Chunks have no effect, which is told.
#[test]
fn processors_send_a_token_to_a_node_once() {
    let told = "overlapDegree: found `4`";
    for (says, two, told) in [
        ("", Exchange::Hierarchical, None),
        ("overlapDegree: 4", Exchange::Hierarchical, Some(told)),
        ("overlapDegree: 1, exchange: flat", Exchange::Flat, None),
        ("exchange: hierarchical", Exchange::Hierarchical, None),
    ] {
        let job = job(&format!("  parallelism: {{ {says} }}\n"), LINKS).expect("a job");
        for size in sizes(&job).0 {
            let rails = Rails::of(&size.layout.mesh, job.profile.ranks.max(1));
            let passes = rails.is_some_and(|rails| rails.places > 1);
            let expected = if passes { two } else { Exchange::Flat };
            assert_eq!(size.exchange, expected, "{says}");
        }
        let warned: Vec<String> = job.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(warned.len(), usize::from(told.is_some()), "{says}: {warned:?}");
        let told = told.is_none_or(|told| {
            warned[0].contains(told) && warned[0].contains("has no effect")
        });
        assert!(told, "{warned:?}");
    }
    let wrong = job("  parallelism: { overlapDegree: 8 }\n", "").expect_err("no such degree");
    assert!(wrong.contains("spec.parallelism.overlapDegree: found `8`"), "{wrong}");
    let wrong = job("  parallelism: { exchange: tree }\n", "").expect_err("no such way");
    assert!(wrong.contains("spec.parallelism.exchange: found `tree`"), "{wrong}");
}

/// A job of 128 experts on so many machines of four GPUs each.
fn job_on_gpus(more: &str, links: &str, expert: u32) -> Job {
    let profile = format!("version: 1\nbackend: cuda\ndevices: 4\nmemory: 80Gi\n{links}");
    let file = ("box.yaml".to_string(), profile.into_bytes());
    let (profiles, broken) = Profiles::shipped().with([file]);
    assert_eq!(broken, []);
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  nodes: \
         {{ profile: box, min: 1, max: 12 }}\n  model: {{ preset: olmoe-1b-7b, numHiddenLayers: 2, \
         experts: {{ count: 128, perToken: 2 }} }}\n  data: {{ train: {{ text: {{ paths: [a] \
         }} }}, sequenceLength: 64 }}\n  training: {{ steps: 10, globalBatchSize: 144 }}\n  \
         parallelism: {{ expert: {expert}{more} }}\n"
    );
    Job::read_with(text.as_bytes(), None, &profiles).unwrap_or_else(|found| panic!("{found:?}"))
}

/// A ring goes through all nodes one after the other; rails reach all of them at once.
#[test]
fn gpus_go_along_rails_where_a_job_says_so_and_the_plan_tells_when_they_would_be_faster() {
    let staged = Exchange::Hierarchical;
    let exchanges = |job: &Job| -> Vec<(u32, Exchange, Option<String>)> {
        let (sizes, skipped) = sizes(job);
        assert!(!sizes.is_empty(), "{skipped:?}");
        let of = |size: &Size| {
            let (exchange, why) = choice(job, &size.layout);
            assert_eq!(exchange, size.exchange);
            (size.nodes, exchange, why)
        };
        sizes.iter().map(of).collect()
    };
    // Groups of 32 on eight nodes. Hops take as long as many bytes do; or nearly no time, and it is
    // within the nodes that bytes take long.
    let far = "links: { allToAll: [{ us: 1, GBps: 50 }], ring: [{ us: 1, GBps: 500 }], network: { \
               us: 500, GBps: 10 }, messageUs: 1, copyGBps: 2000 }\n";
    let near = far.replace("us: 500", "us: 0.1").replace("GBps: 500", "GBps: 20");
    let found = exchanges(&job_on_gpus("", far, 32));
    assert_eq!(found[0].1, Exchange::Flat, "{found:?}");
    let wish = " ms a layer expected; `exchange: hierarchical` ";
    assert!(found[0].2.as_ref().is_some_and(|why| why.contains(wish)));
    let found = exchanges(&job_on_gpus("", &near, 32));
    assert_eq!(found[0].1, Exchange::Flat, "{found:?}");
    assert!(found[0].2.as_ref().is_some_and(|why| why.contains(" ms a layer expected, else ")));
    // Without figures, and where the job says so.
    assert!(exchanges(&job_on_gpus("", "", 8)).iter().all(|of| of.1 == Exchange::Flat));
    let job = job_on_gpus(", exchange: hierarchical", "", 8);
    assert_eq!(job.unsupported(), []);
    let found = exchanges(&job);
    let said = Some("parallelism.exchange says so".to_string());
    assert!(found.iter().all(|of| *of == (of.0, staged, said.clone())), "{found:?}");
    let text = outlook_text(&outlook(&job, None, &moejob_manifest::keys::Keys::default(), &[]));
    let line = "tokens travel in two stages, within nodes and between them: parallelism.exchange";
    assert!(text.contains(line), "{text}");
    // A group of six has four GPUs of one node and two of the next.
    let found = exchanges(&job_on_gpus(", exchange: hierarchical", "", 6));
    let uneven = Some("not every node has as many ranks of an expert group".to_string());
    assert!(found.iter().all(|of| *of == (of.0, Exchange::Flat, uneven.clone())), "{found:?}");
    // On one node there is nothing to choose.
    let found = exchanges(&job_on_gpus(", exchange: hierarchical", far, 4));
    assert!(found.iter().all(|of| *of == (of.0, Exchange::Flat, None)), "{found:?}");
}

/// By hand: 16 GPUs on 4 nodes whose tokens take 1,600 bytes.
#[test]
fn rails_take_what_their_stages_take() {
    let figures = by_hand();
    let machines = Machines { gpus_per_node: 4, figures: &figures };
    let (between, within) = (10.0 + 3.0 * 2.0 + 300.0 / 10.0, 1.0 + 1200.0 / 100.0);
    is(machines.along_rails(Rails { nodes: 4, places: 4 }, 1600.0), between + within);
    // One GPU on each node has nobody to pass it on to.
    let between = 10.0 + 3.0 * 2.0 + 1200.0 / 10.0;
    is(machines.along_rails(Rails { nodes: 4, places: 1 }, 1600.0), between);
}

/// With rails a window joins the GPUs of one node, and holds the tokens of all nodes.
#[test]
fn windows_are_as_large_as_their_rails_need() {
    let mut job = job_on_gpus("", "", 8);
    // Four sequences of 4,096 tokens: the rooms are much larger than a window's other parts.
    (job.training.micro_batch_size, job.training.sequence_length) = (4, 4096);
    let (tokens, top_k) = (4 * 4096, u64::from(job.model.experts.per_token));
    let row = u64::from(job.model.hidden_size) * job.training.precision.element().bytes();
    let rows = [row; 2];
    let layout = Layout::contiguous(Mesh::data_parallel(8, 8));
    let bytes = |rails| window_bytes(&job.model, &layout, &job.training, rails);
    let rails = |nodes, places| Some(Rails { nodes, places });
    for (rails, rooms) in [
        (None, window_rooms(8, tokens, rows, top_k)),
        (rails(2, 4), window_rooms(4, 2 * tokens, rows, top_k)),
        (rails(4, 2), window_rooms(2, 4 * tokens, rows, top_k)),
    ] {
        let beyond = bytes(rails).checked_sub(rooms);
        assert!(beyond.is_some_and(|beyond| beyond < 4 << 20), "{rails:?}: {rooms}, {beyond:?}");
    }
    assert_eq!(bytes(rails(8, 1)), 0, "nobody is near");
    // Sums in fp32 come back twice as long; rows of each expert as often as a token has one.
    for (wire, combine_each, back) in [
        (Wire::Fp32, None, 2 * row),
        (Wire::Fp8, None, row),
        (Wire::Auto, Some(true), top_k * row),
    ] {
        let compute = &mut job.training.compute;
        (compute.wire, compute.combine_each) = (wire, combine_each);
        let rooms = window_rooms(8, tokens, [row, back], top_k);
        let found = window_bytes(&job.model, &layout, &job.training, None);
        let beyond = found.checked_sub(rooms);
        assert!(beyond.is_some_and(|beyond| beyond < 4 << 20), "{wire:?}: {rooms}, {beyond:?}");
    }
}
