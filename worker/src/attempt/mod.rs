//! One attempt of a rank: what it begins with, its steps, what is due between them, its records.

pub mod api;
pub mod gauge;
pub mod pace;
pub mod trainer;
pub(crate) mod start;
mod stop;
mod restore;
mod steps;
mod snapshots;
mod courier;
mod telling;
mod turns;
mod resume;
mod together;
mod products;
pub mod records;
pub mod recorder;
pub mod saves;
