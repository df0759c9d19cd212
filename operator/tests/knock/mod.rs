//! Who knocks at a worker's listener and must get nothing: also from pods of a real cluster
//! (`tests/tests/cluster/inside.rs`).

use moe_worker::gang::tls::server_name;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::ResolvesClientCert;
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{ClientConfig, SignatureScheme};

/// A worker gives a stranger five seconds at most; the rest is for a busy machine.
pub const REFUSED_WITHIN: Duration = Duration::from_secs(12);

pub fn with_alpn(config: Arc<ClientConfig>, alpn: &[u8]) -> Arc<ClientConfig> {
    let mut config = (*config).clone();
    config.alpn_protocols = if alpn.is_empty() { vec![] } else { vec![alpn.to_vec()] };
    Arc::new(config)
}

#[derive(Debug)]
struct NoCertificate;

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

pub fn without_certificate(config: Arc<ClientConfig>) -> Arc<ClientConfig> {
    let mut config = (*config).clone();
    config.client_auth_cert_resolver = Arc::new(NoCertificate);
    Arc::new(config)
}

/// Reads to the stream's end; an alert or a reset is an end too. Gives what had come.
pub async fn drained(stream: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut got = Vec::new();
    let read = async {
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut chunk).await {
            got.extend_from_slice(&chunk[..count]);
        }
    };
    timeout(REFUSED_WITHIN, read).await.expect("the worker ends the stream in time");
    got
}

/// Sends bytes without TLS; what comes back is at most an alert.
pub async fn plain(address: SocketAddr, bytes: Vec<u8>) {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    // The worker may close before it has read all.
    let _ = stream.write_all(&bytes).await;
    let answer = drained(&mut stream).await;
    let alert = answer.is_empty() || (answer.len() <= 16 && answer[0] == 21);
    assert!(alert, "{answer:?} after {} bytes", bytes.len());
}

/// A byte every tenth of a second; the worker must not wait for the last one.
pub async fn dribble(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    bytes: &[u8],
) -> Duration {
    let began = Instant::now();
    let (mut from, mut to) = tokio::io::split(stream);
    let write = async {
        for byte in bytes {
            if to.write_all(&[*byte]).await.is_err() || to.flush().await.is_err() {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        _ = drained(&mut from) => began.elapsed(),
        () = write => unreachable!("it never ends"),
    }
}

pub type Tls = tokio_rustls::client::TlsStream<TcpStream>;

pub async fn connect(address: SocketAddr, config: Arc<ClientConfig>) -> io::Result<Tls> {
    let tcp = TcpStream::connect(address).await?;
    TlsConnector::from(config).connect(server_name(), tcp).await
}

/// Shakes hands, sends bytes, and must get nothing but the end.
pub async fn refused(what: &str, address: SocketAddr, config: Arc<ClientConfig>, bytes: &[u8]) {
    // Under TLS 1.3 a client's handshake may end before its certificate is looked at.
    let Ok(mut stream) = connect(address, config).await else { return };
    let _ = stream.write_all(bytes).await;
    let _ = stream.flush().await;
    let answer = drained(&mut stream).await;
    assert!(answer.is_empty(), "{what}: {answer:?}");
}

pub fn framed(json: &str) -> Vec<u8> {
    [&(json.len() as u32).to_le_bytes()[..], json.as_bytes()].concat()
}

pub const HELLO: &str = r#"{"v":1,"term":1,"attempt":0,"body":"heartbeat"}"#;

pub async fn plain_strangers(address: SocketAddr) {
    // Not random at all, so that a failure repeats; no byte of it is a TLS record's.
    let noise = |seed: u32| {
        let step = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some((*state >> 24) as u8)
        };
        std::iter::successors(Some(seed), |s| Some(s.wrapping_add(1)))
            .scan(seed, move |state, _| step(state))
            .take(1 << 20)
            .collect::<Vec<u8>>()
    };
    plain(address, b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n".to_vec()).await;
    plain(address, b"SSH-2.0-OpenSSH_9.9\r\n".to_vec()).await;
    plain(address, noise(7)).await;
    plain(address, noise(8)).await;
    plain(address, vec![0; 1 << 20]).await;
    plain(address, vec![0xff; 1 << 20]).await;
    // A TLS record that claims more than it may, and one of another version.
    plain(address, [&[22, 3, 1, 0xff, 0xff][..], &[0; 70_000]].concat()).await;
    plain(address, vec![22, 2, 0, 0, 1, 1]).await;
    // A control frame without any TLS.
    plain(address, framed(HELLO)).await;
    for _ in 0..100 {
        drop(TcpStream::connect(address).await.expect("it listens"));
    }
}
