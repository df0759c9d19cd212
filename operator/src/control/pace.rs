//! How much the workers of a job may say: a heartbeat each half second and what a gang tells when
//! it breaks, never so much that the loop has no time for other jobs.
//!
//! Each stream has a small allowance of its own, so that a loud one never takes the heartbeats of
//! another; what goes beyond it comes out of the job's. Where both are used up the stream is read
//! later: its worker waits in its own socket.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Frames a second and at once, of one stream. Heartbeats are two a second.
const STREAM: (f64, f64) = (8.0, 32.0);
/// The same of all streams of a job beyond that: the steps of a small model are some hundred.
const JOB: (f64, f64) = (500.0, 4_000.0);
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

    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.left = (self.left + passed * self.rate).min(self.most);
        let has = self.left >= 1.0;
        self.left -= f64::from(u8::from(has));
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
    /// Waits until another frame of this stream may be told.
    pub async fn admit(&self, own: &mut Allowance) {
        while !own.take(Instant::now()) && !self.take() {
            sleep(PAUSE).await;
        }
    }

    fn take(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now())
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
                loud.admit(&mut own).await;
                told += 1;
            }
            told
        });
        let mut own = Allowance::of_stream();
        for _ in 0..40 {
            sleep(Duration::from_millis(500)).await;
            let began = Instant::now();
            pace.admit(&mut own).await;
            assert!(began.elapsed() < Duration::from_millis(10), "{:?}", began.elapsed());
        }
        let told = flood.await.expect("it ends");
        assert!(told < 4_000 + 32 + 20 * 520, "{told}");
        assert!(told > 10_000, "what a gang may need: {told}");
    }
}
