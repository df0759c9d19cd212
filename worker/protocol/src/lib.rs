//! What the operator and the workers agree on: types, and the pure arithmetic that both must do
//! alike.
//!
//! ```text
//! ModelConfig --params()--> Param table (logical names, shapes)          model
//! ModelConfig --slices()--> what is computed of its experts, and Cut: where that lies   slices
//! Mesh --coord()/rank()--> who is where; --micro_batches()--> whose rows  mesh
//! Layout { Mesh, Placement } --Holders, Owners, Buckets--> whose each element is  layout, owners,
//!                                                                         buckets
//! loads by expert --Replicas--> copies in spare slots; --Shares--> who computes which tokens;
//! --Balance--> when that changes                    by_load, replicas, flow, shares, balance
//! Rails { nodes x places of a group } --> who sends what to whom, whose rows lie where    rails
//! Wire x kind of activations --Formats--> what rows that travel consist of              formats
//! Zero x passes of a round --Turns--> which dense buckets are whole, where and when         zero
//! WorkerConfig (down), Up (up), Down (down)                       config, message, preflight,
//!                                                                         pair, links
//! Up --cut(), excess()--> what a leader takes of it                       bounds
//! CheckpointManifest                                                      checkpoint
//! what cannot be changed of a job --> the hashes that tie checkpoints to it    canonical
//! model x training x ranks that share experts --> sizes that kernels refuse   kernel_sizes
//! model x layout --> buffers, bytes                               buffers, memory, workspace
//! ```
//!
//! No I/O, no clock, no async: a value in, a value out. Anything that two processes must
//! compute alike lives here and nowhere else.

pub mod mesh;
pub mod model;
pub mod slices;
pub mod flops;
pub mod router;
pub mod layout;
pub mod by_load;
pub mod replicas;
pub mod flow;
pub mod shares;
pub mod balance;
pub mod rows;
pub mod owners;
pub mod buckets;
pub mod rails;
pub mod formats;
pub mod zero;
pub mod memory;
pub mod kernel_sizes;
pub mod workspace;
pub mod buffers;
pub mod config;
pub mod members;
pub mod preflight;
pub mod pair;
pub mod links;
pub mod communication;
pub mod seat;
pub mod message;
pub mod bounds;
pub mod cpus;
pub mod pod;
pub mod topology;
pub mod checkpoint;
pub mod canonical;

pub mod report;

pub use checkpoint::CheckpointManifest;
pub use config::WorkerConfig;
pub use layout::{Layout, Placement};
pub use mesh::Mesh;
pub use message::{Down, Up};
pub use model::ModelConfig;

/// Version of everything in this crate that crosses a process or reaches a disk.
pub const PROTOCOL_VERSION: u32 = 1;
