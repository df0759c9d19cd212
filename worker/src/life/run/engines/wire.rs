//! The socket between a worker and an engine: orders one way, reports the other.
//!
//! A frame is a 4-byte little-endian length and that many bytes of JSON; files in memory go with
//! its first byte. What is large, and what is told while a step runs, lies in those files.

use crate::attempt::api::{AttemptEnd, TrainerEvent};
use crate::checkpoint::desk;
use crate::gang::comm::Shape;
use moejob_protocol::WorkerConfig;
use rustix::cmsg_space;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

/// A configuration is at most as long as the leader's frame that brought it.
const FRAME_BYTES_MAX: usize = 2 * moejob_protocol::message::FRAME_BYTES_MAX;
/// Files that go with one frame.
const FILES_MAX: usize = 4;

/// From the worker to an engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Nothing of earlier attempts is needed.
    Forget,
    /// A snapshot to resume from; with its file. One that is `borrowed` is another engine's.
    Slot { borrowed: bool },
    /// What became of the checkpoints that it asked for.
    Wrote(desk::Told),
    /// With the memory of the links, the bell of the worker's data thread, and the desk where the
    /// data are asked for.
    Train { config: Box<WorkerConfig>, shape: Shape },
}

/// From an engine to the worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// The GPU that it is about to open, as NVML writes its uuid; empty where the driver does not
    /// tell. Before anything else of its first attempt.
    Device { uuid: String },
    Told(TrainerEvent),
    /// Of its checkpoints.
    Asks(desk::Ask),
    /// A slot was made; with its file.
    Slot,
    /// A slot with this number is closed there, once.
    Closed { slot: u64 },
    /// What it holds has changed; the worker sees how.
    Changed,
    Ended { attempt: u32, end: AttemptEnd },
}

/// One direction at a time may be used by each of two threads.
#[derive(Debug)]
pub(super) struct Wire {
    socket: UnixStream,
    /// That came and were not asked for yet.
    files: VecDeque<OwnedFd>,
}

impl Wire {
    pub fn new(socket: UnixStream) -> Wire {
        Wire { socket, files: VecDeque::new() }
    }

    /// # Errors
    /// The other end is gone.
    pub fn send(&self, body: &impl Serialize, files: &[BorrowedFd]) -> io::Result<()> {
        assert!(files.len() <= FILES_MAX);
        let text = serde_json::to_vec(body)?;
        if text.len() > FRAME_BYTES_MAX {
            return Err(io::Error::other(format!("a frame of {} bytes", text.len())));
        }
        let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&text);
        let mut rest = &bytes[..];
        let mut files = files;
        while !rest.is_empty() {
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !files.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(files));
            }
            let parts = [IoSlice::new(rest)];
            match sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    rest = &rest[count..];
                    files = &[];
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The next frame; none when the other end has closed.
    ///
    /// # Errors
    /// What came is no frame.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut length = [0; 4];
        if !self.fill(&mut length)? {
            return Ok(None);
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(io::Error::other(format!("a frame of {length} bytes")));
        }
        let mut text = vec![0; length];
        if !self.fill(&mut text)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Some(serde_json::from_slice(&text)?))
    }

    /// A file that came with the frame that was received last.
    ///
    /// # Errors
    /// None came.
    pub fn file(&mut self) -> io::Result<OwnedFd> {
        self.files.pop_front().ok_or_else(|| io::Error::other("a frame without its file"))
    }

    /// Whether there was anything before the end.
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<bool> {
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes[done..])];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let received = match recvmsg(self.socket.as_fd(), &mut parts, &mut control, flags) {
                Ok(received) => received.bytes,
                Err(Errno::INTR) => continue,
                // It ended with orders unread.
                Err(Errno::CONNRESET) => 0,
                Err(error) => return Err(error.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    self.files.extend(files);
                }
            }
            match received {
                0 if done == 0 => return Ok(false),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(true)
    }

    /// What can be waited for: a frame may have come.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub fn try_clone(&self) -> io::Result<Wire> {
        Ok(Wire::new(self.socket.try_clone()?))
    }

    /// No more is sent; the other end sees the end.
    pub fn close(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    #[test]
    fn frames_bring_their_files() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (ours, mut theirs) = (Wire::new(ours), Wire::new(theirs));
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"inside").expect("written");
        ours.send(&Report::Changed, &[]).expect("sent");
        ours.send(&Report::Slot, &[file.as_fd()]).expect("sent");
        drop(ours);
        assert!(matches!(theirs.receive().expect("a frame"), Some(Report::Changed)));
        assert!(theirs.file().is_err());
        assert!(matches!(theirs.receive().expect("a frame"), Some(Report::Slot)));
        let mut came = File::from(theirs.file().expect("a file"));
        let mut text = String::new();
        std::io::Seek::rewind(&mut came).expect("a file");
        came.read_to_string(&mut text).expect("read");
        assert_eq!(text, "inside");
        assert!(theirs.receive::<Report>().expect("the end").is_none());
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        for bytes in [&[1, 0][..], &[9, 0, 0, 0, b'{'], &[255; 8], &[2, 0, 0, 0, b'{', b'}']] {
            let (mut ours, theirs) = UnixStream::pair().expect("a pair");
            ours.write_all(bytes).expect("sent");
            drop(ours);
            assert!(Wire::new(theirs).receive::<Report>().is_err(), "{bytes:?}");
        }
    }
}
