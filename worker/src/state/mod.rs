//! What a rank owns of the training's state, and how it moves between ranks.

pub mod checksum;
pub mod copy;
pub mod farewell;
mod holders;
pub mod rank;
pub mod slot;
pub mod slots;
pub mod snapshot;
pub mod moves;
