//! What the driver's management library (NVML) tells of a GPU beside its work: power, clocks and
//! why they are low, errors of its memory, and the driver's own reports of trouble (Xid).
//!
//! ```text
//! Nvml::load() -> Monitor of a GPU, by its uuid -> read() a step; wait(ms) on a thread of its own
//! ```
//! The library comes with the driver but not with every container, so all of it is optional: where
//! it or one of its functions is missing, the numbers are, too. It never touches a CUDA context.
//! Names and values are those of nvml.h.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use libloading::Library;

type Device = *mut c_void;
type EventSet = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;
const TIMEOUT: Status = 10;
const GPU_IS_LOST: Status = 15;

/// Kinds of events that are waited for: nvmlEventTypeDoubleBitEccError, XidCriticalError.
const DOUBLE_BIT_ECC: c_ulonglong = 0x2;
const XID: c_ulonglong = 0x8;

/// Where the library is looked for, unless `MOEJOB_NVML` names another file.
const NAME: &str = "libnvidia-ml.so.1";

/// The loaded library, initialised.
#[derive(Debug)]
pub struct Nvml {
    loaded: Library,
}

/// Why nothing can be told.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    #[error("{name} cannot be loaded; it comes with the driver (package nvidia-utils, or the \
             driver capability `utility` of a container)")]
    Missing { name: String, source: libloading::Error },
    #[error("{function} is not in the driver's NVML: the driver is too old")]
    Function { function: &'static str, source: libloading::Error },
    #[error("{function}: NVML's error {status}")]
    Refused { function: &'static str, status: c_int },
}

/// A GPU that is watched. Cheap to ask: some ten microseconds a number.
#[derive(Debug)]
pub struct Monitor {
    nvml: Arc<Nvml>,
    device: Device,
    /// None where the GPU or the driver reports no events.
    events: Result<EventSet, NvmlError>,
}

// SAFETY: NVML is thread-safe; handles are plain values.
unsafe impl Send for Monitor {}
// SAFETY: as above.
unsafe impl Sync for Monitor {}

/// What a GPU was like at a moment; none: the driver does not tell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    pub watts: Option<f64>,
    pub celsius: Option<u32>,
    /// Of the multiprocessors.
    pub megahertz: Option<u32>,
    /// Why the clock is lower than it could be, worst first; empty: it is not.
    pub slowed_by: Vec<&'static str>,
    /// Errors of memory that could not be corrected, since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    pub remapped: Option<Remapped>,
}

/// Rows of memory that failed and are to be replaced by spare ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remapped {
    /// Some wait for a reset of the GPU.
    pub pending: bool,
    /// Some could not be replaced.
    pub failed: bool,
}

/// What a GPU may do at most; none: the driver does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    pub megahertz: Option<u32>,
    pub watts: Option<f64>,
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its number where the driver runs, which in a container may be that of nobody.
    pub pid: u32,
    /// Of the GPU's memory; none: the driver does not tell.
    pub bytes: Option<u64>,
}

/// nvmlProcessInfo_t
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessData {
    pid: c_uint,
    bytes: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Processes of one GPU that are asked for.
const PROCESSES_MAX: usize = 64;

/// nvmlMemory_t
#[repr(C)]
#[derive(Default)]
struct MemoryData {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// Trouble that the driver reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The number of the driver's list of Xid errors: 31 is a fault of the program's, 48, 63, 64,
    /// 79, 94 and 95 are the machine's.
    Xid(u64),
    DoubleBitEcc,
    /// The GPU has fallen off the bus.
    Lost,
}

#[repr(C)]
struct EventData {
    device: Device,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

macro_rules! call {
    ($nvml:expr, $name:literal, ($($type:ty),*), $($argument:expr),*) => {
        $nvml.function::<unsafe extern "C" fn($($type),*) -> Status>($name).and_then(|function| {
            // SAFETY: the types are those of nvml.h; every pointer is valid for the call.
            match unsafe { function($($argument),*) } {
                SUCCESS => Ok(()),
                status => Err(NvmlError::Refused { function: $name, status }),
            }
        })
    };
}

impl Nvml {
    /// # Errors
    /// The library is missing or cannot speak to the driver.
    pub fn load() -> Result<Arc<Nvml>, NvmlError> {
        let name = std::env::var("MOEJOB_NVML").unwrap_or_else(|_| NAME.to_owned());
        // SAFETY: the driver's library has no constructors with preconditions.
        let loaded = match unsafe { Library::new(&name) } {
            Ok(loaded) => loaded,
            Err(source) => return Err(NvmlError::Missing { name, source }),
        };
        let nvml = Nvml { loaded };
        call!(nvml, "nvmlInit_v2", (),)?;
        Ok(Arc::new(nvml))
    }

    /// The driver's own version, such as 550.54.15.
    pub fn driver_version(&self) -> Option<String> {
        const LENGTH: usize = 80;
        let mut text: [c_char; LENGTH] = [0; LENGTH];
        let asked = call!(
            self,
            "nvmlSystemGetDriverVersion",
            (*mut c_char, c_uint),
            text.as_mut_ptr(),
            LENGTH as c_uint
        );
        asked.ok()?;
        let bytes: Vec<u8> = text.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
        String::from_utf8(bytes).ok()
    }

    fn function<F: Copy>(&self, function: &'static str) -> Result<F, NvmlError> {
        // SAFETY: `F` is the function's type in nvml.h, by the macro above.
        let found = unsafe { self.loaded.get::<F>(function.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|source| NvmlError::Function { function, source })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        let _ = call!(self, "nvmlShutdown", (),);
    }
}

/// Bits of nvmlClocksEventReasons that mean that work is slowed, worst first. Idle clocks and
/// those that somebody set are no trouble.
const REASONS: [(c_ulonglong, &str); 6] = [
    (0x80, "power brake"),
    (0x40, "hardware thermal"),
    (0x08, "hardware"),
    (0x20, "software thermal"),
    (0x04, "power cap"),
    (0x10, "sync boost"),
];

impl Monitor {
    /// The GPU whose uuid the driver gives as these 16 bytes.
    ///
    /// # Errors
    /// NVML does not know it.
    pub fn open(nvml: &Arc<Nvml>, uuid: [u8; 16]) -> Result<Monitor, NvmlError> {
        let name = CString::new(uuid_text(uuid)).expect("hex has no zero byte");
        let mut device: Device = std::ptr::null_mut();
        call!(
            nvml,
            "nvmlDeviceGetHandleByUUID",
            (*const c_char, *mut Device),
            name.as_ptr(),
            &mut device
        )?;
        let nvml = Arc::clone(nvml);
        let events = watch(&nvml, device);
        Ok(Monitor { nvml, device, events })
    }

    /// Why [`Monitor::wait`] learns of no trouble.
    pub fn unwatched(&self) -> Option<&NvmlError> {
        self.events.as_ref().err()
    }

    pub fn read(&self) -> Reading {
        let mut milliwatts: c_uint = 0;
        let watts = self.unsigned("nvmlDeviceGetPowerUsage", &mut milliwatts);
        let (mut celsius, mut megahertz): (c_uint, c_uint) = (0, 0);
        type Typed = unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> Status;
        let typed = |name: &'static str, kind: c_uint, into: &mut c_uint| {
            let function = self.nvml.function::<Typed>(name).ok()?;
            // SAFETY: the type is that of nvml.h, the target is valid.
            (unsafe { function(self.device, kind, into) } == SUCCESS).then_some(())
        };
        // NVML_TEMPERATURE_GPU and NVML_CLOCK_SM.
        let celsius = typed("nvmlDeviceGetTemperature", 0, &mut celsius).map(|()| celsius);
        let megahertz = typed("nvmlDeviceGetClockInfo", 1, &mut megahertz).map(|()| megahertz);
        Reading {
            watts: watts.map(|()| f64::from(milliwatts) / 1000.0),
            celsius,
            megahertz,
            slowed_by: self.slowed_by(),
            ecc_uncorrected: self.ecc_uncorrected(),
            remapped: self.remapped(),
        }
    }

    /// Free and total bytes of its memory.
    pub fn memory(&self) -> Option<(u64, u64)> {
        let mut data = MemoryData::default();
        let asked = call!(
            self.nvml,
            "nvmlDeviceGetMemoryInfo",
            (Device, *mut MemoryData),
            self.device,
            &mut data
        );
        asked.ok().map(|()| (data.free, data.total))
    }

    /// Processes that have a context on it, this one among them.
    pub fn processes(&self) -> Option<Vec<GpuProcess>> {
        let mut all = [ProcessData::default(); PROCESSES_MAX];
        let mut count = PROCESSES_MAX as c_uint;
        let asked = call!(
            self.nvml,
            "nvmlDeviceGetComputeRunningProcesses_v3",
            (Device, *mut c_uint, *mut ProcessData),
            self.device,
            &mut count,
            all.as_mut_ptr()
        );
        asked.ok()?;
        // All bits set: not available.
        let process = |of: &ProcessData| GpuProcess {
            pid: of.pid,
            bytes: (of.bytes != c_ulonglong::MAX).then_some(of.bytes),
        };
        Some(all.iter().take(count as usize).map(process).collect())
    }

    pub fn limits(&self) -> Limits {
        let mut milliwatts: c_uint = 0;
        let watts = self.unsigned("nvmlDeviceGetEnforcedPowerLimit", &mut milliwatts);
        // NVML_CLOCK_SM
        let (kind, mut megahertz): (c_uint, c_uint) = (1, 0);
        let asked = call!(
            self.nvml,
            "nvmlDeviceGetMaxClockInfo",
            (Device, c_uint, *mut c_uint),
            self.device,
            kind,
            &mut megahertz
        );
        Limits {
            megahertz: asked.ok().map(|()| megahertz),
            watts: watts.map(|()| f64::from(milliwatts) / 1000.0),
        }
    }

    fn unsigned(&self, name: &'static str, into: &mut c_uint) -> Option<()> {
        type Plain = unsafe extern "C" fn(Device, *mut c_uint) -> Status;
        let function = self.nvml.function::<Plain>(name).ok()?;
        // SAFETY: the type is that of nvml.h, the target is valid.
        (unsafe { function(self.device, into) } == SUCCESS).then_some(())
    }

    fn slowed_by(&self) -> Vec<&'static str> {
        let mut bits: c_ulonglong = 0;
        // Drivers before 535 have the second name alone.
        let asked = call!(
            self.nvml,
            "nvmlDeviceGetCurrentClocksEventReasons",
            (Device, *mut c_ulonglong),
            self.device,
            &mut bits
        )
        .or_else(|_| {
            call!(
                self.nvml,
                "nvmlDeviceGetCurrentClocksThrottleReasons",
                (Device, *mut c_ulonglong),
                self.device,
                &mut bits
            )
        });
        if asked.is_err() {
            return Vec::new();
        }
        REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect()
    }

    fn ecc_uncorrected(&self) -> Option<u64> {
        let mut count: c_ulonglong = 0;
        // NVML_MEMORY_ERROR_TYPE_UNCORRECTED and NVML_VOLATILE_ECC.
        let (kind, since): (c_uint, c_uint) = (1, 0);
        let asked = call!(
            self.nvml,
            "nvmlDeviceGetTotalEccErrors",
            (Device, c_uint, c_uint, *mut c_ulonglong),
            self.device,
            kind,
            since,
            &mut count
        );
        asked.ok().map(|()| count)
    }

    fn remapped(&self) -> Option<Remapped> {
        let (mut corrected, mut uncorrected, mut pending, mut failed): (c_uint, c_uint, _, _) =
            (0, 0, 0 as c_uint, 0 as c_uint);
        let asked = call!(
            self.nvml,
            "nvmlDeviceGetRemappedRows",
            (Device, *mut c_uint, *mut c_uint, *mut c_uint, *mut c_uint),
            self.device,
            &mut corrected,
            &mut uncorrected,
            &mut pending,
            &mut failed
        );
        asked.ok().map(|()| Remapped { pending: pending != 0, failed: failed != 0 })
    }

    /// Waits at most so long for the next trouble; none came, or the driver reports none.
    pub fn wait(&self, milliseconds: u32) -> Option<Trouble> {
        let events = *self.events.as_ref().ok()?;
        let mut data = EventData {
            device: std::ptr::null_mut(),
            kind: 0,
            data: 0,
            gpu_instance: 0,
            compute_instance: 0,
        };
        let waited = call!(
            self.nvml,
            "nvmlEventSetWait_v2",
            (EventSet, *mut EventData, c_uint),
            events,
            &mut data,
            milliseconds
        );
        match waited {
            Ok(()) if data.kind & XID != 0 => Some(Trouble::Xid(data.data)),
            Ok(()) if data.kind & DOUBLE_BIT_ECC != 0 => Some(Trouble::DoubleBitEcc),
            Err(NvmlError::Refused { status: GPU_IS_LOST, .. }) => Some(Trouble::Lost),
            Err(NvmlError::Refused { status: TIMEOUT, .. }) | Ok(()) | Err(_) => None,
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if let Ok(events) = self.events {
            let _ = call!(self.nvml, "nvmlEventSetFree", (EventSet), events);
        }
    }
}

fn watch(nvml: &Nvml, device: Device) -> Result<EventSet, NvmlError> {
    let mut kinds = XID | DOUBLE_BIT_ECC;
    // One that is not supported would be refused with the other.
    let mut supported: c_ulonglong = 0;
    let asked = call!(
        nvml,
        "nvmlDeviceGetSupportedEventTypes",
        (Device, *mut c_ulonglong),
        device,
        &mut supported
    );
    if asked.is_ok() {
        kinds &= supported;
    }
    let mut events: EventSet = std::ptr::null_mut();
    call!(nvml, "nvmlEventSetCreate", (*mut EventSet), &mut events)?;
    let registered = call!(
        nvml,
        "nvmlDeviceRegisterEvents",
        (Device, c_ulonglong, EventSet),
        device,
        kinds,
        events
    );
    if let Err(error) = registered {
        let _ = call!(nvml, "nvmlEventSetFree", (EventSet), events);
        return Err(error);
    }
    Ok(events)
}

/// `GPU-8-4-4-4-12`, as NVML and nvidia-smi write it.
pub fn uuid_text(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let [a, b, c, d, e] = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}
