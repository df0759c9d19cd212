//! What it costs that a GPU's optimizer state lies on its host.

use super::time::duration;
use moejob_manifest::job::Job;
use moejob_plan::placement::gib;
use moejob_protocol::memory::RankMemory;
use serde::Serialize;

/// The checks of a node whose limits are the rates of the bus.
const TO_DEVICE: &str = "hostToDeviceGBps";
const TO_HOST: &str = "deviceToHostGBps";

/// What the update of each step moves over a GPU's bus.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OffloadPrice {
    /// Of a rank: read, and as many written.
    pub bytes: u64,
    /// How long that takes; none where the profile does not say how fast the bus is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// The slower way, GB/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
}

impl OffloadPrice {
    /// Of a rank that needs `memory`; none where nothing is offloaded.
    pub fn of(job: &Job, memory: &RankMemory) -> Option<OffloadPrice> {
        let bytes = memory.offloaded_bytes();
        if bytes == 0 {
            return None;
        }
        // Both ways at once: the update writes what it has read.
        let limit = |name| job.profile.expect.get(name).map(|limit| limit.fail);
        let rate = limit(TO_DEVICE).zip(limit(TO_HOST)).map(|(there, back)| there.min(back));
        let rate = rate.filter(|rate| *rate > 0.0);
        let seconds = rate.map(|rate| bytes as f64 / (rate * 1e9));
        Some(OffloadPrice { bytes, seconds, rate })
    }

    /// For a person.
    pub fn lines(&self) -> [String; 2] {
        let moved = gib(self.bytes);
        let price = match (self.seconds, self.rate) {
            (Some(seconds), Some(rate)) => format!(
                "about {} at {rate} GB/s each way, which the profile expects at least",
                duration(seconds)
            ),
            _ => "the profile does not say how fast that is".to_string(),
        };
        [
            format!("  each step's update reads {moved} of it over the bus, and writes as much:"),
            format!("  {price}"),
        ]
    }
}
