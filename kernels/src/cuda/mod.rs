//! The CUDA machine: driver, compiler, memory, streams and products on NVIDIA GPUs. It knows no op.
//!
//! ```text
//! Gpu::open(ordinal)            driver.rs      context, streams, memory; event.rs
//! Compiler::load(sources)       compile.rs     .cu text -> cubin (on disk, or by NVRTC) -> module
//! Cubins::find(source)          cubins.rs      the cache, then what is shipped
//! DRIVER.require()              libraries.rs   every function that is called is there
//! Arch::of(gpu)                 arch.rs        which kernels a GPU takes
//! Gemm::new(config)             gemm/          one grouped product, and which tiles it takes
//! Products::new(gpu)            dense.rs       dense products, by cuBLASLt
//! CudaDevice::new(ordinal)      device.rs      one arena, one stream, waits that end
//! CudaDevice::enqueue(op)       enqueue.rs     kernels of units and descriptions, made once
//! CudaDevice::begin_capture     captured.rs    ops that are recorded once and repeated as one
//! CommLane::new(gpu, how)       comm_lane.rs   a stream for collectives beside the ops, and marks
//! CudaDevice::flight_begins     token_lane.rs  tokens in chunks beside the ops
//! CudaDevice::lane_begin        lane.rs        copies of state to the host beside the ops
//! Copies::new(gpu)              rates.rs       how fast bytes travel
//! Window::new(bytes)            window.rs      memory that other processes map, too
//! Growing::new(bytes)           growing.rs     addresses, and memory where it is needed
//! Arena::in_parts(..)           host_memory.rs memory of the host that kernels work on
//! room::lack(gpu, wanted)       room.rs        whether GPU and host have as much as is planned
//! inspect()                     doctor.rs      what this machine has and lacks
//! Said::beside(shown)           given.rs       what a container was given, by its variables
//! visible_gpus()                machine.rs     GPUs without a context, before a worker starts
//! ```
//! No CUDA is needed to build this: the driver and NVRTC are loaded when first used. Nothing here
//! waits for the device except `synchronize`, `fetch` and large copies, and no launch depends
//! on a number that only the device knows, so a layer can be captured into a graph.

pub(crate) mod arch;
pub(crate) mod captured;
pub(crate) mod comm_lane;
pub(crate) mod compile;
pub(crate) mod cubins;
pub(crate) mod dense;
pub(crate) mod dense_device;
pub(crate) mod dense_record;
pub(crate) mod device;
pub(crate) mod doctor;
pub(crate) mod driver;
pub(crate) mod enqueue;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod fault;
pub(crate) mod gemm;
pub(crate) mod given;
pub(crate) mod growing;
pub(crate) mod host_memory;
pub(crate) mod lane;
pub(crate) mod libraries;
pub(crate) mod machine;
pub(crate) mod measure;
pub(crate) mod nvml;
pub(crate) mod rates;
pub(crate) mod room;
pub(crate) mod staging;
pub(crate) mod tensor_map;
pub(crate) mod token_lane;
pub(crate) mod transfer;
pub(crate) mod window;

pub use arch::{Arch, Unfit};
pub use captured::{Captured, Graph};
pub use comm_lane::{Beside, KeptFree};
pub use compile::{Compiler, Module, Source, compile_into};
pub use cubins::{default_cache_dir, shipped_dir};
pub use dense::{DenseShape, Products};
pub use dense_device::NotTaken;
pub use dense_record::{DenseChoices, DenseRecord, NoChoices, NoRecord, OtherDevice};
pub use device::{CudaDevice, Watch};
pub use doctor::{Inspection, inspect};
pub use driver::{Arena, Function, Gpu, Launch, PinnedBuffer, Stream};
pub use error::CudaError;
pub use event::Event;
pub use fault::Fault;
pub use gemm::{GemmConfig, ProductOp};
pub use given::{ENV_GIVEN, NotGiven, given_words, shares};
pub use lane::Registered;
pub use libraries::{Called, Cuda, called};
pub use machine::{VisibleGpu, keep_open, missing_libraries, uuid_of, visible_gpus};
pub use measure::Measure;
pub use nvml::{
    GpuProcess, Limits, Monitor, Nvml, NvmlError, Reading, Remapped, Trouble, uuid_text,
};
pub use rates::{Copies, CopyRates, peer_read_rate};
pub use staging::Post;
pub use window::Window;
