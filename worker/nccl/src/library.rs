//! The loaded library: which version it is and the functions that are used of it.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::error::Error;

/// `ncclComm_t`
pub(crate) type Handle = *mut c_void;
/// `ncclResult_t`
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const IN_PROGRESS: Code = 7;

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawId(pub [u8; 128]);

/// `ncclConfig_t` of 2.28. Older libraries know a beginning of it; newer ones take it as it is,
/// because it carries its size and version.
#[repr(C)]
pub(crate) struct RawConfig {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub ctas_min: c_int,
    pub ctas_max: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    // From 2.26; these four bytes were padding before.
    pub traffic_class: c_int,
    // From 2.27.
    pub comm_name: *const c_char,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
    // From 2.28.
    pub channels_per_net_peer: c_int,
    pub nvlink_centric_sched: c_int,
}

const _: () = assert!(size_of::<RawConfig>() == 80 && size_of::<RawId>() == 128);

/// What NCCL takes for "not set".
pub(crate) const UNSET: c_int = c_int::MIN;
const MAGIC: u32 = 0xcafe_beef;

impl RawConfig {
    /// Nothing set, in the form that a library of `version` knows.
    pub(crate) fn of(version: Version) -> RawConfig {
        let known = version.min(Version::new(2, 28, 99));
        let size = match known {
            v if v >= Version::new(2, 28, 0) => 80,
            v if v >= Version::new(2, 27, 0) => 72,
            _ => 48,
        };
        // A library that is newer than this table must read what this table has.
        let told = version.min(Version::new(2, 28, 9));
        RawConfig {
            size,
            magic: MAGIC,
            version: told.code(),
            blocking: UNSET,
            cga_cluster_size: UNSET,
            ctas_min: UNSET,
            ctas_max: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            comm_name: std::ptr::null(),
            collnet_enable: UNSET,
            cta_policy: UNSET,
            shrink_share: UNSET,
            nvls_ctas: UNSET,
            channels_per_net_peer: UNSET,
            nvlink_centric_sched: UNSET,
        }
    }
}

/// Of the library: major, minor, patch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    major: u16,
    minor: u16,
    patch: u16,
}

impl Version {
    /// Splits of a communicator with a configuration of their own, on which sub-groups rest.
    pub const LEAST: Version = Version::new(2, 18, 0);
    /// Where a communicator can be revoked.
    pub(crate) const REVOKE: Version = Version::new(2, 28, 0);

    pub const fn new(major: u16, minor: u16, patch: u16) -> Version {
        Version { major, minor, patch }
    }

    /// From what `ncclGetVersion` tells, such as 22809, and 2804 before 2.9.
    pub fn of_code(code: u32) -> Version {
        let (unit, rest) = if code < 10_000 { (1_000, 100) } else { (10_000, 100) };
        let part = |x: u32| u16::try_from(x).unwrap_or(u16::MAX);
        Version::new(part(code / unit), part(code % unit / rest), part(code % rest))
    }

    /// As `ncclGetVersion` tells it, from 2.9 on.
    pub fn code(self) -> u32 {
        u32::from(self.major) * 10_000 + u32::from(self.minor) * 100 + u32::from(self.patch)
    }

    /// Ranks of one communicator need one version.
    ///
    /// # Errors
    /// The first rank whose version is another one, by name.
    pub fn agree(self, all: &[Version]) -> Result<(), Error> {
        match (0..).zip(all).find(|(_, theirs)| **theirs != self) {
            Some((rank, theirs)) => Err(Error::Mixed { rank, theirs: *theirs, ours: self }),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What stands in the environment before the library is loaded, unless the user has set it. A
/// process that starts engines gives it to them.
///
/// NVLink multicast takes device memory that only a reset of the fabric gives back when its owner
/// dies at a bad moment. What is captured into a graph NCCL registers with its peers; where that
/// lies in an arena of several pieces of device memory, a captured all-to-all of 2.28 never ends.
pub const ENVIRONMENT: [(&str, &str); 2] =
    [("NCCL_NVLS_ENABLE", "0"), ("NCCL_GRAPH_REGISTER", "0")];

/// Where the library is looked for, unless `MOEJOB_NCCL` names another file.
const NAME: &str = "libnccl.so.2";

macro_rules! functions {
    (always { $($field:ident $symbol:literal ($($type:ty),*) -> $result:ty;)* }
     optional { $($field_o:ident $symbol_o:literal ($($type_o:ty),*);)* }) => {
        pub(crate) struct Functions {
            $(pub $field: unsafe extern "C" fn($($type),*) -> $result,)*
            $(pub $field_o: Option<unsafe extern "C" fn($($type_o),*) -> Code>,)*
        }

        impl Functions {
            fn of(library: &libloading::Library, name: &str) -> Result<Functions, Error> {
                // SAFETY: the types are those of nccl.h, the same in every version 2.18 to 2.30.
                Ok(unsafe {
                    Functions {
                        $($field: *library.get($symbol).map_err(|source| Error::Symbol {
                            name: name.to_owned(),
                            symbol: $symbol,
                            least: Version::LEAST,
                            source,
                        })?,)*
                        $($field_o: library.get($symbol_o).ok().map(|found| *found),)*
                    }
                })
            }
        }
    };
}

type Stream = *mut c_void;
type Memory = *mut c_void;
type Source = *const c_void;

functions! {
    always {
        error_string "ncclGetErrorString" (Code) -> *const c_char;
        last_error "ncclGetLastError" (Handle) -> *const c_char;
        unique_id "ncclGetUniqueId" (*mut RawId) -> Code;
        init "ncclCommInitRankConfig" (*mut Handle, c_int, RawId, c_int, *mut RawConfig) -> Code;
        split "ncclCommSplit" (Handle, c_int, c_int, *mut Handle, *mut RawConfig) -> Code;
        async_error "ncclCommGetAsyncError" (Handle, *mut Code) -> Code;
        finalize "ncclCommFinalize" (Handle) -> Code;
        destroy "ncclCommDestroy" (Handle) -> Code;
        abort "ncclCommAbort" (Handle) -> Code;
        count "ncclCommCount" (Handle, *mut c_int) -> Code;
        user_rank "ncclCommUserRank" (Handle, *mut c_int) -> Code;
        group_start "ncclGroupStart" () -> Code;
        group_end "ncclGroupEnd" () -> Code;
        send "ncclSend" (Source, usize, c_int, c_int, Handle, Stream) -> Code;
        recv "ncclRecv" (Memory, usize, c_int, c_int, Handle, Stream) -> Code;
        broadcast "ncclBroadcast" (Source, Memory, usize, c_int, c_int, Handle, Stream) -> Code;
        all_reduce "ncclAllReduce" (Source, Memory, usize, c_int, c_int, Handle, Stream) -> Code;
        reduce_scatter "ncclReduceScatter" (Source, Memory, usize, c_int, c_int, Handle, Stream)
            -> Code;
        all_gather "ncclAllGather" (Source, Memory, usize, c_int, Handle, Stream) -> Code;
    }
    optional {
        revoke "ncclCommRevoke" (Handle, c_int);
    }
}

/// The loaded library. Cheap to clone.
#[derive(Clone)]
pub struct Library {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    version: Version,
    functions: Functions,
    /// Never unloaded: threads of the library run its code until the process ends.
    _loaded: ManuallyDrop<libloading::Library>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} ({})", self.inner.version, self.inner.name)
    }
}

impl Library {
    /// Loads `$MOEJOB_NCCL`, else `libnccl.so.2` from where the loader looks for libraries. Sets
    /// what of [`ENVIRONMENT`] is not set.
    ///
    /// # Errors
    /// The library is missing, lacks a function, or is too old or too new.
    pub fn load() -> Result<Library, Error> {
        Library::open(wanted())
    }

    /// [`Library::load`] of this file.
    ///
    /// # Errors
    /// As those of `load`.
    pub fn open(file: impl Into<OsString>) -> Result<Library, Error> {
        let file = file.into();
        let name = file.to_string_lossy().into_owned();
        for (variable, value) in ENVIRONMENT {
            if std::env::var_os(variable).is_none() {
                // SAFETY: std's own readers and writers of the environment wait for each other, and
                // NCCL's readers are not loaded yet. Engines have the variable from their parent,
                // so that nothing is written in a process with threads that read it from C.
                unsafe { std::env::set_var(variable, value) };
            }
        }
        let (loaded, version, functions) = load(&file)?;
        Ok(Library { inner: Arc::new(Inner { name, version, functions, _loaded: loaded }) })
    }

    /// What [`Library::load`] would find, for who only tells of it: sets no variable and calls
    /// nothing but for the version. With it the name that was asked for.
    ///
    /// # Errors
    /// As those of `load`.
    pub fn look() -> Result<(Version, String), Error> {
        let file = wanted();
        let (_, version, _) = load(&file)?;
        Ok((version, file.to_string_lossy().into_owned()))
    }

    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// The file that was asked for.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Whether a communicator can be revoked: without it an end takes a second longer.
    pub fn can_revoke(&self) -> bool {
        self.inner.functions.revoke.is_some()
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.inner.functions
    }

    /// Success, or what the library says of `code`, with its last words.
    pub(crate) fn check(&self, call: &'static str, code: Code, of: Handle) -> Result<(), Error> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: any code may be asked for; the answer is a static text.
        let text = unsafe { text_at((self.functions().error_string)(code)) };
        // SAFETY: the handle is null or valid; the answer is valid until the next call.
        let last = unsafe { text_at((self.functions().last_error)(of)) };
        Err(Error::Refused { call, code, text, last })
    }
}

fn wanted() -> OsString {
    let named = std::env::var_os("MOEJOB_NCCL").filter(|name| !name.is_empty());
    named.unwrap_or_else(|| OsString::from(NAME))
}

type Loaded = (ManuallyDrop<libloading::Library>, Version, Functions);

fn load(file: &OsStr) -> Result<Loaded, Error> {
    let name = file.to_string_lossy().into_owned();
    // SAFETY: NCCL's constructors have no preconditions.
    let loaded = match unsafe { libloading::Library::new(file) } {
        Ok(loaded) => ManuallyDrop::new(loaded),
        Err(source) => return Err(Error::Missing { name, source }),
    };
    let version = version_of(&loaded, &name)?;
    if version < Version::LEAST || version >= Version::new(3, 0, 0) {
        return Err(Error::Version { name, found: version, least: Version::LEAST });
    }
    let functions = Functions::of(&loaded, &name)?;
    Ok((loaded, version, functions))
}

/// The version, before any other function is looked for: a library that is too old is told as such.
fn version_of(loaded: &libloading::Library, name: &str) -> Result<Version, Error> {
    const SYMBOL: &str = "ncclGetVersion";
    type Function = unsafe extern "C" fn(*mut c_int) -> Code;
    let mut code = 0;
    // SAFETY: the type is that of nccl.h; the target is valid for the call.
    let status = unsafe {
        let function = loaded.get::<Function>(SYMBOL).map_err(|source| Error::Symbol {
            name: name.to_owned(),
            symbol: SYMBOL,
            least: Version::LEAST,
            source,
        })?;
        function(&mut code)
    };
    if status != SUCCESS {
        let (text, last) = ("no version".to_owned(), String::new());
        return Err(Error::Refused { call: SYMBOL, code: status, text, last });
    }
    Ok(Version::of_code(u32::try_from(code).unwrap_or(0)))
}

/// # Safety
/// Null, or a text that ends with 0 and stays for the call.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}
