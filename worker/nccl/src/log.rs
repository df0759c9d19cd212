//! What NCCL's log tells of the links that it has built.
//!
//! ```text
//! lines of NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,GRAPH,P2P,NET --read--> Log
//! ```
//! The format is nowhere promised and changes between versions. So a line that is not understood is
//! passed over, numbers are taken from where their words stand, and a log of each version that was
//! seen is kept in `tests/logs` with what is read from it. An empty [`Log`] means that nothing is
//! known, not that nothing was built.

use std::collections::{BTreeMap, BTreeSet};

/// Communicators that are remembered of one log; more are made in no life of an engine.
const COMMS_MAX: usize = 1_024;
/// Channels of a communicator, of which NCCL has 64 at most.
const CHANNELS_MAX: usize = 1_024;
/// Pairs of ranks between which bytes were seen to go.
const ROUTES_MAX: usize = 65_536;

/// What was understood.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// `2.28.9+cuda13.0`
    pub version: Option<String>,
    /// In the order in which they were complete, those that never were at the end.
    pub comms: Vec<Links>,
    /// Ranks of whichever communicator, and what is between them. They are told by threads that
    /// name no communicator.
    pub routes: BTreeSet<Route>,
}

/// What one rank has of one communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// The same for all ranks of the communicator; empty before 2.18.
    pub id: String,
    pub rank: Option<u32>,
    pub world: Option<u32>,
    pub complete: bool,
    /// By channel: the rank before and the one behind.
    pub rings: BTreeMap<u32, (u32, u32)>,
    /// By channel.
    pub trees: BTreeMap<u32, Tree>,
}

/// A rank's place in a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    pub down: Vec<u32>,
    /// None: it is the root.
    pub up: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    pub from: u32,
    pub to: u32,
    /// `P2P`, `SHM`, `NET/IB`, `NET/Socket`, or the name of a plugin.
    pub by: String,
    /// The card reads and writes the GPU's memory itself.
    pub direct: bool,
}

impl Log {
    /// Bytes go by TCP between two ranks.
    pub fn uses_sockets(&self) -> bool {
        self.routes.iter().any(|route| route.by == "NET/Socket")
    }

    /// The communicator of all ranks, as `rank` of `world` has it: the first that it completed,
    /// since all others are split from it.
    pub fn of_all(&self, rank: u32, world: u32) -> Option<&Links> {
        let is_it = |links: &&Links| {
            links.complete && links.rank == Some(rank) && links.world == Some(world)
        };
        self.comms.iter().find(is_it)
    }
}

/// Reads lines of one log or of several behind each other.
pub fn read<'l>(lines: impl IntoIterator<Item = &'l str>) -> Log {
    let mut reader = Reader::default();
    for line in lines {
        reader.line(line);
    }
    reader.end()
}

#[derive(Default)]
struct Reader<'l> {
    log: Log,
    /// What each thread is about to make: a communicator is made by one.
    open: BTreeMap<&'l str, Links>,
}

impl<'l> Reader<'l> {
    fn line(&mut self, line: &'l str) {
        if let Some((_, version)) = line.split_once("NCCL version ") {
            let version = version.split_whitespace().next().map(str::to_string);
            self.log.version = self.log.version.take().or(version);
            return;
        }
        let Some((before, text)) = line.split_once(" NCCL INFO ") else { return };
        let thread = thread_of(before);
        let text = text.trim();
        let mut words = text.split_whitespace();
        match words.next() {
            Some("Ring") if text.contains(" via ") => self.route(text),
            Some("Ring") => {
                if let Some((channel, ring)) = ring(text) {
                    let links = self.open.entry(thread).or_default();
                    if links.rings.len() < CHANNELS_MAX {
                        links.rings.insert(channel, ring);
                    }
                }
            }
            Some("Trees") => {
                let links = self.open.entry(thread).or_default();
                for (channel, tree) in trees(text) {
                    if links.trees.len() < CHANNELS_MAX {
                        links.trees.insert(channel, tree);
                    }
                }
            }
            Some("Channel") => self.route(text),
            _ if text.contains("Init START") => {
                self.keep(thread);
                let links = self.open.entry(thread).or_default();
                named(links, text);
            }
            _ if text.contains("Init COMPLETE") => {
                let links = self.open.entry(thread).or_default();
                named(links, text);
                links.complete = true;
                self.keep(thread);
            }
            _ => {}
        }
    }

    fn route(&mut self, text: &str) {
        if self.log.routes.len() < ROUTES_MAX {
            self.log.routes.extend(route(text));
        }
    }

    /// What the thread was about to make is made, or never will be.
    fn keep(&mut self, thread: &str) {
        let Some(links) = self.open.remove(thread) else { return };
        if links != Links::default() && self.log.comms.len() < COMMS_MAX {
            self.log.comms.push(links);
        }
    }

    fn end(mut self) -> Log {
        let threads: Vec<&str> = self.open.keys().copied().collect();
        threads.into_iter().for_each(|thread| self.keep(thread));
        self.log
    }
}

/// `host:pid:tid` of `[time] host:pid:tid [device]`.
fn thread_of(before: &str) -> &str {
    let is_one = |word: &&str| {
        let mut parts = word.rsplit(':');
        let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<u64>().is_ok());
        is_number(parts.next()) && is_number(parts.next()) && parts.next().is_some()
    };
    before.split_whitespace().rev().find(is_one).unwrap_or(before)
}

/// The number behind a word, wherever it stands.
fn number_after(text: &str, word: &str) -> Option<u32> {
    let mut words = text.split_whitespace();
    words.by_ref().find(|of| *of == word)?;
    words.next()?.parse().ok()
}

fn named(links: &mut Links, text: &str) {
    links.rank = number_after(text, "rank").or(links.rank);
    links.world = number_after(text, "nranks").or(links.world);
    let mut words = text.split_whitespace();
    if words.by_ref().any(|word| word == "commId") {
        links.id = words.next().unwrap_or_default().to_string();
    }
}

/// `Ring 03 : 7 -> 0 -> 1`: the channel, the rank before this one and the one behind.
fn ring(text: &str) -> Option<(u32, (u32, u32))> {
    let (head, ranks) = text.split_once(':')?;
    let channel = head.split_whitespace().nth(1)?.parse().ok()?;
    let ranks: Option<Vec<u32>> = ranks.split("->").map(|rank| rank.trim().parse().ok()).collect();
    match ranks?[..] {
        [before, _, behind] => Some((channel, (before, behind))),
        _ => None,
    }
}

/// `Trees [0] 1/-1/-1->0->-1 [1] ...`: children, rank, parent; before 2.7 the other way round. The
/// line is cut where it is too long for NCCL, and what is cut is left out.
fn trees(text: &str) -> Vec<(u32, Tree)> {
    let mut found = Vec::new();
    let mut words = text.split_whitespace().skip(1);
    while let (Some(channel), Some(links)) = (words.next(), words.next()) {
        let channel = channel.strip_prefix('[').and_then(|of| of.strip_suffix(']')?.parse().ok());
        if let (Some(channel), Some(tree)) = (channel, tree(links)) {
            found.push((channel, tree));
        }
    }
    found
}

fn tree(text: &str) -> Option<Tree> {
    let parts: Vec<&str> = text.split("->").collect();
    let [first, _, last] = parts[..] else { return None };
    let (down, up) = if last.contains('/') { (last, first) } else { (first, last) };
    // -1 is none.
    let some = |text: &str| -> Option<Option<u32>> {
        let number: i64 = text.parse().ok()?;
        Some(u32::try_from(number).ok())
    };
    let down: Option<Vec<Option<u32>>> = down.split('/').map(some).collect();
    // A number that was cut is another number: three children stand there, or the line ended.
    let down = down.filter(|down| down.len() >= 3)?;
    Some(Tree { down: down.into_iter().flatten().collect(), up: some(up)? })
}

/// `Channel 00/0 : 1[1] -> 0[0] [send] via NET/IB/0/GDRDMA`; before 2.8 `Ring 00 : ...`.
fn route(text: &str) -> Option<Route> {
    let (links, via) = text.split_once(" via ")?;
    let (_, links) = links.split_once(':')?;
    let (from, to) = links.split_once("->")?;
    let rank = |text: &str| {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        text[..digits].parse::<u32>().ok()
    };
    let mut parts = via.split_whitespace().next()?.split('/');
    let by = match (parts.next()?, parts.next()) {
        ("NET", Some(plugin)) => format!("NET/{plugin}"),
        (by, _) => by.to_string(),
    };
    Some(Route { from: rank(from)?, to: rank(to)?, by, direct: via.contains("GDRDMA") })
}
