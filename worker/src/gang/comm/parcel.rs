//! Frames that go out or are awaited, as far as they have come.

use super::frame::{HEADER_BYTES, Header, Kind};
use super::pipe::{CHUNK_BYTES_MAX, Read};
use super::{CommError, Lane};
use std::borrow::Cow;

/// What stands in place of a body that comes over strands: u64 its length, u32 the strands, a bit
/// each; little-endian.
const STRIPED_BYTES: usize = 12;

/// A frame on its way out.
#[derive(Debug)]
pub(super) struct Outbound<'a> {
    pub peer: u32,
    /// Until it left with the first chunk.
    header: Option<Header>,
    bytes: Cow<'a, [u8]>,
    /// Of the bytes.
    sent: usize,
}

impl<'a> Outbound<'a> {
    pub fn new(peer: u32, header: Header, bytes: Cow<'a, [u8]>) -> Outbound<'a> {
        Outbound { peer, header: Some(header), bytes, sent: 0 }
    }

    pub fn nothing(peer: u32) -> Outbound<'a> {
        Outbound { peer, header: None, bytes: Cow::Borrowed(&[]), sent: 0 }
    }

    /// Says that so many bytes come over these strands.
    pub fn striped(peer: u32, header: Header, strands: u32) -> Outbound<'a> {
        let bytes = [&header.length.to_le_bytes()[..], &strands.to_le_bytes()].concat();
        let header = Header { kind: Kind::Striped, length: STRIPED_BYTES as u64, ..header };
        Outbound::new(peer, header, Cow::Owned(bytes))
    }

    pub fn is_done(&self) -> bool {
        self.header.is_none() && self.sent == self.bytes.len()
    }

    /// Copies as much into the peer's pipe as fits; says whether anything moved.
    pub fn step(&mut self, lane: &Lane) -> Result<bool, CommError> {
        let mut moved = false;
        while !self.is_done() {
            let space = lane.outgoing.space();
            let space = space.map_err(|why| CommError::PeerLost { rank: self.peer, why })?;
            let head = self.header.map_or(0, |_| HEADER_BYTES);
            // A chunk goes out whole or waits: crumbs would cost a wake each.
            let rest = &self.bytes[self.sent..];
            let most = CHUNK_BYTES_MAX.min(lane.outgoing.holds());
            let size = (head + rest.len()).min(most);
            if size > space {
                break;
            }
            let header = self.header.take().map(|header| header.encode());
            let now = &rest[..size - head];
            lane.outgoing.push(header.as_ref().map_or(&[], |header| &header[..]), now);
            self.sent += size - head;
            moved = true;
        }
        Ok(moved)
    }
}

#[derive(Debug)]
pub(super) enum Target<'a> {
    Exact(&'a mut [u8]),
    Bounded { into: Vec<u8>, bytes_max: usize },
}

/// A frame that is awaited.
#[derive(Debug)]
pub(super) struct Receive<'a> {
    pub peer: u32,
    target: Target<'a>,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that are here.
    headed: usize,
    /// Bytes of the body that are still to come; none before the header is checked.
    missing: Option<usize>,
    /// What says that the body comes over strands.
    striped: Option<[u8; STRIPED_BYTES]>,
}

/// A gather that is under way: by rank, the own one done at once.
#[derive(Debug)]
pub(super) struct Said {
    pub number: u64,
    pub out: Vec<Outbound<'static>>,
    pub receives: Vec<Receive<'static>>,
}

impl Said {
    pub fn is_done(&self) -> bool {
        self.out.iter().all(Outbound::is_done) && self.receives.iter().all(Receive::is_done)
    }
}

pub(super) struct Expected {
    pub attempt: u32,
    pub number: u64,
    pub source: u32,
    pub kind: Kind,
}

impl<'a> Receive<'a> {
    pub fn new(peer: u32, target: Target<'a>) -> Receive<'a> {
        let header = [0; HEADER_BYTES];
        Receive { peer, target, header, headed: 0, missing: None, striped: None }
    }

    pub fn bounded(peer: u32, bytes_max: usize) -> Receive<'a> {
        Receive::new(peer, Target::Bounded { into: Vec::new(), bytes_max })
    }

    /// The own bytes, which nobody sends.
    pub fn done(peer: u32, bytes: Vec<u8>) -> Receive<'a> {
        let target = Target::Bounded { bytes_max: bytes.len(), into: bytes };
        Receive { missing: Some(0), ..Receive::new(peer, target) }
    }

    pub fn into_bytes(self) -> Vec<u8> {
        match self.target {
            Target::Exact(into) => into.to_vec(),
            Target::Bounded { into, .. } => into,
        }
    }

    pub fn is_striped(&self) -> bool {
        self.striped.is_some()
    }

    /// Of what came whole but for its body, which comes over strands: these, and where it goes.
    pub fn into_striped(self) -> Option<(u32, &'a mut [u8], u32)> {
        match (self.target, self.striped) {
            (Target::Exact(into), Some(words)) => Some((self.peer, into, parse_striped(&words).1)),
            _ => None,
        }
    }

    pub fn is_done(&self) -> bool {
        self.missing == Some(0)
    }

    /// Takes as much from the peer's pipe as is there; says whether anything moved.
    pub fn step(&mut self, lane: &Lane, expected: &Expected) -> Result<bool, CommError> {
        let mut moved = false;
        while !self.is_done() {
            let into = match (self.missing, &mut self.target, &mut self.striped) {
                (None, ..) => &mut self.header[self.headed..],
                (Some(missing), _, Some(words)) => &mut words[STRIPED_BYTES - missing..],
                (Some(missing), Target::Exact(into), None) => {
                    let at = into.len() - missing;
                    &mut into[at..]
                }
                (Some(missing), Target::Bounded { into, .. }, None) => {
                    let at = into.len() - missing;
                    &mut into[at..]
                }
            };
            let count = match lane.incoming.read(into) {
                Read::Some(count) => count,
                Read::Empty => return Ok(moved),
                Read::Ended { why } => return Err(CommError::PeerLost { rank: self.peer, why }),
            };
            moved = true;
            match &mut self.missing {
                Some(missing) => *missing -= count,
                None => {
                    self.headed += count;
                    if self.headed == HEADER_BYTES {
                        self.missing = Some(self.open(expected)?);
                    }
                }
            }
        }
        self.check_striped()?;
        Ok(moved)
    }

    fn check_striped(&self) -> Result<(), CommError> {
        let (Some(words), Target::Exact(into)) = (&self.striped, &self.target) else {
            return Ok(());
        };
        let (length, strands) = parse_striped(words);
        if length == into.len() as u64 && strands != 0 {
            return Ok(());
        }
        let found = format!("{length} bytes over the strands {strands:#b}");
        let expected = format!("{} bytes over some", into.len());
        Err(CommError::Protocol { rank: self.peer, found, expected })
    }

    /// Compares the header with what is expected; gives the body's length.
    fn open(&mut self, expected: &Expected) -> Result<usize, CommError> {
        let refuse = |found: String, expected: String| CommError::Protocol {
            rank: self.peer,
            found,
            expected,
        };
        let header = Header::decode(&self.header)
            .map_err(|found| refuse(found, "a frame header".to_string()))?;
        let Expected { attempt, number, source, kind } = *expected;
        let is_striped =
            header.kind == Kind::Striped && matches!(self.target, Target::Exact(_));
        let kind = if is_striped { Kind::Striped } else { kind };
        let want = Header { attempt, number, source, kind, length: header.length };
        if header != want {
            return Err(refuse(header.to_string(), want.to_string()));
        }
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        if is_striped {
            self.striped = Some([0; STRIPED_BYTES]);
            return match length {
                STRIPED_BYTES => Ok(length),
                _ => Err(refuse(header.to_string(), format!("{STRIPED_BYTES} bytes"))),
            };
        }
        match &mut self.target {
            Target::Exact(into) if into.len() == length => {}
            Target::Exact(into) => {
                return Err(refuse(header.to_string(), format!("{} bytes", into.len())));
            }
            Target::Bounded { into, bytes_max } if length <= *bytes_max => {
                into.resize(length, 0);
            }
            Target::Bounded { bytes_max, .. } => {
                return Err(refuse(header.to_string(), format!("at most {bytes_max} bytes")));
            }
        }
        Ok(length)
    }
}

fn parse_striped(words: &[u8; STRIPED_BYTES]) -> (u64, u32) {
    let (length, strands) = words.split_at(8);
    let of = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |all, byte| all << 8 | u64::from(*byte));
    (of(length), of(strands) as u32)
}
