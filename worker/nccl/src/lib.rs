//! Safe, abortable NCCL, loaded at run time; no crate `nccl-rs` is published.
//!
//! ```text
//! Library::load()                      library.rs  the library, its version, its functions
//! UniqueId::new(&library) -> bytes     comm.rs     made by one rank, carried to all on the host
//! Comm::init(&library, seat, id, ..)   comm.rs     a communicator; split; poll; finalize
//! comm.all_reduce(from, to, op, on)    verbs.rs    enqueued on a stream, in one global order
//! comm.group(|group| group.send(..))   verbs.rs    several calls as one
//! abandon(comms, drained, graphs, ..)  end.rs      the way out when a peer is dead
//! log::read(lines)                     log.rs      which rings and trees it says it has built
//! ```
//! Nothing is linked: a machine without NCCL is told so by [`Library::load`]. A communicator is
//! made on the GPU whose primary context is current on the calling thread.
//!
//! **Buffers stay.** A verb only enqueues. The memory of a [`Span`] must stay allocated, and
//! must not be touched by other streams, until the verb is done on its stream.
//!
//! **One order.** All ranks issue the verbs of all communicators of a device in one global order.
//!
//! **Nobody notices a dead peer**, NCCL neither: its asynchronous error stays "success", and
//! kernels spin. Only a deadline or somebody's word ends an attempt. Every wait here has a deadline
//! and looks at the flag `stop` of [`Config`]. A thread outside raises the flag, the thread that
//! drives the device comes back with [`Error::Stopped`] and calls [`abandon`]. A [`Comm`] is not
//! `Sync`, so no thread can be inside a call while another one aborts: that would cost the CUDA
//! context. On a blocking communicator a call may never return; then the process has to be killed.

mod error;
mod library;
mod memory;
mod comm;
mod verbs;
mod end;
pub mod log;

pub use comm::{Comm, Config, Enter, Seat, State, UniqueId};
pub use end::abandon;
pub use error::Error;
pub use library::{ENVIRONMENT, Library, Version};
pub use memory::{DType, Span, Stream};
pub use verbs::{Group, Part, Reduce};
