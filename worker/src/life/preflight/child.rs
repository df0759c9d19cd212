//! The process that measures one GPU. It obeys its parent's lines until they end.

use crate::engine::links::entry;
use crate::engine::notes;
use crate::life::part::{is_bound_to, number, obey, say};
use crate::life::travel::Verb;
use moejob_kernels::cuda::{
    Arena, Copies, CudaError, Gpu, Monitor, Nvml, peer_read_rate, uuid_text,
};
use moejob_kernels::{ArenaPlan, DType};
use moejob_nccl::{Comm, Config, Library, Reduce, Seat, Span, Stream, UniqueId};
use moejob_protocol::pair::PAIR_CHECK;
use moejob_protocol::preflight::{Check, Grade, Measured, Value};
use serde::{Deserialize, Serialize};
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Makes an engine's process one that measures; says which GPU.
pub(super) const ENV_PART: &str = "MOEJOB_PREFLIGHT_GPU";

/// The fastest counts, after one that is not counted.
const REDUCTIONS: usize = 3;
const MEET_LIMIT: Duration = Duration::from_secs(15);
/// The other node's GPUs are opened only when it is known where to meet.
const MEET_ACROSS_LIMIT: Duration = Duration::from_secs(18);
/// For one all-reduce: a hundred times what a slow node takes.
const REDUCE_LIMIT: Duration = Duration::from_secs(15);
/// With [`MEET_ACROSS_LIMIT`] less than a whole preflight: this process tells why by itself.
const REDUCE_ACROSS_LIMIT: Duration = Duration::from_secs(10);
/// What the GPUs of two nodes reduce, as Azure's limit is; such with less have a quarter of what is
/// free.
pub(super) const PAIR_BYTES: usize = 8 << 30;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// With the host and within the GPU, and what the driver tells of it.
    Copies,
    /// Reads of another GPU's memory.
    Peer { ordinal: usize },
    /// A place to meet.
    Id,
    /// An all-reduce of so many bytes; `across`: with the GPUs of another node.
    Meet { id: String, rank: u32, world: u32, bytes: usize, across: bool },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The GPU is open.
    Ready { name: String, free: usize },
    Measured(Vec<Measured>),
    Id(String),
    Bus(Bus),
    /// There is no driver here: nothing can be said of any GPU.
    Absent { why: String },
    /// A check that could not be made.
    Failed { what: String, why: String },
}

/// What an all-reduce gave.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Bus {
    /// What it is of.
    pub check: String,
    /// Bus bandwidth, GB/s.
    pub rate: f64,
    /// Whether bytes went by TCP, where NCCL's log tells.
    pub sockets: Option<bool>,
}

/// The GPU that this process is to measure, if it is one that measures.
pub(crate) fn part() -> Option<usize> {
    number(ENV_PART)
}

/// Ends with its parent, whose process id this is.
pub(crate) fn main(parent: &str, ordinal: usize) -> ExitCode {
    if !is_bound_to(parent) {
        return ExitCode::from(75);
    }
    // SAFETY: there is no second thread yet.
    unsafe { notes::begin(ordinal) };
    let measuring = match Measuring::open(ordinal) {
        Ok(measuring) => measuring,
        Err(error @ CudaError::Missing { .. }) => {
            say(&Reply::Absent { why: error.to_string() });
            return ExitCode::FAILURE;
        }
        Err(error) => {
            // Its parent names the GPU by how this ends; the words go to its log.
            eprintln!("preflight of GPU {ordinal}: {error}");
            return ExitCode::FAILURE;
        }
    };
    match measuring.obey() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

struct Measuring {
    gpu: Gpu,
    monitor: Result<Monitor, String>,
    copies: Option<Copies>,
}

impl Measuring {
    fn open(ordinal: usize) -> Result<Measuring, CudaError> {
        let gpu = Gpu::open(ordinal)?;
        let monitor = Nvml::load().and_then(|nvml| Monitor::open(&nvml, gpu.uuid()));
        let monitor = monitor.map_err(|error| error.to_string());
        let name = format!("GPU {ordinal} ({})", uuid_text(gpu.uuid()));
        let (free, _) = gpu.memory()?;
        // Before it is its turn.
        let copies = Copies::new(&gpu);
        say(&Reply::Ready { name, free });
        let copies = match copies {
            Ok(copies) => Some(copies),
            Err(error) => {
                eprintln!("preflight: {error}");
                None
            }
        };
        Ok(Measuring { gpu, monitor, copies })
    }

    fn obey(mut self) -> io::Result<()> {
        obey(|ask| match ask {
            Ask::Copies => say(&Reply::Measured(self.copies())),
            Ask::Peer { ordinal } => say(&Reply::Measured(vec![
                match peer_read_rate(&self.gpu, ordinal) {
                    Ok(rate) => Measured::number("peerReadGBps", rate),
                    Err(error) => unmeasured("peerReadGBps", &error.to_string()),
                },
            ])),
            Ask::Id => say(&match id() {
                Ok(id) => Reply::Id(id),
                Err(why) => Reply::Failed { what: "allReduceGBps".to_string(), why },
            }),
            Ask::Meet { id, rank, world, bytes, across } => {
                let seat = Seat { rank, world };
                say(&match all_reduce(&self.gpu, &id, seat, bytes, across) {
                    Ok(rate) => {
                        let check = check_of(&self.gpu, world, across);
                        let log = notes::news().ok().filter(|log| !log.routes.is_empty());
                        let sockets = log.map(|log| log.uses_sockets());
                        Reply::Bus(Bus { check, rate, sockets })
                    }
                    Err(why) => {
                        let what = if across { PAIR_CHECK } else { "allReduceGBps" };
                        Reply::Failed { what: what.to_string(), why }
                    }
                });
            }
        })
    }

    /// The clock is read while it works, errors when it has.
    fn copies(&mut self) -> Vec<Measured> {
        // What it has allocated is free for what comes next.
        let rates = self.copies.take().map(|mut copies| copies.rates());
        let mut all = match rates {
            Some(Ok(rates)) => vec![
                Measured::number("hostToDeviceGBps", rates.host_to_device),
                Measured::number("deviceToHostGBps", rates.device_to_host),
                Measured::number("deviceCopyGBps", rates.within_device),
            ],
            Some(Err(error)) => {
                let what = format!("copies fail: {error}");
                let value = Value::Wrong { grade: Grade::Fail, what };
                vec![Measured::of_check(Check::Gpus, value)]
            }
            None => {
                let why = "there is no memory for it";
                vec![unmeasured("hostToDeviceGBps", why), unmeasured("deviceToHostGBps", why)]
            }
        };
        all.extend(self.state());
        all
    }

    fn state(&self) -> [Measured; 2] {
        let monitor = match &self.monitor {
            Ok(monitor) => monitor,
            Err(why) => {
                let unknown = |check| Measured::of_check(check, Value::Unmeasured(why.clone()));
                return [unknown(Check::Clocks), unknown(Check::Ecc)];
            }
        };
        let reading = monitor.read();
        let clocks = match reading.slowed_by.is_empty() {
            true => Value::Fine("nothing slows it".to_string()),
            false => {
                let what = format!("slowed by {}", reading.slowed_by.join(", "));
                Value::Wrong { grade: Grade::Warn, what }
            }
        };
        let errors = match reading.ecc_uncorrected {
            None => Value::Unmeasured("the driver does not tell".to_string()),
            Some(0) => Value::Fine("no errors".to_string()),
            Some(count) => {
                let what = format!("{count} errors since the driver was loaded");
                Value::Wrong { grade: Grade::Fail, what }
            }
        };
        [Measured::of_check(Check::Clocks, clocks), Measured::of_check(Check::Ecc, errors)]
    }
}

fn unmeasured(check: &str, why: &str) -> Measured {
    let value = Value::Unmeasured(why.to_string());
    Measured { check: check.to_string(), of: String::new(), value }
}

/// A place where communicators meet, as text.
pub(crate) fn id() -> Result<String, String> {
    let library = Library::load().map_err(|error| error.to_string())?;
    let id = UniqueId::new(&library).map_err(|error| error.to_string())?;
    Ok(id.bytes().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What [`id`] has told.
pub(crate) fn of_hex(text: &str) -> Option<UniqueId> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let bytes: Vec<u8> = digits?.chunks_exact(2).map(|two| two[0] << 4 | two[1]).collect();
    Some(UniqueId::from_bytes(bytes.try_into().ok()?))
}

/// Limits of machines with Hopper GPUs are those of NCCL with multicast of NVLink, which engines
/// leave off: without it the number is of another check.
fn check_of(gpu: &Gpu, world: u32, across: bool) -> String {
    if across {
        return PAIR_CHECK.to_string();
    }
    let off = std::env::var("NCCL_NVLS_ENABLE").is_ok_and(|value| value == "0");
    let plain = off && gpu.capability().0 >= 9 && world > 2;
    if plain { "plainAllReduceGBps" } else { "allReduceGBps" }.to_string()
}

/// Bus bandwidth, GB/s.
fn all_reduce(
    gpu: &Gpu,
    id: &str,
    seat: Seat,
    bytes: usize,
    across: bool,
) -> Result<f64, String> {
    let (meet_limit, limit) = match across {
        true => (MEET_ACROSS_LIMIT, REDUCE_ACROSS_LIMIT),
        false => (MEET_LIMIT, REDUCE_LIMIT),
    };
    let text = |error: CudaError| error.to_string();
    let library = Library::load().map_err(|error| error.to_string())?;
    let id = of_hex(id).ok_or("no place to meet")?;
    let config = Config { meet_limit, enter: Some(entry(gpu)), ..Config::default() };
    let elements = bytes / 2;
    let arena = Arena::new(gpu, 2 * elements).map_err(text)?;
    let buffer = ArenaPlan::new().alloc(DType::Bf16, elements);
    let stream = gpu.stream().map_err(text)?;
    arena.fill_bytes(&stream, buffer, 0).map_err(text)?;
    // Dropped before what it reads and writes.
    let comm = Comm::init(&library, seat, &id, &config).map_err(|error| error.to_string())?;
    // SAFETY: the arena and the stream are this GPU's, and dropped after the communicator.
    let (span, on) = unsafe {
        let span = Span::new(arena.address(buffer), moejob_nccl::DType::Bf16, elements);
        (span, Stream::new(stream.raw()))
    };
    let mut seconds = f64::INFINITY;
    for reading in 0..=REDUCTIONS {
        let began = Instant::now();
        comm.all_reduce(span, span, Reduce::Sum, on).map_err(|error| error.to_string())?;
        while !stream.is_idle().map_err(text)? {
            if began.elapsed() > limit {
                // A kernel that spins for a peer ends with the process alone.
                return Err(format!("an all-reduce is not done in {} s", limit.as_secs()));
            }
            std::hint::spin_loop();
        }
        if reading > 0 {
            seconds = seconds.min(began.elapsed().as_secs_f64());
        }
    }
    comm.finalize().map_err(|error| error.to_string())?;
    Ok(Verb::AllReduce.bus_rate(bytes, seat.world, seconds) / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_to_meet_goes_through_text() {
        let text: String = (0..128).map(|byte| format!("{byte:02x}")).collect();
        let id = of_hex(&text).expect("an id");
        assert_eq!(id.bytes()[127], 127);
        for wrong in ["", "0", &text[2..], &text.replace('0', "x")] {
            assert!(of_hex(wrong).is_none(), "{wrong}");
        }
    }
}
