//! Links between ranks, all of them on one GPU: each has a window, an arena and a stream of its
//! own. Skipped where there is no GPU. Between two GPUs: worker/nccl/tests/windows.rs.

mod peer_common;

use std::time::{Duration, Instant};

use moejob_kernels::peer::{Awaited, MoveRows};
use moejob_kernels::{ArenaPlan, Buffer, DType};
use peer_common::{LONG, ROOMS, Random, Rank, alone, node};

/// What a rank of the reference has: its rows, whom they are for, and where others' go.
struct Case {
    from: Vec<u8>,
    take: Vec<u32>,
    starts: Vec<u32>,
    places: Vec<u32>,
}

/// Random numbers of rows to everybody, some none; every room is filled without a gap.
fn cases(random: &mut Random, count: usize, rows_max: usize, row_bytes: usize) -> Vec<Case> {
    let sizes: Vec<Vec<usize>> = (0..count)
        .map(|_| (0..count).map(|_| random.below(rows_max) * random.below(4).min(1)).collect())
        .collect();
    let starts = |lens: &mut dyn Iterator<Item = usize>| -> Vec<u32> {
        let mut sum = 0;
        let mut all = vec![0];
        all.extend(lens.map(|len| {
            sum += len as u32;
            sum
        }));
        all
    };
    (0..count)
        .map(|me| {
            let starts_out = starts(&mut sizes[me].iter().copied());
            let places = starts(&mut sizes.iter().map(|row| row[me]));
            let total = starts_out[count] as usize;
            let rows = total.max(1) * 2;
            Case {
                from: (0..rows * row_bytes).map(|_| random.below(256) as u8).collect(),
                take: (0..total.max(1)).map(|_| random.below(rows) as u32).collect(),
                starts: starts_out,
                places: places[..count].to_vec(),
            }
        })
        .collect()
}

/// The rooms that follow, on a processor.
fn reference(cases: &[Case], row_bytes: usize, taken: bool, rooms: &mut [Vec<u8>]) {
    for (me, case) in cases.iter().enumerate() {
        for (p, room) in rooms.iter_mut().enumerate() {
            for (at, i) in (case.starts[p]..case.starts[p + 1]).enumerate() {
                let row = if taken { case.take[i as usize] } else { i } as usize;
                let to = (cases[p].places[me] as usize + at) * row_bytes;
                let row = &case.from[row * row_bytes..][..row_bytes];
                room[to..to + row_bytes].copy_from_slice(row);
            }
        }
    }
}

#[test]
fn rows_arrive_as_on_a_processor() {
    let _alone = alone();
    for count in [1, 2, 3, 4, 8] {
        let Some(mut ranks) = node(count, LONG) else { return };
        let mut random = Random(count as u64);
        let mut rooms = vec![vec![0_u8; ROOMS]; count];
        let widths = [16, 48, 512, 1024, 2048, 4096, 4112, 2048];
        for (turn, row_bytes) in widths.into_iter().enumerate() {
            let (taken, rows_max) = (turn % 3 != 2, ROOMS / row_bytes / count / 4);
            let cases = cases(&mut random, count, rows_max.min(300), row_bytes);
            let blocks = [1, 3, 8, 16][turn % 4];
            let ops: Vec<MoveRows> = ranks
                .iter_mut()
                .zip(&cases)
                .map(|(rank, case)| {
                    rank.plan = ArenaPlan::new();
                    let from = rank.plan.alloc(DType::U8, case.from.len());
                    rank.arena.write(from, &case.from).expect("written");
                    MoveRows {
                        from,
                        row_bytes,
                        take: taken.then(|| rank.words(&case.take)),
                        starts: rank.words(&case.starts),
                        places: rank.words(&case.places),
                        room: 0,
                        room_rows: ROOMS / row_bytes,
                        blocks,
                        step: turn as u32,
                    }
                })
                .collect();
            for (rank, op) in ranks.iter().zip(&ops) {
                rank.links.move_rows((&rank.stream, &rank.arena), op).expect("enqueued");
            }
            reference(&cases, row_bytes, taken, &mut rooms);
            for (me, rank) in ranks.iter().enumerate() {
                let found = rank.room(&mut rank.plan.clone(), ROOMS);
                assert_eq!(rank.links.check(), Ok(()));
                assert!(found == rooms[me], "rank {me} of {count}, rows of {row_bytes} bytes");
            }
        }
    }
}

#[test]
fn counts_arrive_epoch_by_epoch() {
    let _alone = alone();
    for count in [1, 2, 5, 8] {
        let Some(mut ranks) = node(count, LONG) else { return };
        for len in [1, 7, 128, 1024] {
            let buffers: Vec<[Buffer; 2]> = ranks
                .iter_mut()
                .map(|rank| {
                    rank.plan = ArenaPlan::new();
                    [(); 2].map(|()| rank.plan.alloc(DType::U32, count * len))
                })
                .collect();
            for epoch in 0..20 {
                let value = |from: usize, to: usize, i: usize| {
                    (epoch << 24 | from << 20 | to << 16 | i) as u32
                };
                for (me, rank) in ranks.iter().enumerate() {
                    let each = (0..count).flat_map(|to| (0..len).map(move |i| value(me, to, i)));
                    let each: Vec<u32> = each.collect();
                    rank.arena.write(buffers[me][0], &each).expect("written");
                }
                for (rank, [values, out]) in ranks.iter().zip(&buffers) {
                    let on = (&rank.stream, &rank.arena);
                    rank.links.exchange_counts(on, *values, *out, 0).expect("enqueued");
                }
                for (me, rank) in ranks.iter().enumerate() {
                    rank.stream.synchronize().expect("done");
                    assert_eq!(rank.links.check(), Ok(()));
                    let mut found = vec![0_u32; count * len];
                    rank.arena.read_into(buffers[me][1], &mut found).expect("read");
                    let each = (0..count).flat_map(|q| (0..len).map(move |i| value(q, me, i)));
                    assert!(found.into_iter().eq(each), "rank {me} of {count}, {len} counts");
                }
            }
        }
    }
}

#[test]
fn rows_go_back_by_source() {
    let _alone = alone();
    let Some(mut ranks) = node(1, LONG) else { return };
    let rank = &mut ranks[0];
    let mut random = Random(3);
    for locals in [1, 5, 64] {
        // [`PeerLinks::return_order`] of one position has one source.
        let lens: Vec<usize> = (0..locals).map(|_| random.below(9)).collect();
        check_return_order(rank, &lens, &[0]);
    }
    let Some(mut ranks) = node(6, LONG) else { return };
    for sources in [&[0, 1, 2, 3, 4, 5][..], &[1, 4], &[5]] {
        for locals in [1, 3, 40] {
            let lens: Vec<usize> = (0..locals * sources.len()).map(|_| random.below(70)).collect();
            check_return_order(&mut ranks[2], &lens, sources);
        }
    }
}

fn check_return_order(rank: &mut Rank, lens: &[usize], sources: &[usize]) {
    let positions = rank.links.desc().positions;
    let mut segments = vec![0_u32];
    for len in lens {
        segments.push(segments[segments.len() - 1] + *len as u32);
    }
    let rows = *segments.last().expect("one at least") as usize;
    let (mut take, mut starts) = (Vec::new(), vec![0_u32]);
    for p in 0..positions {
        if let Some(s) = sources.iter().position(|source| *source == p) {
            for at in (s..lens.len()).step_by(sources.len()) {
                take.extend(segments[at]..segments[at + 1]);
            }
        }
        starts.push(take.len() as u32);
    }
    rank.plan = ArenaPlan::new();
    let at = rank.words(&segments);
    let out = [rows.max(1), positions + 1].map(|len| rank.words(&vec![7; len]));
    let on = (&rank.stream, &rank.arena);
    rank.links.return_order(on, (at, sources), (out[0], out[1])).expect("enqueued");
    rank.stream.synchronize().expect("done");
    let read = |buffer: Buffer| {
        let mut words = vec![0_u32; buffer.len()];
        rank.arena.read_into(buffer, &mut words).expect("read");
        words
    };
    assert_eq!(read(out[0])[..rows], take, "{sources:?}");
    assert_eq!(read(out[1]), starts, "{sources:?}");
}

/// The rooms are a buffer of an arena, of which ops know nothing.
#[test]
fn an_arena_ends_with_the_rooms() {
    let _alone = alone();
    let Some(mut ranks) = node(2, LONG) else { return };
    let row = 256;
    let mut made = Vec::new();
    for (me, rank) in ranks.iter_mut().enumerate() {
        let (arena, rooms) = rank.links.joined(3 << 20).expect("memory");
        assert_eq!(rooms.bytes(), ROOMS);
        rank.arena = arena;
        let from = rank.plan.alloc(DType::U8, 4 * row);
        rank.arena.write(from, &vec![me as u8 + 1; 4 * row]).expect("written");
        let (starts, places) = (rank.words(&[0, 1, 4]), rank.words(&[1, 5]));
        let op = MoveRows {
            from,
            row_bytes: row,
            take: None,
            starts,
            places,
            room: 2 * row,
            room_rows: 8,
            blocks: 1,
            step: 0,
        };
        rank.arena.fill_bytes(&rank.stream, rooms, 9).expect("filled");
        rank.stream.synchronize().expect("done");
        made.push((rooms, op));
    }
    for (rank, (_, op)) in ranks.iter().zip(&made) {
        rank.links.move_rows((&rank.stream, &rank.arena), op).expect("enqueued");
    }
    for (me, (rank, (rooms, _))) in ranks.iter().zip(&made).enumerate() {
        rank.stream.synchronize().expect("done");
        let mut found = vec![0_u8; 16 * row];
        rank.arena.read_into(rooms.slice(0, found.len()), &mut found).expect("read");
        // Row 1 of the room, which is row 3 of the rooms, from rank 0; row 5 from rank 1.
        let rows = if me == 0 { 1 } else { 3 };
        let expected = (0..16 * row).map(|at| match at / row {
            at if (3..3 + rows).contains(&at) => 1,
            at if (7..7 + rows).contains(&at) => 2,
            _ => 9,
        });
        assert!(found.into_iter().eq(expected), "rank {me}");
    }
}

/// A launch of a captured graph counts its epochs, too.
#[test]
fn captured_launches_go_on_counting() {
    let _alone = alone();
    let Some(mut ranks) = node(2, LONG) else { return };
    let row = 64;
    let graphs: Vec<_> = ranks
        .iter_mut()
        .map(|rank| {
            let from = rank.plan.alloc(DType::U8, 4 * row);
            let (starts, places) = (rank.words(&[0, 2, 4]), rank.words(&[0, 2]));
            let [values, out] = [rank.words(&[5, 6]), rank.words(&[0, 0])];
            let op = MoveRows {
                from,
                row_bytes: row,
                take: None,
                starts,
                places,
                room: 0,
                room_rows: 4,
                blocks: 2,
                step: 0,
            };
            let on = (&rank.stream, &rank.arena);
            let graph = rank.stream.capture(|| {
                rank.links.exchange_counts(on, values, out, 0)?;
                rank.links.move_rows(on, &op)
            });
            (graph.expect("captured"), from)
        })
        .collect();
    for turn in 1..=5_u8 {
        for (me, (rank, (_, from))) in ranks.iter().zip(&graphs).enumerate() {
            let bytes = vec![turn * 8 + me as u8; 4 * row];
            rank.arena.write(*from, &bytes).expect("written");
        }
        for (rank, (graph, _)) in ranks.iter().zip(&graphs) {
            rank.stream.launch_graph(graph).expect("launched");
        }
        for rank in &ranks {
            let found = rank.room(&mut rank.plan.clone(), 4 * row);
            let expected = (0..4 * row).map(|at| turn * 8 + (at / (2 * row)) as u8);
            assert!(found.into_iter().eq(expected), "turn {turn}");
            assert_eq!(rank.links.check(), Ok(()));
        }
    }
}

/// An op of no rows on the ranks of `node`.
fn nothing(rank: &mut Rank) -> MoveRows {
    let count = rank.links.desc().positions;
    let from = rank.plan.alloc(DType::U8, 16);
    let (starts, places) = (rank.words(&vec![0; count + 1]), rank.words(&vec![0; count]));
    MoveRows {
        from,
        row_bytes: 16,
        take: None,
        starts,
        places,
        room: 0,
        room_rows: 1,
        blocks: 4,
        step: 77,
    }
}

#[test]
fn who_never_comes_is_named_in_time() {
    let _alone = alone();
    let patience = Duration::from_millis(200);
    let Some(mut ranks) = node(3, patience) else { return };
    let op = nothing(&mut ranks[0]);
    let other = nothing(&mut ranks[2]);
    let began = Instant::now();
    for (at, op) in [(0, op), (2, other)] {
        let rank = &ranks[at];
        rank.links.move_rows((&rank.stream, &rank.arena), &op).expect("enqueued");
        // What is enqueued behind a failure does not wait again.
        for _ in 0..50 {
            rank.links.move_rows((&rank.stream, &rank.arena), &op).expect("enqueued");
        }
    }
    for at in [0, 2] {
        ranks[at].stream.synchronize().expect("ended");
        let failure = ranks[at].links.check().expect_err("position 1 did nothing");
        assert_eq!((failure.what, failure.position, failure.step), (Awaited::Place, 1, 77));
        let text = "the GPU at position 1 of this node did not say in time where its rows go";
        assert!(failure.to_string().starts_with(text), "{failure}");
    }
    let spent = began.elapsed();
    assert!(spent >= patience && spent < 10 * patience, "{spent:?}");
    let Some(mut ranks) = node(2, patience) else { return };
    let [values, out] = [(); 2].map(|()| ranks[1].words(&[1, 2, 3, 4]));
    let on = (&ranks[1].stream, &ranks[1].arena);
    ranks[1].links.exchange_counts(on, values, out, 3).expect("enqueued");
    ranks[1].stream.synchronize().expect("ended");
    let failure = ranks[1].links.check().expect_err("position 0 did nothing");
    assert_eq!((failure.what, failure.position, failure.step), (Awaited::Counts, 0, 3));
}

#[test]
fn a_wait_ends_when_the_host_says_so() {
    let _alone = alone();
    let Some(mut ranks) = node(2, Duration::from_secs(60)) else { return };
    let op = nothing(&mut ranks[0]);
    ranks[0].links.move_rows((&ranks[0].stream, &ranks[0].arena), &op).expect("enqueued");
    std::thread::sleep(Duration::from_millis(50));
    assert!(!ranks[0].stream.is_idle().expect("asked"), "it waits");
    let began = Instant::now();
    ranks[0].links.stop();
    ranks[0].stream.synchronize().expect("ended");
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    assert_eq!(ranks[0].links.check(), Ok(()), "nobody failed");
}

#[test]
fn rows_outside_a_room_are_refused() {
    let _alone = alone();
    let Some(mut ranks) = node(2, Duration::from_secs(2)) else { return };
    let ops: Vec<MoveRows> = ranks
        .iter_mut()
        .map(|rank| {
            let from = rank.plan.alloc(DType::U8, 64);
            // Both want the other's two rows at row 3 of 4.
            let (starts, places) = (rank.words(&[0, 2, 4]), rank.words(&[3, 3]));
            MoveRows {
                from,
                row_bytes: 16,
                take: None,
                starts,
                places,
                room: 0,
                room_rows: 4,
                blocks: 1,
                step: 1,
            }
        })
        .collect();
    for (rank, op) in ranks.iter().zip(&ops) {
        rank.links.move_rows((&rank.stream, &rank.arena), op).expect("enqueued");
    }
    for rank in &ranks {
        rank.stream.synchronize().expect("ended");
        let failure = rank.links.check().expect_err("no room");
        assert_eq!(failure.what, Awaited::Room);
    }
}
