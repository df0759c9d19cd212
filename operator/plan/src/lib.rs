//! What is decided about jobs. No clock, I/O, async or randomness: equal inputs, equal plans.
//!
//! ```text
//! Job x machine --sizes--> the gangs that work: mesh, placement, memory      placement fits launch
//! Observed --decide::plan--> Plan { actions, why, requeue }                  observed decide track
//! Plan --check--> what must always hold                                      check
//! Observed --status--> MoeJobStatus                                          status engines
//! Cluster --allocate--> the nodes of each job                                allocate
//! Job x layout --traffic--> what a rank sends in a step, by verb             traffic
//! Measured x expect, pairs --preflight--> good and bad nodes                 preflight
//! Job x birth --pod--> Pod, NetworkPolicy, PodDisruptionBudget               pods overlay
//! what happens --JobLoop--> effects                                          lead record
//! ```
//! Manifests are read in `moejob_manifest`, and the network is known to `moejob_fabric`.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod traffic;
pub mod seats;
pub mod placement;
pub mod overlay;
pub mod pods;
pub mod allocate;
pub mod launch;
pub mod observed;
pub mod reasons;
pub mod decide;
pub mod engines;
pub mod repeat;
pub mod recovery;
pub mod track;
pub mod check;
pub mod status;
pub mod record;
pub mod lead;
pub mod orphans;
pub mod locations;
pub mod fits;
pub mod preflight;

pub use decide::{Action, Plan, plan};
pub use observed::Observed;
