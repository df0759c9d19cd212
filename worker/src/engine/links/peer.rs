//! Tokens of an expert group through windows: of all of its ranks where they lie on one node, else
//! of those of a node where rails (`tokens.rs`) bring them there.
//!
//! ```text
//! open:    own window -> who is where, through the gang -> files to each other (files.rs)
//!          -> windows of the others -> who has them all, through the gang
//! gather:  tokens to the ranks that have one of their experts
//! scatter: sums of what became of them back
//! watch:   a thread ends the kernels' waits when the attempt is over
//! leave:   ends them, too; the windows go when the streams are empty
//! ```
//! Either all ranks that share windows have them or none has. Then their tokens travel as before.

use super::Links;
use super::files::{Desk, Seat};
use super::ledger::WindowRows;
use super::wanted::{Use, blocks_for};
use crate::failure::chain;
use crate::gang::comm::{Comm, CommError, Lookout};
use moejob_kernels::cuda::CudaDevice;
use moejob_kernels::peer::{
    CountRows, GatherRows, Need, PEERS_MAX, PeerDesc, PeerLinks, ScatterRows,
};
use moejob_kernels::{Buffer, Device, WireFormat};
use moejob_protocol::communication::{Link, Verb};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// How long a kernel waits for a peer. A peer that is dead or stopped is noticed by its worker
/// before; this is for what nobody notices.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);
/// Between two looks at the group.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What a rank says of its window.
const WORDS_MAX: usize = 1024;

/// Ranks of an expert group that may share windows.
#[derive(Clone, Debug)]
pub(crate) struct Near {
    /// In ep order, which is that of positions: the whole group, or with rails those of a node.
    pub ranks: Vec<u32>,
    /// Bytes of the rooms.
    pub rooms: usize,
    pub wanted: Use,
    /// Blocks at most of what is beside products.
    pub beside: usize,
    /// How long a kernel waits for a peer.
    pub patience: Duration,
}

/// The windows of an expert group.
#[derive(Debug)]
pub(super) struct Windows {
    /// None once they were left.
    links: Mutex<Option<PeerLinks>>,
    /// A kernel was enqueued.
    used: AtomicBool,
    blocks: usize,
    /// Blocks of what is beside products.
    beside: usize,
}

/// What passes windows by one verb.
struct Pass<'a> {
    verb: Verb,
    need: &'a Need,
    /// Bytes of a row, of those that are needed.
    row: usize,
    /// Bytes beside the rows.
    words: usize,
}

/// What a rank says before windows are opened.
#[derive(Serialize, Deserialize)]
enum Word {
    NotWanted,
    /// None can be had, and why.
    None(String),
    At(Seat),
}

impl Windows {
    /// Windows of the own group; none where its tokens travel as before. All ranks of the attempt
    /// call it alike.
    ///
    /// # Errors
    /// A peer is lost.
    pub fn open(
        comm: &mut Comm,
        device: &Device,
        near: &Near,
    ) -> Result<Option<Arc<Windows>>, CommError> {
        let own = near.wanted.blocks().map(|blocks| {
            Own::new(device, near, comm, blocks)
        });
        let word = match &own {
            None => Word::NotWanted,
            Some(Err(why)) => Word::None(why.clone()),
            Some(Ok(own)) => Word::At(own.desk.seat().clone()),
        };
        let words = tell(comm, &word)?;
        let at = |rank: u32| words.get(rank as usize).and_then(Option::as_ref);
        let is_first = near.ranks.first() == Some(&comm.rank());
        let tells = own.is_some() && is_first;
        let goes_without = |why: &str| {
            match near.wanted {
                Use::On { .. } if tells => {
                    tracing::warn!("tokens travel by NCCL, for there are no windows: {why}");
                }
                _ if tells => {
                    tracing::info!("tokens travel by NCCL, for there are no windows: {why}");
                }
                _ => {}
            }
            Ok(None)
        };
        let seats: Result<Vec<Seat>, String> = near
            .ranks
            .iter()
            .map(|rank| match at(*rank) {
                Some(Word::At(seat)) => Ok(seat.clone()),
                Some(Word::None(why)) => Err(format!("rank {rank}: {why}")),
                _ => Err(format!("rank {rank} wants none")),
            })
            .collect();
        let seats = seats.and_then(|seats| match seats.iter().all(|seat| seat.is_near(&seats[0])) {
            true => Ok(seats),
            false => Err("the group lies on several machines, or in several pods".to_string()),
        });
        if !words.iter().flatten().any(|word| matches!(word, Word::At(_))) {
            return goes_without(&seats.err().unwrap_or_default());
        }
        // Some group tries it: all ranks hear each other once more.
        let lookout = comm.lookout();
        let opened = match (own, seats) {
            (Some(Ok(own)), Ok(seats)) => own.connect(&seats, &lookout),
            (Some(Err(why)), _) | (_, Err(why)) => Err(why),
            (None, Ok(_)) => Err("they are not wanted here".to_string()),
        };
        let word = opened.as_ref().err().cloned();
        let words: Vec<Option<Option<String>>> = tell(comm, &word)?;
        let failed = near.ranks.iter().find_map(|rank| match words.get(*rank as usize) {
            Some(Some(None)) => None,
            Some(Some(Some(why))) => Some(format!("rank {rank}: {why}")),
            _ => Some(format!("rank {rank} said nothing of it")),
        });
        match (opened, failed) {
            (Ok(windows), None) => {
                let watched = (Arc::downgrade(&windows), lookout);
                // Without it only the kernels' own deadlines end their waits.
                let thread = std::thread::Builder::new().name("windows".to_string());
                let _ = thread.spawn(move || watch_over(&watched.0, &watched.1));
                tracing::info!(ranks = ?near.ranks, "tokens travel through windows");
                Ok(Some(windows))
            }
            (opened, Some(why)) => {
                // Nothing was enqueued.
                opened.iter().for_each(|windows| windows.release());
                goes_without(&why)
            }
            (Err(why), None) => goes_without(&why),
        }
    }

    /// What the kernels failed at first.
    pub fn check(&self) -> Result<(), CommError> {
        let links = self.links();
        let checked = links.as_ref().map_or(Ok(()), PeerLinks::check);
        checked.map_err(|failure| CommError::Aborted { reason: failure.to_string() })
    }

    /// Ends all waits of the kernels.
    pub fn stop(&self) {
        self.links().iter().for_each(PeerLinks::stop);
    }

    /// Gives the windows back, behind the last kernel that uses them.
    pub fn release(&self) {
        drop(self.links().take());
    }

    /// `rows`, with `weights` the ids of `need`, of the ranks whose tokens have an expert here;
    /// rows travel in `format`, if that is another one.
    pub fn gather(
        &self,
        cuda: &CudaDevice,
        need: &Need,
        (rows, format): (Buffer, Option<WireFormat>),
        weights: Option<Buffer>,
        step: u32,
    ) {
        if let Some(links) = &*self.links() {
            self.used.store(true, Ordering::Relaxed);
            let blocks = self.blocks_of(cuda, need, rows);
            cuda.gather_peer_rows(links, &GatherRows { need, rows, format, weights, blocks, step });
        }
    }

    /// The own ones of `rows` and `slots` become sums over the group. `onto`: see [`ScatterRows`].
    pub fn scatter(
        &self,
        cuda: &CudaDevice,
        need: &Need,
        (rows, slots, onto): (Buffer, Option<Buffer>, Option<[Buffer; 2]>),
        step: u32,
    ) {
        if let Some(links) = &*self.links() {
            self.used.store(true, Ordering::Relaxed);
            let blocks = self.blocks_of(cuda, need, rows);
            cuda.scatter_rows(links, &ScatterRows { need, rows, slots, onto, blocks, step });
        }
    }

    /// Counts the bytes of the rows that have passed between this rank and the others.
    fn count(&self, cuda: &CudaDevice, Pass { verb, need, row, .. }: &Pass) {
        let counter = usize::from(*verb == Verb::Combine);
        if let Some(links) = &*self.links() {
            cuda.count_rows(links, &CountRows { need, row_bytes: *row, counter });
        }
    }

    /// Where this rank stands among those that share windows.
    fn position(&self) -> Option<usize> {
        self.links().as_ref().map(|links| links.desc().me)
    }

    /// What was counted in steps that are over.
    pub fn rows_passed(&self) -> WindowRows {
        self.links().as_ref().map(PeerLinks::rows_passed).unwrap_or_default()
    }

    /// The same on every rank.
    fn blocks_of(&self, cuda: &CudaDevice, need: &Need, rows: Buffer) -> usize {
        let own = rows.bytes() / need.experts.len() * need.nodes;
        let most = if cuda.is_in_flight() { self.beside } else { self.blocks };
        blocks_for(own, most)
    }

    fn links(&self) -> MutexGuard<'_, Option<PeerLinks>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Windows {
    /// A kernel may still use windows that were not left, and would fault without them. They go
    /// with the process.
    fn drop(&mut self) {
        self.stop();
        match self.used.load(Ordering::Relaxed) {
            true => std::mem::forget(self.links().take()),
            false => self.release(),
        }
    }
}

impl Links {
    /// Tokens of the own expert group travel through windows from now on, if it can have some.
    /// All ranks call it alike.
    ///
    /// # Errors
    /// A peer is lost.
    pub(crate) fn open_windows(&mut self, device: &Device, near: &Near) -> Result<bool, CommError> {
        self.windows = Windows::open(&mut self.comm, device, near)?;
        Ok(self.windows.is_some())
    }

    /// [`Links::gather_tokens`] through windows. False: there are none.
    pub(super) fn gather_by_windows(
        &mut self,
        device: &mut Device,
        need: &Need,
        (rows, format): (Buffer, Option<WireFormat>),
        weights: Option<Buffer>,
    ) -> bool {
        let Some(windows) = self.windows_of(device) else { return false };
        // An id and a weight for each choice, of all tokens here; of rows those that are needed.
        let words = weights.map_or(0, |_| 2 * 4 * need.top_k);
        let words = words * windows.position().map_or(0, |me| tokens_of_others(need, me));
        let whole = row_bytes(need, rows);
        let row = format.map_or(whole, |of| of.row_bytes(whole / rows.dtype().size()));
        let pass = Pass { verb: Verb::Dispatch, need, row, words };
        self.pass(&windows, device, &pass, |cuda, step| {
            windows.gather(cuda, need, (rows, format), weights, step);
        });
        true
    }

    /// [`Links::scatter_tokens`] likewise.
    pub(super) fn scatter_by_windows(
        &mut self,
        device: &mut Device,
        need: &Need,
        rows: Buffer,
        (slots, onto): (Option<Buffer>, Option<[Buffer; 2]>),
    ) -> bool {
        let Some(windows) = self.windows_of(device) else { return false };
        let row = row_bytes(need, rows) + slots.map_or(0, |_| 4 * need.top_k);
        let pass = Pass { verb: Verb::Combine, need, row, words: 0 };
        self.pass(&windows, device, &pass, |cuda, step| {
            windows.scatter(cuda, need, (rows, slots, onto), step);
        });
        true
    }

    fn windows_of(&self, device: &Device) -> Option<Arc<Windows>> {
        self.windows.clone().filter(|_| device.as_cuda().is_some())
    }

    fn pass(
        &mut self,
        windows: &Windows,
        device: &mut Device,
        pass: &Pass,
        enqueue: impl FnOnce(&CudaDevice, u32),
    ) {
        if self.failure.is_some() {
            return;
        }
        let (step, looks) = (self.step, self.is_looked_at());
        let begun = device.begin_stretch(false);
        if let Some(cuda) = device.as_cuda() {
            enqueue(cuda, step);
        }
        self.sent(device, begun, (pass.verb, Link::Window), pass.words as u64);
        // By the ids, which are here now.
        if let (Some(cuda), true) = (device.as_cuda(), looks) {
            windows.count(cuda, pass);
        }
    }

    /// What is enqueued from now on belongs to `step`.
    pub(crate) fn at_step(&mut self, step: u64) {
        self.step = u32::try_from(step).unwrap_or(u32::MAX);
    }
}

/// The own window, while others are opened.
struct Own {
    links: PeerLinks,
    desk: Desk,
    position: usize,
    blocks: usize,
    beside: usize,
}

impl Own {
    fn new(device: &Device, near: &Near, comm: &Comm, blocks: usize) -> Result<Own, String> {
        let cuda = device.as_cuda().ok_or("its device is a processor")?;
        let positions = near.ranks.len();
        if positions > PEERS_MAX {
            return Err(format!("there are windows for {PEERS_MAX} ranks at most"));
        }
        let me = near.ranks.iter().position(|rank| *rank == comm.rank());
        let position = me.ok_or("it is none of the group")?;
        let Near { rooms, patience, .. } = *near;
        let desc = PeerDesc { positions, me: position, rooms, patience };
        let links = cuda.peer_links(desc).map_err(|error| chain(&error))?;
        let desk = Desk::open().map_err(|error| format!("no socket for windows: {error}"))?;
        let beside = near.beside.clamp(1, blocks);
        Ok(Own { links, desk, position, blocks, beside })
    }

    /// Opens the others' windows.
    fn connect(self, seats: &[Seat], lookout: &Lookout) -> Result<Arc<Windows>, String> {
        let Own { mut links, desk, position, blocks, beside } = self;
        let files = links.export().map_err(|error| chain(&error))?;
        let over = || lookout.look().is_err();
        let all = desk.exchange(position, seats, &files, &over);
        let all = all.map_err(|error| format!("windows were not handed over: {error}"))?;
        for (from, files) in all {
            links.connect(from, files).map_err(|error| chain(&error))?;
        }
        let links = Mutex::new(Some(links));
        Ok(Arc::new(Windows { links, used: AtomicBool::new(false), blocks, beside }))
    }
}

/// Bytes of a row of all tokens' `rows`.
fn row_bytes(need: &Need, rows: Buffer) -> usize {
    rows.bytes() / (need.experts.len() * need.tokens)
}

/// Those that the other ranks of this node lay into their windows: their own, and those of their
/// rails.
fn tokens_of_others(need: &Need, me: usize) -> usize {
    let positions = need.experts.len() / need.nodes;
    let is_other = |rank: &usize| rank % positions != me;
    (0..need.present).filter(is_other).count() * need.tokens
}

/// What every rank says, by rank; none for what is not understood.
fn tell<W: Serialize + for<'a> Deserialize<'a>>(
    comm: &mut Comm,
    word: &W,
) -> Result<Vec<Option<W>>, CommError> {
    let bytes = serde_json::to_vec(word).unwrap_or_default();
    // What is too long to be told is not understood anywhere.
    let bytes = if bytes.len() > WORDS_MAX { &[] } else { &bytes[..] };
    let all = comm.gather_all(bytes, WORDS_MAX)?;
    Ok(all.iter().map(|bytes| serde_json::from_slice(bytes).ok()).collect())
}

/// Nothing on a GPU notices that a peer is gone.
fn watch_over(windows: &Weak<Windows>, lookout: &Lookout) {
    while let Some(here) = windows.upgrade() {
        if lookout.look().is_err() {
            here.stop();
            return;
        }
        drop(here);
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_kernels::peer::rooms_of_group;
    use moejob_protocol::memory::window_rooms;

    /// What a plan counts is what kernels want.
    #[test]
    fn rooms_are_those_of_the_plan() {
        let sizes = [(2, 32, 256, 2), (8, 4096, 4096, 8), (3, 7, 64, 1)];
        for (positions, tokens, row, top_k) in sizes {
            for rows in [[row, row], [row, 2 * row], [2 * row, row]] {
                let planned = window_rooms(positions, tokens, rows, top_k);
                let [positions, tokens, top_k] =
                    [positions, tokens, top_k].map(|count| count as usize);
                let rows = rows.map(|bytes| bytes as usize);
                assert_eq!(rooms_of_group(positions, tokens, rows, top_k) as u64, planned);
            }
        }
    }

    /// So are rows in the formats that they may travel in.
    #[test]
    fn rows_are_as_long_as_the_plan_says() {
        use moejob_kernels::WireFormat;
        use moejob_protocol::formats::RowFormat;
        use moejob_protocol::memory::Kind;
        for dim in [64, 128, 192, 2048, 2112, 7168] {
            let planned = RowFormat::Fp8.bytes(dim as u64);
            assert_eq!(WireFormat::Fp8.row_bytes(dim) as u64, planned);
            let planned = RowFormat::Of(Kind::Bf16).bytes(dim as u64);
            assert_eq!(WireFormat::Bf16.row_bytes(dim) as u64, planned);
        }
    }

    /// Processors have none: all ranks hear it, and go on.
    #[test]
    fn a_group_without_windows_goes_on() {
        for wanted in [Use::Auto, Use::Off, Use::On { blocks: 8 }] {
            std::thread::scope(|scope| {
                for mut comm in Comm::in_process(4) {
                    scope.spawn(move || {
                        let device = Device::cpu(1, 0).expect("a processor");
                        let first = comm.rank() / 2 * 2;
                        // One of the ranks wants none in any case.
                        let wanted = if comm.rank() == 3 { Use::Off } else { wanted };
                        let ranks = vec![first, first + 1];
                        let (rooms, beside, patience) = (1 << 20, 8, PATIENCE);
                        let near = Near { ranks, rooms, wanted, beside, patience };
                        let opened = Windows::open(&mut comm, &device, &near);
                        assert!(opened.expect("all are here").is_none());
                        assert_eq!(comm.collective(), 1);
                    });
                }
            });
        }
    }
}
