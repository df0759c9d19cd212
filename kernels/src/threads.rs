//! Threads that the system may refuse: under a limit of processes (`pids.max`, `ulimit -u`) work is
//! done on fewer of them. `Scope::spawn` would panic.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, Result, Scope, ScopedJoinHandle};

/// Work that was begun, or is done.
#[derive(Debug)]
pub enum Work<'scope, T> {
    Begun(ScopedJoinHandle<'scope, T>),
    Done(T),
}

/// Begins `work` on a thread of its own, or does it here and now where the system gives none. So it
/// may wait for nothing that its caller does later.
pub fn begin<'scope, T, F>(scope: &'scope Scope<'scope, '_>, work: F) -> Work<'scope, T>
where
    F: FnOnce() -> T + Send + 'scope,
    T: Send + 'scope,
{
    // A thread that is refused takes along what it was given.
    let kept = Arc::new(Mutex::new(Some(work)));
    let given = Arc::clone(&kept);
    match Builder::new().spawn_scoped(scope, move || take(&given)()) {
        Ok(thread) => Work::Begun(thread),
        Err(_) => Work::Done(take(&kept)()),
    }
}

fn take<F>(kept: &Mutex<Option<F>>) -> F {
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    kept.take().expect("a thread begins once, or never")
}

impl<T> Work<'_, T> {
    /// # Errors
    /// The panic of a thread; one of work that was done here has gone on there.
    pub fn join(self) -> Result<T> {
        match self {
            Work::Begun(thread) => thread.join(),
            Work::Done(done) => Ok(done),
        }
    }
}
