//! Tokens of an expert group between GPUs: to the ranks that have one of their experts, or to all,
//! and what became of them back.
//!
//! ```text
//! gather    own rows -> all ranks
//! scatter   what is added here -> sums, at the token's rank
//!
//! gather    own rows -> ranks of the rail -> what each rail brought -> ranks of the node
//! scatter   what is added here -> sums of the node, at the rank of the token's rail
//!           -> the token's rank: their sum, in the order of nodes
//! ```
//! The second pair is that of a group on several nodes whose tokens travel along rails: who is in
//! which, and what lies where, is [`Rails`]. Between nodes each rank exchanges with those of its
//! place alone; within a node by the node's communicator, or through windows (`peer.rs`). Rows come
//! straight to where they belong. Sums of other nodes land where rows lie that this rank needs no
//! longer, so nothing takes memory of its own.
//!
//! Rows may travel in another format than they are computed with (`packing.rs`). Then the own ones
//! go through it as well, so that no number depends on which rank has an expert. Through windows
//! the kernel packs and unpacks tokens itself; everything else is packed before it leaves, moved,
//! and unpacked. Sums that travel as bf16 are made of what was packed, in fp32, and rounded once.

use super::packing::{Packing, Rows};
use super::shared::of_all;
use super::{Links, Parcel, Shared};
use crate::engine::group::ExpertGroup;
use moejob_kernels::peer::Need;
use moejob_kernels::{Add, Buffer, Device, Sum};
use moejob_protocol::communication::Verb;
use moejob_protocol::rails::Rails;

impl Links {
    /// Tokens of the own expert group, which has a buffer of rows [P T, D] on each rank, to the
    /// ranks that have one of their experts, or to all; with `weights` [P T, K] also these and the
    /// ids of `need`, of all tokens to all. Other rows say nothing.
    pub(crate) fn gather_tokens(
        &mut self,
        device: &mut Device,
        (group, need): (&ExpertGroup, &Need),
        of: Rows,
        weights: Option<Buffer>,
    ) {
        let by_windows = self.has_windows(device);
        // The kernel packs for itself what does not come by rails.
        let packs = !by_windows || group.rails.is_some();
        let packed = of.travelling(group.ranks.len() * need.tokens).filter(|_| packs);
        if let Some(packed) = packed {
            packed.of(group, group.me).pack(device);
        }
        let words = weights.iter().flat_map(|weights| [need.ids, *weights]);
        let rows = packed.map_or(of.rows, |packed| packed.packed);
        let all: Vec<Buffer> = std::iter::once(rows).chain(words).collect();
        if let Some(rails) = group.rails {
            self.out_along(device, (group, rails), &all);
        }
        if by_windows {
            if let (Some(packed), Some(rails)) = (packed, group.rails) {
                let came = rails.along(group.me);
                came.for_each(|from| packed.of(group, from).unpack(device));
            }
            let format = of.packed.map(|packed| packed.format);
            self.gather_by_windows(device, need, (of.rows, format), weights);
        } else if group.rails.is_none_or(|rails| rails.places > 1) {
            // Rails of nodes with one rank each have brought everything.
            self.all_gather_as(Verb::Dispatch, device, &near(group, &all));
        }
        if let Some(packed) = packed.filter(|_| !by_windows) {
            packed.unpack(device);
        }
    }

    /// What each rank of the own expert group adds to all tokens, rows [P T, D] and `slots`
    /// [P T, K]: each rank's own part becomes the sum. With rails it is made within each node
    /// first, and then over nodes in their order. With `onto`, [T, D] each, the second of them
    /// becomes the first plus the own sums of rows, and what the own rows are then is not said.
    pub(crate) fn scatter_tokens(
        &mut self,
        device: &mut Device,
        (group, need): (&ExpertGroup, &Need),
        of: Rows,
        (slots, onto): (Option<Buffer>, Option<[Buffer; 2]>),
    ) {
        let packed = of.travelling(group.ranks.len() * need.tokens);
        if let Some(packed) = packed {
            packed.pack(device);
        }
        let rows = packed.map_or(of.rows, |packed| packed.sums());
        let all: Vec<Buffer> = std::iter::once(rows).chain(slots).collect();
        // The kernel adds to what is of the kind that it sums.
        let alike = |[a, _]: &[Buffer; 2]| a.dtype() == of.rows.dtype();
        let flat = group.rails.is_none() && packed.is_none();
        let whole = onto.filter(alike).filter(|_| flat);
        match self.scatter_by_windows(device, need, rows, (slots, whole)) {
            true if whole.is_some() => return,
            true => {}
            false => self.reduce_scatter_as(Verb::Combine, device, &near(group, &all)),
        }
        match group.rails.filter(|rails| rails.places > 1) {
            Some(rails) => self.back_along(device, (group, rails), (packed, &all)),
            None => {
                let own = packed.map(|packed| packed.of(group, group.me));
                own.iter().for_each(|own| own.unpack(device));
            }
        }
        self.add_onto(device, (group, of.rows), onto);
    }

    /// The second of `onto` becomes the first plus the own sums of rows.
    fn add_onto(
        &self,
        device: &mut Device,
        (group, rows): (&ExpertGroup, Buffer),
        onto: Option<[Buffer; 2]>,
    ) {
        if let Some([a, out]) = onto.filter(|_| !self.has_failed()) {
            device.sum(&Sum { a, b: chunk(group, rows, group.me), out });
        }
    }

    /// Tokens travel through windows on this device, unless a verb has failed.
    fn has_windows(&self, device: &Device) -> bool {
        self.windows.is_some() && device.as_cuda().is_some() && self.failure.is_none()
    }

    /// The own part of each buffer to the others of the rail, and theirs here.
    fn out_along(
        &mut self,
        device: &mut Device,
        (group, rails): (&ExpertGroup, Rails),
        all: &[Buffer],
    ) {
        let others = || rails.along(group.me);
        let of = |position| chunks(group, all, position);
        let sends: Vec<Parcel> =
            others().map(|to| (group.ranks[to], of(group.me))).collect();
        let receives: Vec<Parcel> = others().map(|from| (group.ranks[from], of(from))).collect();
        self.exchange(device, &sends, &receives);
    }

    /// The sums that this node has of others' tokens to the ranks of these. The own part of each
    /// buffer becomes the sum over all nodes, in their order; that of packed rows what they are
    /// packed of.
    fn back_along(
        &mut self,
        device: &mut Device,
        (group, rails): (&ExpertGroup, Rails),
        (packed, all): (Option<Packing>, &[Buffer]),
    ) {
        let others = || rails.along(group.me);
        let of = |position| chunks(group, all, position);
        let sends: Vec<Parcel> = others().map(|to| (group.ranks[to], of(to))).collect();
        let receives: Vec<Parcel> =
            others().map(|from| (group.ranks[from], of(rails.landing(from)))).collect();
        self.exchange(device, &sends, &receives);
        if self.has_failed() {
            return;
        }
        let mut terms: Vec<usize> = others().map(|from| rails.landing(from)).collect();
        terms.insert(rails.node(group.me), group.me);
        let mut all = all.to_vec();
        if let Some(packed) = packed {
            terms.iter().for_each(|position| packed.of(group, *position).unpack(device));
            all[0] = packed.rows;
        }
        for buffer in all {
            let terms: Vec<Buffer> =
                terms.iter().map(|position| chunk(group, buffer, *position)).collect();
            add_in_order(device, &terms, rails.node(group.me));
        }
    }
}

/// What the ranks of one node have in common of some buffers of all tokens: the rows of each node's
/// ranks, a chunk for each rank here. Without rails, or with one rank on each node, all of it is
/// the whole group's.
fn near<'a>(group: &'a ExpertGroup, all: &[Buffer]) -> Vec<Shared<'a>> {
    let Some(rails) = group.rails.filter(|rails| rails.places > 1) else {
        return of_all(&group.ranks, all);
    };
    let holders = group.near();
    let of_node = |buffer: &Buffer, node| {
        let len = buffer.len() / rails.nodes;
        Shared { holders, len, buffer: Some(buffer.slice(node * len, len)) }
    };
    all.iter().flat_map(|buffer| (0..rails.nodes).map(move |node| of_node(buffer, node))).collect()
}

/// The part of a buffer of all tokens that is of the rank at `position`.
pub(super) fn chunk(group: &ExpertGroup, buffer: Buffer, position: usize) -> Buffer {
    let len = buffer.len() / group.ranks.len();
    buffer.slice(position * len, len)
}

/// The same of each of some buffers.
pub(super) fn chunks(group: &ExpertGroup, all: &[Buffer], position: usize) -> Vec<Buffer> {
    all.iter().map(|buffer| chunk(group, *buffer, position)).collect()
}

/// terms[own] = the sum of all, in their order.
fn add_in_order(device: &mut Device, terms: &[Buffer], own: usize) {
    // A sum of two is the same in either order.
    let sum = if own < 2 { own } else { 0 };
    for (_, term) in terms.iter().enumerate().filter(|(at, _)| *at != sum) {
        device.add(&Add { a: terms[sum], b: *term });
    }
    if sum != own {
        device.copy(terms[sum], terms[own]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gang::comm::Comm;
    use crate::engine::links::Packed;
    use moejob_kernels::{ArenaPlan, DType, WireFormat};

    const TOKENS: usize = 3;
    /// A block of fp8, and the begin of another.
    const DIM: usize = 144;
    const TOP_K: usize = 2;

    /// What `rank` has in a row, or adds to it.
    type Value = fn(rank: usize, at: usize) -> f32;

    /// Sums of these round: (a + b) + c is not a + (b + c).
    fn rough(rank: usize, at: usize) -> f32 {
        let mixed = (rank * 7919 + at * 104_729 + 17) as u32;
        (mixed.wrapping_mul(2_654_435_761) >> 8) as f32 * 1.37 / (1 + mixed % 977) as f32
    }

    /// Sums of these do not.
    fn whole(rank: usize, at: usize) -> f32 {
        ((rank * 31 + at * 7) % 1000) as f32 - 500.0
    }

    /// What a rank of a group has after its tokens went out, and sums came back.
    struct Found {
        rows: Vec<f32>,
        ids: Vec<u32>,
        sums: [Vec<f32>; 2],
    }

    /// Two groups of processors, each on nodes of its own: what each rank of each has, by position.
    fn travel(ranks: usize, rails: Option<Rails>, value: Value) -> Vec<Vec<Found>> {
        travel_as(ranks, rails, value, None)
    }

    /// The same of rows that travel in a format; sums do so as bf16 alone.
    fn travel_as(
        ranks: usize,
        rails: Option<Rails>,
        value: Value,
        format: Option<WireFormat>,
    ) -> Vec<Vec<Found>> {
        let of_rank = |comm: Comm| {
            let rank = comm.rank() as usize;
            let (first, me) = (rank / ranks * ranks, rank % ranks);
            let members = (first..first + ranks).map(|rank| rank as u32).collect();
            let group = ExpertGroup::of(members, me, rails);
            let mut plan = ArenaPlan::new();
            let tokens = ranks * TOKENS;
            let rows = plan.alloc(DType::F32, tokens * DIM);
            let ids = plan.alloc(DType::U32, tokens * TOP_K);
            let slots = plan.alloc(DType::F32, tokens * TOP_K);
            let onto = [(); 2].map(|()| plan.alloc(DType::F32, TOKENS * DIM));
            let room = plan.alloc(DType::F32, tokens * DIM);
            let packed = format.map(|format| Packed { format, room });
            let mut device = Device::cpu(1, plan.bytes()).expect("a processor");
            let need = Need {
                tokens: TOKENS,
                top_k: TOP_K,
                ids,
                present: ranks,
                experts: (0..ranks as u32).map(|position| (position, 1)).collect(),
                nodes: rails.map_or(1, |rails| rails.nodes),
                node: rails.map_or(0, |rails| rails.node(me)),
            };
            let mut links = Links::new(comm);
            let own = |buffer: Buffer, value: &dyn Fn(usize) -> f32| -> Vec<f32> {
                let len = buffer.len() / ranks;
                let is_own = |at: usize| at / len == me;
                let at = |at| if is_own(at) { value(at) } else { f32::NAN };
                (0..buffer.len()).map(at).collect()
            };
            device.write(rows, &own(rows, &|at| value(rank, at)));
            device.write(slots, &own(slots, &|at| value(rank, at)));
            let mut words = vec![u32::MAX; ids.len()];
            let len = ids.len() / ranks;
            (me * len..(me + 1) * len).for_each(|at| words[at] = at as u32);
            device.write(ids, &words);
            let of = Rows { rows, packed };
            links.gather_tokens(&mut device, (&group, &need), of, Some(slots));
            let mut found = Found {
                rows: device.read_vec(rows),
                ids: device.read_vec(ids),
                sums: [Vec::new(), Vec::new()],
            };
            let adds = |buffer: Buffer| -> Vec<f32> {
                (0..buffer.len()).map(|at| value(rank, at)).collect()
            };
            device.write(rows, &adds(rows));
            device.write(slots, &adds(slots));
            let [residual, out] = onto;
            let before: Vec<f32> = (0..residual.len()).map(|at| value(rank, at + 1)).collect();
            device.write(residual, &before);
            let asked = (Some(slots), Some(onto));
            let packed = packed.filter(|packed| packed.format == WireFormat::Bf16);
            links.scatter_tokens(&mut device, (&group, &need), Rows { rows, packed }, asked);
            assert_eq!(links.check(), Ok(()));
            found.sums = [rows, slots].map(|buffer| device.read_vec(chunk(&group, buffer, me)));
            let whole: Vec<f32> = before.iter().zip(&found.sums[0]).map(|(a, b)| a + b).collect();
            assert_eq!(bits(&device.read_vec::<f32>(out)), bits(&whole), "rank {rank}");
            (rank, found)
        };
        let mut all: Vec<(usize, Found)> = std::thread::scope(|scope| {
            let comms = Comm::in_process(2 * ranks as u32);
            let threads: Vec<_> =
                comms.into_iter().map(|comm| scope.spawn(move || of_rank(comm))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        all.sort_by_key(|(rank, _)| *rank);
        let mut found = all.into_iter().map(|(_, found)| found);
        (0..2).map(|_| found.by_ref().take(ranks).collect()).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    const SHAPES: [(usize, usize); 7] = [(2, 1), (3, 1), (2, 2), (2, 3), (3, 2), (4, 2), (3, 4)];

    #[test]
    fn rails_bring_what_the_flat_way_brings() {
        for (nodes, places) in SHAPES {
            let ranks = nodes * places;
            let flat = travel(ranks, None, rough);
            let rails = travel(ranks, Some(Rails { nodes, places }), rough);
            for (number, (flat, rails)) in flat.iter().zip(&rails).enumerate() {
                for (position, (flat, rails)) in flat.iter().zip(rails).enumerate() {
                    let what = format!("{nodes} x {places}: group {number}, {position}");
                    let row = |at: usize| at / (TOKENS * DIM) + number * ranks;
                    let whose = |at| rough(row(at), at).to_bits();
                    let expected: Vec<u32> = (0..rails.rows.len()).map(whose).collect();
                    assert_eq!(bits(&rails.rows), expected, "{what}");
                    assert_eq!(bits(&flat.rows), expected, "{what}");
                    assert_eq!(rails.ids, (0..rails.ids.len() as u32).collect::<Vec<_>>());
                }
            }
        }
    }

    /// Sums of what the ranks from `first` on add: of each `size` of them, then of these sums.
    fn expected((first, ranks): (usize, usize), size: usize, at: usize) -> f32 {
        let of = |begin: usize| {
            let terms = (begin..begin + size).map(|rank| rough(first + rank, at));
            terms.reduce(|sum, x| sum + x).expect("a rank")
        };
        (0..ranks).step_by(size).map(of).reduce(|sum, x| sum + x).expect("a node")
    }

    /// Within a node in the order of its ranks, then in the order of nodes; flat in that of ranks.
    #[test]
    fn sums_are_made_in_the_order_that_is_told() {
        for (nodes, places) in SHAPES {
            let (ranks, rails) = (nodes * places, Some(Rails { nodes, places }));
            let mut rounds_alike = true;
            for (rails, size) in [(rails, places), (None, ranks)] {
                let found = travel(ranks, rails, rough);
                let all = found.iter().flatten().enumerate();
                let sums = all.flat_map(|(rank, of)| of.sums.each_ref().map(|sums| (rank, sums)));
                for (rank, sums) in sums {
                    let (group, position) = (rank / ranks * ranks, rank % ranks);
                    let own = position * sums.len()..(position + 1) * sums.len();
                    let by = |size| -> Vec<f32> {
                        own.clone().map(|at| expected((group, ranks), size, at)).collect()
                    };
                    assert_eq!(bits(sums), bits(&by(size)), "{nodes} x {places}: {rank}");
                    rounds_alike &= bits(sums) == bits(&by(ranks));
                }
            }
            // Nodes of one rank add as the flat way does.
            assert_eq!(rounds_alike, places == 1, "{nodes} x {places}");
            let [rails, flat] = [rails, None].map(|rails| travel(ranks, rails, whole));
            for (rails, flat) in rails.iter().flatten().zip(flat.iter().flatten()) {
                assert_eq!(rails.sums, flat.sums, "{nodes} x {places}: sums that do not round");
            }
        }
    }

    fn halved(x: f32) -> f32 {
        half::bf16::from_f32(x).to_f32()
    }

    /// What a row of all tokens stands for after it has travelled.
    fn rounded(format: WireFormat, row: &[f32]) -> Vec<f32> {
        if format == WireFormat::Bf16 {
            return row.iter().map(|x| halved(*x)).collect();
        }
        let mut packed = vec![0; format.row_bytes(row.len())];
        moejob_kernels::fp8_pack(row, &mut packed);
        let mut out = vec![0.0; row.len()];
        moejob_kernels::fp8_unpack(&packed, &mut out);
        out
    }

    /// Every rank reads the same numbers, also whose tokens they are, and whatever way they came.
    #[test]
    fn rows_stand_for_the_same_on_all_ranks() {
        for (format, (nodes, places)) in
            [WireFormat::Bf16, WireFormat::Fp8].into_iter().flat_map(|of| SHAPES.map(|s| (of, s)))
        {
            let ranks = nodes * places;
            for rails in [None, Some(Rails { nodes, places })] {
                let found = travel_as(ranks, rails, rough, Some(format));
                for (rank, found) in found.iter().flatten().enumerate() {
                    let first = rank / ranks * ranks;
                    let whose = |at: usize| first + at / (TOKENS * DIM);
                    let all: Vec<f32> =
                        (0..found.rows.len()).map(|at| rough(whose(at), at)).collect();
                    let expected: Vec<f32> =
                        all.chunks(DIM).flat_map(|row| rounded(format, row)).collect();
                    assert_ne!(bits(&expected), bits(&all));
                    let what = format!("{format:?} {nodes} x {places} {rails:?}: {rank}");
                    assert_eq!(bits(&found.rows), bits(&expected), "{what}");
                    let ids: Vec<u32> = (0..found.ids.len() as u32).collect();
                    assert_eq!(found.ids, ids, "{what}");
                }
            }
        }
    }

    /// As bf16: of what was rounded, in fp32 and rounded once in each node; in fp32 over nodes.
    #[test]
    fn sums_of_packed_rows_are_made_of_what_they_stand_for() {
        for (nodes, places) in SHAPES {
            let ranks = nodes * places;
            // Nodes of one rank each add as the flat way does.
            let near = if places > 1 { places } else { ranks };
            for (rails, size) in [(Some(Rails { nodes, places }), near), (None, ranks)] {
                let found = travel_as(ranks, rails, rough, Some(WireFormat::Bf16));
                for (rank, found) in found.iter().flatten().enumerate() {
                    let (first, position) = (rank / ranks * ranks, rank % ranks);
                    let sum = |at: usize| {
                        let node = |begin: usize| {
                            let terms = (begin..begin + size).map(|p| halved(rough(first + p, at)));
                            halved(terms.fold(0.0, |sum, x| sum + x))
                        };
                        let nodes = (0..ranks).step_by(size).map(node);
                        nodes.reduce(|sum, x| sum + x).expect("a node")
                    };
                    let [rows, slots] = &found.sums;
                    let at = position * rows.len()..(position + 1) * rows.len();
                    let sums: Vec<f32> = at.map(sum).collect();
                    let what = format!("{nodes} x {places} {rails:?}: {rank}");
                    assert_eq!(bits(rows), bits(&sums), "{what}");
                    let at = position * slots.len()..(position + 1) * slots.len();
                    let whole: Vec<f32> =
                        at.map(|at| expected((first, ranks), size, at)).collect();
                    assert_eq!(bits(slots), bits(&whole), "{what}: slots are not packed");
                }
            }
        }
    }
}
