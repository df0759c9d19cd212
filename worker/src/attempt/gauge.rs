//! What a rank's GPU tells of itself while it trains. A processor tells nothing.
//!
//! ```text
//! thread: NVML, once a second -> the newest reading                (power, clocks, errors)
//!         NVML's events ------`-> story.rs: what is news -> news()
//! Gauge::report(device, tokens/s) -> DeviceReport of a step        never waits for NVML
//! ```
//! Between two steps the GPU waits for the host, so the host must not wait for a slow driver call.

mod story;

use crate::failure::chain;
use moejob_kernels::Device;
use moejob_kernels::cuda::{Arch, Gpu, Monitor, Nvml, Reading, Trouble, uuid_text};
use moejob_protocol::flops::bf16_ceiling;
use moejob_protocol::report::DeviceReport;
pub use story::{Story, Told};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two readings.
const EVERY: Duration = Duration::from_secs(1);
/// The thread looks so often whether it is still wanted.
const WAIT_MILLISECONDS: u32 = 250;
/// News that nobody asked for yet; a broken GPU has many, and the first ones tell most.
const NEWS_MAX: usize = 16;
/// The kernels are not those of this kind of GPU.
const OLDER_KERNELS: &str = "OlderKernels";

/// The driver tells something of this GPU to nobody.
const UNWATCHED: &str = "DeviceUnwatched";

fn unwatched(what: &str, error: &dyn std::error::Error) -> Told {
    Told { reason: UNWATCHED, message: format!("{what} not told: {}", chain(error)) }
}

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
    news: Mutex<Vec<Told>>,
    ended: AtomicBool,
}

impl Gauge {
    /// Of a job of `world` such devices, whose tokens take so many operations; none of a processor.
    pub fn of(device: &Device, flops_per_token: u64, world: u32) -> Option<Gauge> {
        let Device::Cuda(cuda) = device else { return None };
        let gpu = cuda.gpu();
        let shared = Arc::<Shared>::default();
        if let Some(remark) = Arch::remark(gpu.capability()) {
            shared.push(Told { reason: OLDER_KERNELS, message: format!("it is {remark}") });
        }
        let (watched, uuid) = (Arc::clone(&shared), gpu.uuid());
        let work = move || {
            // It takes a while to load.
            match Nvml::load().and_then(|nvml| Monitor::open(&nvml, uuid)) {
                Ok(monitor) => {
                    if let Some(error) = monitor.unwatched() {
                        watched.push(unwatched("troubles of it are", error));
                    }
                    watch(&monitor, &watched);
                }
                Err(error) => {
                    watched.push(unwatched("its power, clocks and troubles are", &error));
                }
            }
        };
        let thread = std::thread::Builder::new().name("gauge".to_string()).spawn(work);
        if let Err(error) = thread {
            shared.push(unwatched("its power, clocks and troubles are", &error));
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

    /// What there is to tell since the last call.
    pub fn news(&mut self) -> Vec<Told> {
        let mut news = self.shared.news.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *news)
    }

    /// `NVIDIA H200 (GPU-7c)`
    pub fn named(&self) -> String {
        format!("{} ({})", self.name, self.uuid)
    }

    pub fn uuid(&self) -> &str {
        &self.uuid
    }
}

impl Shared {
    fn push(&self, told: Told) {
        let mut news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        if news.len() < NEWS_MAX {
            news.push(told);
        }
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
    let (began, mut read, mut story) = (Instant::now(), None::<Instant>, Story::default());
    while !shared.ended.load(Ordering::Relaxed) {
        if read.is_none_or(|read| read.elapsed() >= EVERY) {
            read = Some(Instant::now());
            let reading = monitor.read();
            story.reading(&reading, began.elapsed()).into_iter().for_each(|told| shared.push(told));
            *shared.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(reading);
        }
        let waits = Instant::now();
        if let Some(trouble) = monitor.wait(WAIT_MILLISECONDS) {
            story.trouble(trouble, began.elapsed()).into_iter().for_each(|told| shared.push(told));
            if trouble == Trouble::Lost {
                return;
            }
        }
        // A driver without events answers at once.
        let wait = Duration::from_millis(WAIT_MILLISECONDS.into());
        std::thread::sleep(wait.saturating_sub(waits.elapsed()));
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
        let told = |number: u64| Told { reason: "DeviceTrouble", message: number.to_string() };
        (0..20).for_each(|number| gauge.shared.push(told(number)));
        assert_eq!(gauge.news(), (0..16).map(told).collect::<Vec<_>>());
        assert_eq!((gauge.news(), gauge.named().as_str()), (Vec::new(), "NVIDIA H200 (GPU-7c)"));
    }
}
