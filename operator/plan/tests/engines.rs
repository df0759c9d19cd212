//! What a leader knows of the engines of a gang, whatever their workers say.

use moejob_plan::engines::{Engines, LOST_KEPT};
use moejob_plan::observed::{Gang, Millis};
use moejob_protocol::Mesh;
use moejob_protocol::config::Member;
use moejob_protocol::layout::Layout;
use moejob_protocol::report::{DEVICE_FAILED, Detail, Event, EventKind};

/// No machine has more devices.
const DEVICES_MAX: u64 = 64;
/// Of how an engine ended and its last words.
const CAUSE_BYTES_MAX: usize = 300;

fn gang(workers: u32, ranks: u32) -> Gang {
    let member = |index: u32| Member {
        rank: index * ranks,
        worker: format!("j-{index}"),
        node: format!("n{index}"),
        address: String::new(),
    };
    Gang {
        attempt: 3,
        digest: String::new(),
        layout: Layout::contiguous(Mesh::data_parallel(workers * ranks, 2)),
        members: (0..workers).map(member).collect(),
        resumed_at: 0,
        started_at: 0,
        stepped: true,
        stop_requested: None,
        broken: None,
        ended: None,
        inherited: false,
    }
}

fn event(kind: EventKind, device: u64, uuid: &str) -> Event {
    let text = |text: &str| Detail::Text(text.to_string());
    let details = [
        ("rank", Detail::Number(99)),
        ("device", Detail::Number(device)),
        ("uuid", text(uuid)),
        ("exit", text("exit code 70")),
        ("lastWords", text(&"e\u{1b}".repeat(1000))),
    ];
    Event {
        time: String::new(),
        attempt: 3,
        event: kind,
        reason: DEVICE_FAILED.to_string(),
        message: String::new(),
        details: details.map(|(name, detail)| (name.to_string(), detail)).into(),
    }
}

#[test]
fn a_loss_is_named_by_rank_node_device_and_uuid() {
    let (mut engines, gang) = (Engines::default(), gang(3, 8));
    let from = ("j-1", "n1");
    let started = event(EventKind::EngineStarted, 2, "GPU-a");
    assert_eq!(engines.heard(from, (Some(&gang), true), &started, 5), None);
    // It ended before it could say which GPU it had.
    let lost = event(EventKind::EngineLost, 2, "");
    let loss = engines.heard(from, (Some(&gang), true), &lost, 7).expect("a loss");
    assert_eq!((loss.rank, loss.device, loss.attempt, loss.at), (10, 2, 3, 7));
    assert_eq!((loss.place().as_str(), loss.by_device), ("device 2 of n1 (GPU-a)", true));
    assert!(loss.cause.starts_with("exit code 70: e"), "{}", loss.cause);
    assert!(loss.cause.len() <= CAUSE_BYTES_MAX && !loss.cause.contains('\u{1b}'));
    // Without a gang only the worker can say which rank it was.
    let loss = engines.heard(from, (None, true), &lost, 8).expect("a loss");
    assert_eq!(loss.rank, 99);
}

#[test]
fn what_is_kept_of_workers_that_say_anything_is_bounded() {
    let (mut engines, gang) = (Engines::default(), gang(1, 2));
    let from = ("j-0", "n0");
    for uuid in ["", "a b", "\u{202e}", "x".repeat(65).as_str(), "GPU-\n"] {
        let started = event(EventKind::EngineStarted, 0, uuid);
        engines.heard(from, (Some(&gang), true), &started, 0);
        assert_eq!(engines, Engines::default(), "{uuid:?}");
    }
    for device in [DEVICES_MAX, u64::MAX] {
        let lost = event(EventKind::EngineLost, device, "GPU-a");
        assert_eq!(engines.heard(from, (Some(&gang), true), &lost, 0), None);
    }
    for at in 0..100 {
        let lost = event(EventKind::EngineLost, at % DEVICES_MAX, "");
        engines.heard(from, (Some(&gang), true), &lost, at);
    }
    let kept: Vec<Millis> = engines.lost.iter().map(|loss| loss.at).collect();
    assert_eq!(kept, (92..100).collect::<Vec<_>>());
    let many = [engines.lost.clone(), engines.lost.clone(), engines.lost.clone()].concat();
    assert_eq!(Engines::restored(many).lost.len(), LOST_KEPT);
}

#[test]
fn the_table_has_every_rank_and_the_uuids_that_are_known() {
    let (mut engines, gang) = (Engines::default(), gang(512, 8));
    let started = event(EventKind::EngineStarted, 7, "GPU-b");
    engines.heard(("j-511", "n511"), (Some(&gang), true), &started, 0);
    let table = engines.table(&gang);
    assert_eq!(table.len(), 4096);
    assert!(table.iter().enumerate().all(|(at, of)| of.rank as usize == at));
    let last = &table[4095];
    assert_eq!((&*last.worker, &*last.node, last.device), ("j-511", "n511", 7));
    assert_eq!((last.uuid.as_str(), table[4094].uuid.as_str()), ("GPU-b", ""));
    let before = engines.changes();
    engines.prune(|worker| worker != "j-511");
    assert!(engines.changes() > before && engines.table(&gang)[4095].uuid.is_empty());
}
