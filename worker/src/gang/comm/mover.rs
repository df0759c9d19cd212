//! Moves the bytes of all pairs of ranks between two workers over their one stream.
//!
//! ```text
//! u16 kind | u16 way | u32 from | u32 to | u32 length, little-endian; data and ends carry that
//! many bytes
//! ```
//! A pair's sender has as much on its way as a pipe holds at most, until the receiver's mover says
//! that the engine has taken some. So the reader always has room for what comes, and a pair whose
//! engine is slow holds no other pair up: two ranks of a worker wait for each other through their
//! peers.
//! What travels beside the steps goes where no pair has anything for a step, a chunk at a time, but
//! is not held up for ever ([`precedence`](super::precedence)).

use super::links::{PeerPipes, Way};
use super::pipe::{CHUNK_BYTES_MAX, Read};
use super::precedence::{Precedence, Traffic};
use crate::failure::chain;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Frames that go out in one write.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// Where so much waits for a step, what travels beside yields to it.
pub(super) const BESIDE_BYTES_MAX: usize = 4 << 10;
const HEAD_BYTES: usize = 16;
/// The longest reason that a peer gives for its end.
const WHY_BYTES_MAX: usize = 252;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Bytes of a pipe, `from` the producer.
    Data = 1,
    /// So many bytes were taken, `from` the consumer.
    Credit = 2,
    /// `from` has left the group, and says why.
    End = 3,
}

/// What goes on between a rank here and one of the peer's.
#[derive(Debug)]
struct Pair {
    pipes: PeerPipes,
    /// Bytes that may still be sent.
    credit: AtomicU64,
    /// Bytes of the incoming pipe whose room was given back.
    credited: AtomicU64,
    /// The end of the own rank was told.
    told_end: AtomicBool,
}

impl Pair {
    /// Whether [`fill`] would append something.
    fn has_bytes(&self) -> bool {
        let Pair { pipes, credit, told_end, .. } = self;
        !told_end.load(Ordering::Relaxed)
            && !pipes.outgoing.is_refused()
            && credit.load(Ordering::Relaxed) > 0
            && pipes.outgoing.has_more()
    }
}

/// One stream's pairs, for its reader and its writer. Both run on the data thread.
#[derive(Debug)]
pub(super) struct Pairs {
    pairs: Vec<Pair>,
    locals: Range<u32>,
    remotes: Range<u32>,
    /// The writer has something to do.
    pub wake: Notify,
    /// Of all streams of the worker.
    traffic: Arc<Traffic>,
}

impl Pairs {
    pub fn new(
        pipes: Vec<PeerPipes>,
        locals: Range<u32>,
        remotes: Range<u32>,
        traffic: Arc<Traffic>,
    ) -> Arc<Pairs> {
        assert_eq!(pipes.len(), Way::ALL.len() * locals.len() * remotes.len());
        let pair = |pipes: PeerPipes| Pair {
            credit: AtomicU64::new(pipes.outgoing.holds() as u64),
            pipes,
            credited: AtomicU64::new(0),
            told_end: AtomicBool::new(false),
        };
        let pairs = pipes.into_iter().map(pair).collect();
        Arc::new(Pairs { pairs, locals, remotes, wake: Notify::new(), traffic })
    }

    /// The peer's.
    pub fn remotes(&self) -> Range<u32> {
        self.remotes.clone()
    }

    /// The first of the peer's ranks names it.
    pub fn first_remote(&self) -> u32 {
        self.remotes.start
    }

    fn find(&self, way: u32, remote: u32, local: u32) -> io::Result<&Pair> {
        let Some(way) = Way::ALL.into_iter().find(|known| *known as u32 == way) else {
            return Err(refuse(format!("a frame of the way {way}")));
        };
        if !self.remotes.contains(&remote) || !self.locals.contains(&local) {
            return Err(refuse(format!("a frame from rank {remote} to rank {local}")));
        }
        let row = (local - self.locals.start) as usize * self.remotes.len()
            + way as usize * self.pairs.len() / Way::ALL.len();
        Ok(&self.pairs[row + (remote - self.remotes.start) as usize])
    }

    /// The stream is over: nothing comes or goes any more.
    pub fn end(&self, why: &str) {
        for Pair { pipes, .. } in &self.pairs {
            pipes.incoming.end(why);
            pipes.outgoing.refuse(why);
        }
    }
}

fn refuse(found: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the peer sent {found}"))
}

fn head(kind: Kind, way: Way, from: u32, to: u32, length: usize) -> [u8; HEAD_BYTES] {
    let mut bytes = [0; HEAD_BYTES];
    let words = [kind as u32 | (way as u32) << 16, from, to, length as u32];
    for (at, word) in bytes.chunks_exact_mut(4).zip(words) {
        at.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Moves bytes from the peer's engines to ours until the stream ends.
pub(super) async fn read(mut stream: impl AsyncRead + Unpin, pairs: Arc<Pairs>) {
    let mut body = vec![0; CHUNK_BYTES_MAX];
    let why = loop {
        match read_frame(&mut stream, &pairs, &mut body).await {
            Ok(true) => {}
            Ok(false) => break "its stream ended".to_string(),
            Err(error) => break chain(&error),
        }
    };
    pairs.end(&why);
    pairs.wake.notify_one();
}

/// Says whether there was one.
async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    pairs: &Pairs,
    body: &mut [u8],
) -> io::Result<bool> {
    let mut bytes = [0; HEAD_BYTES];
    if stream.read(&mut bytes[..1]).await? == 0 {
        return Ok(false);
    }
    stream.read_exact(&mut bytes[1..]).await?;
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[4 * at + i]));
    let (kind, way) = (word(0) & 0xffff, word(0) >> 16);
    let (from, to, length) = (word(1), word(2), word(3) as usize);
    let pair = pairs.find(way, from, to)?;
    if kind == Kind::Credit as u32 {
        let credit = pair.credit.load(Ordering::Relaxed) + length as u64;
        if credit > pair.pipes.outgoing.holds() as u64 {
            return Err(refuse(format!("room for {length} bytes that were not sent")));
        }
        pair.credit.store(credit, Ordering::Relaxed);
        pairs.wake.notify_one();
        return Ok(true);
    }
    let most = if kind == Kind::Data as u32 { CHUNK_BYTES_MAX } else { WHY_BYTES_MAX };
    if kind != Kind::Data as u32 && kind != Kind::End as u32 {
        return Err(refuse(format!("a frame of kind {kind}")));
    }
    if length > most {
        return Err(refuse(format!("a frame of {length} bytes, at most {most}")));
    }
    let body = &mut body[..length];
    stream.read_exact(body).await?;
    let PeerPipes { incoming, outgoing, .. } = &pair.pipes;
    if kind == Kind::End as u32 {
        let why = String::from_utf8_lossy(body);
        incoming.end(&why);
        outgoing.refuse(&why);
        return Ok(true);
    }
    match incoming.space() {
        Ok(space) if space >= length => incoming.push(body, &[]),
        Ok(space) => return Err(refuse(format!("{length} bytes, with room for {space}"))),
        // The engine left; its end tells the peer.
        Err(_) => {}
    }
    Ok(true)
}

/// Moves bytes from our engines to the peer's until all of ours have left or the stream ends.
/// `arm` makes the engines' next ring heard.
pub(super) async fn write(
    mut stream: impl AsyncWrite + Unpin,
    pairs: Arc<Pairs>,
    first: Option<Vec<u8>>,
    arm: impl Fn(),
) {
    let mut batch = first.unwrap_or_default();
    let mut chunk = vec![0; CHUNK_BYTES_MAX];
    let mut precedence = Precedence::default();
    let moved: io::Result<()> = async {
        loop {
            arm();
            let (steps, beside) = pairs.pairs.split_at(pairs.pairs.len() / Way::ALL.len());
            for pair in steps {
                if batch.len() < BATCH_BYTES_MAX {
                    give_credit(pair, &mut batch);
                    fill(pair, &mut batch, &mut chunk);
                }
            }
            let waiting = beside.iter().any(Pair::has_bytes);
            let sizes = (BESIDE_BYTES_MAX, CHUNK_BYTES_MAX);
            let now = Instant::now().into_std();
            let steps = batch.len() >= BESIDE_BYTES_MAX;
            let most = batch.len() + precedence.beside(now, batch.len(), waiting, sizes);
            // A few bytes, without which the peer's copies would wait for our steps.
            beside.iter().for_each(|pair| give_credit(pair, &mut batch));
            let mut before = usize::MAX;
            while batch.len() < most && batch.len() != before {
                before = batch.len();
                for pair in beside {
                    if batch.len() < most {
                        fill(pair, &mut batch, &mut chunk);
                    }
                }
            }
            if !batch.is_empty() {
                if steps {
                    pairs.traffic.begin();
                }
                stream.write_all(&batch).await?;
                stream.flush().await?;
                if steps {
                    pairs.traffic.end(Instant::now().into_std());
                }
                batch.clear();
                continue;
            }
            let over = |pair: &Pair| {
                pair.told_end.load(Ordering::Relaxed) || pair.pipes.outgoing.is_refused()
            };
            if pairs.pairs.iter().all(over) {
                return stream.shutdown().await;
            }
            pairs.wake.notified().await;
        }
    }
    .await;
    if let Err(error) = moved {
        pairs.end(&chain(&error));
    }
}

/// Appends how much the own rank has taken, where that is worth a word.
fn give_credit(pair: &Pair, batch: &mut Vec<u8>) {
    let PeerPipes { way, local, remote, incoming, .. } = &pair.pipes;
    let credited = pair.credited.load(Ordering::Relaxed);
    let taken = incoming.taken().saturating_sub(credited) as usize;
    // More than the pipe holds was never taken, whatever an engine's memory says.
    if (incoming.credit()..=incoming.holds()).contains(&taken) {
        pair.credited.store(credited + taken as u64, Ordering::Relaxed);
        batch.extend_from_slice(&head(Kind::Credit, *way, *local, *remote, taken));
    }
}

/// Appends a chunk of what a pair has to say.
fn fill(pair: &Pair, batch: &mut Vec<u8>, chunk: &mut [u8]) {
    let PeerPipes { way, local, remote, outgoing, .. } = &pair.pipes;
    if pair.told_end.load(Ordering::Relaxed) || outgoing.is_refused() {
        return;
    }
    let credit = pair.credit.load(Ordering::Relaxed);
    let most = chunk.len().min(credit as usize);
    if most == 0 {
        return;
    }
    match outgoing.read(&mut chunk[..most]) {
        Read::Some(length) => {
            pair.credit.store(credit - length as u64, Ordering::Relaxed);
            batch.extend_from_slice(&head(Kind::Data, *way, *local, *remote, length));
            batch.extend_from_slice(&chunk[..length]);
        }
        Read::Empty => {}
        Read::Ended { why } => {
            pair.told_end.store(true, Ordering::Relaxed);
            let why = &why.as_bytes()[..why.len().min(WHY_BYTES_MAX)];
            batch.extend_from_slice(&head(Kind::End, *way, *local, *remote, why.len()));
            batch.extend_from_slice(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gang::comm::{Links, Shape};

    const SHAPE: Shape = Shape { attempt: 1, first: 0, count: 1, world: 2, strands: 0 };

    fn pairs() -> (Links, Arc<Pairs>) {
        let links = Links::create(SHAPE).expect("memory");
        let pairs = Pairs::new(links.pairs(1..2), 0..1, 1..2, Arc::default());
        (links, pairs)
    }

    /// Why the stream ended that brought `bytes`.
    async fn after(bytes: &[u8]) -> String {
        let (_links, pairs) = pairs();
        read(bytes, Arc::clone(&pairs)).await;
        match pairs.pairs[0].pipes.outgoing.space() {
            Err(why) => why,
            Ok(_) => "none".to_string(),
        }
    }

    /// Of a step.
    fn head(kind: Kind, from: u32, to: u32, length: usize) -> [u8; HEAD_BYTES] {
        super::head(kind, Way::Step, from, to, length)
    }

    #[tokio::test]
    async fn strange_frames_end_the_stream() {
        for (bytes, expected) in [
            (head(Kind::Data, 2, 0, 0), "the peer sent a frame from rank 2 to rank 0"),
            (head(Kind::Data, 1, 1, 0), "the peer sent a frame from rank 1 to rank 1"),
            (head(Kind::Data, 1, 0, 65_537), "the peer sent a frame of 65537 bytes, at most 65536"),
            (head(Kind::End, 1, 0, 300), "the peer sent a frame of 300 bytes, at most 252"),
            (head(Kind::Credit, 1, 0, 1), "the peer sent room for 1 bytes that were not sent"),
            ([9; HEAD_BYTES], "the peer sent a frame of the way 2313"),
        ] {
            assert_eq!(after(&bytes).await, expected);
        }
        let mut elsewhere = super::head(Kind::Data, Way::Beside, 1, 0, 0);
        elsewhere[2] = 2;
        assert_eq!(after(&elsewhere).await, "the peer sent a frame of the way 2");
        let mut unknown = head(Kind::Data, 1, 0, 0);
        unknown[0] = 7;
        assert_eq!(after(&unknown).await, "the peer sent a frame of kind 7");
        assert_eq!(after(&[]).await, "its stream ended");
        let left = [&head(Kind::End, 1, 0, 4)[..], b"left"].concat();
        assert_eq!(after(&left).await, "left");
    }

    /// Bytes of one way that came out of a stream in so many seconds of a line that always has
    /// room, where a step has bytes at any time and a copy has, too.
    async fn of_a_copy_after(seconds: u64) -> usize {
        let (links, pairs) = pairs();
        let (out, mut far) = tokio::io::duplex(CHUNK_BYTES_MAX);
        let writer = tokio::spawn(write(out, Arc::clone(&pairs), None, || ()));
        let (step, copy) = (&pairs.pairs[0], &pairs.pairs[1]);
        let until = Instant::now() + std::time::Duration::from_secs(seconds);
        let (mut of_copies, mut before) = (0, false);
        while Instant::now() < until {
            for pair in [step, copy] {
                let space = pair.pipes.outgoing.space().expect("nobody refuses");
                pair.pipes.outgoing.push(&vec![0; space], &[]);
                let all = pair.pipes.outgoing.holds() as u64;
                pair.credit.store(all, Ordering::Relaxed);
            }
            pairs.wake.notify_one();
            let mut head = [0; HEAD_BYTES];
            far.read_exact(&mut head).await.expect("a frame");
            let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| head[4 * at + i]));
            let length = word(3) as usize;
            far.read_exact(&mut vec![0; length]).await.expect("its bytes");
            let beside = word(0) >> 16 == Way::Beside as u32;
            of_copies += usize::from(beside) * length;
            // One after the other, as soon as the copy's turn has come.
            assert!(!(beside && before), "two chunks of a copy in a row");
            before = beside;
            tokio::time::advance(std::time::Duration::from_millis(5)).await;
        }
        writer.abort();
        drop(links);
        of_copies
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_yields_to_a_step_for_a_bounded_time() {
        assert_eq!(of_a_copy_after(9).await, 0);
        // Half of the frames of two seconds.
        let after = of_a_copy_after(12).await / CHUNK_BYTES_MAX;
        assert!((180..=200).contains(&after), "{after} chunks");
    }

    #[tokio::test]
    async fn more_than_the_credit_ends_the_stream() {
        let frame = [&head(Kind::Data, 1, 0, CHUNK_BYTES_MAX)[..], &[7; CHUNK_BYTES_MAX]].concat();
        let fits = super::super::pipe::PIPE_BYTES_MAX / CHUNK_BYTES_MAX;
        assert_eq!(after(&frame.repeat(fits)).await, "its stream ended");
        let expected = "the peer sent 65536 bytes, with room for 0";
        assert_eq!(after(&frame.repeat(fits + 1)).await, expected);
    }
}
