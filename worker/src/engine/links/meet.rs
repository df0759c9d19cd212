//! How the GPUs of a gang find each other: on a thread of its own, while the state comes back.

use super::nccl::{Joined, Lane, NoLinks};
use super::{Aside, Groups};
use crate::engine::notes;
use crate::gang::comm::Comm;
use moejob_kernels::cuda::{Arena, CudaError, Gpu, Stream as Lines};
use moejob_kernels::{ArenaPlan, Buffer, DType};
use moejob_nccl::{
    Config, Error, Library, Reduce, Seat, Span, Stream, UniqueId, Version,
};
use moejob_protocol::links::Built;
use std::collections::HashSet;
use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a rank tells of its library.
const WORDS_MAX: usize = 256;
/// Between two looks at the first words.
const PAUSE: Duration = Duration::from_micros(500);

/// One library on all ranks, or the first rank that has none or another.
pub(super) fn agree(comm: &mut Comm, own: Result<Library, Error>) -> Result<Library, NoLinks> {
    let words = match &own {
        Ok(library) => library.version().code().to_string(),
        Err(error) => format!("{error}"),
    };
    let words: String = words.chars().filter(char::is_ascii).take(WORDS_MAX).collect();
    let all = comm.gather_all(words.as_bytes(), WORDS_MAX)?;
    let world = comm.world();
    let library = own.map_err(|source| NoLinks::Nccl { world, source })?;
    let mut versions = Vec::with_capacity(all.len());
    for (rank, words) in (0..).zip(&all) {
        let words = String::from_utf8_lossy(words);
        match words.parse() {
            Ok(code) => versions.push(Version::of_code(code)),
            Err(_) => return Err(NoLinks::Elsewhere { rank, why: words.into_owned() }),
        }
    }
    let agreed = library.version().agree(&versions);
    agreed.map_err(|source| NoLinks::Nccl { world, source })?;
    Ok(library)
}

/// What all ranks meet by: rank 0 makes it.
pub(super) fn name_of_all(comm: &mut Comm, library: &Library) -> Result<UniqueId, NoLinks> {
    let id = (comm.rank() == 0).then(|| UniqueId::new(library)).transpose();
    // Also without one: the others must not wait for it.
    let bytes = match &id {
        Ok(Some(id)) => &id.bytes()[..],
        _ => &[],
    };
    let all = comm.gather_all(bytes, UniqueId::BYTES)?;
    id.map_err(|source| NoLinks::Nccl { world: comm.world(), source })?;
    match <[u8; UniqueId::BYTES]>::try_from(all[0].as_slice()) {
        Ok(bytes) => Ok(UniqueId::from_bytes(bytes)),
        Err(_) => {
            Err(NoLinks::Elsewhere { rank: 0, why: "it has no id to meet by".to_string() })
        }
    }
}

/// One rank that meets the others.
pub(super) struct Party {
    pub gpu: Gpu,
    pub room: Room,
    pub seat: Seat,
    pub library: Library,
    pub id: UniqueId,
    pub config: Config,
    pub groups: Groups,
    pub aside: Option<Aside>,
}

/// How it has met them.
pub(super) struct Met {
    pub joined: Vec<Joined>,
    /// What NCCL says it has built.
    pub built: Built,
}

impl Party {
    /// # Errors
    /// Not all came, or this one is to stop.
    pub fn meet(self) -> Result<Met, Error> {
        let Party { gpu, room, seat, library, id, config, groups, aside } = self;
        // A device that cannot be entered says so to its next op, too.
        let _ = gpu.make_current();
        let began = Instant::now();
        let told = |what| tracing::debug!(seconds = began.elapsed().as_secs_f64(), what);
        let everyone = moejob_nccl::Comm::init(&library, seat, &id, &config)?;
        told("a communicator of all ranks");
        let mut joined = Vec::new();
        let mut split = |lane, groups: &[Vec<u32>], config: &Config| {
            for apart in splits(groups) {
                let is_own = |ranks: &&Vec<u32>| ranks.binary_search(&seat.rank).is_ok();
                let color = apart.iter().position(is_own);
                let comm = everyone.split_as(color.map(|at| at as u32), seat.rank, config)?;
                let own = color.map(|at| apart[at].clone()).zip(comm);
                joined.extend(own.map(|(ranks, comm)| Joined { lane, ranks, comm }));
            }
            Ok::<(), Error>(())
        };
        let of_some = |group: &&Vec<u32>| group.len() != seat.world as usize;
        let of_some: Vec<Vec<u32>> = groups.shared.iter().filter(of_some).cloned().collect();
        split(Lane::Ops, &of_some, &config)?;
        if let Some(Aside { groups, overlap, .. }) = &aside {
            let config = Config { ctas_max: Some(overlap.ctas), ..config.clone() };
            split(Lane::Aside, groups, &config)?;
        }
        let all = Joined { lane: Lane::Ops, ranks: (0..seat.world).collect(), comm: everyone };
        joined.insert(0, all);
        told("all communicators");
        greet(room, seat.rank, &joined, &groups.parcels, &config)?;
        told("a word to each");
        let version = library.version().to_string();
        let built = notes::built(seat.rank, seat.world, version);
        told("what is built");
        Ok(Met { joined, built })
    }
}

/// Groups of ranks by the splits that make their communicators. One split makes those of all groups
/// that have no rank in common, so a gang of any size takes as many as a rank has groups. Whatever
/// ranks two groups have in common, these come in the same order on all of them.
fn splits(groups: &[Vec<u32>]) -> Vec<Vec<&Vec<u32>>> {
    let mut splits: Vec<(HashSet<u32>, Vec<&Vec<u32>>)> = Vec::new();
    for group in groups {
        let is_free = |taken: &HashSet<u32>| !group.iter().any(|rank| taken.contains(rank));
        let at = splits.iter().position(|(taken, _)| is_free(taken)).unwrap_or(splits.len());
        if at == splits.len() {
            splits.push((HashSet::new(), Vec::new()));
        }
        let (taken, of_split) = &mut splits[at];
        taken.extend(group);
        of_split.push(group);
    }
    splits.into_iter().map(|(_, groups)| groups).collect()
}

/// A word by each way that the verbs of a step take: NCCL opens a way when it is first used, which
/// takes longer than a step. No rank leaves a word out: the others' words would then meet its step.
fn greet(
    room: Room,
    me: u32,
    joined: &[Joined],
    peers: &[u32],
    config: &Config,
) -> Result<(), Error> {
    // From the first word on something in it may wait for a peer. It is given back only when
    // nothing does any more: to give it back earlier would wait for that peer, too.
    let room = ManuallyDrop::new(room);
    let (stream, word, other) = (room.stream(), room.span(room.word), room.span(room.other));
    for Joined { comm, .. } in joined {
        let all = room.span(room.all.slice(0, comm.world() as usize));
        comm.all_reduce(word, word, Reduce::Sum, stream)?;
        comm.reduce_scatter(all, word, Reduce::Sum, stream)?;
        comm.all_gather(word, all, stream)?;
    }
    if let Some(Joined { comm, .. }) = joined.first() {
        let others = || peers.iter().filter(|peer| **peer != me);
        comm.group(|group| {
            others().try_for_each(|to| group.send(word, *to, stream))?;
            others().try_for_each(|from| group.recv(other, *from, stream))
        })?;
    }
    room.settle(config)?;
    drop(ManuallyDrop::into_inner(room));
    Ok(())
}

/// Some words of device memory, and a stream. It is made before anybody meets, so that a rank that
/// has no memory for it ends the attempt in place of missing among the words.
pub(super) struct Room {
    lines: Lines,
    arena: Arena,
    word: Buffer,
    /// What peers say, one after the other.
    other: Buffer,
    all: Buffer,
}

impl Room {
    pub fn new(gpu: &Gpu, world: u32) -> Result<Room, CudaError> {
        let mut plan = ArenaPlan::new();
        let mut words = |len| plan.alloc(DType::F32, len);
        let (word, other, all) = (words(1), words(1), words(world as usize));
        Ok(Room { lines: gpu.stream()?, arena: Arena::new(gpu, plan.bytes())?, word, other, all })
    }

    fn stream(&self) -> Stream {
        // SAFETY: of the GPU that is current here, as it was for the communicators; it is ended
        // only when all verbs on it are done.
        unsafe { Stream::new(self.lines.raw()) }
    }

    fn span(&self, buffer: Buffer) -> Span {
        // SAFETY: buffers of the arena, which outlives the verbs; nobody reads what they hold.
        unsafe { Span::new(self.arena.address(buffer), moejob_nccl::DType::F32, buffer.len()) }
    }

    /// Waits for all words.
    fn settle(&self, config: &Config) -> Result<(), Error> {
        let call = "the first words between GPUs";
        let until = Instant::now() + config.meet_limit;
        // A device that failed says so to its next op.
        while !self.lines.is_idle().unwrap_or(true) {
            if config.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped { call });
            }
            if Instant::now() > until {
                return Err(Error::Late { call, limit: config.meet_limit });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    fn text(groups: &[&[u32]]) -> String {
        let groups: Vec<Vec<u32>> = groups.iter().map(|ranks| ranks.to_vec()).collect();
        let all: Vec<String> = splits(&groups).iter().map(|of| format!("{of:?}")).collect();
        all.join(" | ")
    }

    #[test]
    fn groups_without_a_common_rank_are_one_split() {
        assert_eq!(text(&[]), "");
        assert_eq!(text(&[&[0, 1], &[2, 3]]), "[[0, 1], [2, 3]]");
        // All ranks, then those of each place.
        let of_places = text(&[&[0, 1, 2, 3], &[0, 2], &[1, 3]]);
        assert_eq!(of_places, "[[0, 1, 2, 3]] | [[0, 2], [1, 3]]");
        // Rank 3 is in none.
        assert_eq!(text(&[&[0, 1], &[1, 2], &[4, 5]]), "[[0, 1], [4, 5]] | [[1, 2]]");
    }
    /// 512 ranks that share experts out over 8, whose buckets travel beside the ops: one call for
    /// the communicator of all, one for expert groups, two for buckets.
    #[test]
    fn five_hundred_ranks_meet_by_four_calls() {
        let experts: Vec<Vec<u32>> = (0..64).map(|at| (at * 8..at * 8 + 8).collect()).collect();
        let places = (0..8).map(|place| (0..64).map(|at| at * 8 + place).collect());
        let mut buckets: Vec<Vec<u32>> = places.chain([(0..512).collect()]).collect();
        buckets.sort();
        assert_eq!((splits(&experts).len(), splits(&buckets).len()), (1, 2));
        let all: usize = splits(&buckets).iter().map(Vec::len).sum();
        assert_eq!(all, 9, "each of them");
    }
}
