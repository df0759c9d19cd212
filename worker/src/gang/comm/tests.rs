use super::*;
use std::thread;
use std::time::Duration;

/// Runs `body` on one thread a rank and returns what each gave, in rank order.
fn on_ranks<T: Send>(
    world: u32,
    body: impl Fn(&mut Comm) -> T + Sync,
) -> Vec<T> {
    let mut comms = Comm::in_process(world);
    thread::scope(|scope| {
        let handles: Vec<_> =
            comms.iter_mut().map(|comm| scope.spawn(|| body(comm))).collect();
        handles.into_iter().map(|handle| handle.join().expect("no panic")).collect()
    })
}

/// Bytes that depend on everything that a mix-up could confuse.
fn pattern(from: u32, to: u32, round: u32, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i as u32 * 31 + from * 7 + to * 13 + round * 17) as u8).collect()
}

#[test]
fn all_to_all_of_uneven_and_large_messages() {
    let length = |from: u32, to: u32, round: u32| -> usize {
        [0, 1, 33, 70_000, 3 << 20][((from + 2 * to + round) % 5) as usize]
    };
    on_ranks(4, |comm| {
        let me = comm.rank();
        for round in 0..10 {
            let sends: Vec<Vec<u8>> =
                (0..4).map(|to| pattern(me, to, round, length(me, to, round))).collect();
            let mut into: Vec<Vec<u8>> =
                (0..4).map(|from| vec![0; length(from, me, round)]).collect();
            let sends: Vec<(u32, &[u8])> = (0..4).zip(sends.iter().map(Vec::as_slice)).collect();
            let mut recvs: Vec<(u32, &mut [u8])> =
                (0..4).zip(into.iter_mut().map(Vec::as_mut_slice)).collect();
            comm.exchange(&sends, &mut recvs).expect("an exchange");
            for (from, bytes) in (0..4).zip(&into) {
                assert_eq!(*bytes, pattern(from, me, round, length(from, me, round)));
            }
        }
        assert_eq!(comm.collective(), 10);
    });
}

#[test]
fn gather_gives_every_rank_the_same_blobs() {
    let all = on_ranks(3, |comm| {
        let mine = vec![comm.rank() as u8; comm.rank() as usize * 100_000];
        comm.gather_all(&mine, 200_000).expect("a gather")
    });
    for blobs in all {
        assert_eq!(blobs, (0..3u8).map(|r| vec![r; r as usize * 100_000]).collect::<Vec<_>>());
    }
}

#[test]
fn what_is_said_is_heard_behind_other_calls() {
    let rounds = 20_u8;
    let all = on_ranks(3, |comm| {
        let me = comm.rank();
        let mut heard = Vec::new();
        for round in 0..rounds {
            comm.say(&[round, me as u8], 16).expect("said");
            // Rank 2 exchanges nothing, and the others more than a pipe holds.
            let length = 3 * PIPE_BYTES_MAX / 2;
            let (peer, mut into) = (1 - me.min(1), vec![0; length]);
            let mine = pattern(me, peer, u32::from(round), length);
            let of_two = me < 2;
            let sends: Vec<(u32, &[u8])> =
                of_two.then_some((peer, mine.as_slice())).into_iter().collect();
            let mut recvs: Vec<(u32, &mut [u8])> =
                of_two.then_some((peer, into.as_mut_slice())).into_iter().collect();
            comm.exchange(&sends, &mut recvs).expect("an exchange");
            assert!(!of_two || into == pattern(peer, me, u32::from(round), length));
            let between = comm.gather_all(&[me as u8; 3], 3).expect("a gather");
            assert_eq!(between, (0..3).map(|rank| vec![rank; 3]).collect::<Vec<_>>());
            heard.push(comm.hear().expect("heard"));
        }
        assert_eq!(comm.collective(), 3 * u64::from(rounds));
        heard
    });
    for heard in all {
        for (round, said) in (0..rounds).zip(heard) {
            assert_eq!(said, (0..3).map(|rank| vec![round, rank]).collect::<Vec<_>>());
        }
    }
}

/// Pipes of many ranks hold little, and what is longer goes through all the same.
#[test]
fn many_ranks_exchange_more_than_their_pipes_hold() {
    let (world, length) = (64, 100_000);
    let holds = moejob_protocol::memory::pipe_bytes(world.into(), world.into());
    assert!(holds < length as u64 / 2, "{holds}");
    on_ranks(world, |comm| {
        let me = comm.rank();
        let (next, before) = ((me + 1) % world, (me + world - 1) % world);
        let (mine, mut into) = (pattern(me, next, 0, length), vec![0; length]);
        comm.exchange(&[(next, &mine)], &mut [(before, &mut into)]).expect("an exchange");
        assert!(into == pattern(before, me, 0, length));
    });
}

/// A pipe that is full takes what is said later, and nothing else goes before it.
#[test]
fn what_is_said_into_a_full_pipe_leaves_first() {
    let all = on_ranks(2, |comm| {
        if comm.rank() == 0 {
            // Taken over by the pipe, which is then full but for less than what is said.
            let first = vec![1; PIPE_BYTES_MAX - HEADER_BYTES - 8];
            comm.exchange(&[(1, &first)], &mut []).expect("an exchange");
            comm.say(b"0 is here", 16).expect("said");
            comm.exchange(&[(1, &[2; 5])], &mut []).expect("an exchange");
        } else {
            // Rank 0 cannot have got further: nothing was read yet.
            let mut first = vec![0; PIPE_BYTES_MAX - HEADER_BYTES - 8];
            comm.exchange(&[], &mut [(0, &mut first)]).expect("an exchange");
            comm.say(b"1 is here", 16).expect("said");
            let mut second = [0; 5];
            comm.exchange(&[], &mut [(0, &mut second)]).expect("an exchange");
            assert_eq!((first[0], second), (1, [2; 5]));
        }
        comm.hear().expect("heard")
    });
    assert_eq!(all, vec![vec![b"0 is here".to_vec(), b"1 is here".to_vec()]; 2]);
}

#[test]
fn a_rank_that_leaves_before_it_spoke_is_lost() {
    let mut comms = Comm::in_process(2);
    let gone = comms.pop().expect("two");
    let mut comm = comms.pop().expect("two");
    comm.say(b"here", 8).expect("said");
    drop(gone);
    let error = comm.hear().expect_err("it never spoke");
    assert!(matches!(error, CommError::PeerLost { rank: 1, .. }), "{error}");
    assert!(matches!(comm.say(b"x", 8), Err(CommError::Aborted { .. })), "and it stays so");
}

#[test]
fn who_says_more_than_allowed_is_refused() {
    let mut comms = Comm::in_process(2);
    let mut loud = comms.pop().expect("two");
    let mut comm = comms.pop().expect("two");
    loud.say(&[0; 9], 9).expect("said");
    // What has come is looked at when this rank speaks already.
    let said = comm.say(b"here", 8);
    let error = said.and_then(|()| comm.hear()).expect_err("nine bytes");
    assert!(matches!(error, CommError::Protocol { rank: 1, .. }), "{error}");
}

#[test]
fn a_world_of_one_copies_to_itself() {
    let mut comm = Comm::solo(3);
    let mut into = [0; 4];
    comm.exchange(&[(0, &[1, 2, 3, 4])], &mut [(0, &mut into)]).expect("an exchange");
    assert_eq!(into, [1, 2, 3, 4]);
    assert_eq!(comm.gather_all(b"x", 1).expect("a gather"), vec![b"x".to_vec()]);
    comm.abort_handle().abort("asked");
    let error = comm.exchange(&[], &mut []).expect_err("aborted");
    assert_eq!(error.to_string(), "the collective was aborted: asked");
}

#[test]
fn abort_wakes_a_blocked_rank_and_stays() {
    let mut comms = Comm::in_process(2);
    let mut comm = comms.remove(0);
    let handle = comm.abort_handle();
    let waiter = thread::spawn(move || {
        let first = comm.exchange(&[], &mut [(1, &mut [0; 8])]);
        (first, comm.exchange(&[], &mut []))
    });
    thread::sleep(Duration::from_millis(20));
    handle.abort("the leader asked");
    let aborted = Err(CommError::Aborted { reason: "the leader asked".to_string() });
    assert_eq!(waiter.join().expect("no panic"), (aborted.clone(), aborted));
}

#[test]
fn a_peer_that_leaves_is_lost_after_its_last_frame() {
    let mut comms = Comm::in_process(2);
    let mut other = comms.pop().expect("two");
    let mut comm = comms.pop().expect("two");
    other.exchange(&[(0, b"last")], &mut []).expect("room");
    drop(other);
    let mut into = [0; 4];
    comm.exchange(&[], &mut [(1, &mut into)]).expect("it was sent before the end");
    assert_eq!(&into, b"last");
    let lost = CommError::PeerLost { rank: 1, why: "the rank left the group".to_string() };
    assert_eq!(comm.exchange(&[], &mut [(1, &mut into)]), Err(lost.clone()));
    let aborted = CommError::Aborted { reason: lost.to_string() };
    assert_eq!(comm.exchange(&[(1, b"x")], &mut []), Err(aborted));
}

/// What rank 0 says when rank 1's stream holds `bytes` and 4 bytes are expected.
fn after(bytes: &[u8]) -> String {
    let links = Links::in_process(2, 7);
    let mut comm = links.comm(0);
    let other = links.comm(1);
    let incoming = &other.lanes[0].as_ref().expect("a peer").outgoing;
    for chunk in bytes.chunks(5) {
        incoming.push(chunk, &[]);
    }
    incoming.end("its stream ended");
    let mut into = [0xee; 4];
    match comm.exchange(&[], &mut [(1, &mut into)]) {
        Ok(()) => format!("{into:?}"),
        Err(error) => {
            let untouched = matches!(error, CommError::PeerLost { .. }) || into == [0xee; 4];
            assert!(untouched, "a refused frame reached the buffer");
            error.to_string()
        }
    }
}

#[test]
fn frames_are_checked_before_a_byte_is_stored() {
    let good = Header { attempt: 7, number: 1, source: 1, kind: Kind::Exchange, length: 4 };
    let frame = |header: Header| [&header.encode()[..], &[1, 2, 3, 4]].concat();
    let check = |bytes: Vec<u8>, expected: &str| assert_eq!(after(&bytes), expected);
    let want = "an exchange of attempt 7, number 1, rank 1, 4 bytes";
    check(frame(good), "[1, 2, 3, 4]");
    check(
        frame(Header { attempt: 6, ..good }),
        &format!(
            "rank 1 sent an exchange of attempt 6, number 1, rank 1, 4 bytes, expected {want}"
        ),
    );
    check(
        frame(Header { attempt: 8, number: 2, ..good }),
        &format!(
            "rank 1 sent an exchange of attempt 8, number 2, rank 1, 4 bytes, expected {want}"
        ),
    );
    check(
        frame(Header { source: 2, ..good }),
        &format!(
            "rank 1 sent an exchange of attempt 7, number 1, rank 2, 4 bytes, expected {want}"
        ),
    );
    check(
        frame(Header { kind: Kind::Gather, ..good }),
        &format!("rank 1 sent a gather of attempt 7, number 1, rank 1, 4 bytes, expected {want}"),
    );
    for length in [0, 3, 5, 1 << 32, u64::MAX] {
        check(
            frame(Header { length, ..good }),
            &format!(
                "rank 1 sent an exchange of attempt 7, number 1, rank 1, {length} bytes, \
                 expected 4 bytes"
            ),
        );
    }
    let mut unknown = frame(good);
    unknown[20] = 9;
    check(unknown, "rank 1 sent the unknown kind 9, expected a frame header");
    check(
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n".to_vec(),
        "rank 1 sent the magic [47, 45, 54, 20], expected a frame header",
    );
    check(vec![0; 64], "rank 1 sent the magic [00, 00, 00, 00], expected a frame header");
    for cut in [0, 1, 31, 32, 35] {
        check(frame(good)[..cut].to_vec(), "rank 1 is lost: its stream ended");
    }
}

#[test]
fn a_frame_after_the_expected_one_is_the_next_collectives() {
    let header = Header { attempt: 1, number: 1, source: 1, kind: Kind::Exchange, length: 0 };
    let mut comms = Comm::in_process(2);
    let lane = comms[0].lanes[1].as_ref().expect("a peer");
    // A replay of collective 1 where collective 2 is expected.
    lane.incoming.push(&header.encode(), &header.encode());
    let comm = &mut comms[0];
    comm.exchange(&[], &mut [(1, &mut [])]).expect("the first");
    let error = comm.exchange(&[], &mut [(1, &mut [])]).expect_err("a replay");
    assert!(matches!(error, CommError::Protocol { rank: 1, .. }), "{error}");
}

#[test]
fn a_longer_blob_than_agreed_is_refused() {
    let errors = on_ranks(2, |comm| {
        let mine = vec![0; 10 + comm.rank() as usize];
        comm.gather_all(&mine, mine.len()).err().map(|error| error.to_string())
    });
    let refusal = "rank 1 sent a gather of attempt 1, number 1, rank 1, 11 bytes, \
                   expected at most 10 bytes";
    assert_eq!(errors, [Some(refusal.to_string()), None]);
}

#[test]
#[should_panic(expected = "rank 1 twice in one collective")]
fn a_rank_twice_is_a_programmer_error() {
    let mut comms = Comm::in_process(2);
    let _ = comms[0].exchange(&[(1, b"a"), (1, b"b")], &mut []);
}
