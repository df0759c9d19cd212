//! Windows between two GPUs, a process each. Where there are not two, each test says so and passes.
//! What the kernels do with more ranks is held against a processor by kernels/tests/cuda_peer.rs.

mod common;

use std::time::{Duration, Instant};

use common::{Bed, HERE, Peer, introduce, link, listen, say, turn};
use moejob_kernels::peer::{Awaited, MoveRows, PeerLinks};
use moejob_kernels::{ArenaPlan, DType};

/// Where a process that was started for a part of a test begins.
#[test]
fn part() {
    let Some((part, rank)) = common::part() else { return };
    match part.as_str() {
        "epochs" => epochs(rank),
        "survivor" => survivor(),
        "victim" => victim(),
        other => panic!("no part {other}"),
    }
}

const ROWS: usize = 2048;
const ROW: usize = 4096;
const LONG: Duration = Duration::from_secs(20);

/// The word `at` of row `row` that `rank` sends in an epoch: fresh each time.
fn word(rank: u32, epoch: u32, row: usize, at: usize) -> u32 {
    let mixed = (row as u32).wrapping_mul(0x9e37_79b1) ^ (at as u32).wrapping_mul(0x85eb_ca77);
    mixed ^ (epoch * 2 + rank).wrapping_mul(0xc2b2_ae3d)
}

#[test]
fn rows_and_counts_are_right_in_every_epoch() {
    let Some(_turn) = turn() else { return };
    let mut peers = [0, 1].map(|rank| Peer::start("epochs", rank, &HERE));
    let [first, second] = &mut peers;
    introduce(first, second);
    for mut peer in peers {
        peer.expect("done");
        peer.ends_well();
    }
}

/// Both send at once, gathered rows, to themselves and to the other, and read at once.
fn epochs(rank: u32) {
    let mut bed = Bed::new(rank, 64 << 20);
    let links = link(&bed, rank, 2 * ROWS * ROW, LONG);
    let from = bed.bytes(ROWS * ROW);
    let source = |i: usize| (37 * i + 11) % ROWS;
    let take: Vec<u32> = (0..ROWS).map(|i| source(i) as u32).collect();
    let take = bed.words(&take);
    for epoch in 0..160_u32 {
        let row_bytes = [ROW, 2048, 1024, 512][epoch as usize % 4];
        // A sender's rows below this are for rank 0, the rest for rank 1.
        let split = |sender: u32| (epoch as usize * 13 + sender as usize * 700) % ROWS;
        let first = |sender: u32| if rank == 0 { 0 } else { split(sender) };
        let count = |sender: u32| if rank == 0 { split(sender) } else { ROWS - split(sender) };
        let data: Vec<u32> = (0..ROWS)
            .flat_map(|i| (0..row_bytes / 4).map(move |at| word(rank, epoch, i, at)))
            .collect();
        let words = from.slice(0, ROWS * row_bytes).reinterpret(DType::U32);
        bed.arena.write(words, &data).expect("written");
        let starts = bed.words(&[0, split(rank) as u32, ROWS as u32]);
        let places = bed.words(&[0, count(0) as u32]);
        let counts: Vec<u32> = (0..256).map(|i| word(rank, epoch, i / 128, i)).collect();
        let [values, out] = [bed.words(&counts), bed.words(&[0; 256])];
        let op = MoveRows {
            from,
            row_bytes,
            take: Some(take),
            starts,
            places,
            room: 0,
            room_rows: 2 * ROWS,
            blocks: [1, 8, 16, 24][epoch as usize / 4 % 4],
            step: epoch,
        };
        let on = (&bed.stream, &bed.arena);
        links.exchange_counts(on, values, out, epoch).expect("enqueued");
        links.move_rows(on, &op).expect("enqueued");
        bed.stream.synchronize().expect("done");
        links.check().expect("all there");
        let mut told = vec![0; 256];
        bed.arena.read_into(out, &mut told).expect("read");
        let me = rank as usize;
        let expected = (0..256).map(|i| word((i / 128) as u32, epoch, me, me * 128 + i % 128));
        assert!(told.into_iter().eq(expected), "counts of epoch {epoch}");
        check_room(&bed, &links, row_bytes, |at| match at.checked_sub(count(0)) {
            None => Some((0, epoch, source(first(0) + at))),
            Some(at) if at < count(1) => Some((1, epoch, source(first(1) + at))),
            Some(_) => None,
        });
    }
    say("done");
}

/// `row(at)`: sender, epoch and row of what lies in row `at` of the room, if anything does.
fn check_room(
    bed: &Bed,
    links: &PeerLinks,
    row_bytes: usize,
    row: impl Fn(usize) -> Option<(u32, u32, usize)>,
) {
    let mut plan = ArenaPlan::new();
    plan.alloc(DType::U8, 32 << 20);
    let copy = plan.alloc(DType::U8, 2 * ROWS * row_bytes);
    links.copy_room((&bed.stream, &bed.arena), 0, copy).expect("enqueued");
    bed.stream.synchronize().expect("done");
    let copy = copy.reinterpret(DType::U32);
    let mut found = vec![0_u32; copy.len()];
    bed.arena.read_into(copy, &mut found).expect("read");
    for (at, words) in found.chunks(row_bytes / 4).enumerate() {
        let Some((sender, epoch, i)) = row(at) else { continue };
        let expected = (0..words.len()).map(|w| word(sender, epoch, i, w));
        assert!(words.iter().copied().eq(expected), "row {at} from {sender}, epoch {epoch}");
    }
}

#[test]
fn a_dead_peer_is_named_and_its_window_given_back() {
    let Some(_turn) = turn() else { return };
    let mut survivor = Peer::start("survivor", 0, &HERE);
    for end in ["patience", "stop", "patience"] {
        let mut victim = Peer::start("victim", 1, &HERE);
        survivor.tell(end);
        introduce(&mut survivor, &mut victim);
        survivor.expect("right");
        victim.expect("right");
        std::thread::sleep(Duration::from_millis(20));
        victim.kill();
        survivor.tell("dead");
        survivor.expect("gone");
    }
    survivor.tell("end");
    survivor.expect("done");
    survivor.ends_well();
}

/// 64 MiB at once to the other.
const MANY: usize = 16384;
const PATIENCE: Duration = Duration::from_millis(700);

fn until_death(bed: &mut Bed, rank: u32) -> PeerLinks {
    let links = link(bed, rank, MANY * ROW, PATIENCE);
    bed.forget();
    let from = bed.bytes(MANY * ROW);
    let bytes = vec![rank as u8 + 1; MANY * ROW];
    bed.arena.write(from, &bytes).expect("written");
    let list = if rank == 0 { [0, 0, MANY as u32] } else { [0, MANY as u32, MANY as u32] };
    let (starts, places) = (bed.words(&list), bed.words(&[0, 0]));
    let op = MoveRows {
        from,
        row_bytes: ROW,
        take: None,
        starts,
        places,
        room: 0,
        room_rows: MANY,
        blocks: 16,
        step: 5,
    };
    links.move_rows((&bed.stream, &bed.arena), &op).expect("enqueued");
    bed.stream.synchronize().expect("done");
    links.check().expect("there");
    let mut plan = ArenaPlan::new();
    plan.alloc(DType::U8, 100 << 20);
    let copy = plan.alloc(DType::U8, MANY * ROW);
    links.copy_room((&bed.stream, &bed.arena), 0, copy).expect("enqueued");
    bed.stream.synchronize().expect("done");
    let mut found = vec![0_u8; MANY * ROW];
    bed.arena.read_into(copy, &mut found).expect("read");
    assert!(found.iter().all(|byte| *byte == 2 - rank as u8), "the other's rows");
    for _ in 0..800 {
        links.move_rows((&bed.stream, &bed.arena), &op).expect("enqueued");
    }
    say("right");
    links
}

fn victim() {
    let mut bed = Bed::new(1, 200 << 20);
    let _links = until_death(&mut bed, 1);
    // Killed long before.
    std::thread::sleep(Duration::from_secs(60));
}

fn survivor() {
    let mut bed = Bed::new(0, 200 << 20);
    let mut free = Vec::new();
    loop {
        let end = listen();
        if end == "end" {
            break;
        }
        let links = until_death(&mut bed, 0);
        assert_eq!(listen(), "dead");
        let began = Instant::now();
        if end == "stop" {
            links.stop();
        }
        bed.stream.synchronize().expect("ended, and the context is well");
        let spent = began.elapsed();
        println!("  {end}: the streams are empty after {spent:?}: {:?}", links.check());
        if end == "stop" {
            assert!(spent < Duration::from_millis(300), "{spent:?}");
        } else {
            assert!(spent < 3 * PATIENCE, "{spent:?}");
            let failure = links.check().expect_err("the other is dead");
            assert!(failure.position == 1 && failure.what != Awaited::Room, "{failure}");
            assert_eq!(failure.step, 5);
        }
        // The dead one's window goes back, too.
        drop(links);
        bed.gpu.synchronize().expect("the context is well");
        free.push(bed.gpu.memory().expect("told").0);
        say("gone");
    }
    assert_eq!(free[1], free[2], "device memory creeps");
    say("done");
}
