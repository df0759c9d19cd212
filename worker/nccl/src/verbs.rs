//! What is enqueued: collectives, and sends and receives in groups.

use std::ffi::c_int;

use crate::comm::{Comm, Seat};
use crate::error::Error;
use crate::library::{Code, IN_PROGRESS, SUCCESS};
use crate::memory::{Span, Stream};

/// How elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    Sum,
    Max,
    Min,
}

impl Reduce {
    /// `ncclRedOp_t`
    fn code(self) -> c_int {
        match self {
            Reduce::Sum => 0,
            Reduce::Max => 2,
            Reduce::Min => 3,
        }
    }
}

/// Elements of a span that go to, or come from, one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub start: usize,
    pub len: usize,
}

/// Verbs on one communicator. Each enqueues on `stream` and returns; a span that is read and one
/// that is written may be the same where NCCL works in place, and must not overlap otherwise.
///
/// All ranks call the same verb with the same sizes. Spans of wrong lengths or kinds are a
/// programmer's error and panic.
impl Comm {
    /// `to` = the sum (or largest, least) of all ranks' `from`. In place: the same span.
    ///
    /// # Errors
    /// [`Error::Late`], [`Error::Stopped`] or what NCCL says; so of every verb.
    pub fn all_reduce(
        &self,
        from: Span,
        to: Span,
        reduce: Reduce,
        stream: Stream,
    ) -> Result<(), Error> {
        self.group(|group| group.all_reduce(from, to, reduce, stream))
    }

    /// `to` = this rank's part of the sum of all `from`, which has as many parts as ranks. In
    /// place: `to` is that part of `from`.
    pub fn reduce_scatter(
        &self,
        from: Span,
        to: Span,
        reduce: Reduce,
        stream: Stream,
    ) -> Result<(), Error> {
        self.group(|group| group.reduce_scatter(from, to, reduce, stream))
    }

    /// `to` = all ranks' `from`, one after the other. In place: `from` is this rank's part of `to`.
    pub fn all_gather(&self, from: Span, to: Span, stream: Stream) -> Result<(), Error> {
        self.group(|group| group.all_gather(from, to, stream))
    }

    /// `to` = `from` of the rank `root`. In place: the same span.
    pub fn broadcast(
        &self,
        from: Span,
        to: Span,
        root: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        self.group(|group| group.broadcast(from, to, root, stream))
    }

    /// Part `p` of `from` becomes this rank's part of rank `p`'s `to`, all parts of one length.
    pub fn all_to_all(&self, from: Span, to: Span, stream: Stream) -> Result<(), Error> {
        let world = self.world() as usize;
        assert_eq!((from.dtype(), from.len()), (to.dtype(), to.len()), "{from:?} {to:?}");
        assert!(from.len().is_multiple_of(world), "{from:?} in {world} equal parts");
        let len = from.len() / world;
        let parts: Vec<Part> = (0..world).map(|p| Part { start: p * len, len }).collect();
        self.all_to_all_v((from, &parts), (to, &parts), stream)
    }

    /// The p-th part of `from` to rank p, what comes from rank p to the p-th part of `to`. What one
    /// rank sends has the length that the other expects; parts without elements do not travel.
    pub fn all_to_all_v(
        &self,
        (from, sends): (Span, &[Part]),
        (to, receives): (Span, &[Part]),
        stream: Stream,
    ) -> Result<(), Error> {
        let world = self.world() as usize;
        assert_eq!((sends.len(), receives.len()), (world, world), "a part a rank");
        self.group(|group| {
            for (peer, (send, receive)) in (0..).zip(sends.iter().zip(receives)) {
                group.send(from.slice(send.start, send.len), peer, stream)?;
                group.recv(to.slice(receive.start, receive.len), peer, stream)?;
            }
            Ok(())
        })
    }

    /// What `enqueue` calls starts as one, and waits for its peers as one: only so may ranks send
    /// to each other and receive in any order.
    pub fn group(
        &self,
        enqueue: impl FnOnce(&Group<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let call = "ncclGroupEnd";
        // SAFETY: no preconditions; ended below or, if `enqueue` panics, when it is dropped.
        let code = unsafe { (self.library().functions().group_start)() };
        self.library().check("ncclGroupStart", code, self.handle())?;
        let open = Open { comm: self };
        let enqueued = enqueue(&Group { comm: self });
        let code = open.end();
        enqueued?;
        self.done(call, code, self.config().call_limit)
    }
}

/// A group that was started: it is ended on every path.
struct Open<'a> {
    comm: &'a Comm,
}

impl Open<'_> {
    fn end(self) -> Code {
        let comm = self.comm;
        std::mem::forget(self);
        // SAFETY: started on this thread.
        unsafe { (comm.library().functions().group_end)() }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // SAFETY: as above. The panic that brought us here says enough.
        let _ = unsafe { (self.comm.library().functions().group_end)() };
    }
}

/// Verbs that start together.
#[derive(Debug)]
pub struct Group<'a> {
    comm: &'a Comm,
}

impl Group<'_> {
    pub fn seat(&self) -> Seat {
        self.comm.seat()
    }

    /// A span without elements does not travel: its receiver expects none.
    pub fn send(&self, from: Span, to: u32, stream: Stream) -> Result<(), Error> {
        if from.is_empty() {
            return Ok(());
        }
        let (peer, kind) = (self.rank(to), from.dtype().code());
        // SAFETY: the span's and the stream's promises; the handle is valid.
        let code = unsafe {
            let send = self.comm.library().functions().send;
            send(from.pointer(), from.len(), kind, peer, self.comm.handle(), stream.0)
        };
        self.begun("ncclSend", code)
    }

    pub fn recv(&self, to: Span, from: u32, stream: Stream) -> Result<(), Error> {
        if to.is_empty() {
            return Ok(());
        }
        let (peer, kind) = (self.rank(from), to.dtype().code());
        // SAFETY: the span's and the stream's promises; the handle is valid.
        let code = unsafe {
            let recv = self.comm.library().functions().recv;
            recv(to.pointer(), to.len(), kind, peer, self.comm.handle(), stream.0)
        };
        self.begun("ncclRecv", code)
    }

    /// See [`Comm::all_reduce`].
    pub fn all_reduce(
        &self,
        from: Span,
        to: Span,
        reduce: Reduce,
        stream: Stream,
    ) -> Result<(), Error> {
        assert_eq!((from.dtype(), from.len()), (to.dtype(), to.len()), "{from:?} {to:?}");
        let (kind, reduce) = (from.dtype().code(), reduce.code());
        let (source, target) = (from.pointer(), to.pointer());
        // SAFETY: the spans' and the stream's promises; the handle is valid.
        let code = unsafe {
            let all_reduce = self.comm.library().functions().all_reduce;
            all_reduce(source, target, from.len(), kind, reduce, self.comm.handle(), stream.0)
        };
        self.begun("ncclAllReduce", code)
    }

    /// See [`Comm::reduce_scatter`].
    pub fn reduce_scatter(
        &self,
        from: Span,
        to: Span,
        reduce: Reduce,
        stream: Stream,
    ) -> Result<(), Error> {
        let whole = to.len() * self.seat().world as usize;
        assert_eq!((from.dtype(), from.len()), (to.dtype(), whole), "{from:?} {to:?}");
        let (kind, reduce) = (from.dtype().code(), reduce.code());
        let (source, target) = (from.pointer(), to.pointer());
        // SAFETY: the spans' and the stream's promises; the handle is valid.
        let code = unsafe {
            let reduce_scatter = self.comm.library().functions().reduce_scatter;
            reduce_scatter(source, target, to.len(), kind, reduce, self.comm.handle(), stream.0)
        };
        self.begun("ncclReduceScatter", code)
    }

    /// See [`Comm::all_gather`].
    pub fn all_gather(&self, from: Span, to: Span, stream: Stream) -> Result<(), Error> {
        let whole = from.len() * self.seat().world as usize;
        assert_eq!((from.dtype(), whole), (to.dtype(), to.len()), "{from:?} {to:?}");
        let (kind, source, target) = (from.dtype().code(), from.pointer(), to.pointer());
        // SAFETY: the spans' and the stream's promises; the handle is valid.
        let code = unsafe {
            let all_gather = self.comm.library().functions().all_gather;
            all_gather(source, target, from.len(), kind, self.comm.handle(), stream.0)
        };
        self.begun("ncclAllGather", code)
    }

    /// See [`Comm::broadcast`].
    pub fn broadcast(
        &self,
        from: Span,
        to: Span,
        root: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        assert_eq!((from.dtype(), from.len()), (to.dtype(), to.len()), "{from:?} {to:?}");
        let (kind, root) = (from.dtype().code(), self.rank(root));
        let (source, target) = (from.pointer(), to.pointer());
        // SAFETY: the spans' and the stream's promises; the handle is valid.
        let code = unsafe {
            let broadcast = self.comm.library().functions().broadcast;
            broadcast(source, target, from.len(), kind, root, self.comm.handle(), stream.0)
        };
        self.begun("ncclBroadcast", code)
    }

    fn rank(&self, rank: u32) -> c_int {
        assert!(rank < self.seat().world, "rank {rank} of {:?}", self.seat());
        rank as c_int
    }

    /// Inside a group a call is only noted; what becomes of it is told at the group's end.
    fn begun(&self, call: &'static str, code: Code) -> Result<(), Error> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => self.comm.library().check(call, code, self.comm.handle()),
        }
    }
}
