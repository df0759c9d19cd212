//! The leader against real workers' shells over real sockets.

mod gang;

use gang::{Gang, JOB, PATIENCE, Streams, Worker, config, start};
use moejob::control::{LeaderEvent, Verifier};
use moe_worker::gang::tls::{Trust, WorkerKey, server_name};
use moejob_identity::authority::{Authority, new_pem};
use moe_worker::life::control::read_frame;
use moejob_plan::lead::{Ending, Link};
use moejob_protocol::message::{FRAME_BYTES_MAX, Frame, Held, Hello, LeftReason, Request, alpn};
use moejob_protocol::{Down, Up};
use std::sync::Arc;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_trains_stops_shrinks_and_completes() {
    let mut gang = Gang::new(3).await;
    gang.configure(1, &[0, 1, 2], u64::MAX);
    assert_eq!(gang.until_step(1).await, 3.0, "0 + 1 + 2");
    // A stop that one rank alone was asked for takes effect on all after the same step.
    let stop = Request { checkpoint_now: false, stop_after_this_step: true };
    gang.leader.send("w1", 1, Down::Request(stop));
    let mut steps = Vec::new();
    for _ in 0..3 {
        let (_, reason, held) = gang.until_left(1).await;
        let LeftReason::Stopped { step } = reason else { panic!("{reason:?}") };
        assert_eq!((held[0].attempt, held[0].step), (1, step));
        steps.push(step);
    }
    assert!(steps.iter().all(|step| *step == steps[0]), "{steps:?}");
    // The next attempt is of two, in another order; the third stays idle.
    gang.configure(2, &[2, 0], 100);
    gang.until_completed(2, 100).await;
    assert_eq!(gang.shut_down().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_member_ends_the_attempt_and_the_rest_go_on() {
    let mut gang = Gang::new(3).await;
    gang.configure(1, &[0, 1, 2], u64::MAX);
    gang.until_step(3).await;
    // Its owner is gone, so it ends; its peers see its streams close.
    let lost = gang.workers.remove(1);
    drop(lost.owner);
    let mut reasons = Vec::new();
    let mut closed = false;
    while reasons.len() < 2 || !closed {
        let pick = |event: &LeaderEvent| match event {
            LeaderEvent::Up { up: Up::Left { reason, .. }, .. } => Some(Some(reason.clone())),
            LeaderEvent::Ended { .. } => Some(None),
            _ => None,
        };
        let (name, event) = gang.until(pick).await;
        match event {
            Some(reason) if name != "w1" => reasons.push(reason),
            Some(_) => {}
            None => {
                assert_eq!(name, "w1");
                closed = true;
            }
        }
    }
    let lost_peer = |reason: &LeftReason| matches!(reason, LeftReason::PeerLost { .. });
    assert!(reasons.iter().all(lost_peer), "{reasons:?}");
    assert_eq!(lost.thread.join().expect("no panic"), 75);
    gang.configure(2, &[0, 1], 10);
    gang.until_completed(2, 10).await;
    assert_eq!(gang.shut_down().await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_wakes_ranks_that_wait_for_each_other() {
    let mut gang = Gang::new(2).await;
    // Rank 1 is never configured, so rank 0 joins in vain; then both leave.
    let workers: Vec<&Worker> = gang.workers.iter().collect();
    let half = Arc::new(config(1, &workers, 10));
    gang.leader.configure("w0", 0, &half);
    for name in ["w0", "w1"] {
        gang.leader.send(name, 1, Down::Leave { reason: "try again".to_string() });
    }
    for _ in 0..2 {
        assert_eq!(gang.until_left(1).await.1, LeftReason::Asked);
    }
    gang.configure(2, &[0, 1], u64::MAX);
    gang.until_step(2).await;
    for name in ["w0", "w1"] {
        gang.leader.send(name, 2, Down::Leave { reason: "again".to_string() });
    }
    for _ in 0..2 {
        let (_, reason, held) = gang.until_left(2).await;
        assert_eq!(reason, LeftReason::Asked);
        assert_eq!(held[0].attempt, 2);
    }
    // A configuration of the attempt that was left comes too late.
    gang.configure(1, &[0, 1], 10);
    gang.configure(3, &[1, 0], 10);
    gang.until_completed(2, 10).await;
    assert_eq!(gang.shut_down().await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_the_trainer_reaches_the_leader() {
    let mut gang = Gang::new(1).await;
    gang.configure_with(1, &[0], 10, |config| config.job_name = "panic".to_string());
    let failed = |event: &LeaderEvent| match event {
        LeaderEvent::Up { up: Up::Failed { exit_code, message, .. }, .. } => {
            Some((*exit_code, message.clone()))
        }
        _ => None,
    };
    let (_, (exit_code, message)) = gang.until(failed).await;
    assert_eq!(exit_code, 1);
    assert!(message.contains("as asked"), "{message}");
    assert_eq!(gang.exit_codes().await, [1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_not_who_was_dialled_is_refused() {
    let authority = Authority::new().expect("an authority");
    let secret = authority.new_secret();
    let worker = start("w0", authority.certificate_pem(), &secret);
    let stranger = Authority::new().expect("an authority");
    let foreign = start("w1", stranger.certificate_pem(), &secret);
    let mut leader = Streams::new(authority, &secret, 300);
    let mut check = async |name: &str, address: &str, token: &str, expected: &str| {
        let verifier = Verifier::Local { secret: token.to_string() };
        leader.leader.dial(name, address, verifier, false);
        let (of, event) = timeout(PATIENCE, leader.next()).await.expect("an answer");
        assert_eq!(of, name);
        match event {
            LeaderEvent::Ended { reason, .. } => assert!(reason.contains(expected), "{reason}"),
            other => panic!("{other:?}"),
        }
    };
    check("w0", &worker.address, &"0".repeat(64), "its token is not the one").await;
    check("w0", &worker.address, "", "its token is not the one").await;
    check("w9", &worker.address, &secret, "it is \"w0\", not who was dialled").await;
    // A worker of another authority tells this leader nothing.
    check("w1", &foreign.address, &secret, "").await;
    check("w2", "127.0.0.1:1", &secret, "cannot be reached").await;
    check("w2", "no address", &secret, "cannot be reached").await;
    drop((worker.owner, foreign.owner));
    assert_eq!(worker.thread.join().expect("no panic"), 75);
    assert_eq!(foreign.thread.join().expect("no panic"), 75);
}

/// Orders that fit into no frame lose the worker, by a reason that says what to do: nobody waits
/// for a member that was never told of its attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_that_are_too_long_to_be_sent_end_the_stream_and_say_so() {
    let mut gang = Gang::new(1).await;
    let workers: Vec<&Worker> = gang.workers.iter().collect();
    let mut long = config(1, &workers, 10);
    long.job_name = "x".repeat(FRAME_BYTES_MAX);
    gang.leader.configure("w0", 0, &Arc::new(long));
    let ended = |event: &LeaderEvent| match event {
        LeaderEvent::Ended { why, reason } => Some((*why, reason.clone())),
        _ => None,
    };
    let (_, (why, reason)) = gang.until(ended).await;
    assert_eq!(why, Ending::Refused, "the next stream would not take it either");
    assert!(reason.starts_with("its orders for an attempt have 41"), "{reason}");
    assert!(reason.contains("lower nodes.max"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_that_says_nothing_is_left() {
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = mute.local_addr().expect("an address").to_string();
    let authority = Authority::new().expect("an authority");
    let mut leader = Streams::new(authority, "secret", 300);
    leader.dial("w0", &address);
    let (_, event) = timeout(PATIENCE, leader.next()).await.expect("an answer");
    let LeaderEvent::Ended { reason, .. } = event else { panic!("{event:?}") };
    assert_eq!(reason, "no proof within 5000 ms");
}

/// Pods that were made before the authority had a successor hear of it on their streams: when it
/// takes over, weeks later, they believe it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_was_told_of_the_successor_believes_it() {
    let (first, second) = (new_pem().expect("one"), new_pem().expect("another"));
    let of = |(certificate, key): &(String, String)| {
        Authority::from_pem(certificate, key).expect("an authority")
    };
    let answer = async |address: &str| {
        let mut next = Streams::of(Arc::new(of(&second)), (JOB, 9), "another secret", 300);
        next.dial("w0", address);
        match timeout(PATIENCE, next.next()).await.expect("an answer") {
            (_, LeaderEvent::Ended { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    };
    for (told, believes) in [(None, false), (Some(&second.0), true)] {
        let authority = of(&first);
        let authority = match told {
            Some(successor) => authority.followed_by(successor),
            None => authority,
        };
        let mut gang = Gang::of(2, authority).await;
        gang.configure_with(1, &[0, 1], u64::MAX, |config| {
            config.recovery.orphan_timeout_ms = 600_000;
        });
        gang.until_step(1).await;
        let said = answer(&gang.workers[0].address.clone()).await;
        // It has shown its token, for which it had to believe the leader first.
        assert_eq!(said == "its token is not the one it was given", believes, "{said}");
    }
}

/// A leaf is valid for a day, and nobody knows how old that of an adopted member is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leaf_of_a_member_is_renewed_on_its_stream() {
    let (certificate, key) = new_pem().expect("an authority");
    let authority = || Authority::from_pem(&certificate, &key).expect("an authority");
    let mut gang = Gang::of(2, authority()).await;
    gang.configure_with(1, &[0, 1], u64::MAX, |config| config.recovery.orphan_timeout_ms = 600_000);
    gang.until_step(2).await;
    let address = gang.workers[0].address.clone();
    let client = authority().client();
    let shown = async || {
        let tcp = TcpStream::connect(&address).await.expect("it listens");
        let connector = TlsConnector::from(Arc::clone(&client));
        let stream = connector.connect(server_name(), tcp).await.expect("a handshake");
        stream.get_ref().1.peer_certificates().expect("a leaf")[0].clone().into_owned()
    };
    let first = shown().await;
    assert!(authority().names(&first, JOB, "w0"));
    let mut next = Streams::of(Arc::new(authority()), (JOB, 4), "another secret", 30_000);
    next.dial("w0", &address);
    let start = std::time::Instant::now();
    let renewed = loop {
        assert!(start.elapsed() < PATIENCE, "it was not renewed");
        // Every step is an event: asked after each, the worker would count too many joins.
        let pause = std::time::Duration::from_millis(200);
        let _ = timeout(pause, async { loop { next.next().await; } }).await;
        let leaf = shown().await;
        if leaf != first {
            break leaf;
        }
    };
    assert!(authority().names(&renewed, JOB, "w0"));
}

/// Each side says what it speaks where the other one speaks nothing of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sides_without_a_protocol_in_common_say_so() {
    let authority = Authority::new().expect("an authority");
    let trust = Trust::from_pem(authority.certificate_pem()).expect("its certificate");
    let worker = start("w0", authority.certificate_pem(), "secret");
    // A leader of the future, which cannot speak to this worker, and one that still can.
    for (versions, chosen) in [(&[7, 6][..], None), (&[7, 1], Some("moejob-control/1"))] {
        let mut client = (*authority.client()).clone();
        client.alpn_protocols = alpn(versions);
        let tcp = TcpStream::connect(&worker.address).await.expect("it listens");
        let connector = TlsConnector::from(Arc::new(client));
        let found = match connector.connect(server_name(), tcp).await {
            Ok(stream) => {
                let name = stream.get_ref().1.alpn_protocol().expect("one of them");
                Some(String::from_utf8_lossy(name).into_owned())
            }
            Err(error) => {
                assert!(error.to_string().contains("NoApplicationProtocol"), "{error}");
                None
            }
        };
        assert_eq!(found.as_deref(), chosen);
    }
    // A worker of the future, whose leader this one cannot be.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let key = WorkerKey::generate().expect("a key");
    let mut server = (*key.control_server(&trust).expect("a server")).clone();
    server.alpn_protocols = alpn(&[7]);
    let acceptor = TlsAcceptor::from(Arc::new(server));
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            assert!(acceptor.accept(tcp).await.is_err(), "there is nothing in common");
        }
    });
    let mut leader = Streams::new(authority, "secret", 300);
    leader.dial("w1", &address);
    match timeout(PATIENCE, leader.next()).await.expect("an answer") {
        (_, LeaderEvent::Ended { why: Ending::Unspoken, reason }) => {
            assert!(reason.starts_with("it speaks none of the control protocols"), "{reason}");
            assert!(reason.contains("(4, 3, 2, 1)"), "what the leader speaks: {reason}");
        }
        other => panic!("{other:?}"),
    }
}

/// Its token is judged by nobody then: with a slow API server hundreds of members would be lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_proves_itself_to_the_next_leader_by_its_leaf() {
    let (certificate, key) = new_pem().expect("an authority");
    let authority = || Arc::new(Authority::from_pem(&certificate, &key).expect("an authority"));
    let mut gang = Gang::of(3, Authority::from_pem(&certificate, &key).expect("one")).await;
    let addresses: Vec<String> = gang.workers.iter().map(|of| of.address.clone()).collect();
    let answer = async |leader: &mut Streams, name: &str, address: &str| {
        leader.dial(name, address);
        match timeout(PATIENCE, leader.next()).await.expect("an answer") {
            (_, LeaderEvent::Opened(hello)) => format!("attempt {}", hello.attempt),
            (_, LeaderEvent::Ended { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    };
    // Nobody reads what the first leader hears from here on: it is to be long about it.
    gang.configure_with(1, &[0, 1], u64::MAX, |config| config.recovery.orphan_timeout_ms = 600_000);
    gang.until_step(2).await;
    let mut next = Streams::of(authority(), (JOB, 4), "another secret", 3_000);
    let spare = answer(&mut next, "w2", &addresses[2]).await;
    assert_eq!(spare, "its token is not the one it was given", "it has no leaf");
    let mut other = Streams::of(authority(), ("job-2", 3), "another secret", 3_000);
    let stranger = answer(&mut other, "w1", &addresses[1]).await;
    assert_eq!(stranger, "its token is not the one it was given", "a leaf of another job");
    let mut foreign = Streams::of(Arc::new(Authority::new().expect("one")), (JOB, 3), "s", 3_000);
    let foreign = answer(&mut foreign, "w1", &addresses[1]).await;
    assert!(!foreign.starts_with("attempt"), "{foreign}");
    assert_eq!(answer(&mut next, "w1", &addresses[1]).await, "attempt 1");
    // It goes on, and is told so by the leader that it believes now.
    let steps = |event: &LeaderEvent| matches!(event, LeaderEvent::Up { attempt: 1, .. });
    assert!(steps(&timeout(PATIENCE, next.next()).await.expect("it speaks").1));
}

/// A worker of any image answers with a proof that is right, and says then what none can have: its
/// stream ends, and the reason names what was too much.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_with_more_than_a_worker_can_have_ends_its_stream() {
    let held = |steps: u64, shard: u32| -> Vec<Held> {
        let one = |step| Held { attempt: 1, step, shards: vec![shard] };
        (0..steps).map(one).collect()
    };
    let left = |held: Vec<Held>| Up::Left { reason: LeftReason::Asked, held };
    let long = Up::Failed { exit_code: 1, message: "x".repeat(200 << 10), step: None };
    let many = "its frame has more than it can have: snapshots in its memory: 2000, and no \
                worker has more than 64";
    let foreign = "its frame has more than it can have: the snapshot of step 0 of attempt 1 has \
                   shard 4, and the job 4 ranks at most";
    for (says, expected) in [
        (left(held(2_000, 0)), many),
        (left(held(1, 4)), foreign),
        (long, "its stream: a frame of 204875 bytes; allowed are 1 to 131072"),
        (left(held(64, 3)), "heard"),
    ] {
        let authority = Authority::new().expect("an authority");
        let trust = Trust::from_pem(authority.certificate_pem()).expect("its certificate");
        let address = any_image(&trust, says).await;
        let mut leader = Streams::new(authority, "secret", 3_000);
        leader.execute(Link::Ranks(4), |_| unreachable!("nobody is dialled"));
        leader.dial("w1", &address);
        let mut next = async || timeout(PATIENCE, leader.next()).await.expect("an answer").1;
        assert!(matches!(next().await, LeaderEvent::Opened(_)));
        let found = match next().await {
            LeaderEvent::Up { .. } => "heard".to_string(),
            LeaderEvent::Ended { why: Ending::Refused, reason } => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(found, expected);
    }
}

/// The address of a worker that proves itself, and then says that.
async fn any_image(trust: &Trust, says: Up) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let key = WorkerKey::generate().expect("a key");
    let acceptor = TlsAcceptor::from(key.control_server(trust).expect("a server"));
    tokio::spawn(async move {
        let (tcp, _) = listener.accept().await.expect("a leader");
        let mut stream = acceptor.accept(tcp).await.expect("TLS");
        let first: Frame<Down> = read_frame(&mut stream, PATIENCE).await.expect("a heartbeat");
        let hello = Up::Hello(Hello {
            version: 1,
            worker: "w1".to_string(),
            token: "secret".to_string(),
            signing_request: key.signing_request.clone(),
            ..Hello::default()
        });
        for body in [hello, says] {
            // Without the bounds that an honest worker holds to.
            let frame = Frame { v: first.v, term: first.term, attempt: 1, body };
            let text = serde_json::to_vec(&frame).expect("JSON");
            let length = (text.len() as u32).to_le_bytes();
            stream.write_all(&[&length[..], &text].concat()).await.expect("it is sent");
            stream.flush().await.expect("it is sent");
        }
        // What the leader says meanwhile nobody reads.
        std::future::pending::<()>().await;
    });
    address
}
