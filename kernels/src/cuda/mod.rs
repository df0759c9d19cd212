//! The CUDA device: driver, compiler and the mixture-of-experts layer on NVIDIA GPUs.
//!
//! ```text
//! Gpu::open(ordinal)            driver.rs    context, streams, events, memory
//! Compiler::load(sources)       compile.rs   .cu text -> cubin (on disk, or by NVRTC) -> module
//! Cubins::find(source)          cubins.rs    the cache, then what is shipped
//! StepKernels::sources(arch)    kernel_list.rs all that a model's step takes, without a GPU
//! DRIVER.require()              libraries.rs every function that is called is there
//! Arch::of(gpu)                 arch.rs      which kernels a GPU takes
//! GemmConfig::choose(shape)     tiles.rs     which tiles a product takes
//! Gemm::new(config)             gemm.rs      one grouped product
//! MoeLayer::new(desc)           layer.rs     forward, backward: a fixed list of launches (call.rs)
//! AttentionKernels::new(desc)   attention.rs forward, backward: a fixed list of launches
//! Products::new(gpu)            dense.rs     dense products, by cuBLASLt
//! GateKernels::new(shape)       gate.rs      routers beyond dropless top-k
//! CudaDevice::balance_losses    router.rs    balance, entropies, counts, and the cosine gate
//! Head::new(desc)               head.rs      the head with its loss: products, softmax between
//! CommLane::new(gpu, how)        comm_lane.rs a stream for collectives beside the ops, and marks
//! CudaDevice::flight_begins      token_lane.rs tokens in chunks beside the ops
//! CudaDevice::new(ordinal)      device.rs    the layer and the ops of a step as those of `Device`
//! CudaDevice::begin_capture     captured.rs  ops that are recorded once and repeated as one
//! CudaDevice::lane_begin        lane.rs      copies of state to the host beside the ops
//! Unit::source                  step_ops.rs  kernels of norms, optimizer ..., when needed
//! PeerLinks::new(desc)          peer.rs      rows and counts to the other GPUs of the node
//! PeerLinks::gather_rows(op)    peer_group.rs tokens of an expert group, by need, and sums of them
//! PeerLinks::share(arena)       peer_in_place.rs the same, read where it lies
//! PeerLinks::count_rows(op)     peer_count.rs how many bytes of them pass
//! Copies::new(gpu)               rates.rs     how fast bytes travel
//! Window::new(bytes)            window.rs    memory that other processes map, too
//! Growing::new(bytes)           growing.rs   addresses, and memory where it is needed
//! Arena::in_parts(..)           host_memory.rs memory of the host that kernels work on
//! GPU and host before an arena   room.rs      whether both have as much as is planned
//! inspect()                     doctor.rs    what this machine has and lacks
//! Said::beside(shown)            given.rs     what a container was given, by its variables
//! visible_gpus()                machine.rs   the same without a context, before a worker starts
//! ```
//! No CUDA is needed to build this: the driver and NVRTC are loaded when first used. Nothing here
//! waits for the device except `synchronize`, `fetch` and large copies, and no launch depends
//! on a number that only the device knows, so a layer can be captured into a graph.
//! Letters as in the crate: `T` tokens, `D` dim, `F` expert hidden, `E` experts, `K` top-k,
//! `R = T K` routed rows, `W` = 2 F gated, else F.

mod arch;
mod attention;
mod attention_shape;
mod cached_attention;
mod call;
mod captured;
mod comm_lane;
mod compile;
mod cubins;
mod dense;
mod convert;
mod wire;
mod dense_device;
mod dense_record;
mod device;
mod elementwise;
mod embed;
mod doctor;
mod driver;
mod error;
mod event;
mod fault;
mod gate;
mod gemm;
mod given;
mod growing;
mod head;
mod here;
mod host_memory;
mod kernel_list;
mod lane;
mod layer;
mod libraries;
mod machine;
mod measure;
mod nvml;
mod norm;
mod optimizer;
mod peer;
mod peer_count;
mod peer_group;
mod peer_in_place;
mod rates;
mod room;
mod route;
mod router;
mod shape;
mod staging;
mod step_ops;
mod tensor_map;
mod tiles;
mod token_lane;
mod transfer;
mod window;

pub use attention::AttentionKernels;
pub use attention_shape::AttentionDesc;
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
pub use gate::GateShape;
pub(crate) use gate::workspace_bytes as gate_workspace;
pub use fault::Fault;
pub use given::{ENV_GIVEN, NotGiven, given_words};
pub use head::Head;
pub use arch::{Arch, Unfit};
pub use gemm::{GemmConfig, Output, ProductOp};
pub use kernel_list::StepKernels;
pub use lane::Registered;
pub use layer::{
    Gradients, LayerError, MoeLayer, MoeTensors, Observer, Saved, Stacked,
    Weights,
};
pub use libraries::{Called, Cuda, called};
pub use machine::{VisibleGpu, keep_open, missing_libraries, shares, uuid_of, visible_gpus};
pub use measure::Measure;
pub use nvml::{
    GpuProcess, Limits, Monitor, Nvml, NvmlError, Reading, Remapped, Trouble, uuid_text,
};
pub use peer::{Awaited, COUNTS_MAX, MoveRows, PEERS_MAX, PeerDesc, PeerFailure, PeerLinks};
pub use peer_count::CountRows;
pub use peer_group::{GatherRows, Need, ScatterRows, rooms_of_group};
pub use rates::{Copies, CopyRates, peer_read_rate};
pub use shape::{MoeActivation, MoeDesc, Refusal};
pub use staging::Post;
pub use window::Window;
