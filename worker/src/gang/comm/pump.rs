//! Moves the bytes of strands between pipes and their streams, a thread each.
//!
//! ```text
//! the dialler's hello: "MOES" | u32 attempt | u32 from | u32 to | u32 index, little-endian
//! the answer:          "MOES" | u32 attempt
//! then what the pipe from rank `from` to rank `to` carries, in that direction alone
//! ```
//! A strand is dialled by the worker that dialled the peer's stream, once that is there. Who does
//! not want it closes the connection, as does a release that knows none.

use super::mover::BESIDE_BYTES_MAX;
use super::pipe::{CHUNK_BYTES_MAX, Read};
use super::precedence::{Precedence, Traffic};
use super::strand::Strand;
use crate::failure::chain;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepidle};
use rustix::net::{RecvFlags, recv};
use rustls::Connection;
use std::io::{self, BufRead, BufReader, Cursor, Read as _, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio_rustls::TlsStream;

const MAGIC: [u8; 4] = *b"MOES";
pub(super) const HELLO_BYTES: usize = 20;
pub(super) const ANSWER_BYTES: usize = 8;
/// A read of the system has so many bytes at most: rustls alone would ask for 4 KiB.
const READ_BYTES: usize = 256 << 10;
/// A strand that nobody uses is looked at so often, and by the system itself.
const IDLE_LOOK: Duration = Duration::from_millis(500);
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// How soon a thread that waits for its engine hears that the attempt was left.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// While steps have bytes.
const YIELD: Duration = Duration::from_millis(1);

/// Which strand a connection is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Hello {
    pub attempt: u32,
    /// The rank whose bytes it carries.
    pub from: u32,
    pub to: u32,
    pub index: u32,
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        let words = [self.attempt, self.from, self.to, self.index];
        for (at, word) in bytes[4..].chunks_exact_mut(4).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn parse(bytes: &[u8; HELLO_BYTES]) -> Option<Hello> {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[4 * at + i]));
        let hello = Hello { attempt: word(1), from: word(2), to: word(3), index: word(4) };
        bytes.starts_with(&MAGIC).then_some(hello)
    }

    pub fn answer(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes.copy_from_slice(&self.encode()[..ANSWER_BYTES]);
        bytes
    }
}

/// A strand's thread. It ends with this.
#[derive(Debug)]
pub(super) struct Pump {
    tcp: TcpStream,
    closed: Arc<AtomicBool>,
}

impl Pump {
    /// Carries what comes out of the strand's pipe (`sends`), or into it.
    ///
    /// # Errors
    /// The system gives no thread, or the socket is gone.
    pub fn start(
        stream: TlsStream<tokio::io::BufReader<tokio::net::TcpStream>>,
        strand: Strand,
        sends: bool,
        traffic: Arc<Traffic>,
    ) -> io::Result<Pump> {
        let (buffered, tls) = match stream {
            TlsStream::Client(stream) => {
                let (tcp, tls) = stream.into_inner();
                (tcp, Connection::Client(tls))
            }
            TlsStream::Server(stream) => {
                let (tcp, tls) = stream.into_inner();
                (tcp, Connection::Server(tls))
            }
        };
        let ahead = buffered.buffer().to_vec();
        let tcp = buffered.into_inner().into_std()?;
        tcp.set_nonblocking(false)?;
        // One that a machine between forgets is known to be lost before it is used.
        let _ = set_socket_keepalive(&tcp, true);
        let _ = set_tcp_keepidle(&tcp, KEEP_ALIVE);
        let (own, closed) = (tcp.try_clone()?, Arc::new(AtomicBool::new(false)));
        let strands = Pumped { tls, strand: strand.clone(), closed: Arc::clone(&closed), traffic };
        let thread = std::thread::Builder::new().name("strand".to_string());
        thread.spawn(move || strands.run(tcp, ahead, sends))?;
        strand.pipe.set_open(true);
        Ok(Pump { tcp: own, closed })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::SeqCst);
        let _ = self.tcp.shutdown(Shutdown::Both);
    }
}

struct Pumped {
    tls: Connection,
    strand: Strand,
    closed: Arc<AtomicBool>,
    traffic: Arc<Traffic>,
}

impl Pumped {
    fn run(mut self, tcp: TcpStream, ahead: Vec<u8>, sends: bool) {
        let ended = match sends {
            true => self.send(&tcp),
            false => self.receive(&tcp, ahead),
        };
        let why = match &ended {
            Ok(()) => "its strand ended".to_string(),
            Err(error) => format!("a strand to it is lost: {}", chain(error)),
        };
        let pipe = &self.strand.pipe;
        pipe.set_open(false);
        match sends {
            true => pipe.refuse(&why),
            false => pipe.end(&why),
        }
        let _ = tcp.shutdown(Shutdown::Both);
    }

    fn check(&self) -> io::Result<()> {
        match self.closed.load(Ordering::SeqCst) {
            true => Err(io::Error::other("the attempt was left")),
            false => Ok(()),
        }
    }

    /// Until the engine has ended the pipe and all of it has left.
    fn send(&mut self, mut tcp: &TcpStream) -> io::Result<()> {
        self.tls.set_buffer_limit(None);
        let mut chunk = vec![0; CHUNK_BYTES_MAX];
        let mut precedence = Precedence::default();
        loop {
            let seen = self.strand.more.generation();
            self.check()?;
            let (now, waiting) = (Instant::now(), self.strand.pipe.has_more());
            let steps = self.traffic.is_stepping(now);
            let of_steps = if steps { chunk.len() } else { 0 };
            let sizes = (BESIDE_BYTES_MAX, chunk.len());
            if waiting && precedence.beside(now, of_steps, waiting, sizes) == 0 {
                std::thread::sleep(YIELD);
                continue;
            }
            match self.strand.pipe.read(&mut chunk) {
                Read::Some(length) => {
                    self.tls.writer().write_all(&chunk[..length])?;
                    self.flush(&mut tcp)?;
                    // Half of the line is the steps'.
                    std::thread::sleep(if steps { now.elapsed() } else { Duration::ZERO });
                }
                Read::Empty => {
                    self.strand.more.wait_for(seen, IDLE_LOOK);
                    is_there(tcp)?;
                }
                Read::Ended { .. } => {
                    self.tls.send_close_notify();
                    return self.flush(&mut tcp);
                }
            }
        }
    }

    fn flush(&mut self, tcp: &mut impl Write) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(tcp)?;
        }
        Ok(())
    }

    /// Until the peer ends the stream. `ahead` came with the handshake's bytes.
    fn receive(&mut self, mut tcp: &TcpStream, ahead: Vec<u8>) -> io::Result<()> {
        let mut input = BufReader::with_capacity(READ_BYTES, Cursor::new(ahead).chain(tcp));
        loop {
            loop {
                let taken = match self.tls.reader().into_first_chunk() {
                    Ok([]) => return Ok(()),
                    Ok(bytes) => push(&self.strand, bytes, &self.closed)?,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                };
                self.tls.reader().consume(taken);
            }
            if self.tls.read_tls(&mut input)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let state = self.tls.process_new_packets();
            state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            // Answers of the protocol.
            self.flush(&mut tcp)?;
        }
    }
}

/// Puts as much into the pipe as fits, once something does.
fn push(strand: &Strand, bytes: &[u8], closed: &AtomicBool) -> io::Result<usize> {
    loop {
        let seen = strand.room.generation();
        match strand.pipe.space() {
            Ok(0) => strand.room.wait_for(seen, LOOK_EVERY),
            Ok(space) => {
                let length = space.min(bytes.len());
                strand.pipe.push(&bytes[..length], &[]);
                return Ok(length);
            }
            Err(why) => return Err(io::Error::other(why)),
        }
        if closed.load(Ordering::SeqCst) {
            return Err(io::Error::other("the attempt was left"));
        }
    }
}

/// The peer has not closed it, as far as the system knows.
fn is_there(tcp: &TcpStream) -> io::Result<()> {
    match recv(tcp, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        let hello = Hello { attempt: 7, from: 300, to: 2, index: 5 };
        assert_eq!(Hello::parse(&hello.encode()), Some(hello));
        let mut other = hello.encode();
        other[0] = b'x';
        assert_eq!(Hello::parse(&other), None);
        assert_eq!(hello.answer(), *b"MOES\x07\0\0\0");
    }
}
