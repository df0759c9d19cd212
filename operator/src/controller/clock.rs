//! The time of all decisions.

use moejob_plan::observed::Millis;
use std::time::{Instant, SystemTime};

/// Milliseconds since 1970, by the machine's clock.
pub fn now() -> Millis {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis() as Millis
}

/// Milliseconds since 1970 that never go back: the next leader reads them in the record.
#[derive(Clone, Copy)]
pub struct Clock {
    start: Instant,
    start_millis: Millis,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { start: Instant::now(), start_millis: now() }
    }

    pub fn now(&self) -> Millis {
        self.start_millis + self.start.elapsed().as_millis() as Millis
    }
}
