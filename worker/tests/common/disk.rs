//! Storage that does as a test says.

use moe_worker::checkpoint::{Disk, Effect, Faults};
use std::io::Result;
use std::sync::{Arc, Condvar, Mutex};

/// Answers by a rule.
struct By<F>(F);

impl<F> std::fmt::Debug for By<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("By")
    }
}

impl<F: Fn(Effect) -> Result<()> + Send + Sync> Faults for By<F> {
    fn before(&self, effect: Effect) -> Result<()> {
        self.0(effect)
    }
}

pub fn faulty(rule: impl Fn(Effect) -> Result<()> + Send + Sync + 'static) -> Disk {
    Disk::with_faults(Arc::new(By(rule)))
}

/// Opened by one thread, waited for by others.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<(u32, bool)>, Condvar)>);

impl Gate {
    /// Waits here until the gate is open.
    pub fn pass(&self) {
        let (state, changed) = &*self.0;
        let mut state = state.lock().expect("no panic");
        state.0 += 1;
        changed.notify_all();
        drop(changed.wait_while(state, |state| !state.1).expect("no panic"));
    }

    pub fn wait_for_somebody(&self) {
        let (state, changed) = &*self.0;
        let state = state.lock().expect("no panic");
        drop(changed.wait_while(state, |state| state.0 == 0).expect("no panic"));
    }

    pub fn open(&self) {
        self.0.0.lock().expect("no panic").1 = true;
        self.0.1.notify_all();
    }
}
