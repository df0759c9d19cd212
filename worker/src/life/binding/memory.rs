//! On which NUMA nodes the memory of a process lies, by `/proc/PID/numa_maps`.

use super::Seat;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

/// Of `numa_maps` so much is read: a line for each range of memory.
const BYTES_MAX: u64 = 16 << 20;
/// A process may have so much elsewhere: what it had before it was bound, and what libraries share.
const ELSEWHERE_KIB: u64 = 256 << 10;
/// One part in so many may lie elsewhere.
const ELSEWHERE_PART: u64 = 8;
/// Where a line does not say how large its pages are.
const PAGE_KIB: u64 = 4;

/// KiB of a process's own memory, by NUMA node.
pub type OfNodes = BTreeMap<u32, u64>;

/// Why nothing is known is told in words. Reading takes the kernel a walk over all pages.
///
/// # Errors
/// The kernel has no such file, or does not let this process read it.
pub fn read(process: u32) -> Result<OfNodes, String> {
    let path = format!("/proc/{process}/numa_maps");
    let text = File::open(&path).and_then(|file| {
        let mut bytes = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    });
    text.map(|text| own(&text)).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("this kernel has no {path}"),
        _ => format!("{path}: {error}"),
    })
}

/// What belongs to the process alone: files that it maps are others', too.
pub fn own(numa_maps: &str) -> OfNodes {
    let mut all = OfNodes::new();
    for line in numa_maps.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().skip(2).collect();
        if words.iter().any(|word| word.starts_with("file=")) {
            continue;
        }
        let number = |text: &str| text.parse::<u64>().ok();
        let size = words.iter().find_map(|word| number(word.strip_prefix("kernelpagesize_kB=")?));
        for word in &words {
            let count = word.strip_prefix('N').and_then(|word| word.split_once('='));
            let count = count.and_then(|(node, pages)| Some((node.parse().ok()?, number(pages)?)));
            if let Some((node, pages)) = count {
                let sum: &mut u64 = all.entry(node).or_default();
                *sum = sum.saturating_add(pages.saturating_mul(size.unwrap_or(PAGE_KIB)));
            }
        }
    }
    all
}

/// What lies on other nodes than the seat's, in words, where it is more than can be helped.
pub fn misplaced(seat: &Seat, all: &OfNodes) -> Option<String> {
    let sum = |of: &mut dyn Iterator<Item = u64>| of.fold(0_u64, u64::saturating_add);
    let total = sum(&mut all.values().copied());
    let elsewhere = all.iter().filter(|(node, _)| **node != seat.node);
    let elsewhere: Vec<(u32, u64)> = elsewhere.map(|(node, kib)| (*node, *kib)).collect();
    let away = sum(&mut elsewhere.iter().map(|(_, kib)| *kib));
    if away <= ELSEWHERE_KIB || away <= total / ELSEWHERE_PART {
        return None;
    }
    let nodes: Vec<String> = elsewhere.iter().map(|(node, _)| node.to_string()).collect();
    Some(format!(
        "{} of {} MiB of its memory lie on NUMA node {}, planned {}",
        away >> 10,
        total >> 10,
        nodes.join(" and "),
        seat.node
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c0000000 default heap anon=262144 dirty=262144 N0=262000 N1=144 kernelpagesize_kB=4
7f0000000000 prefer:0 anon=512 dirty=512 N1=512 kernelpagesize_kB=2048
7f1000000000 default file=/usr/lib/libc.so.6 mapped=300 N1=300 kernelpagesize_kB=4
7f2000000000 default file=/memfd:snapshots\\040(deleted) dirty=999999 N1=999999
7ffc00000000 default stack:123 anon=30 dirty=30 N0=30
not a line N7=
7ff000000000 default N99999999999=5 N2=x N3=18446744073709551615
";

    fn seat(node: u32) -> Seat {
        Seat { node, cpus: vec![0], near: vec![0] }
    }

    #[test]
    fn memory_of_its_own_is_counted_by_node() {
        let all = own(&MAPS.lines().take(6).map(|line| format!("{line}\n")).collect::<String>());
        assert_eq!(all, OfNodes::from([(0, (262_000 + 30) * 4), (1, 144 * 4 + 512 * 2048)]));
        assert_eq!(own(MAPS).get(&3), Some(&u64::MAX), "nonsense does not overflow");
        assert_eq!(own(""), OfNodes::new());
    }

    #[test]
    fn what_lies_elsewhere_is_told_where_it_is_more_than_can_be_helped() {
        let of = |here: u64, there: u64| {
            misplaced(&seat(0), &OfNodes::from([(0, here << 10), (1, there << 10)]))
        };
        assert_eq!(of(1_000, 200), None, "MiB that it had before");
        assert_eq!(of(10_000, 1_000), None, "a small part");
        let told = "1000 of 3000 MiB of its memory lie on NUMA node 1, planned 0";
        assert_eq!(of(2_000, 1_000).as_deref(), Some(told));
        let three = OfNodes::from([(1, 1 << 20), (2, 1 << 20)]);
        let told = misplaced(&seat(0), &three).expect("all of it");
        assert!(told.ends_with("NUMA node 1 and 2, planned 0"), "{told}");
        let nonsense = OfNodes::from([(3, u64::MAX), (0, 9)]);
        assert!(misplaced(&seat(0), &nonsense).is_some());
    }

    #[test]
    fn a_process_that_is_gone_says_why() {
        let found = read(0).expect_err("no process has this number");
        assert!(found.contains("/proc/0/numa_maps"), "{found}");
    }
}
