//! How much the workers of a job may say: a heartbeat each half second and what a gang tells when
//! it breaks, never so much that the loop has no time for other jobs, nor so many bytes that frames
//! which wait for it fill the memory.
//!
//! Frames are counted by their bytes, one for each that is begun of [`UNIT_BYTES`]. Each stream
//! has a small allowance of its own, so that a loud one never takes the heartbeats of another; what
//! goes beyond it comes out of the job's. Where both are used up the stream is read later: its
//! worker waits in its own socket.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Frames a second and at once, of one stream. Heartbeats are two a second.
const STREAM: (f64, f64) = (8.0, 32.0);
/// The same of all streams of a job beyond that: the steps of a small model are some hundred.
const JOB: (f64, f64) = (500.0, 4_000.0);
/// What is paid for once. Heartbeats, steps and partings of most workers are shorter.
const UNIT_BYTES: usize = 1 << 10;
const PAUSE: Duration = Duration::from_millis(5);

/// Frames that may come.
#[derive(Debug)]
pub struct Allowance {
    rate: f64,
    most: f64,
    left: f64,
    at: Instant,
}

impl Allowance {
    pub fn of_stream() -> Allowance {
        Allowance::new(STREAM)
    }

    fn new((rate, most): (f64, f64)) -> Allowance {
        Allowance { rate, most, left: most, at: Instant::now() }
    }

    /// Takes so many away, where there are `least`.
    fn take(&mut self, units: f64, least: f64, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.left = (self.left + passed * self.rate).min(self.most);
        let has = self.left >= least;
        if has {
            self.left -= units;
        }
        has
    }
}

/// What the streams of a job share.
#[derive(Clone, Debug)]
pub struct Pace(Arc<Mutex<Allowance>>);

impl Default for Pace {
    fn default() -> Pace {
        Pace(Arc::new(Mutex::new(Allowance::new(JOB))))
    }
}

impl Pace {
    /// Waits until another frame of this stream, of so many bytes, may be told. Long ones are owed
    /// to the job: else short ones of a loud stream would never let one through.
    pub async fn admit(&self, own: &mut Allowance, bytes: usize) {
        let units = bytes.div_ceil(UNIT_BYTES).max(1) as f64;
        while !own.take(units, units, Instant::now()) && !self.take(units) {
            sleep(PAUSE).await;
        }
    }

    fn take(&self, units: f64) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.take(units, 1.0, Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_slowed_and_other_streams_of_the_job_keep_their_heartbeats() {
        let pace = Pace::default();
        let loud = pace.clone();
        let flood = tokio::spawn(async move {
            let mut own = Allowance::of_stream();
            let mut told = 0u32;
            let end = Instant::now() + Duration::from_secs(20);
            while Instant::now() < end {
                loud.admit(&mut own, 200).await;
                told += 1;
            }
            told
        });
        let mut own = Allowance::of_stream();
        for _ in 0..40 {
            sleep(Duration::from_millis(500)).await;
            let began = Instant::now();
            pace.admit(&mut own, 200).await;
            assert!(began.elapsed() < Duration::from_millis(10), "{:?}", began.elapsed());
        }
        let told = flood.await.expect("it ends");
        assert!(told < 4_000 + 32 + 20 * 520, "{told}");
        assert!(told > 10_000, "what a gang may need: {told}");
    }
    /// Frames of 128 KiB from each of eight workers: what comes is bounded by bytes, and a long
    /// frame of another worker is let through all the same.
    #[tokio::test(start_paused = true)]
    async fn long_frames_are_counted_by_their_bytes() {
        const BYTES: usize = 128 << 10;
        let pace = Pace::default();
        let end = Instant::now() + Duration::from_secs(20);
        let floods: Vec<_> = (0..8)
            .map(|_| {
                let loud = pace.clone();
                tokio::spawn(async move {
                    let (mut own, mut told) = (Allowance::of_stream(), 0);
                    while Instant::now() < end {
                        loud.admit(&mut own, BYTES).await;
                        told += BYTES;
                    }
                    told
                })
            })
            .collect();
        sleep(Duration::from_secs(15)).await;
        let (mut own, began) = (Allowance::of_stream(), Instant::now());
        pace.admit(&mut own, 100 << 10).await;
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        let mut told = 0;
        for flood in floods {
            told += flood.await.expect("it ends");
        }
        assert!(told <= (4_000 + 20 * 500 + 9 * 128) << 10, "{} KiB", told >> 10);
        assert!(told > 10_000 << 10, "what a gang may need: {} KiB", told >> 10);
    }
}
