//! Part D of the bad input: everything that may reach a worker's listener and must get nothing,
//! while a gang trains.

mod gang;
mod knock;

use gang::{Gang, JOB, Worker, config};
use knock::{
    HELLO, REFUSED_WITHIN, Tls, connect, drained, dribble, framed, plain_strangers, refused,
    with_alpn, without_certificate,
};
use moe_worker::gang::comm::{Header, Kind};
use moe_worker::gang::strangers::HANDSHAKES_MAX;
use moe_worker::life::listener::JOINS_BURST;
use moe_worker::gang::tls::{ALPN_CONTROL, ALPN_DATA, Identity, leader_client};
use moejob::control::LeaderEvent;
use moejob_identity::authority::Authority;
use moejob_protocol::Up;
use moejob_protocol::message::{LeftReason, Phase};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::ClientConfig;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// What hundreds of strangers may add to the memory of this process, in KiB.
const GROWTH_KIB_MAX: u64 = 48 << 10;

/// The authority's key in the hands of the test, to make what the operator never makes.
struct Forge {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    key: String,
}

const DAY: i64 = 24 * 3600;

impl Forge {
    fn new() -> Forge {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        let text = key.serialize_pem();
        Forge { issuer: Issuer::new(params, key), certificate, key: text }
    }

    fn authority(&self) -> Authority {
        Authority::from_pem(&self.certificate, &self.key).expect("an authority")
    }

    /// A client with a certificate of these names, valid between these seconds from now.
    fn client(&self, names: &[&str], from: i64, to: i64, alpn: &[u8]) -> Arc<ClientConfig> {
        let key = KeyPair::generate().expect("a key");
        let at = |seconds: i64| {
            let offset = Duration::from_secs(seconds.unsigned_abs());
            let now = SystemTime::now();
            if seconds < 0 { now - offset } else { now + offset }
        };
        let mut params = CertificateParams::default();
        (params.not_before, params.not_after) = (at(from).into(), at(to).into());
        let name = |uri: &&str| SanType::URI((*uri).try_into().expect("ASCII"));
        params.subject_alt_names = names.iter().map(name).collect();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        with_alpn(leader_client(&certificate, &key.serialize_pem()).expect("a client"), alpn)
    }

    fn valid(&self, name: &str, alpn: &[u8]) -> Arc<ClientConfig> {
        self.client(&[name], -DAY, DAY, alpn)
    }
}

fn worker(job_uid: &str, attempt: u32, worker: &str) -> String {
    Identity::Worker { job_uid: job_uid.into(), attempt, worker: worker.into() }.to_string()
}

/// Names, times and authorities that are not right for the stream that is asked for.
async fn wrong_certificates(address: SocketAddr, forge: &Forge) {
    let other = Forge::new();
    let operator = Identity::Operator.to_string();
    let member = worker(JOB, 1, "w0");
    for alpn in [ALPN_CONTROL, ALPN_DATA, b"", b"h2"] {
        for name in [&operator, &member] {
            let what = format!("{name} asks for {}", String::from_utf8_lossy(alpn));
            let none = without_certificate(forge.valid(name, alpn));
            refused(&format!("{what}, no certificate"), address, none, &framed(HELLO)).await;
            let foreign = other.valid(name, alpn);
            refused(&format!("{what}, another authority"), address, foreign, &framed(HELLO)).await;
            let expired = forge.client(&[name], -2 * DAY, -60, alpn);
            refused(&format!("{what}, expired"), address, expired, &framed(HELLO)).await;
            let early = forge.client(&[name], 60, DAY, alpn);
            refused(&format!("{what}, not yet valid"), address, early, &framed(HELLO)).await;
            let two = forge.client(&[name, "moejob://x/1/y"], -DAY, DAY, alpn);
            refused(&format!("{what}, two names"), address, two, &framed(HELLO)).await;
        }
    }
    for name in [&member, "moejob://operators", "moejob://Operator", "https://operator"] {
        refused(name, address, forge.valid(name, ALPN_CONTROL), &framed(HELLO)).await;
    }
    for alpn in [&b""[..], b"h2", b"moejob-control/9"] {
        refused("the operator", address, forge.valid(&operator, alpn), &framed(HELLO)).await;
    }
    refused("no name", address, forge.client(&[], -DAY, DAY, ALPN_CONTROL), &framed(HELLO)).await;
    for name in [
        operator,
        worker("job-2", 1, "w0"),
        worker(JOB, 0, "w0"),
        worker(JOB, 2, "w0"),
        worker(JOB, u32::MAX, "w0"),
        worker(JOB, 1, "w9"),
        // The right name, a second time: the rank has its stream.
        worker(JOB, 1, "w0"),
        // Itself, and one that is dialled but never dials.
        worker(JOB, 1, "w1"),
        worker(JOB, 1, "w2"),
        "moejob://job-1/01/w0".to_string(),
        "moejob://job-1/1".to_string(),
    ] {
        refused(&name, address, forge.valid(&name, ALPN_DATA), &[0; 64]).await;
    }
}

/// The operator's own certificate does not excuse a broken first frame.
async fn broken_frames(address: SocketAddr, forge: &Forge) {
    let operator = Identity::Operator.to_string();
    let client = || forge.valid(&operator, ALPN_CONTROL);
    for (what, bytes) in [
        ("length 0", vec![0; 4]),
        ("4 GiB", vec![0xff; 4]),
        ("a byte too long", [&(1u32 << 20 | 1).to_le_bytes()[..], &[b' '; 100]].concat()),
        ("not JSON", framed("\0\0\0\0")),
        ("not UTF-8", [&[2, 0, 0, 0][..], &[0xc3, 0x28]].concat()),
        ("trailing", framed(&format!("{HELLO}{HELLO}"))),
        ("another version", framed(r#"{"v":9,"term":1,"attempt":0,"body":"heartbeat"}"#)),
        ("unknown type", framed(r#"{"v":1,"term":1,"attempt":0,"body":"selfDestruct"}"#)),
        ("unknown field", framed(r#"{"v":1,"term":1,"attempt":0,"body":"heartbeat","x":1}"#)),
        ("an attempt below 0", framed(r#"{"v":1,"term":1,"attempt":-1,"body":"heartbeat"}"#)),
        ("nesting", framed(&"[".repeat(100_000))),
        ("a term that is over", framed(r#"{"v":1,"term":0,"attempt":0,"body":"heartbeat"}"#)),
    ] {
        refused(what, address, client(), &bytes).await;
    }
}

/// Those that take their time, all at once.
async fn slow_strangers(address: SocketAddr, forge: &Forge) {
    let operator = Identity::Operator.to_string();
    let limit = |took: Duration| assert!(took < REFUSED_WITHIN, "{took:?}");
    let handshake = async {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        // The start of a real ClientHello.
        limit(dribble(&mut stream, &[22, 3, 1, 1, 0, 1, 0, 0, 252, 3, 3]).await);
    };
    let idle = async {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        assert!(drained(&mut stream).await.is_empty());
    };
    let header = async {
        let client = forge.valid(&operator, ALPN_CONTROL);
        let mut stream = connect(address, client).await.expect("the operator");
        limit(dribble(&mut stream, &[40, 0]).await);
    };
    let body = async {
        let client = forge.valid(&operator, ALPN_CONTROL);
        let mut stream = connect(address, client).await.expect("the operator");
        limit(dribble(&mut stream, &framed(&" ".repeat(200))).await);
    };
    let truncated = async {
        let client = forge.valid(&operator, ALPN_CONTROL);
        refused("truncated", address, client, &[100, 0, 0, 0, b'{']).await;
    };
    let silent = async {
        let client = forge.valid(&operator, ALPN_CONTROL);
        let mut stream = connect(address, client).await.expect("the operator");
        assert!(drained(&mut stream).await.is_empty());
    };
    tokio::join!(handshake, idle, header, body, truncated, silent);
}

/// Hundreds that connect and say nothing: all but the newest are put out at once. A machine that is
/// busy with other things may be slow once, and so there are several tries.
async fn a_flood(address: SocketAddr) {
    let mut took = Vec::new();
    while took.iter().all(|took| *took >= Duration::from_secs(4)) {
        assert!(took.len() < 5, "nobody is put out before the time of a handshake: {took:?}");
        let mut streams = Vec::new();
        for _ in 0..300 {
            streams.push(TcpStream::connect(address).await.expect("it listens"));
        }
        let began = Instant::now();
        let old = streams.len() - HANDSHAKES_MAX;
        for stream in &mut streams[..old] {
            assert!(drained(stream).await.is_empty());
        }
        took.push(began.elapsed());
    }
    // Beyond the rate of one address even the newest are put out, before any handshake.
    let mut closed = Vec::new();
    while closed.iter().all(|closed| *closed <= HANDSHAKES_MAX / 2) {
        assert!(closed.len() < 5, "of the newest {HANDSHAKES_MAX} {closed:?} are closed");
        closed.push(beyond_the_rate(address).await);
    }
}

/// How many of the newest of a burst are closed after a second.
async fn beyond_the_rate(address: SocketAddr) -> usize {
    let mut streams = VecDeque::new();
    for _ in 0..2 * JOINS_BURST {
        streams.push_back(TcpStream::connect(address).await.expect("it listens"));
        if streams.len() > HANDSHAKES_MAX {
            streams.pop_front();
        }
    }
    sleep(Duration::from_secs(1)).await;
    let closed = |stream: &&TcpStream| match stream.try_read(&mut [0; 1]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    };
    streams.iter().filter(closed).count()
}

/// Of this process, in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_get_nothing_and_the_gang_trains_on() {
    let forge = Forge::new();
    let mut gang = Gang::of(3, forge.authority()).await;
    gang.configure(1, &[0, 1, 2], u64::MAX);
    gang.until_step(10).await;
    let addresses: Vec<SocketAddr> =
        gang.workers.iter().map(|worker| worker.address.parse().expect("an address")).collect();
    let before = resident_kib();
    let strangers = tokio::spawn(async move {
        for address in addresses {
            plain_strangers(address).await;
            // Only rank 1 is dialled by one rank and dials another.
            wrong_certificates(address, &forge).await;
            broken_frames(address, &forge).await;
            a_flood(address).await;
        }
    });
    // Anything but steps and heartbeats means that the gang was disturbed.
    let mut steps = 0;
    while !strangers.is_finished() {
        let Ok((name, event)) =
            timeout(Duration::from_secs(10), gang.leader.next()).await
        else {
            panic!("the gang is silent after {steps} steps");
        };
        match event {
            LeaderEvent::Up { attempt: 1, up: Up::Step(_) } => steps += 1,
            LeaderEvent::Up { attempt: 1, up: Up::Heartbeat(_) } => {}
            other => panic!("{name}: {other:?}"),
        }
    }
    strangers.await.expect("all are refused");
    let growth = resident_kib().saturating_sub(before);
    assert!(growth < GROWTH_KIB_MAX, "{growth} KiB more after the strangers");
    assert!(steps > 20, "{steps} steps meanwhile");
    let codes = gang.shut_down().await;
    assert_eq!(codes, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_takes_the_seat_of_a_rank_that_is_still_to_come() {
    let forge = Forge::new();
    let mut gang = Gang::of(2, forge.authority()).await;
    let both: Vec<&Worker> = gang.workers.iter().collect();
    let config = Arc::new(config(5, &both, 10));
    let address = gang.workers[1].address.parse().expect("an address");
    gang.leader.configure("w1", 1, &config);
    // It answers under its new leaf once it waits for rank 0.
    let joining = |event: &LeaderEvent| match event {
        LeaderEvent::Up { up: Up::Heartbeat(heart), .. } => {
            (heart.phase == Phase::Joining).then_some(())
        }
        _ => None,
    };
    gang.until(joining).await;
    for name in [
        worker("job-2", 5, "w0"),
        worker(JOB, 4, "w0"),
        worker(JOB, 6, "w0"),
        worker(JOB, 5, "w1"),
        worker(JOB, 5, "w9"),
        Identity::Operator.to_string(),
    ] {
        refused(&name, address, forge.valid(&name, ALPN_DATA), &[0; 64]).await;
    }
    let other = Forge::new();
    let name = worker(JOB, 5, "w0");
    refused("another authority", address, other.valid(&name, ALPN_DATA), &[0; 64]).await;
    let expired = forge.client(&[&name], -2 * DAY, -60, ALPN_DATA);
    refused("expired", address, expired, &[0; 64]).await;
    gang.leader.configure("w0", 0, &config);
    gang.until_completed(2, 10).await;
    assert_eq!(gang.shut_down().await, [0, 0]);
}

/// A member with all its papers that sends what no member sends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_members_broken_frames_end_the_attempt_and_nothing_else() {
    let forge = Forge::new();
    let mut gang = Gang::of(2, forge.authority()).await;
    let address = gang.workers[1].address.parse().expect("an address");
    let frames: Vec<Box<dyn Fn(Header) -> Vec<u8>>> = vec![
        Box::new(|_| b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n".to_vec()),
        Box::new(|_| vec![0; 100_000]),
        Box::new(|header| framed_data(Header { attempt: header.attempt - 1, ..header })),
        Box::new(|header| framed_data(Header { attempt: header.attempt + 1, ..header })),
        Box::new(|header| framed_data(Header { number: 0, ..header })),
        Box::new(|header| framed_data(Header { number: 2, ..header })),
        Box::new(|header| framed_data(Header { source: 1, ..header })),
        Box::new(|header| framed_data(Header { source: u32::MAX, ..header })),
        Box::new(|header| framed_data(Header { kind: Kind::Exchange, ..header })),
        Box::new(|header| framed_data(Header { length: 17, ..header })),
        Box::new(|header| framed_data(Header { length: u64::MAX, ..header })),
        // The right frame, and then the same once more where the next is expected.
        Box::new(|header| [framed_data(header), framed_data(header)].concat()),
        // It ends within the header, and within the body.
        Box::new(|header| header.encode()[..31].to_vec()),
        Box::new(|header| framed_data(header)[..40].to_vec()),
    ];
    let mut attempt = 0;
    for frame in frames {
        attempt += 1;
        let both: Vec<&Worker> = gang.workers.iter().collect();
        let config = Arc::new(config(attempt, &both, u64::MAX));
        gang.leader.configure("w1", 1, &config);
        let client = || forge.valid(&worker(JOB, attempt, "w0"), ALPN_DATA);
        let mut stream = welcomed(address, client).await;
        let header = Header { attempt, number: 1, source: 0, kind: Kind::Gather, length: 16 };
        // The worker may have ended the stream as soon as it saw the header.
        let _ = stream.write_all(&frame(header)).await;
        let _ = stream.shutdown().await;
        let (name, reason, _) = gang.until_left(attempt).await;
        assert_eq!((name.as_str(), reason), ("w1", LeftReason::PeerLost { rank: 0 }));
    }
    gang.configure(attempt + 1, &[0, 1], 10);
    gang.until_completed(2, 10).await;
    assert_eq!(gang.shut_down().await, [0, 0]);
}

/// A frame of 16 bytes, whatever its header claims.
fn framed_data(header: Header) -> Vec<u8> {
    [&header.encode()[..], &[0; 16]].concat()
}

/// A data stream that was accepted. The listener may not know of the attempt at once.
async fn welcomed(address: SocketAddr, client: impl Fn() -> Arc<ClientConfig>) -> Tls {
    for _ in 0..200 {
        if let Ok(mut stream) = connect(address, client()).await {
            let mut welcome = [0; 8];
            if stream.read_exact(&mut welcome).await.is_ok() {
                return stream;
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
    panic!("no welcome");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_strangers_are_left_after_five_seconds() {
    let forge = Forge::new();
    let gang = Gang::of(1, forge.authority()).await;
    let address = gang.workers[0].address.parse().expect("an address");
    slow_strangers(address, &forge).await;
    assert_eq!(gang.shut_down().await, [0]);
}
