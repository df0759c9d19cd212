//! Open files between the engines of one machine, each to each.
//!
//! ```text
//! Desk::open() -> Seat, which all are told -> exchange(seats, files) -> as many of each other one
//! ```
//! A desk is a socket of datagrams with an abstract name: it exists in a network namespace, and
//! needs no folder and no right. Anybody there could write to it, so what counts has the secret of
//! its receiver, which is told through the gang alone.

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// For all files to come.
const EXCHANGE_MAX: Duration = Duration::from_secs(10);
/// Between two looks at those whose queue was full.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
/// In one message.
const FILES_MAX: usize = 4;

/// Where a desk is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seat {
    /// This start of the machine's kernel, and the network namespace.
    place: String,
    name: String,
    secret: String,
}

impl Seat {
    /// Their desks can reach each other.
    pub fn is_near(&self, other: &Seat) -> bool {
        self.place == other.place
    }
}

#[derive(Debug)]
pub(crate) struct Desk {
    socket: UnixDatagram,
    seat: Seat,
}

impl Desk {
    pub fn open() -> io::Result<Desk> {
        let mut random = [0; 32];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
        let hex = |bytes: &[u8]| -> String {
            bytes.iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let network = std::fs::read_link("/proc/self/ns/net")?;
        let seat = Seat {
            place: format!("{} {}", boot.trim(), network.display()),
            name: format!("moejob-{}", hex(&random[..16])),
            secret: hex(&random[16..]),
        };
        let socket = UnixDatagram::bind_addr(&address(&seat)?)?;
        Ok(Desk { socket, seat })
    }

    pub fn seat(&self) -> &Seat {
        &self.seat
    }

    /// Gives `files`, four at most, to each of `seats` but the `me`-th, which is this desk's;
    /// theirs, by number. `over` ends it.
    ///
    /// # Errors
    /// Not all came in time, or the system passes no files.
    pub fn exchange(
        &self,
        me: usize,
        seats: &[Seat],
        files: &[OwnedFd],
        over: &dyn Fn() -> bool,
    ) -> io::Result<BTreeMap<usize, Vec<OwnedFd>>> {
        let until = Instant::now() + EXCHANGE_MAX;
        let mut came = BTreeMap::new();
        let mut left: Vec<usize> = (0..seats.len()).filter(|seat| *seat != me).collect();
        loop {
            let mut waiting = Vec::new();
            for to in left {
                if !give(&seats[to], me, files)? {
                    waiting.push(to);
                }
            }
            left = waiting;
            while let Some((from, files)) = self.take(seats.len())? {
                came.insert(from, files);
            }
            if left.is_empty() && came.len() + 1 == seats.len() {
                return Ok(came);
            }
            if over() || Instant::now() > until {
                let missing = (0..seats.len()).find(|from| *from != me && !came.contains_key(from));
                let what = missing.map_or(String::new(), |from| format!("position {from} is late"));
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            let mut all = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut all, Some(&PAUSE)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next files that have come, and from whom; what is none of ours is passed over.
    fn take(&self, seats: usize) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
        loop {
            let mut bytes = [0; 128];
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let len = match recvmsg(self.socket.as_fd(), &mut parts, &mut control, flags) {
                Ok(received) => received.bytes,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            let mut files: Vec<OwnedFd> = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(some) = message {
                    files.extend(some);
                }
            }
            let text = std::str::from_utf8(&bytes[..len]).unwrap_or_default();
            let from = text.strip_prefix(self.seat.secret.as_str());
            let from = from.and_then(|from| from.trim().parse().ok()).filter(|from| *from < seats);
            if let Some(from) = from.filter(|_| !files.is_empty()) {
                return Ok(Some((from, files)));
            }
        }
    }
}

fn address(seat: &Seat) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(seat.name.as_bytes())
}

/// False: the other's queue is full.
fn give(to: &Seat, me: usize, files: &[OwnedFd]) -> io::Result<bool> {
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address(to)?)?;
    let text = format!("{} {me}", to.secret);
    let files: Vec<BorrowedFd> = files.iter().map(AsFd::as_fd).collect();
    loop {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::Error::other(format!("{} files at once", files.len())));
        }
        let parts = [IoSlice::new(text.as_bytes())];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&socket, &parts, &mut control, flags) {
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::NOBUFS) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::sync::Barrier;

    /// As many as ranks give each other.
    fn marked(number: usize) -> [OwnedFd; 2] {
        [1, 2].map(|which| {
            let mut file = tempfile::tempfile().expect("a file");
            file.write_all(format!("{which} of {number}").as_bytes()).expect("written");
            file.into()
        })
    }

    fn texts(files: Vec<OwnedFd>) -> Vec<String> {
        let text = |file| {
            // All who got the file share its position, so nobody may read by it.
            let mut bytes = [0; 16];
            let len = std::fs::File::from(file).read_at(&mut bytes, 0).expect("read");
            String::from_utf8_lossy(&bytes[..len]).into_owned()
        };
        files.into_iter().map(text).collect()
    }

    /// Also of more than a queue of datagrams holds.
    #[test]
    fn everybody_gets_a_file_of_each() {
        for count in [1, 2, 3, 16] {
            let desks: Vec<Desk> = (0..count).map(|_| Desk::open().expect("a desk")).collect();
            let seats: Vec<Seat> = desks.iter().map(|desk| desk.seat().clone()).collect();
            assert!(seats.iter().all(|seat| seat.is_near(&seats[0])));
            let begin = Barrier::new(count);
            std::thread::scope(|scope| {
                for (me, desk) in desks.iter().enumerate() {
                    let (seats, begin) = (&seats, &begin);
                    scope.spawn(move || {
                        begin.wait();
                        let came = desk.exchange(me, seats, &marked(me), &|| false);
                        let came = came.expect("all are here");
                        assert_eq!(came.len(), count - 1);
                        for (from, files) in came {
                            let expected = [1, 2].map(|which| format!("{which} of {from}"));
                            assert_eq!(texts(files), expected);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn strangers_are_passed_over_and_who_is_late_is_named() {
        let (desk, other) = (Desk::open().expect("a desk"), Desk::open().expect("a desk"));
        let seats = [desk.seat().clone(), other.seat().clone()];
        let guess = Seat { secret: "0".repeat(32), ..seats[0].clone() };
        assert!(give(&guess, 1, &marked(7)).expect("sent"));
        let far = Seat { secret: seats[0].secret.clone(), ..seats[0].clone() };
        assert!(give(&far, 9, &marked(8)).expect("sent"), "of no position");
        let error = desk.exchange(0, &seats, &marked(0), &|| true).expect_err("nobody came");
        assert!(error.to_string().contains("position 1 is late"), "{error}");
        assert!(give(&seats[0], 1, &marked(1)).expect("sent"));
        let came = desk.exchange(0, &seats, &marked(0), &|| false).expect("it came");
        let came: Vec<Vec<String>> = came.into_values().map(texts).collect();
        assert_eq!(came, [["1 of 1", "2 of 1"]]);
    }

    #[test]
    fn a_desk_that_is_gone_is_an_error() {
        let (desk, other) = (Desk::open().expect("a desk"), Desk::open().expect("a desk"));
        let seats = [desk.seat().clone(), other.seat().clone()];
        drop(other);
        assert!(desk.exchange(0, &seats, &marked(0), &|| false).is_err());
        let elsewhere = Seat { place: "another kernel".to_string(), ..seats[0].clone() };
        assert!(!elsewhere.is_near(&seats[0]));
    }
}
