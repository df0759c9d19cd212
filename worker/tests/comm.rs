//! The data plane over TLS: ranks of one process, each with its own listener and data thread.

use moe_worker::gang::comm::{Comm, CommError, DataPlane, Join, JoinError, Links};
use moe_worker::life::listener;
use moe_worker::gang::tls::{Identity, Trust, WorkerKey};
use moejob_protocol::config::Member;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

const JOB: &str = "job-1";

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    trust: Trust,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        let trust = Trust::from_pem(&certificate).expect("a certificate");
        Authority { issuer: Issuer::new(params, key), trust }
    }

    fn leaf(&self, key: &WorkerKey, attempt: u32, worker: &str) -> String {
        let mut request =
            CertificateSigningRequestParams::from_pem(&key.signing_request).expect("a request");
        let identity =
            Identity::Worker { job_uid: JOB.into(), attempt, worker: worker.into() }.to_string();
        let params = &mut request.params;
        params.subject_alt_names = vec![SanType::URI(identity.try_into().expect("ASCII"))];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        request.signed_by(&self.issuer).expect("a leaf").pem()
    }
}

/// A worker's streams without its session.
struct Node {
    name: String,
    address: String,
    key: WorkerKey,
    data: DataPlane,
    /// That it wants.
    strands: u32,
}

impl Node {
    async fn new(name: &str, authority: &Authority) -> Node {
        let key = WorkerKey::generate().expect("a key");
        let data = DataPlane::start().expect("a thread");
        let tcp = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = tcp.local_addr().expect("an address").to_string();
        let tls = key.control_server(&authority.trust).expect("a configuration");
        // Nobody dials the control stream here.
        let (leaders, _) = mpsc::channel(1);
        let (_, shown) = tokio::sync::watch::channel(tls);
        tokio::spawn(listener::serve(tcp, shown, leaders, data.offers()));
        Node { name: name.to_string(), address, key, data, strands: 0 }
    }

    /// Joins as the worker at `place`, of so many ranks each as `nodes` have.
    async fn join_with(
        &self,
        authority: &Authority,
        attempt: u32,
        place: usize,
        nodes: &[(&Node, u32)],
    ) -> oneshot::Receiver<Result<Links, JoinError>> {
        let leaf = authority.leaf(&self.key, attempt, &self.name);
        let tls = self.key.attempt(&authority.trust, &leaf).expect("our leaf");
        let mut world = 0;
        let mut member = |(node, ranks): &(&Node, u32)| {
            let rank = world;
            world += ranks;
            Member {
                rank,
                worker: node.name.clone(),
                node: node.name.clone(),
                address: node.address.clone(),
            }
        };
        let members: Vec<Member> = nodes.iter().map(&mut member).collect();
        let (rank, ranks, strands) = (members[place].rank, nodes[place].1, self.strands);
        self.data.join(Join { rank, ranks, world, members, tls, strands }).await
    }

    async fn join(
        &self,
        authority: &Authority,
        attempt: u32,
        rank: u32,
        nodes: &[Node],
    ) -> oneshot::Receiver<Result<Links, JoinError>> {
        let leaf = authority.leaf(&self.key, attempt, &self.name);
        let tls = self.key.attempt(&authority.trust, &leaf).expect("our leaf");
        let member = |(rank, node): (u32, &Node)| Member {
            rank,
            worker: node.name.clone(),
            node: node.name.clone(),
            address: node.address.clone(),
        };
        let members = (0..).zip(nodes).map(member).collect();
        let world = nodes.len() as u32;
        let strands = self.strands;
        self.data.join(Join { rank, ranks: 1, world, members, tls, strands }).await
    }
}

async fn nodes(count: usize, authority: &Authority) -> Vec<Node> {
    let mut nodes = Vec::new();
    for index in 0..count {
        nodes.push(Node::new(&format!("w{index}"), authority).await);
    }
    nodes
}

async fn group(authority: &Authority, attempt: u32, nodes: &[Node]) -> Vec<Comm> {
    let mut joining = Vec::new();
    for (rank, node) in (0..).zip(nodes) {
        joining.push(node.join(authority, attempt, rank, nodes).await);
    }
    let mut comms = Vec::new();
    for joined in joining {
        let links = joined.await.expect("an answer").expect("all connect");
        comms.extend(links.shape().ranks().map(|rank| links.comm(rank)));
    }
    comms
}

/// Runs `body` on a thread a rank while the data threads move the bytes.
async fn on_ranks<T: Send + 'static>(
    comms: Vec<Comm>,
    body: impl Fn(&mut Comm) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let spawn = |mut comm: Comm| {
        let body = body.clone();
        tokio::task::spawn_blocking(move || body(&mut comm))
    };
    let tasks: Vec<_> = comms.into_iter().map(spawn).collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.expect("no panic"));
    }
    results
}

/// Exchanges messages of changing sizes and folds all that was received into one hash.
fn busy(comm: &mut Comm) -> u64 {
    let world = comm.world();
    let length = |from: u32, to: u32, round: u32| -> usize {
        [0, 7, 32, 65_536, 700_001][((from * 3 + to + round) % 5) as usize]
    };
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for round in 0..20 {
        let me = comm.rank();
        let byte = |i: usize, from: u32, to: u32| (i as u32 * 7 + from * 31 + to * 5 + round) as u8;
        let sends: Vec<Vec<u8>> = (0..world)
            .map(|to| (0..length(me, to, round)).map(|i| byte(i, me, to)).collect())
            .collect();
        let mut into: Vec<Vec<u8>> =
            (0..world).map(|from| vec![0; length(from, me, round)]).collect();
        let sends: Vec<(u32, &[u8])> = (0..world).zip(sends.iter().map(Vec::as_slice)).collect();
        let mut recvs: Vec<(u32, &mut [u8])> =
            (0..world).zip(into.iter_mut().map(Vec::as_mut_slice)).collect();
        comm.exchange(&sends, &mut recvs).expect("an exchange");
        for byte in into.iter().flatten() {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    hash
}

/// A copy that its receiver does not take holds no collective up, and arrives once it does.
#[tokio::test]
async fn copies_travel_beside_collectives() {
    const LENGTH: usize = 9 << 20;
    let authority = Authority::new();
    let nodes = nodes(2, &authority).await;
    let mut comms = group(&authority, 1, &nodes).await;
    let pattern = |rank: usize| -> Vec<u8> {
        (0..LENGTH).map(|at| (at * 31 + at / 4096 + rank) as u8).collect()
    };
    let mut ferries = comms.iter_mut().map(|comm| comm.take_ferry().expect("the first to ask"));
    let (mut first, mut second) = (ferries.next().expect("rank 0's"), ferries.next());
    drop(ferries);
    let sent = std::thread::spawn(move || {
        let mut into = vec![0; LENGTH];
        let carried = first.carry(7, &[(1, &pattern(0))], &mut [(1, &mut into)], &mut Vec::new());
        (first, carried.map(|()| into))
    });
    let hashes = on_ranks(comms, busy).await;
    assert_eq!(hashes, on_ranks(Comm::in_process(2), busy).await);
    assert!(!sent.is_finished(), "nobody has taken it");
    let taken = tokio::task::spawn_blocking(move || {
        let (mut ferry, mut into) = (second.take().expect("rank 1's"), vec![0; LENGTH]);
        let carried = ferry.carry(7, &[(0, &pattern(1))], &mut [(0, &mut into)], &mut Vec::new());
        // What is stopped says so at once, whatever it waits for.
        ferry.stopper().stop();
        assert!(ferry.carry(8, &[], &mut [(0, &mut [0])], &mut Vec::new()).is_err());
        (ferry, carried.map(|()| into))
    });
    let (_second, taken) = taken.await.expect("no panic");
    let (_first, sent) = sent.join().expect("no panic");
    assert!(taken.expect("it arrives") == pattern(0));
    assert!(sent.expect("it arrives") == pattern(1));
}

#[tokio::test]
async fn over_tls_the_same_bytes_arrive_as_in_process() {
    let authority = Authority::new();
    let nodes = nodes(4, &authority).await;
    let over_tls = on_ranks(group(&authority, 1, &nodes).await, busy).await;
    assert_eq!(over_tls, on_ranks(Comm::in_process(4), busy).await);
    // Another attempt of the same workers.
    let over_tls_again = on_ranks(group(&authority, 2, &nodes).await, busy).await;
    assert_eq!(over_tls_again, over_tls);
}

/// Ranks of one worker reach each other in memory, those of two over one stream.
#[tokio::test]
async fn several_ranks_a_worker_get_the_same_bytes() {
    let authority = Authority::new();
    let nodes = nodes(3, &authority).await;
    let expected = on_ranks(Comm::in_process(6), busy).await;
    for (attempt, ranks) in (1..).zip([&[6, 0, 0][..], &[3, 3, 0], &[2, 2, 2], &[1, 4, 1]]) {
        let all: Vec<(&Node, u32)> =
            nodes.iter().zip(ranks.iter().copied()).filter(|(_, ranks)| *ranks > 0).collect();
        let mut joining = Vec::new();
        for (place, (node, _)) in all.iter().enumerate() {
            joining.push(node.join_with(&authority, attempt, place, &all).await);
        }
        let mut comms = Vec::new();
        for joined in joining {
            let links = joined.await.expect("an answer").expect("all connect");
            comms.extend(links.shape().ranks().map(|rank| links.comm(rank)));
        }
        assert_eq!(on_ranks(comms, busy).await, expected, "{ranks:?}");
    }
}

/// Rank 2 is ahead and fills what is between it and rank 0, which waits for rank 1, which waits for
/// a word of rank 3 that comes behind it over the same stream.
#[tokio::test]
async fn a_pair_that_is_full_holds_no_other_up() {
    const BYTES: usize = 4 << 20;
    let authority = Authority::new();
    let nodes = nodes(2, &authority).await;
    let all = [(&nodes[0], 2), (&nodes[1], 2)];
    let joining = [
        nodes[0].join_with(&authority, 1, 0, &all).await,
        nodes[1].join_with(&authority, 1, 1, &all).await,
    ];
    let mut comms = Vec::new();
    for joined in joining {
        let links = joined.await.expect("an answer").expect("all connect");
        comms.extend(links.shape().ranks().map(|rank| links.comm(rank)));
    }
    let from_3_to_1_to_0_then_2_to_0 = on_ranks(comms, |comm| {
        let (large, mut into, mut word) = (vec![2; BYTES], vec![0; BYTES], [0]);
        let calls = match comm.rank() {
            0 => [
                comm.exchange(&[], &mut []),
                comm.exchange(&[], &mut [(1, &mut word)]),
                comm.exchange(&[], &mut [(2, &mut into)]),
            ],
            1 => [
                comm.exchange(&[], &mut [(3, &mut word)]),
                comm.exchange(&[(0, &[7])], &mut []),
                comm.exchange(&[], &mut []),
            ],
            2 => [
                comm.exchange(&[], &mut []),
                comm.exchange(&[], &mut []),
                comm.exchange(&[(0, &large)], &mut []),
            ],
            _ => {
                std::thread::sleep(Duration::from_millis(100));
                [
                    comm.exchange(&[(1, &[7])], &mut []),
                    comm.exchange(&[], &mut []),
                    comm.exchange(&[], &mut []),
                ]
            }
        };
        assert!(calls.iter().all(Result::is_ok), "{calls:?}");
        (into[BYTES - 1], word[0])
    });
    let waited = tokio::time::timeout(Duration::from_secs(20), from_3_to_1_to_0_then_2_to_0);
    assert_eq!(waited.await.expect("nobody waits"), [(2, 7), (0, 7), (0, 0), (0, 0)]);
}

#[tokio::test]
async fn a_rank_that_leaves_is_lost_to_its_peers_after_its_last_bytes() {
    let authority = Authority::new();
    let nodes = nodes(3, &authority).await;
    let comms = group(&authority, 1, &nodes).await;
    let results = on_ranks(comms, |comm| {
        let all = comm.gather_all(&vec![comm.rank() as u8; 300_000], 300_000).expect("a gather");
        assert!((0..3).all(|rank| all[rank][299_999] == rank as u8));
        if comm.rank() == 1 {
            return None;
        }
        let began = Instant::now();
        let error = comm.gather_all(b"more", 4).expect_err("a rank is missing");
        Some((error, began.elapsed()))
    });
    for (error, took) in results.await.into_iter().flatten() {
        // The second of the two may see the first one leave.
        assert!(matches!(error, CommError::PeerLost { .. }), "{error}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}

#[tokio::test]
async fn leaving_ends_joins_and_collectives_at_once() {
    let authority = Authority::new();
    let nodes = nodes(2, &authority).await;
    // Rank 1 never joins.
    let joining = nodes[0].join(&authority, 1, 0, &nodes).await;
    tokio::time::sleep(Duration::from_millis(30)).await;
    nodes[0].data.leave().await;
    let error = joining.await.expect("an answer").expect_err("left");
    assert!(matches!(error, JoinError::Left), "{error}");
    let mut comms = group(&authority, 2, &nodes).await;
    let mut comm = comms.remove(0);
    let waiter = tokio::task::spawn_blocking(move || comm.gather_all(b"x", 1));
    tokio::time::sleep(Duration::from_millis(30)).await;
    nodes[0].data.leave().await;
    let error = waiter.await.expect("no panic").expect_err("left");
    let expected = CommError::PeerLost { rank: 1, why: "the attempt was left".to_string() };
    assert_eq!(error, expected);
}

#[tokio::test]
async fn ranks_meet_in_the_attempt_that_both_are_in() {
    let authority = Authority::new();
    let nodes = nodes(2, &authority).await;
    // One is an attempt behind, so they do not meet, whoever dials.
    for (first, second) in [(1, 2), (4, 3)] {
        let early = nodes[0].join(&authority, first, 0, &nodes).await;
        let late = nodes[1].join(&authority, second, 1, &nodes).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let behind = if first < second { &nodes[0] } else { &nodes[1] };
        let rank = u32::from(first > second);
        let joined = behind.join(&authority, first.max(second), rank, &nodes).await;
        let (up_to_date, left) = if first < second { (late, early) } else { (early, late) };
        assert!(matches!(left.await.expect("an answer"), Err(JoinError::Left)));
        let mut comms = Vec::new();
        for joined in [up_to_date, joined] {
            let links = joined.await.expect("an answer").expect("they meet");
            comms.push(links.comm(links.shape().first));
        }
        comms.sort_by_key(Comm::rank);
        assert!(comms.iter().all(|comm| comm.attempt() == first.max(second)));
        on_ranks(comms, busy).await;
    }
}

/// Bulk data of changing sizes, each way at once, folded into one hash.
fn bulky(comm: &mut Comm) -> u64 {
    let (me, world) = (comm.rank(), comm.world());
    let length = |from: u32, to: u32, round: u32| -> usize {
        [0, 7, (3 << 20) + 3, 600_000, 1 << 20][((from * 3 + to + round) % 5) as usize]
    };
    let mut hasher = blake3::Hasher::new();
    for round in 0..5 {
        let byte = |i: usize, to: u32| (i * 31 + i / 4096) as u8 ^ (me * 5 + to * 3 + round) as u8;
        let peers = || (0..world).filter(|peer| *peer != me);
        let sends: Vec<Vec<u8>> =
            peers().map(|to| (0..length(me, to, round)).map(|i| byte(i, to)).collect()).collect();
        let mut into: Vec<Vec<u8>> =
            peers().map(|from| vec![0; length(from, me, round)]).collect();
        let sends: Vec<(u32, &[u8])> = peers().zip(sends.iter().map(Vec::as_slice)).collect();
        let mut recvs: Vec<(u32, &mut [u8])> =
            peers().zip(into.iter_mut().map(Vec::as_mut_slice)).collect();
        comm.exchange_bulk(&sends, &mut recvs).expect("an exchange");
        for bytes in &into {
            hasher.update(bytes);
        }
        // Between two of them others.
        comm.gather_all(&[me as u8], 1).expect("a gather");
    }
    u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("8 bytes"))
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..2_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what}: not within ten seconds");
}

/// With all strands, with some of them, with none, and while they come: the same bytes.
#[tokio::test]
async fn bulk_data_arrives_over_as_many_strands_as_there_are() {
    let authority = Authority::new();
    let expected = on_ranks(Comm::in_process(3), bulky).await;
    // The second worker has two ranks. One that wants none is as one of an earlier release.
    for (attempt, (first, second)) in (1..).zip([(3, 3), (3, 2), (0, 3), (3, 0)]) {
        let mut nodes = nodes(2, &authority).await;
        (nodes[0].strands, nodes[1].strands) = (first, second);
        let all = [(&nodes[0], 1), (&nodes[1], 2)];
        let joining = [
            nodes[0].join_with(&authority, attempt, 0, &all).await,
            nodes[1].join_with(&authority, attempt, 1, &all).await,
        ];
        let mut comms = Vec::new();
        for joined in joining {
            let links = joined.await.expect("an answer").expect("all connect");
            comms.extend(links.shape().ranks().map(|rank| links.comm(rank)));
        }
        if attempt == 1 {
            // They come meanwhile.
            assert_eq!(on_ranks(comms, bulky).await, expected);
            continue;
        }
        let there = first.min(second);
        let strands = |comms: &[Comm]| {
            [(0, 1), (0, 2), (1, 0), (2, 0)].map(|(of, peer)| comms[of as usize].strands(peer))
        };
        until("all strands", || strands(&comms) == [there; 4]).await;
        assert_eq!(comms[1].strands(2), 0, "they are of one worker");
        let carried = on_ranks(comms, |comm| (bulky(comm), over_ferries(comm))).await;
        for (rank, (hash, ferried)) in carried.into_iter().enumerate() {
            assert_eq!(hash, expected[rank], "strands {first} and {second}");
            assert!(ferried, "strands {first} and {second}, rank {rank}");
        }
    }
}

/// A copy each way beside collectives; whether it came whole.
fn over_ferries(comm: &mut Comm) -> bool {
    const LENGTH: usize = (2 << 20) + 1;
    let (me, world) = (comm.rank(), comm.world());
    let pattern = |rank: u32| -> Vec<u8> {
        (0..LENGTH).map(|i| (i * 7 + i / 5000) as u8 ^ rank as u8).collect()
    };
    let (next, before) = ((me + 1) % world, (me + world - 1) % world);
    let mut ferry = comm.take_ferry().expect("the first to ask");
    let carried = std::thread::spawn(move || {
        let (mut into, mut arrived) = (vec![0; LENGTH], Vec::new());
        let sent = pattern(me);
        let result =
            ferry.carry(9, &[(next, &sent)], &mut [(before, &mut into)], &mut arrived);
        // Whoever is done first must not leave before the others have theirs.
        (ferry, result, arrived == [before] && into == pattern(before))
    });
    for _ in 0..20 {
        comm.gather_all(&[7; 100], 100).expect("a gather");
    }
    let (ferry, result, same) = carried.join().expect("no panic");
    comm.gather_all(&[1], 1).expect("a gather");
    drop(ferry);
    result.is_ok() && same
}

/// Dials a strand as the worker `node` would, and gives the stream if it was welcomed.
async fn dial_strand(
    node: &Node,
    to: &Node,
    authority: &Authority,
    words: [u32; 4],
) -> Option<tokio_rustls::client::TlsStream<tokio::net::TcpStream>> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let leaf = authority.leaf(&node.key, 1, &node.name);
    let tls = node.key.attempt(&authority.trust, &leaf).expect("our leaf");
    let tcp = tokio::net::TcpStream::connect(&to.address).await.expect("a connection");
    let connector = tokio_rustls::TlsConnector::from(tls.strand);
    let name = moe_worker::gang::tls::server_name();
    let mut stream = connector.connect(name, tcp).await.expect("a handshake");
    let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    stream.write_all(&[b"MOES", &words[..]].concat()).await.expect("sent");
    stream.flush().await.expect("sent");
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).await.ok()?;
    assert_eq!(answer, *b"MOES\x01\0\0\0");
    Some(stream)
}

/// What is no strand of the attempt is closed; one that is lost while it carries nothing is not
/// used any more; one that is lost while it does ends the attempt.
#[tokio::test]
async fn strands_that_lie_and_strands_that_are_lost() {
    let authority = Authority::new();
    let mut nodes = nodes(3, &authority).await;
    // The first one dials none by itself.
    nodes[1].strands = 2;
    let gang = [(&nodes[0], 1), (&nodes[1], 1)];
    let joining = [
        nodes[0].join_with(&authority, 1, 0, &gang).await,
        nodes[1].join_with(&authority, 1, 1, &gang).await,
    ];
    let mut comms = Vec::new();
    for joined in joining {
        comms.push(joined.await.expect("an answer").expect("all connect").comm(comms.len() as u32));
    }
    let (liar, peer) = (&nodes[0], &nodes[1]);
    for (words, what) in [
        ([2, 1, 0, 0], "another attempt"),
        ([1, 1, 0, 2], "more than are wanted"),
        ([1, 1, 2, 0], "a rank that is none"),
        ([1, 0, 0, 0], "of a rank with itself"),
        ([1, 1, 1, 0], "the same"),
    ] {
        assert!(dial_strand(liar, peer, &authority, words).await.is_none(), "{what}");
    }
    let stranger = dial_strand(&nodes[2], peer, &authority, [1, 1, 0, 0]).await;
    assert!(stranger.is_none(), "no member of the attempt");
    assert_eq!(comms[1].strands(0), 0);
    let idle = dial_strand(liar, peer, &authority, [1, 1, 0, 0]).await.expect("welcome");
    until("a strand", || comms[1].strands(0) == 1).await;
    assert!(dial_strand(liar, peer, &authority, [1, 1, 0, 0]).await.is_none(), "twice");
    drop(idle);
    until("its end", || comms[1].strands(0) == 0).await;
    // It is as if it had never been.
    let mut expected = on_ranks(Comm::in_process(2), bulky).await;
    let hashes = on_ranks_again(&mut comms, bulky).await;
    assert_eq!(hashes, expected);
    expected.clear();
    let used = dial_strand(liar, peer, &authority, [1, 1, 0, 1]).await.expect("welcome");
    until("a strand", || comms[1].strands(0) == 1).await;
    let mut comm = comms.pop().expect("rank 1's");
    let sending = tokio::task::spawn_blocking(move || {
        comm.exchange_bulk(&[(0, &vec![1; 32 << 20])], &mut [])
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(used);
    let waited = tokio::time::timeout(Duration::from_secs(10), sending).await;
    let error = waited.expect("in time").expect("no panic").expect_err("a strand is lost");
    assert!(matches!(error, CommError::PeerLost { rank: 0, .. }), "{error}");
}

/// [`on_ranks`], which gives the groups back.
async fn on_ranks_again(
    comms: &mut Vec<Comm>,
    body: impl Fn(&mut Comm) -> u64 + Clone + Send + 'static,
) -> Vec<u64> {
    let (mut kept, mut results) = (Vec::new(), Vec::new());
    let run = |mut comm: Comm| {
        let body = body.clone();
        tokio::task::spawn_blocking(move || {
            let result = body(&mut comm);
            (comm, result)
        })
    };
    let tasks: Vec<_> = comms.drain(..).map(run).collect();
    for task in tasks {
        let (comm, result) = task.await.expect("no panic");
        kept.push(comm);
        results.push(result);
    }
    *comms = kept;
    results
}

/// What bulk data costs: `SPEED_MIB=256 SPEED_STRANDS=4 cargo test -p moe-worker --test comm --
/// --nocapture what_bulk`. A build for tests has an unoptimised TLS, unless it is told otherwise.
#[tokio::test]
async fn what_bulk_data_costs() {
    let told = |name: &str, or: u32| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(or)
    };
    let bytes = (told("SPEED_MIB", 2) as usize) << 20;
    let (authority, strands) = (Authority::new(), told("SPEED_STRANDS", 2));
    let mut nodes = nodes(2, &authority).await;
    nodes.iter_mut().for_each(|node| node.strands = strands);
    let comms = group(&authority, 1, &nodes).await;
    let are_there = || comms.iter().all(|comm| comm.strands(1 - comm.rank()) == strands);
    until("all strands", are_there).await;
    let rounds = told("SPEED_ROUNDS", 4);
    let both = told("SPEED_BOTH", 0) == 1;
    let spent = || {
        let stat = std::fs::read_to_string("/proc/self/stat").expect("a process");
        let fields: Vec<&str> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
        let ticks = |at: usize| fields[at].parse::<f64>().expect("a number");
        (ticks(11) / 100.0, ticks(12) / 100.0)
    };
    let (began, before) = (Instant::now(), spent());
    let seconds = on_ranks(comms, move |comm| {
        let (peer, sends) = (1 - comm.rank(), comm.rank() == 0 || both);
        let (out, mut into) = (vec![7; bytes], vec![1; bytes]);
        comm.gather_all(&[1], 1).expect("a gather");
        let began = Instant::now();
        for _ in 0..rounds {
            let sent = sends.then_some((peer, out.as_slice())).into_iter().collect::<Vec<_>>();
            let mut came: Vec<(u32, &mut [u8])> = Vec::new();
            if comm.rank() == 1 || both {
                came.push((peer, &mut into));
            }
            comm.exchange_bulk(&sent, &mut came).expect("an exchange");
        }
        comm.gather_all(&[1], 1).expect("a gather");
        assert!(into.ends_with(&[if comm.rank() == 1 || both { 7 } else { 1 }]));
        began.elapsed().as_secs_f64()
    });
    let seconds = seconds.await.into_iter().fold(0.0, f64::max);
    let bytes = bytes as f64 * f64::from(rounds) * if both { 2.0 } else { 1.0 } / 1e9;
    let ((user, system), (user_before, system_before)) = (spent(), before);
    println!(
        "{strands} strands: {bytes:.2} GB in {seconds:.2} s of {:.2}, {:.2} GB/s; {:.3} + {:.3} s \
         of processors a GB, both sides",
        began.elapsed().as_secs_f64(),
        bytes / seconds,
        (user - user_before) / bytes,
        (system - system_before) / bytes,
    );
}
