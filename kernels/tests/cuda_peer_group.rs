//! Tokens of an expert group by need, all ranks on one GPU, against a processor. Skipped where
//! there is no GPU.

mod peer_common;

use std::time::{Duration, Instant};

use half::{bf16, f16};
use moejob_kernels::peer::{Awaited, CountRows, GatherRows, Need, ScatterRows, rooms_of_group};
use moejob_kernels::{ArenaPlan, Buffer, DType, NO_EXPERT, WireFormat, fp8_pack, fp8_unpack};
use peer_common::{LONG, ROOMS, Random, Rank, alone, node};

/// A layer whose experts are shared out over `positions` of each of `nodes`, seen on one of them.
#[derive(Clone, Debug)]
struct Case {
    nodes: usize,
    node: usize,
    positions: usize,
    /// Of a rank.
    tokens: usize,
    top_k: usize,
    dim: usize,
    dtype: DType,
    /// As what rows travel out.
    format: Option<WireFormat>,
    /// By (node, position).
    present: usize,
    /// The same: first, and how many; one may have none.
    experts: Vec<(u32, u32)>,
    ids: Vec<u32>,
    /// All ranks' find room on one GPU.
    blocks: usize,
}

impl Case {
    fn new(
        random: &mut Random,
        (nodes, positions): (usize, usize),
        dtype: DType,
        turn: usize,
    ) -> Case {
        let (ranks, node) = (nodes * positions, turn % nodes);
        let top_k = [1, 2, 4, 8][turn % 4];
        let each = [9_u32, 5, 16][turn % 3];
        let mut experts: Vec<(u32, u32)> = (0..ranks as u32).map(|p| (p * each, each)).collect();
        if turn % 4 == 3 {
            experts[ranks - 1].1 = 0;
        }
        let tokens = [1, 7, 64, 200][turn % 4];
        let count: u32 = experts.iter().map(|of| of.1).sum();
        let mut ids = Vec::new();
        for _ in 0..ranks * tokens {
            // Most of a token's experts lie at few ranks; some choices are empty.
            let mut chosen: Vec<u32> = Vec::new();
            while chosen.len() < top_k {
                let id = random.below(count as usize) as u32;
                if random.below(12) == 0 {
                    chosen.push(NO_EXPERT);
                } else if !chosen.contains(&id) {
                    chosen.push(id);
                }
            }
            ids.extend(chosen);
        }
        // The last rank has no tokens, and with several nodes the one before it neither.
        let present = match (turn % 5, nodes) {
            (4, 1) => ranks - 1,
            (4, _) => ranks - 2,
            _ => ranks,
        };
        let dim = [64, 8, 2048, 520][turn % 4];
        let blocks = [1, 3, 8, 12][(turn + positions) % 4];
        let format = None;
        Case {
            nodes,
            node,
            positions,
            tokens,
            top_k,
            dim,
            dtype,
            format,
            present,
            experts,
            ids,
            blocks,
        }
    }

    /// The same, whose rows travel in another format.
    fn travelling_as(self, format: WireFormat) -> Case {
        Case { format: Some(format), dim: self.dim.next_multiple_of(16), ..self }
    }

    /// What rows stand for after they have travelled.
    fn travelled(&self, values: &[f32]) -> Vec<f32> {
        match self.format {
            None => values.to_vec(),
            Some(WireFormat::Bf16) => {
                values.iter().map(|x| bf16::from_f32(*x).to_f32()).collect()
            }
            Some(WireFormat::Fp8) => {
                let mut packed = vec![0; WireFormat::Fp8.row_bytes(self.dim)];
                let mut found = values.to_vec();
                for row in found.chunks_mut(self.dim) {
                    fp8_pack(row, &mut packed);
                    fp8_unpack(&packed, row);
                }
                found
            }
        }
    }

    fn rows(&self) -> usize {
        self.nodes * self.positions * self.tokens
    }

    /// Whether the rank has tokens whose row it is.
    fn is_present(&self, row: usize) -> bool {
        row / self.tokens < self.present
    }

    /// The position whose row it is.
    fn position(&self, row: usize) -> usize {
        row / self.tokens % self.positions
    }

    fn needs(&self, row: usize, position: usize) -> bool {
        let (first, count) = self.experts[self.node * self.positions + position];
        let ids = &self.ids[row * self.top_k..][..self.top_k];
        ids.iter().any(|id| (first..first + count).contains(id))
    }

    fn need(&self, ids: Buffer) -> Need {
        Need {
            tokens: self.tokens,
            top_k: self.top_k,
            ids,
            present: self.present,
            experts: self.experts.clone(),
            nodes: self.nodes,
            node: self.node,
        }
    }

    /// What this position has of a buffer of all, with `filler` at the others' places.
    fn own<E: Copy>(&self, me: usize, all: &[E], filler: E) -> Vec<E> {
        let width = all.len() / self.rows();
        let own = |(at, value): (usize, &E)| match self.position(at / width) == me {
            true => *value,
            false => filler,
        };
        all.iter().enumerate().map(own).collect()
    }
}

/// What numbers of a kind look like in memory, and back.
fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let bytes = |x: &f32| match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
        _ => f16::from_f32(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        DType::Bf16 => {
            bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect()
        }
        _ => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
    }
}

fn place<E: moejob_kernels::Element>(rank: &mut Rank, dtype: DType, values: &[E]) -> Buffer {
    let buffer = rank.alloc(dtype, values.len());
    rank.arena.write(buffer, values).expect("written");
    buffer
}

/// Rows of `dtype` from their bytes.
fn place_rows(rank: &mut Rank, case: &Case, bytes: &[u8]) -> Buffer {
    let buffer = rank.alloc(case.dtype, case.rows() * case.dim);
    rank.arena.write(buffer.reinterpret(DType::U8), bytes).expect("written");
    buffer
}

fn bytes_of(rank: &Rank, buffer: Buffer) -> Vec<u8> {
    rank.stream.synchronize().expect("done");
    assert_eq!(rank.links.check(), Ok(()));
    let mut found = vec![0_u8; buffer.bytes()];
    rank.arena.read_into(buffer.reinterpret(DType::U8), &mut found).expect("read");
    found
}

const FILLER: u8 = 0xa5;

fn gather(ranks: &mut [Rank], case: &Case, random: &mut Random) {
    let values: Vec<f32> =
        (0..case.rows() * case.dim).map(|_| random.below(2000) as f32 / 64.0 - 15.0).collect();
    let all = encode(case.dtype, &values);
    let arrives = encode(case.dtype, &case.travelled(&decode(case.dtype, &all)));
    // It rounds.
    assert_eq!(all == arrives, case.format.is_none(), "{case:?}");
    let weights: Vec<f32> =
        (0..case.ids.len()).map(|_| random.below(1000) as f32 / 1000.0).collect();
    // With the ids first, as in forward; then rows alone, as in backward.
    for brings in [true, false] {
        let made: Vec<(Need, Buffer, Buffer)> = ranks
            .iter_mut()
            .enumerate()
            .map(|(me, rank)| {
                rank.plan = ArenaPlan::new();
                let ids = if brings { case.own(me, &case.ids, 7) } else { case.ids.clone() };
                let ids = place(rank, DType::U32, &ids);
                let rows = place_rows(rank, case, &case.own(me, &all, FILLER));
                let weights = place(rank, DType::F32, &case.own(me, &weights, -1.0));
                (case.need(ids), rows, weights)
            })
            .collect();
        for (rank, (need, rows, weights)) in ranks.iter().zip(&made) {
            let weights = brings.then_some(*weights);
            let (rows, format, blocks) = (*rows, case.format, case.blocks);
            let op = GatherRows { need, rows, format, weights, blocks, step: 3 };
            rank.links.gather_rows((&rank.stream, &rank.arena), &op).expect("enqueued");
        }
        let passed = |rank: &Rank| rank.links.rows_passed()[usize::from(brings)];
        let before: Vec<u64> = ranks.iter().map(passed).collect();
        for (rank, (need, _, _)) in ranks.iter().zip(&made) {
            let op = CountRows { need, row_bytes: 48, counter: brings.into() };
            rank.links.count_rows((&rank.stream, &rank.arena), &op).expect("enqueued");
        }
        for (me, (rank, (need, rows, buffer))) in ranks.iter().zip(&made).enumerate() {
            let found = bytes_of(rank, *rows);
            let width = all.len() / case.rows();
            let come = |row: &usize| {
                case.position(*row) != me && case.is_present(*row) && case.needs(*row, me)
            };
            let come = (0..case.rows()).filter(come).count() as u64;
            assert_eq!(passed(rank) - before[me], 48 * come, "rank {me} {case:?}");
            for row in 0..case.rows() {
                let comes = case.is_present(row) && case.needs(row, me);
                let found = &found[row * width..][..width];
                let own = case.position(row) == me;
                if own || comes {
                    // Own ones, too: but no rank without tokens has laid any out.
                    let all = if case.is_present(row) { &arrives } else { &all };
                    assert!(*found == all[row * width..][..width], "rank {me} row {row} {case:?}");
                } else {
                    assert!(found.iter().all(|byte| *byte == FILLER), "rank {me} row {row}");
                }
            }
            let told = |slot: usize| {
                let row = slot / case.top_k;
                case.position(row) == me || case.is_present(row)
            };
            if brings {
                let mut words = vec![0_u32; case.ids.len()];
                rank.arena.read_into(need.ids, &mut words).expect("read");
                let mut numbers = vec![0_f32; words.len()];
                rank.arena.read_into(*buffer, &mut numbers).expect("read");
                for slot in 0..words.len() {
                    let expected = match told(slot) {
                        true => (case.ids[slot], weights[slot]),
                        false => (7, -1.0),
                    };
                    assert_eq!((words[slot], numbers[slot]), expected, "rank {me} slot {slot}");
                }
            }
        }
    }
}

fn scatter(ranks: &mut [Rank], case: &Case, random: &mut Random) {
    let count = case.positions;
    // What a rank adds to a token that needs it not is never read.
    let parts: Vec<Vec<f32>> = (0..count)
        .map(|_| {
            let values = (0..case.rows() * case.dim).map(|_| random.below(4001) as f32);
            let values: Vec<f32> = values.map(|x| (x - 2000.0) / 97.0).collect();
            decode(case.dtype, &encode(case.dtype, &values))
        })
        .collect();
    let slots: Vec<Vec<f32>> = (0..count)
        .map(|_| (0..case.ids.len()).map(|_| random.below(4001) as f32 / 31.0).collect())
        .collect();
    // What sums are added to, where they are: numbers of the kind.
    let before: Vec<f32> =
        (0..case.tokens * case.dim).map(|_| random.below(4001) as f32 / 53.0 - 30.0).collect();
    let before = decode(case.dtype, &encode(case.dtype, &before));
    for (with_slots, onto) in [(true, false), (false, false), (true, true)] {
        if onto && case.nodes > 1 {
            continue;
        }
        let made: Vec<(Need, Buffer, Buffer, [Buffer; 2])> = ranks
            .iter_mut()
            .zip(parts.iter().zip(&slots))
            .map(|(rank, (part, slots))| {
                rank.plan = ArenaPlan::new();
                let ids = place(rank, DType::U32, &case.ids);
                let rows = place_rows(rank, case, &encode(case.dtype, part));
                let slots = place(rank, DType::F32, slots);
                let nothing = vec![FILLER; before.len() * case.dtype.size()];
                let pair = [encode(case.dtype, &before), nothing].map(|bytes| {
                    let buffer = rank.plan.alloc(case.dtype, before.len());
                    let all = buffer.reinterpret(DType::U8);
                    rank.arena.write(all, &bytes).expect("written");
                    buffer
                });
                (case.need(ids), rows, slots, pair)
            })
            .collect();
        for (rank, (need, rows, slots, pair)) in ranks.iter().zip(&made) {
            let slots = with_slots.then_some(*slots);
            let (rows, onto) = (*rows, onto.then_some(*pair));
            let op = ScatterRows { need, rows, slots, onto, blocks: case.blocks, step: 4 };
            rank.links.scatter_rows((&rank.stream, &rank.arena), &op).expect("enqueued");
        }
        for (me, (rank, (_, rows, buffer, pair))) in ranks.iter().zip(&made).enumerate() {
            let found = bytes_of(rank, *rows);
            let width = found.len() / case.rows();
            let whole = bytes_of(rank, pair[1]);
            let mut numbers = vec![0_f32; case.ids.len()];
            rank.arena.read_into(*buffer, &mut numbers).expect("read");
            for row in 0..case.rows() {
                let found = &found[row * width..][..width];
                let own = case.position(row) == me && case.is_present(row);
                let range = |of: &[f32], width: usize| of[row * width..][..width].to_vec();
                if !own {
                    let expected = encode(case.dtype, &range(&parts[me], case.dim));
                    assert!(found == expected, "rank {me} row {row}: not its own");
                    assert_eq!(range(&numbers, case.top_k), range(&slots[me], case.top_k));
                    continue;
                }
                let adds = || (0..count).filter(|q| case.needs(row, *q));
                let sum = |of: &[Vec<f32>], width: usize| -> (Vec<f32>, Vec<f64>) {
                    let at = |i: usize| adds().map(move |q| of[q][row * width + i]);
                    let small = (0..width).map(|i| at(i).fold(0.0, |sum, x| sum + x)).collect();
                    (small, (0..width).map(|i| at(i).map(f64::from).sum()).collect())
                };
                let (expected, exact) = sum(&parts, case.dim);
                let rounded = encode(case.dtype, &expected);
                let own = row % case.tokens * case.dim..;
                if onto {
                    let before = before[own.clone()].iter();
                    let sums = decode(case.dtype, &rounded);
                    let all: Vec<f32> = before.zip(sums).map(|(a, b)| a + b).collect();
                    let found = &whole[own.start * case.dtype.size()..][..width];
                    assert!(found == encode(case.dtype, &all), "rank {me} row {row} {case:?}");
                } else {
                    assert!(found == rounded, "rank {me} row {row} {case:?}");
                    assert!(whole.iter().all(|byte| *byte == FILLER), "rank {me}");
                }
                let unit = match case.dtype {
                    DType::F32 => 2.0_f64.powi(-24),
                    DType::Bf16 => 2.0_f64.powi(-8),
                    _ => 2.0_f64.powi(-11),
                };
                // The last rounding, and those of sums in fp32 before.
                let largest = 21.0 * count as f64;
                let most: f64 = 1.01 * largest * (unit + count as f64 * 2.0_f64.powi(-24));
                for (found, exact) in decode(case.dtype, &rounded).iter().zip(exact) {
                    assert!((f64::from(*found) - exact).abs() <= most, "{found} for {exact}");
                }
                let expected = match with_slots {
                    true => sum(&slots, case.top_k).0,
                    false => range(&slots[me], case.top_k),
                };
                assert_eq!(range(&numbers, case.top_k), expected, "rank {me} row {row}");
            }
        }
    }
}

#[test]
fn tokens_travel_by_need_and_come_back_summed() {
    let _alone = alone();
    for count in [1, 2, 3, 4, 8] {
        travel(1, count);
    }
}

/// The links join one of several nodes; a rank has the tokens of all ranks of its place.
#[test]
fn rails_bring_tokens_of_other_nodes() {
    let _alone = alone();
    for (nodes, count) in [(2, 1), (2, 2), (3, 2), (2, 4), (4, 3), (2, 8)] {
        travel(nodes, count);
    }
}

fn travel(nodes: usize, count: usize) {
    let Some(mut ranks) = node(count, LONG) else { return };
    let mut random = Random((16 * (nodes - 1) + count) as u64);
    for turn in 0..10 {
        let dtype = [DType::F32, DType::Bf16, DType::F16][turn % 3];
        let case = Case::new(&mut random, (nodes, count), dtype, turn);
        let row = case.dim * dtype.size();
        assert!(rooms_of_group(count, nodes * case.tokens, [row; 2], case.top_k) <= ROOMS);
        // Of several nodes rows are laid in either case.
        let ways = if nodes == 1 { &[false, true][..] } else { &[false] };
        for &in_place in ways {
            ranks.iter_mut().for_each(|rank| rank.in_place = in_place);
            gather(&mut ranks, &case, &mut random);
            scatter(&mut ranks, &case, &mut random);
        }
        for (dtype, format) in FORMATS {
            let case = Case { dtype, ..case.clone() }.travelling_as(format);
            gather(&mut ranks, &case, &mut random);
        }
    }
}

const FORMATS: [(DType, WireFormat); 3] = [
    (DType::F32, WireFormat::Bf16),
    (DType::F32, WireFormat::Fp8),
    (DType::Bf16, WireFormat::Fp8),
];

/// Epoch after epoch without the host: each round's rows are those of the round before, summed.
#[test]
fn rounds_follow_each_other() {
    let _alone = alone();
    [false, true].into_iter().for_each(rounds);
}

fn rounds(in_place: bool) {
    let (count, tokens, dim) = (3, 96, 64);
    let Some(mut ranks) = node(count, LONG) else { return };
    ranks.iter_mut().for_each(|rank| rank.in_place = in_place);
    // Token t of each rank is needed by ranks t % 3 and (t + 1) % 3.
    let ids: Vec<u32> = (0..count * tokens)
        .flat_map(|row| [(row % tokens % 3) as u32, ((row % tokens + 1) % 3) as u32])
        .collect();
    let made: Vec<(Need, Buffer)> = ranks
        .iter_mut()
        .map(|rank| {
            let ids = place(rank, DType::U32, &ids);
            let experts = (0..count as u32).map(|p| (p, 1)).collect();
            let need = Need { tokens, top_k: 2, ids, present: 3, experts, nodes: 1, node: 0 };
            let rows = place(rank, DType::F32, &vec![1.0_f32; count * tokens * dim]);
            (need, rows)
        })
        .collect();
    const ROUNDS: usize = 40;
    for round in 0..ROUNDS {
        for (rank, (need, rows)) in ranks.iter().zip(&made) {
            let on = (&rank.stream, &rank.arena);
            let (rows, step) = (*rows, round as u32);
            let (format, weights) = (None, None);
            let op = GatherRows { need, rows, format, weights, blocks: 5, step };
            rank.links.gather_rows(on, &op).expect("enqueued");
            let op = ScatterRows { need, rows, slots: None, onto: None, blocks: 5, step };
            rank.links.scatter_rows(on, &op).expect("enqueued");
        }
    }
    for (me, (rank, (_, rows))) in ranks.iter().zip(&made).enumerate() {
        let found = decode(DType::F32, &bytes_of(rank, *rows));
        // Two ranks have a row that was gathered: each round doubles it.
        let expected = 2.0_f32.powi(ROUNDS as i32);
        let own = &found[me * tokens * dim..][..tokens * dim];
        assert!(own.iter().all(|x| *x == expected), "rank {me}: {} for {expected}", own[0]);
    }
}

fn gathered(need: &Need, rows: Buffer) -> GatherRows<'_> {
    GatherRows { need, rows, format: None, weights: None, blocks: 2, step: 9 }
}

#[test]
fn who_never_comes_is_named_and_a_stop_ends_the_wait() {
    let _alone = alone();
    [false, true].into_iter().for_each(waits_end);
}

fn waits_end(in_place: bool) {
    let patience = Duration::from_millis(200);
    let op = |rank: &mut Rank| {
        rank.in_place = in_place;
        let ids = place(rank, DType::U32, &[0_u32, 1, 0, 1]);
        let experts = vec![(0, 1), (1, 1)];
        let need = Need { tokens: 2, top_k: 1, ids, present: 2, experts, nodes: 1, node: 0 };
        (need, place(rank, DType::F32, &[0_f32; 16]))
    };
    let Some(mut ranks) = node(2, patience) else { return };
    let (need, rows) = op(&mut ranks[1]);
    let rank = &ranks[1];
    let on = (&rank.stream, &rank.arena);
    let began = Instant::now();
    for _ in 0..20 {
        let gather = gathered(&need, rows);
        rank.links.gather_rows(on, &gather).expect("enqueued");
        let (slots, onto) = (None, None);
        let scatter = ScatterRows { need: &need, rows, slots, onto, blocks: 2, step: 9 };
        rank.links.scatter_rows(on, &scatter).expect("enqueued");
    }
    rank.stream.synchronize().expect("ended");
    let failure = rank.links.check().expect_err("position 0 did nothing");
    assert_eq!((failure.what, failure.position, failure.step), (Awaited::Place, 0, 9));
    assert!(began.elapsed() < 10 * patience, "{:?}", began.elapsed());

    let Some(mut ranks) = node(2, Duration::from_secs(60)) else { return };
    let (need, rows) = op(&mut ranks[0]);
    let rank = &ranks[0];
    let (slots, onto) = (None, None);
    let scatter = ScatterRows { need: &need, rows, slots, onto, blocks: 2, step: 9 };
    rank.links.scatter_rows((&rank.stream, &rank.arena), &scatter).expect("enqueued");
    std::thread::sleep(Duration::from_millis(50));
    assert!(!rank.stream.is_idle().expect("asked"), "it waits");
    rank.links.stop();
    rank.stream.synchronize().expect("ended");
    assert_eq!(rank.links.check(), Ok(()), "nobody failed");
    // What is enqueued behind it does nothing, also where the other comes now.
    let gather = gathered(&need, rows);
    rank.links.gather_rows((&rank.stream, &rank.arena), &gather).expect("enqueued");
    rank.stream.synchronize().expect("ended");
    let other = op(&mut ranks[1]);
    let late = &ranks[1];
    let gather = gathered(&other.0, other.1);
    // What lay there before the stop may be read where it lies.
    for _ in 0..if in_place { 2 } else { 1 } {
        late.links.gather_rows((&late.stream, &late.arena), &gather).expect("enqueued");
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(!late.stream.is_idle().expect("asked"), "nobody tells it of rows");
    late.links.stop();
    late.stream.synchronize().expect("ended");
}
