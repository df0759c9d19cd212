//! Storage as a person's command reads it.

use moe_worker::disk::{Disk, Progress, Stamina, Trouble};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Storage that stumbles is waited for, as a job waits for it; it is said on the terminal.
pub fn patient() -> Disk {
    let stamina = Stamina {
        longest: Duration::from_secs(3600),
        retry: Duration::from_millis(250),
        // Whoever may not read what is named has a mistake to mend.
        known: Arc::new(AtomicBool::new(false)),
    };
    let (trouble, told) = (Trouble::default(), AtomicU64::new(0));
    let stumbling = trouble.clone();
    let progress = Progress::default().seen_by(move |_, _| {
        if let Some(last) = stumbling.last().filter(|last| last.lasted.is_none())
            && told.swap(last.number, Ordering::Relaxed) != last.number
        {
            eprintln!("moejob: {}; it is tried again (Ctrl-C to end)", last.why);
        }
    });
    Disk::real().counting(progress).patient(stamina, trouble)
}
