//! Logs of NCCL, a version each, and what is read from them. `UPDATE_GOLDEN=1` writes what is read
//! now: read the difference.

use moejob_nccl::log::{Links, Log, read};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Channels that are alike stand on one line: `0-5: 1 -> 0 -> 1`.
fn alike<T: PartialEq>(all: &BTreeMap<u32, T>, show: impl Fn(&T) -> String) -> String {
    let mut runs: Vec<(u32, u32, &T)> = Vec::new();
    for (channel, of) in all {
        match runs.last_mut() {
            Some((_, last, same)) if *same == of && *last + 1 == *channel => *last = *channel,
            _ => runs.push((*channel, *channel, of)),
        }
    }
    let run = |(first, last, of): &(u32, u32, &T)| match first == last {
        true => format!("{first}: {}", show(of)),
        false => format!("{first}-{last}: {}", show(of)),
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

fn show(log: &Log) -> String {
    let mut text = format!("version {}\n", log.version.as_deref().unwrap_or("unknown"));
    for Links { id, rank, world, complete, rings, trees } in &log.comms {
        let number = |of: &Option<u32>| of.map_or("?".to_string(), |of| of.to_string());
        let (rank, world) = (number(rank), number(world));
        let state = if *complete { "complete" } else { "open" };
        let _ = writeln!(text, "rank {rank} of {world}, {state}, {id}");
        let rings = alike(rings, |(before, behind)| format!("{before} -> {rank} -> {behind}"));
        let _ = writeln!(text, "  rings {rings}");
        let trees = alike(trees, |tree| {
            let up = number(&tree.up).replace('?', "root");
            format!("{:?} below, {up} above", tree.down)
        });
        let _ = writeln!(text, "  trees {trees}");
    }
    for route in &log.routes {
        let direct = if route.direct { ", direct" } else { "" };
        let _ = writeln!(text, "{} -> {} by {}{direct}", route.from, route.to, route.by);
    }
    let _ = writeln!(text, "sockets: {}", log.uses_sockets());
    text
}

#[test]
fn logs_of_each_version_say_what_is_written() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/logs");
    let mut logs = 0;
    for entry in std::fs::read_dir(&folder).expect("the logs are there") {
        let path = entry.expect("a readable folder").path();
        if path.extension().is_none_or(|of| of != "log") {
            continue;
        }
        logs += 1;
        let text = std::fs::read_to_string(&path).expect("a readable log");
        let (found, golden) = (show(&read(text.lines())), path.with_extension("read"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&golden, &found).expect("a writable folder");
        }
        let expected = std::fs::read_to_string(&golden).expect("what is read from it");
        assert_eq!(found, expected, "{}", path.display());
    }
    assert!(logs >= 4, "{logs} logs");
}

/// Whatever stands there is passed over: no panic, and nothing is made up.
#[test]
fn what_is_no_line_of_nccl_is_passed_over() {
    let lines = [
        "", " NCCL INFO ", "a NCCL INFO Ring", "a NCCL INFO Ring 0", "a NCCL INFO Ring x : 1 -> 2",
        "a NCCL INFO Ring 00 : 1 -> 2 -> 99999999999", "a NCCL INFO Trees", "a NCCL INFO Trees [0]",
        "a NCCL INFO Trees [0] 1/2", "a NCCL INFO Trees [0] 1/-1->0->1", "NCCL version",
        "a NCCL INFO Trees [x] 1/-1/-1->0->1", "a NCCL INFO Channel 00/0 : via",
        "\u{0} NCCL INFO é",
        "a NCCL INFO Channel 00/0 : x[1] -> y[0] via P2P", "a NCCL INFO Channel 00 : 1 -> 0",
        "a NCCL INFO Channel 00/0 : 1[1] -> 0[0] via ",
    ];
    assert_eq!(read(lines), Log::default());
    // Every beginning of a real line, and lines with their bytes in disorder.
    let text = include_str!("logs/2.28.9-two-h200.log");
    for line in text.lines().filter(|line| line.contains("Trees") || line.contains("via")).take(9) {
        for end in (0..line.len()).filter(|end| line.is_char_boundary(*end)) {
            let _ = read([&line[..end]]);
            let turned: String = line[..end].chars().rev().collect();
            let _ = read([&turned[..]]);
        }
    }
}

#[test]
fn a_line_that_was_cut_gives_no_other_number() {
    let whole = "h:1:2 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 12/-1/-1->0->34";
    let of = |text: &str| read([text]).comms.first().map_or(0, |links| links.trees.len());
    assert_eq!(of(whole), 2);
    let cut = whole.rfind("->34").expect("its end");
    assert_eq!(of(&whole[..cut]), 1, "the second one lacks its parent");
}
