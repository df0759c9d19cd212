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
        Node { name: name.to_string(), address, key, data }
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
        let ranks = nodes.iter().flat_map(|(node, ranks)| vec![*node; *ranks as usize]);
        let member = |(rank, node): (u32, &Node)| Member {
            rank,
            worker: node.name.clone(),
            node: node.name.clone(),
            address: node.address.clone(),
        };
        let members = (0..).zip(ranks).map(member).collect();
        let rank = nodes[..place].iter().map(|(_, ranks)| *ranks).sum();
        self.data.join(Join { rank, ranks: nodes[place].1, members, tls }).await
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
        self.data.join(Join { rank, ranks: 1, members, tls }).await
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
        let carried = first.carry(7, &[(1, &pattern(0))], &mut [(1, &mut into)]);
        (first, carried.map(|()| into))
    });
    let hashes = on_ranks(comms, busy).await;
    assert_eq!(hashes, on_ranks(Comm::in_process(2), busy).await);
    assert!(!sent.is_finished(), "nobody has taken it");
    let taken = tokio::task::spawn_blocking(move || {
        let (mut ferry, mut into) = (second.take().expect("rank 1's"), vec![0; LENGTH]);
        let carried = ferry.carry(7, &[(0, &pattern(1))], &mut [(0, &mut into)]);
        // What is stopped says so at once, whatever it waits for.
        ferry.stopper().stop();
        assert!(ferry.carry(8, &[], &mut [(0, &mut [0])]).is_err());
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
