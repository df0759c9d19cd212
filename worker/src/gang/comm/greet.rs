//! How the streams between two workers begin: who dials, who answers, and how both prove who they
//! are.

use super::pump::{ANSWER_BYTES, HELLO_BYTES, Hello};
use crate::failure::chain;
use crate::gang::strangers::HANDSHAKE_MS_MAX;
use crate::gang::tls::{ALPN_STRAND, AttemptTls, Identity, server_name};
use moejob_protocol::config::Member;
use rustls::ClientConfig;
use rustls::server::Accepted;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::{StartHandshake, TlsConnector, TlsStream};

/// One try to reach a peer's listener.
const DIAL_MS_MAX: u64 = 1_000;
/// Between two tries, doubling; the peer may not know of the attempt yet.
const DIAL_PAUSE_MS: u64 = 4;
const DIAL_PAUSE_MS_MAX: u64 = 128;
/// First half of what the accepting side answers; the attempt follows.
const WELCOME: [u8; 4] = *b"MOEW";
/// A read of the system has so many bytes at most: rustls alone would ask for 4 KiB.
const READ_BYTES: usize = 32 << 10;

pub(super) struct Offer {
    pub accepted: Accepted,
    pub tcp: std::net::TcpStream,
    pub deadline: std::time::Instant,
}

pub(super) type Stream = TlsStream<BufReader<TcpStream>>;

/// A stream whose other end has proven who it is, or that it cannot be reached, with its attempt:
/// it may arrive after that attempt was left.
pub(super) struct Arrival {
    pub attempt: u32,
    pub peer: Connected,
}

pub(super) enum Connected {
    Dialled { rank: u32, stream: Box<Stream> },
    Unreached { rank: u32, why: String },
    Came { worker: String, stream: Box<Stream> },
    /// A strand: welcomed by the worker that was dialled, or of the one that came.
    Strand { came: Option<String>, hello: Hello, stream: Box<Stream> },
}

pub(super) fn encode_welcome(attempt: u32) -> Vec<u8> {
    [WELCOME, attempt.to_le_bytes()].concat()
}

/// The listener's side of a handshake; the connection is a stranger's until it ends.
pub(super) async fn receive(offer: Offer, tls: AttemptTls, connected: mpsc::Sender<Arrival>) {
    let Offer { accepted, tcp, deadline } = offer;
    let opened = async {
        let tcp = TcpStream::from_std(tcp)?;
        let tcp = BufReader::with_capacity(READ_BYTES, tcp);
        let mut stream = StartHandshake::from_parts(accepted, tcp).into_stream(tls.server).await?;
        let peer = Identity::of_peer(stream.get_ref().1.peer_certificates());
        let peer = peer.map_err(io::Error::other)?;
        match peer {
            // This side has shown its leaf of the same attempt, so both agree on which it is.
            Identity::Worker { job_uid, attempt, worker }
                if job_uid == tls.job_uid && attempt == tls.attempt =>
            {
                let is_strand = stream.get_ref().1.alpn_protocol() == Some(ALPN_STRAND);
                let mut hello = [0; HELLO_BYTES];
                if is_strand {
                    stream.read_exact(&mut hello).await?;
                }
                let stream = Box::new(TlsStream::from(stream));
                let peer = match Hello::parse(&hello) {
                    _ if !is_strand => Connected::Came { worker, stream },
                    Some(hello) => Connected::Strand { came: Some(worker), hello, stream },
                    None => return Err(io::Error::other("it says nothing of a strand")),
                };
                Ok(Arrival { attempt, peer })
            }
            other => Err(io::Error::other(format!("{other} is not of this attempt"))),
        }
    };
    match timeout_at(deadline.into(), opened).await {
        Ok(Ok(arrival)) => drop(connected.send(arrival).await),
        Ok(Err(error)) => tracing::debug!(error = chain(&error), "data handshake refused"),
        Err(_) => tracing::debug!("data handshake refused: too slow"),
    }
}

/// Dials until the peer welcomes this rank, or the deadline.
pub(super) async fn dial(
    member: Member,
    tls: AttemptTls,
    deadline: Instant,
    connected: mpsc::Sender<Arrival>,
) {
    let mut pause = Duration::from_millis(DIAL_PAUSE_MS);
    let rank = member.rank;
    let peer = loop {
        let why = match dial_once(&member, &tls).await {
            Ok(stream) => break Connected::Dialled { rank, stream: Box::new(stream) },
            Err(error) => chain(&error),
        };
        tracing::debug!(rank, why, "peer not reached");
        if Instant::now() + pause >= deadline {
            break Connected::Unreached { rank, why };
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(DIAL_PAUSE_MS_MAX));
    };
    let _ = connected.send(Arrival { attempt: tls.attempt, peer }).await;
}

async fn dial_once(member: &Member, tls: &AttemptTls) -> io::Result<Stream> {
    let welcomed = async {
        let mut stream = connect(member, tls, &tls.client).await?;
        let mut welcome = [0; 8];
        stream.read_exact(&mut welcome).await?;
        if welcome[..] != encode_welcome(tls.attempt) {
            return Err(io::Error::other("the peer's welcome is not for this attempt"));
        }
        Ok(stream)
    };
    let opened = timeout(Duration::from_millis(HANDSHAKE_MS_MAX), welcomed).await;
    opened.map_err(|_| late("the handshake"))?
}

pub(super) async fn dial_strand(
    member: &Member,
    tls: &AttemptTls,
    hello: Hello,
) -> io::Result<Stream> {
    let welcomed = async {
        let mut stream = connect(member, tls, &tls.strand).await?;
        stream.write_all(&hello.encode()).await?;
        stream.flush().await?;
        let mut answer = [0; ANSWER_BYTES];
        stream.read_exact(&mut answer).await?;
        if answer != hello.answer() {
            return Err(io::Error::other("the peer's answer is not for this strand"));
        }
        Ok(stream)
    };
    let opened = timeout(Duration::from_millis(HANDSHAKE_MS_MAX), welcomed).await;
    opened.map_err(|_| late("the handshake"))?
}

/// A stream to the member, which has proven who it is.
async fn connect(
    member: &Member,
    tls: &AttemptTls,
    as_client: &Arc<ClientConfig>,
) -> io::Result<Stream> {
    let connect = TcpStream::connect(&member.address);
    let tcp = timeout(Duration::from_millis(DIAL_MS_MAX), connect).await;
    let tcp = tcp.map_err(|_| late("connecting"))??;
    tcp.set_nodelay(true)?;
    let connector = TlsConnector::from(Arc::clone(as_client));
    let tcp = BufReader::with_capacity(READ_BYTES, tcp);
    let stream = connector.connect(server_name(), tcp).await?;
    let found = Identity::of_peer(stream.get_ref().1.peer_certificates());
    let expected = Identity::Worker {
        job_uid: tls.job_uid.clone(),
        attempt: tls.attempt,
        worker: member.worker.clone(),
    };
    match found {
        Ok(found) if found == expected => Ok(TlsStream::from(stream)),
        Ok(found) => Err(io::Error::other(format!("{found} answers"))),
        Err(error) => Err(io::Error::other(error)),
    }
}

fn late(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} took too long"))
}
