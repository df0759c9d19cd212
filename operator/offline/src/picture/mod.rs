//! The plan as a picture: nodes by leaf, their NUMA nodes, devices and cards, ranks and experts,
//! expert groups, and NCCL's ring and trees; with a loss, before and after it.
//!
//! ```text
//! Job x nodes x what is lost -> scenes -> svg, or a page with it and all words of the plan
//! ```
//!
//! Nothing is fetched and nothing runs: the page has no script. Names are those of others, so each
//! is made printable and escaped.

mod draw;
mod scene;

pub use draw::{html, svg};
pub use scene::{Picture, Scene, Seat, picture};
