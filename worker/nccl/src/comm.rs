//! Communicators: made, split, polled and finalized.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::end;
use crate::error::Error;
use crate::library::{
    Code, Handle, IN_PROGRESS, Library, RawConfig, RawId, SUCCESS, UNSET, Version,
};

/// Names a communicator that is about to be made. One rank makes it, all get its bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; UniqueId::BYTES]);

impl UniqueId {
    pub const BYTES: usize = 128;

    /// # Errors
    /// NCCL finds no network interface to meet on.
    pub fn new(library: &Library) -> Result<UniqueId, Error> {
        let mut id = RawId([0; UniqueId::BYTES]);
        // SAFETY: the target is valid for the call.
        let code = unsafe { (library.functions().unique_id)(&mut id) };
        library.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(UniqueId(id.0))
    }

    pub fn from_bytes(bytes: [u8; UniqueId::BYTES]) -> UniqueId {
        UniqueId(bytes)
    }

    pub fn bytes(&self) -> &[u8; UniqueId::BYTES] {
        &self.0
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It holds an address and a secret.
        f.write_str("UniqueId")
    }
}

/// A rank among as many as take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    pub rank: u32,
    pub world: u32,
}

/// How communicators are made, and how long their calls may take.
#[derive(Clone, Debug)]
pub struct Config {
    /// Calls return when they are done, which costs the host 11 to 22 us and not 62 to 130. But
    /// with a dead peer one may never return, and then nothing but the end of the process helps.
    pub blocking: bool,
    /// Multiprocessors at most; none: what NCCL chooses.
    pub ctas_max: Option<u32>,
    /// A split takes the resources of its parent instead of its own 0.5 GiB. The two then must not
    /// run at once.
    pub split_share: bool,
    /// For making, splitting and finalizing, in which all ranks meet.
    pub meet_limit: Duration,
    /// For enqueueing a verb.
    pub call_limit: Duration,
    /// Raised by whoever wants this attempt to end: every wait looks at it.
    pub stop: Arc<AtomicBool>,
    /// How a thread enters the communicator's GPU; none: NCCL finds it by itself.
    pub enter: Option<Enter>,
}

/// Makes a communicator's GPU the one that is current on the thread that calls it. NCCL goes back
/// to the GPU that was current before a call, and on a thread that has entered none that is the
/// first one: it would make a context of 0.5 GiB there.
#[derive(Clone)]
pub struct Enter(Arc<dyn Fn() + Send + Sync>);

impl Enter {
    pub fn new(enter: impl Fn() + Send + Sync + 'static) -> Enter {
        Enter(Arc::new(enter))
    }
}

impl fmt::Debug for Enter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Enter")
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            blocking: false,
            ctas_max: None,
            split_share: false,
            meet_limit: Duration::from_secs(60),
            call_limit: Duration::from_secs(20),
            stop: Arc::default(),
            enter: None,
        }
    }
}

impl Config {
    /// For so many ranks: the more there are, the longer they take to meet.
    pub fn for_ranks(world: u32) -> Config {
        const MEET_EACH: Duration = Duration::from_millis(50);
        let config = Config::default();
        Config { meet_limit: config.meet_limit + MEET_EACH * world, ..config }
    }

    /// For a thread that may not drive the GPU.
    pub(crate) fn enter(&self) {
        if let Some(Enter(enter)) = &self.enter {
            enter();
        }
    }

    fn raw(&self, version: Version) -> RawConfig {
        let ctas = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
        RawConfig {
            blocking: c_int::from(self.blocking),
            ctas_max: self.ctas_max.map_or(UNSET, ctas),
            split_share: c_int::from(self.split_share),
            ..RawConfig::of(version)
        }
    }
}

/// What [`Comm::poll`] finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is under way on the host. Kernels may run, or spin for a dead peer.
    Ready,
    InProgress,
}

/// A communicator of the GPU that was current when it was made.
pub struct Comm {
    library: Library,
    /// Null once it was given to be aborted or destroyed.
    handle: Handle,
    seat: Seat,
    config: Config,
    /// Calls change the communicator: one thread at a time.
    _not_sync: PhantomData<std::cell::Cell<()>>,
}

// SAFETY: NCCL sets its device by itself in every call and keeps no thread-local state of a
// communicator outside groups, which begin and end within one call here.
unsafe impl Send for Comm {}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm({} of {}, {:?})", self.seat.rank, self.seat.world, self.library)
    }
}

impl Comm {
    /// Meets the other ranks. The GPU is the one whose primary context is current here.
    ///
    /// # Errors
    /// [`Error::Late`] when not all came within `meet_limit`, [`Error::Stopped`], or what NCCL
    /// says.
    ///
    /// # Panics
    /// The rank is not below the world.
    pub fn init(
        library: &Library,
        seat: Seat,
        id: &UniqueId,
        config: &Config,
    ) -> Result<Comm, Error> {
        assert!(seat.rank < seat.world, "{seat:?}");
        let call = "ncclCommInitRankConfig";
        let mut raw = config.raw(library.version());
        let mut handle = std::ptr::null_mut();
        let [world, rank] =
            [seat.world, seat.rank].map(|n| c_int::try_from(n).unwrap_or(c_int::MAX));
        // SAFETY: both targets are valid for the call; NCCL copies the configuration.
        let code = unsafe {
            (library.functions().init)(&mut handle, world, RawId(id.0), rank, &mut raw)
        };
        if handle.is_null() {
            library.check(call, code, handle)?;
        }
        let comm = Comm::owning(library, handle, seat, config);
        comm.done(call, code, comm.config.meet_limit)?;
        Ok(comm)
    }

    fn owning(library: &Library, handle: Handle, seat: Seat, config: &Config) -> Comm {
        let (library, config) = (library.clone(), config.clone());
        Comm { library, handle, seat, config, _not_sync: PhantomData }
    }

    /// The communicator of those that give the same color, in the order of `key`, then of ranks;
    /// none for who gives none. All ranks call it.
    ///
    /// # Errors
    /// As those of `init`.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Comm>, Error> {
        self.split_as(color, key, &self.config)
    }

    /// [`Comm::split`], made as `config` says. All ranks say the same.
    ///
    /// # Errors
    /// As those of `init`.
    pub fn split_as(
        &self,
        color: Option<u32>,
        key: u32,
        config: &Config,
    ) -> Result<Option<Comm>, Error> {
        let call = "ncclCommSplit";
        /// `NCCL_SPLIT_NOCOLOR`
        const NO_COLOR: c_int = -1;
        let color = color.map_or(NO_COLOR, |n| c_int::try_from(n).unwrap_or(c_int::MAX));
        let key = c_int::try_from(key).unwrap_or(c_int::MAX);
        let mut raw = config.raw(self.library.version());
        // NCCL may write here until the call is done. If that is not waited for to its end, the
        // place is given up for good.
        let place: *mut Handle = Box::into_raw(Box::new(std::ptr::null_mut()));
        // SAFETY: the handle is valid, and so are both targets; NCCL copies the configuration.
        let code = unsafe {
            (self.library.functions().split)(self.handle, color, key, place, &mut raw)
        };
        self.done(call, code, self.config.meet_limit)?;
        // SAFETY: made above, and the call that could write to it is done.
        let handle = *unsafe { Box::from_raw(place) };
        if handle.is_null() {
            return Ok(None);
        }
        let mut comm = Comm::owning(&self.library, handle, self.seat, config);
        comm.settle(call, self.config.meet_limit)?;
        let functions = self.library.functions();
        let (rank, world) = (comm.ask(functions.user_rank)?, comm.ask(functions.count)?);
        comm.seat = Seat { rank, world };
        Ok(Some(comm))
    }

    fn ask(&self, what: unsafe extern "C" fn(Handle, *mut c_int) -> Code) -> Result<u32, Error> {
        let mut answer = 0;
        // SAFETY: the handle is valid and settled, the target valid for the call.
        let code = unsafe { what(self.handle, &mut answer) };
        self.library.check("asking for the ranks of a communicator", code, self.handle)?;
        Ok(u32::try_from(answer).unwrap_or(0))
    }

    pub fn seat(&self) -> Seat {
        self.seat
    }

    pub fn rank(&self) -> u32 {
        self.seat.rank
    }

    pub fn world(&self) -> u32 {
        self.seat.world
    }

    pub fn library(&self) -> &Library {
        &self.library
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// How the communicator is, without waiting.
    ///
    /// # Errors
    /// What went wrong behind the host's back: a link that failed, say. A dead peer is no error.
    pub fn poll(&self) -> Result<State, Error> {
        match self.state()? {
            SUCCESS => Ok(State::Ready),
            IN_PROGRESS => Ok(State::InProgress),
            code => {
                self.library.check("a communicator", code, self.handle)?;
                Ok(State::Ready)
            }
        }
    }

    fn state(&self) -> Result<Code, Error> {
        let mut state = SUCCESS;
        // SAFETY: the handle is valid, the target valid for the call.
        let code = unsafe { (self.library.functions().async_error)(self.handle, &mut state) };
        self.library.check("ncclCommGetAsyncError", code, self.handle)?;
        Ok(state)
    }

    /// What a call answered. What does not block is waited for even after a success: a split
    /// answers so while it is under way.
    pub(crate) fn done(
        &self,
        call: &'static str,
        code: Code,
        limit: Duration,
    ) -> Result<(), Error> {
        match code {
            IN_PROGRESS => self.settle(call, limit),
            SUCCESS if !self.config.blocking => self.settle(call, limit),
            code => self.library.check(call, code, self.handle),
        }
    }

    /// Waits until nothing is in progress on the host.
    pub(crate) fn settle(&self, call: &'static str, limit: Duration) -> Result<(), Error> {
        /// Enqueueing takes less than this, and a sleep would double it.
        const SPIN: Duration = Duration::from_micros(300);
        const PAUSE: Duration = Duration::from_micros(50);
        let began = Instant::now();
        loop {
            match self.state()? {
                IN_PROGRESS => {}
                code => return self.library.check(call, code, self.handle),
            }
            if self.config.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped { call });
            }
            match began.elapsed() {
                spent if spent > limit => return Err(Error::Late { call, limit }),
                spent if spent > SPIN => std::thread::sleep(PAUSE),
                _ => std::hint::spin_loop(),
            }
        }
    }

    /// Makes what is enqueued end by itself, on this rank. Returns at once on a communicator that
    /// does not block. Afterwards only [`crate::abandon`] is left.
    ///
    /// # Errors
    /// [`Error::Absent`] before 2.28, or what NCCL says.
    pub fn revoke(&self) -> Result<(), Error> {
        let (call, found) = ("ncclCommRevoke", self.library.version());
        let Some(revoke) = self.library.functions().revoke else {
            return Err(Error::Absent { call, found, since: Version::REVOKE });
        };
        self.config.enter();
        // SAFETY: the handle is valid; 0 are the default flags.
        match unsafe { revoke(self.handle, 0) } {
            IN_PROGRESS => Ok(()),
            code => self.library.check(call, code, self.handle),
        }
    }

    /// Ends a communicator whose ranks are all well and at their end. All call it; the streams must
    /// be drained and captured graphs destroyed before.
    ///
    /// # Errors
    /// As those of `init`; the communicator is then aborted.
    pub fn finalize(mut self) -> Result<(), Error> {
        // SAFETY: the handle is valid.
        let code = unsafe { (self.library.functions().finalize)(self.handle) };
        self.done("ncclCommFinalize", code, self.config.meet_limit)?;
        let handle = self.take();
        // SAFETY: finalized, and destroyed once: nobody has the handle any more.
        let code = unsafe { (self.library.functions().destroy)(handle) };
        self.library.check("ncclCommDestroy", code, std::ptr::null_mut())
    }

    /// The handle, for its end.
    pub(crate) fn take(&mut self) -> Handle {
        std::mem::replace(&mut self.handle, std::ptr::null_mut())
    }
}

/// Revokes and aborts, and waits for it for a bounded time. A communicator that a captured graph
/// still uses cannot be aborted: it is then left as it is until the process ends.
impl Drop for Comm {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            if !self.config.blocking {
                let _ = self.revoke();
            }
            end::abort_within(self, end::DROP_LIMIT);
        }
    }
}
