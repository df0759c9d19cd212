//! What a person writes: a manifest or a profile, read and judged, with every problem told at once.
//!
//! ```text
//! text --yaml--> tree --read--> MoeJobSpec (as typed) + problems of shape     spec crd yaml read
//! text --profile--> Profile of a machine; --keys--> labels of the fabric      profile keys
//! MoeJobSpec x Profile --job--> Job (valid, defaulted), or every problem      job rules steps pod
//! Job --cost--> what it takes to plan it                                      cost
//! what may change of a spec, and what two runs of one job must share          changes identity
//! fields and their defaults for a person; a manifest with other values        explain edit
//! ```
//! What is decided about a job stands above: nothing here knows of pods or gangs. `status` is the
//! form of what is decided, as the definition has it.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod problem;
pub mod spec;
pub mod status;
pub mod words;
pub mod crd;
pub mod yaml;
pub mod read;
pub mod several;
pub mod profile;
pub mod preset;
pub mod keys;
pub mod pod;
pub mod workspace;
pub mod resources;
mod router;
pub mod devices;
pub mod cost;
mod steps;
mod rules;
pub mod job;
pub mod identity;
pub mod changes;
pub mod edit;
pub mod explain;
mod synonyms;

pub use job::Job;
