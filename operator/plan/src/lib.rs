//! From a manifest to a plan, without a clock, I/O, async or randomness: equal inputs, equal plans.
//!
//! ```text
//! text --yaml--> tree --read--> MoeJobSpec (as typed) + problems of shape     spec crd yaml read
//! MoeJobSpec --job--> Job (valid, defaulted), or every problem               job rules
//! Job x machine --sizes--> the gangs that work: mesh, placement, memory      profile sizes
//! Observed --decide::plan--> Plan { actions, why, requeue }                  observed decide track
//! Plan --check--> what must always hold                                      check
//! Observed --status--> MoeJobStatus                                          status engines
//! Cluster --allocate--> the nodes of each job                        fabric topology allocate
//! Profile x GPUs x bytes --travel--> seconds of an exchange between GPUs     travel
//! Job x layout --traffic--> what a rank sends in a step, by verb             traffic
//! Measured x expect, pairs --preflight--> good and bad nodes                 preflight
//! Job x birth --pod--> Pod, NetworkPolicy, PodDisruptionBudget               pods overlay pod
//! ```

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod problem;
pub mod spec;
pub mod words;
pub mod crd;
pub mod yaml;
pub mod read;
pub mod several;
pub mod profile;
pub mod travel;
pub mod traffic;
pub mod preset;
pub mod fabric;
pub mod seats;
pub mod topology;
pub mod placement;
pub mod pod;
pub mod overlay;
pub mod pods;
pub mod resources;
pub mod allocate;
mod canonical;
mod router;
pub mod devices;
pub mod cost;
mod rules;
pub mod job;
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
pub mod changes;
pub mod edit;
pub mod explain;
pub mod lead;
pub mod orphans;
pub mod locations;
pub mod offline;
pub mod picture;
pub mod preflight;

pub use decide::{Action, Plan, plan};
pub use job::Job;
pub use observed::Observed;
