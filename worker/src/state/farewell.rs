//! What an engine's worker hears of the engine's slots.

use crate::state::slot::Slot;
use std::fmt;
use std::sync::Arc;

/// What an engine tells its worker of a slot.
#[derive(Debug)]
pub enum OfSlot<'a> {
    Made(&'a Slot),
    /// The one with this number ([`Slot::id`]) is closed here: nothing of it is left in this
    /// process, which had it open one time more before.
    Closed(u64),
}

pub(super) type Tell = Arc<dyn Fn(OfSlot<'_>) + Send + Sync>;

/// Tells of a slot's end. It is the last part of one, so file and memory are closed by then.
pub(super) struct Farewell {
    pub id: u64,
    /// None where it is nobody else's.
    pub to: Option<Tell>,
}

impl fmt::Debug for Farewell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Farewell").field(&self.id).finish()
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        if let Some(tell) = &self.to {
            tell(OfSlot::Closed(self.id));
        }
    }
}
