//! What rank 0's GPU tells of itself while it trains. A processor tells nothing.
//!
//! ```text
//! thread: NVML, once a second -> the newest reading, troubles      (power, clocks, Xid)
//! Gauge::report(device, tokens/s) -> DeviceReport of a step        never waits for NVML
//! ```
//! Between two steps the GPU waits for the host, so the host must not wait for a slow driver call.

use moejob_kernels::Device;
use moejob_kernels::cuda::{Gpu, Monitor, Nvml, Reading, Trouble, uuid_text};
use moejob_protocol::flops::bf16_ceiling;
use moejob_protocol::report::DeviceReport;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two readings.
const EVERY: Duration = Duration::from_secs(1);
/// The thread looks so often whether it is still wanted.
const WAIT_MILLISECONDS: u32 = 250;
/// Troubles that nobody asked for yet; a broken GPU reports many, and the first ones tell most.
const TROUBLES_MAX: usize = 16;

/// A GPU that is watched until this is dropped.
#[derive(Debug)]
pub struct Gauge {
    name: String,
    uuid: String,
    /// Operations of a token, and the rate that all devices together could reach.
    flops_per_token: f64,
    ceiling: Option<f64>,
    shared: Arc<Shared>,
    memory: Option<u64>,
    asked: Option<Instant>,
}

#[derive(Debug, Default)]
struct Shared {
    newest: Mutex<Option<Reading>>,
    troubles: Mutex<Vec<Trouble>>,
    ended: AtomicBool,
}

impl Gauge {
    /// Of a job of `world` such devices, whose tokens take so many operations; none of a processor.
    pub fn of(device: &Device, flops_per_token: u64, world: u32) -> Option<Gauge> {
        let Device::Cuda(cuda) = device else { return None };
        let gpu = cuda.gpu();
        let shared = Arc::<Shared>::default();
        // Without NVML there are no watts; without a thread neither.
        if let Ok(monitor) = Nvml::load().and_then(|nvml| Monitor::open(&nvml, gpu.uuid())) {
            let watched = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("gauge".to_string());
            let _ = thread.spawn(move || watch(&monitor, &watched));
        }
        Some(Gauge {
            name: gpu.name().to_string(),
            uuid: uuid_text(gpu.uuid()),
            flops_per_token: flops_per_token as f64,
            ceiling: bf16_ceiling(gpu.name()).map(|rate| rate * f64::from(world)),
            shared,
            memory: None,
            asked: None,
        })
    }

    /// What stands in the metrics of a step in which the job had this rate.
    pub fn report(&mut self, device: &Device, tokens_per_second: f64) -> DeviceReport {
        if self.asked.is_none_or(|asked| asked.elapsed() >= EVERY) {
            self.asked = Some(Instant::now());
            self.memory = match device {
                Device::Cuda(cuda) => used(cuda.gpu()),
                _ => None,
            };
        }
        let newest = self.shared.newest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let reading = newest.unwrap_or_default();
        let rate = tokens_per_second * self.flops_per_token;
        DeviceReport {
            name: self.name.clone(),
            uuid: self.uuid.clone(),
            model_flops_per_second: rate,
            ceiling_share: self.ceiling.map(|ceiling| rate / ceiling),
            memory_bytes: self.memory,
            watts: reading.watts,
            celsius: reading.celsius,
            megahertz: reading.megahertz,
            slowed_by: reading.slowed_by.iter().map(ToString::to_string).collect(),
            ecc_uncorrected: reading.ecc_uncorrected,
        }
    }

    /// What the driver has reported since the last call, in words.
    pub fn troubles(&mut self) -> Vec<String> {
        let mut troubles = self.shared.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let Gauge { name, uuid, .. } = self;
        let said = troubles.drain(..).map(|of| format!("{name} ({uuid}): {}", words(of)));
        said.collect()
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
    }
}

/// Bytes of the device that are in use, by whomever.
fn used(gpu: &Gpu) -> Option<u64> {
    gpu.make_current().ok()?;
    let (free, total) = gpu.memory().ok()?;
    Some((total - free) as u64)
}

fn watch(monitor: &Monitor, shared: &Shared) {
    let mut read: Option<Instant> = None;
    while !shared.ended.load(Ordering::Relaxed) {
        if read.is_none_or(|read| read.elapsed() >= EVERY) {
            read = Some(Instant::now());
            let reading = monitor.read();
            *shared.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(reading);
        }
        let began = Instant::now();
        if let Some(trouble) = monitor.wait(WAIT_MILLISECONDS) {
            let mut troubles = shared.troubles.lock().unwrap_or_else(PoisonError::into_inner);
            if troubles.len() < TROUBLES_MAX {
                troubles.push(trouble);
            }
            if trouble == Trouble::Lost {
                return;
            }
        }
        // A driver without events answers at once.
        let wait = Duration::from_millis(WAIT_MILLISECONDS.into());
        std::thread::sleep(wait.saturating_sub(began.elapsed()));
    }
}

fn words(trouble: Trouble) -> String {
    match trouble {
        Trouble::Xid(number) => format!("the driver reports the error Xid {number}"),
        Trouble::DoubleBitEcc => "its memory has an error that cannot be corrected".to_string(),
        Trouble::Lost => "it has fallen off the bus; the machine must be restarted".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_tells_nothing() {
        let device = Device::cpu(1, 4096).expect("a device");
        assert!(Gauge::of(&device, 6, 1).is_none());
    }

    #[test]
    fn a_step_tells_its_rate_and_what_was_read_last() {
        let device = Device::cpu(1, 4096).expect("a device");
        let mut gauge = Gauge {
            name: "NVIDIA H200".to_string(),
            uuid: "GPU-7c".to_string(),
            flops_per_token: 1e9,
            ceiling: bf16_ceiling("NVIDIA H200"),
            shared: Arc::default(),
            memory: None,
            asked: None,
        };
        let told = gauge.report(&device, 494_500.0);
        assert_eq!((told.model_flops_per_second, told.watts), (494.5e12, None));
        assert_eq!((told.uuid.as_str(), told.ceiling_share), ("GPU-7c", Some(0.5)));
        let reading = Reading { watts: Some(650.0), ..Reading::default() };
        *gauge.shared.newest.lock().expect("a reading") = Some(reading);
        assert_eq!(gauge.report(&device, 1.0).watts, Some(650.0));
        let told = "NVIDIA H200 (GPU-7c): the driver reports the error Xid 79";
        gauge.shared.troubles.lock().expect("troubles").push(Trouble::Xid(79));
        assert_eq!(gauge.troubles(), [told]);
        assert_eq!(gauge.troubles(), [""; 0]);
    }
}
