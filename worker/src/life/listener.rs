//! The worker's one listener: both streams come in here, and everything else ends here.
//!
//! ```text
//! accept -> ClientHello -> ALPN control -> handshake -> operator? -> first frame -> the shell
//!                               \ data -> the data runtime, which does the same for peers
//! ```
//!
//! A stranger costs a socket and a few kilobytes for at most five seconds, and can push out other
//! strangers, but no stream that has proven who it is.

use crate::failure::chain;
use crate::gang::comm::DataOffers;
use crate::gang::strangers::{HANDSHAKE_MS_MAX, Strangers};
use crate::life::control::{self, FrameError};
use crate::gang::tls::{ALPN_DATA, ALPN_STRAND, Identity, TlsError};
use moejob_protocol::Down;
use moejob_protocol::message::{
    ALPN_CONTROL_PREFIX, CONTROL_VERSIONS, Frame, alpn, version_of,
};
use rustls::ServerConfig;
use rustls::server::Acceptor;
use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake};

/// Connections that one address may open at once, and then each second. A rank of a large job is
/// dialled by hundreds of peers, but by each of them a few times a second at most.
pub const JOINS_BURST: u32 = 512;
pub const JOINS_PER_SECOND: u32 = 64;
/// Addresses whose joins are counted; the one that came longest ago is forgotten first.
const SOURCES_MAX: usize = 1024;
/// After an accept that failed, for want of file descriptors say.
const ACCEPT_PAUSE_MS: u64 = 50;

/// A control stream of the operator's.
#[derive(Debug)]
pub struct LeaderStream {
    pub stream: TlsStream<TcpStream>,
    /// The leader speaks first, so that its term is known.
    pub first: Frame<Down>,
    /// Of the control stream, that both sides speak.
    pub version: u32,
}

/// Why a connection got nothing.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("no proof within {HANDSHAKE_MS_MAX} ms")]
    Slow,
    #[error("the TLS handshake failed")]
    Handshake(#[from] io::Error),
    #[error("neither of our protocols was asked for")]
    Alpn,
    #[error("it speaks {asked}, this worker {}", alpn_text(&alpn(CONTROL_VERSIONS)))]
    Protocol { asked: String },
    #[error("the peer's certificate is not for this")]
    Tls(#[from] TlsError),
    #[error("the peer is {found}, not the operator")]
    NotOperator { found: Identity },
    #[error("the first frame was refused")]
    Frame(#[from] FrameError),
    #[error("too many data connections at once")]
    Busy,
}

/// Accepts for ever. Control streams go to `leaders`, data connections to `data`. `tls` is what
/// the next leader is shown.
pub async fn serve(
    listener: TcpListener,
    tls: watch::Receiver<Arc<ServerConfig>>,
    leaders: mpsc::Sender<LeaderStream>,
    data: DataOffers,
) {
    let mut pending = Strangers::default();
    let mut joins = Joins::default();
    loop {
        let tcp = match listener.accept().await {
            // Closed before a byte is read: that costs microseconds, a handshake a thousand times
            // as much.
            Ok((_, from)) if !joins.admit(from.ip(), Instant::now()) => continue,
            Ok((tcp, _)) => tcp,
            Err(error) => {
                tracing::debug!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(ACCEPT_PAUSE_MS)).await;
                continue;
            }
        };
        let tls = Arc::clone(&tls.borrow());
        let (leaders, data) = (leaders.clone(), data.clone());
        pending.admit(async move {
            let deadline = Instant::now() + Duration::from_millis(HANDSHAKE_MS_MAX);
            let opened = timeout_at(deadline, open(tcp, tls, data, deadline)).await;
            match opened.unwrap_or(Err(Refusal::Slow)) {
                // The shell takes streams as fast as they come; a full queue means that it ends.
                Ok(Some(leader)) => drop(leaders.send(leader).await),
                Ok(None) => {}
                // A leader of another release, or a stranger: the first one is told to a person.
                Err(refusal @ Refusal::Protocol { .. })
                    if !PROTOCOL_TOLD.swap(true, Ordering::Relaxed) =>
                {
                    tracing::warn!("a leader was refused: {}", chain(&refusal));
                }
                Err(refusal) => tracing::debug!(refusal = chain(&refusal), "connection refused"),
            }
        });
    }
}

/// A control stream; none when it was a data connection and went its way.
async fn open(
    tcp: TcpStream,
    tls: Arc<ServerConfig>,
    data: DataOffers,
    deadline: Instant,
) -> Result<Option<LeaderStream>, Refusal> {
    tcp.set_nodelay(true)?;
    let start = LazyConfigAcceptor::new(Acceptor::default(), tcp).await?;
    let asked: Vec<Vec<u8>> = match start.client_hello().alpn() {
        Some(names) => names.map(<[u8]>::to_vec).collect(),
        None => Vec::new(),
    };
    if asked.iter().any(|name| name == ALPN_DATA || name == ALPN_STRAND) {
        let StartHandshake { accepted, io, .. } = start;
        return if data.offer(accepted, io.into_std()?, deadline.into_std()) {
            Ok(None)
        } else {
            Err(Refusal::Busy)
        };
    }
    if !asked.iter().any(|name| name.starts_with(ALPN_CONTROL_PREFIX.as_bytes())) {
        return Err(Refusal::Alpn);
    }
    let ours = alpn(CONTROL_VERSIONS);
    let known = asked.iter().any(|name| ours.contains(name));
    // Where there is no version that both speak TLS itself says so to the other side.
    let mut stream = match start.into_stream(tls).await {
        Err(_) if !known => return Err(Refusal::Protocol { asked: alpn_text(&asked) }),
        stream => stream?,
    };
    let found = Identity::of_peer(stream.get_ref().1.peer_certificates())?;
    if found != Identity::Operator {
        return Err(Refusal::NotOperator { found });
    }
    let first = control::read_frame(&mut stream, Duration::from_millis(HANDSHAKE_MS_MAX)).await?;
    let agreed = stream.get_ref().1.alpn_protocol().and_then(version_of);
    // TLS agrees on one of ours, or on none at all.
    let version = agreed.unwrap_or(1);
    Ok(Some(LeaderStream { stream, first, version }))
}

/// Whether it was told already that a leader speaks another protocol.
static PROTOCOL_TOLD: AtomicBool = AtomicBool::new(false);

/// Names as a person reads them; whoever connects may have put anything there.
fn alpn_text(names: &[Vec<u8>]) -> String {
    let name = |name: &Vec<u8>| name.escape_ascii().to_string();
    names.iter().take(8).map(name).collect::<Vec<_>>().join(", ")
}

/// How often each address may still come: a bucket of `JOINS_BURST`, filled again by
/// `JOINS_PER_SECOND`.
#[derive(Debug, Default)]
pub struct Joins(HashMap<IpAddr, (Instant, f64)>);

impl Joins {
    /// Counts one connection, and gives whether it may go on.
    pub fn admit(&mut self, from: IpAddr, now: Instant) -> bool {
        if self.0.len() >= SOURCES_MAX && !self.0.contains_key(&from) {
            let oldest = self.0.iter().min_by_key(|(_, (seen, _))| *seen).map(|(ip, _)| *ip);
            oldest.map(|ip| self.0.remove(&ip));
        }
        let (seen, left) = self.0.entry(from).or_insert((now, f64::from(JOINS_BURST)));
        let filled = now.duration_since(*seen).as_secs_f64() * f64::from(JOINS_PER_SECOND);
        *seen = now;
        *left = (*left + filled).min(f64::from(JOINS_BURST));
        let admitted = *left >= 1.0;
        if admitted {
            *left -= 1.0;
        }
        admitted
    }
}
