//! A device and all that one rank computes with it: how it is opened and left.

use crate::data::DataError;
use crate::engine::beside::{ENV_OVERLAP, Overlap};
use crate::engine::flight::Flights;
use crate::engine::graphs::{ENV_GRAPHS, Graphs, Paces, Use};
use crate::engine::links::{Aside, Groups, Links, NoLinks, NotLeft, PATIENCE, PeerUse};
use crate::engine::looks::Looks;
use crate::engine::model::Model;
use crate::engine::patience::{Deadline, Patience, guard};
use crate::engine::places::Places;
use crate::engine::buckets::BucketSums;
use crate::engine::trace::Trace;
use crate::engine::validate::Favourites;
use crate::failure::chain;
use crate::gang::comm::{Comm, CommError};
use crate::state::rank::{DeviceError, RankState};
use moejob_kernels::cuda::{CudaError, Fault};
use moejob_kernels::{Device, KernelError, Pace, StepPhase};
use moejob_protocol::WorkerConfig;
use moejob_protocol::communication::CommunicationReport;
use moejob_protocol::config::{Backend, Exchange, TrainingConfig};
use moejob_protocol::memory::Shape;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::rails::Rails;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a step did not happen.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Data(#[from] DataError),
    /// Nothing of the step counts.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a device does not go on that is one of `world`: what its GPU says, and all of it in words.
/// One that waits for others is not to blame for what becomes of them.
pub(crate) fn device_error(gpu: Option<&CudaError>, words: String, world: u32) -> DeviceError {
    match gpu {
        Some(CudaError::GivenUp { why }) => DeviceError::GivenUp(why.clone()),
        Some(CudaError::Late { .. }) if world > 1 => DeviceError::Hangs(words),
        Some(error) if error.is_room() => DeviceError::Full(words),
        _ => DeviceError::Failed(words),
    }
}

/// The first failure of `device` that is known of, where it is one of `world`.
///
/// # Errors
/// See [`DeviceError`].
pub(crate) fn check(device: &Device, world: u32) -> Result<(), DeviceError> {
    device.check().map_err(|error| device_error(error.of_gpu(), chain(error), world))
}

/// Why a rank has no engine.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Links(#[from] NoLinks),
}

/// The GPU of a rank: the ranks of a worker follow each other, a device each, from the one that the
/// worker names to its engine on; workers of one machine share its devices out so.
pub const ENV_DEVICE: &str = "MOEJOB_DEVICE";
/// The processors of an engine, where its worker has bound it: a list as the kernel writes it.
pub const ENV_CPUS: &str = "MOEJOB_CPUS";

/// The sets of ranks that share the experts out; with rails those of each node of them, since
/// between nodes tokens travel from rank to rank.
fn expert_groups(mesh: &Mesh, rails: Option<Rails>) -> Vec<Vec<u32>> {
    if mesh.ep == 1 {
        return Vec::new();
    }
    let several = rails.filter(|rails| rails.places > 1);
    let size = several.map_or(mesh.ep as usize, |rails| rails.places);
    let groups = (0..mesh.world()).map(|rank| mesh.expert_group(rank));
    groups.flat_map(|group| group.chunks(size).map(<[u32]>::to_vec).collect::<Vec<_>>()).collect()
}

/// By which tokens of expert groups travel between nodes; none: from each rank to each.
fn rails(config: &WorkerConfig, rank: u32) -> Option<Rails> {
    let (mesh, ranks) = (&config.layout.mesh, config.ranks.max(1));
    let wanted = config.exchange == Exchange::Hierarchical;
    let rails = Rails::of(mesh, ranks).filter(|_| wanted);
    if wanted && rails.is_none() && !ranks.is_multiple_of(mesh.ep) && rank == 0 {
        tracing::warn!(
            "tokens travel from each rank to each, for nodes have different numbers of ranks of an \
             expert group"
        );
    }
    rails
}

/// How buckets travel beside the ops; none: they do not.
fn aside(places: &Places) -> Option<Aside> {
    let mut groups = places.groups();
    groups.sort();
    let said = std::env::var(ENV_OVERLAP).ok();
    let overlap = Overlap::parse(said.as_deref(), places.mostly_shared())?;
    Some(Aside { groups, marks: places.mark_count(), overlap })
}

/// Among those that this process sees.
pub(crate) fn device_of(rank: u32, ranks: u32) -> usize {
    let named = std::env::var(ENV_DEVICE).ok().and_then(|named| named.parse().ok());
    named.unwrap_or((rank % ranks) as usize)
}

/// A device and all that one rank computes with it. It knows the other ranks by its links alone.
#[derive(Debug)]
pub struct Engine {
    // Dropped first: a device ends when nothing on it waits for peers any more.
    pub links: Links,
    pub model: Model,
    pub gradients: BucketSums,
    pub(crate) training: TrainingConfig,
    pub(crate) favourites: Favourites,
    /// Steps in whose next run a number is broken.
    pub(super) spoiled: Vec<u64>,
    /// The step at which the device is broken, and how.
    pub(super) fault: Option<(u64, Fault)>,
    pub(super) patience: Patience,
    pub(super) deadline: Arc<Deadline>,
    /// Seconds of each phase since they were last asked for.
    pub(super) phases: [f64; StepPhase::COUNT],
    /// How the host kept pace in them.
    pub(super) paces: Paces,
    pub(super) looks: Looks,
    pub(super) trace: Option<Trace>,
    pub(super) flights: Flights,
    pub(super) graphs: Graphs,
}

impl Engine {
    /// Plans and reserves the memory of `rank`; there is no state yet. Its GPU begins to meet
    /// others, for which `links.meet()` waits before the first step.
    ///
    /// # Errors
    /// The device cannot be made, lacks a kernel, has too little memory, or cannot be connected.
    pub fn open(config: &WorkerConfig, rank: u32, comm: Comm) -> Result<Engine, OpenError> {
        Engine::open_on(config, rank, comm, device_of(rank, config.ranks.max(1)))
    }

    /// The same on the GPU of this number, if its device is one.
    ///
    /// # Errors
    /// See [`Engine::open`].
    pub fn open_on(
        config: &WorkerConfig,
        rank: u32,
        comm: Comm,
        gpu: usize,
    ) -> Result<Engine, OpenError> {
        let (training, ranks) = (&config.training, config.ranks.max(1));
        let began = Instant::now();
        let told = |what| tracing::debug!(seconds = began.elapsed().as_secs_f64(), what);
        let device = match training.compute.backend {
            Backend::Cpu => {
                let here = std::thread::available_parallelism().map_or(1, usize::from);
                // The ranks of a worker share its processors, unless each has its own.
                let threads = match config.threads as usize {
                    0 if std::env::var_os(ENV_CPUS).is_some() => here,
                    0 => here / ranks as usize,
                    threads => threads / ranks as usize,
                };
                Device::cpu(threads.max(1), 0)?
            }
            Backend::Cuda => Device::cuda(gpu, 0)?,
        };
        told("a device");
        let mut shape = Shape::new(&config.model, &config.layout, rank, training);
        shape.documents = config.data.reset_at_boundaries;
        shape.masked = config.data.mask_at_boundaries && !shape.on_cpu;
        shape.rails = rails(config, rank);
        let mut model = Model::on(device, shape, &config.model, &config.layout, rank, training)?;
        told("its memory");
        let links = match training.compute.backend {
            // Nothing is beside what processors compute: the fewer exchanges, the better.
            Backend::Cpu => Links::new(comm).one_by_one(),
            Backend::Cuda => {
                let aside = aside(&model.places);
                // Where buckets travel beside the ops, they do so by communicators of their own.
                let mut groups = match aside {
                    None => model.places.groups(),
                    Some(_) => Vec::new(),
                };
                if !model.shape.by_need() {
                    groups.extend(expert_groups(&config.layout.mesh, model.shape.rails));
                }
                groups.sort();
                groups.dedup();
                let parcels = model.group.partners();
                let groups = Groups { shared: groups, parcels };
                let (aside, near) = (aside.as_ref(), model.near(PeerUse::said(), PATIENCE));
                Links::between_gpus(comm, &mut model.device, &groups, aside, near.as_ref())?
            }
        };
        told("the way to its links");
        Ok(Engine::new(model, training, links))
    }

    pub fn new(model: Model, training: &TrainingConfig, mut links: Links) -> Engine {
        let deadline = Deadline::new();
        if model.device.as_cuda().is_some() {
            guard(&deadline, model.rank, links.comm().abort_handle());
        }
        let gradients = BucketSums::new(&model);
        let favourites = Favourites::default();
        let (training, spoiled) = (training.clone(), Vec::new());
        let (phases, trace) = ([0.0; StepPhase::COUNT], None);
        let (fault, patience) = (None, Patience::default());
        let (flights, paces) = (Flights::default(), Paces::default());
        let looks = Looks::default();
        let graphs = Graphs::new(Use::parse(std::env::var(ENV_GRAPHS).ok().as_deref()));
        Engine {
            links,
            model,
            gradients,
            training,
            favourites,
            spoiled,
            fault,
            patience,
            deadline,
            phases,
            paces,
            looks,
            trace,
            flights,
            graphs,
        }
    }

    /// Tokens of its expert group travel through windows from now on, if the group can have some:
    /// as [`ENV_PEER`](crate::engine::links::ENV_PEER) does from the begin of an attempt. All ranks
    /// call it alike, between steps. A kernel waits so long for a peer at most.
    ///
    /// # Errors
    /// A peer is lost.
    pub fn open_windows(
        &mut self,
        wanted: PeerUse,
        patience: Duration,
    ) -> Result<bool, CommError> {
        match self.model.near(wanted, patience) {
            Some(near) => self.links.open_windows(&self.model.device, &near),
            None => Ok(false),
        }
    }

    /// The attempt ends well: waits until what is under way beside the ops has arrived, here and on
    /// all ranks. A rank that left before would take its part away from the others. A peer that is
    /// lost now changes nothing.
    ///
    /// # Errors
    /// The device failed.
    pub fn all_arrived(&mut self) -> Result<(), StepError> {
        if self.model.device.as_cuda().is_none() || !self.links.work_beside() {
            return Ok(());
        }
        let arrived = self.model.finish();
        let told = self.links.comm().gather_all(&[], 0);
        // A wait that was given up is the peers' fault.
        if let Err(error) = told.and_then(|_| self.links.check()) {
            tracing::info!("a rank left early: {error}");
            return Ok(());
        }
        Ok(arrived?)
    }

    /// The attempt is over. See [`Links::leave`].
    ///
    /// # Errors
    /// What runs on the device does not end: the process has to.
    pub fn leave(&mut self) -> Result<(), NotLeft> {
        let began = Instant::now();
        let left = self.links.leave(&self.model.device);
        tracing::debug!(seconds = began.elapsed().as_secs_f64(), "its links are left");
        // A step may be under way that waits for nobody, and writes to memory of the host.
        if left.is_ok() && !self.is_settled() {
            let _ = self.model.device.finish();
        }
        // Nothing of a device that has failed is given back: that could wait for a kernel.
        if left.is_ok() && self.model.device.check().is_ok() {
            self.forget_graphs();
        }
        left
    }

    /// Writes a trace of some of the steps to come, see [`Engine::take_traced`].
    pub fn trace(&mut self, trace: Trace) {
        self.trace = Some(trace);
    }

    /// Seconds of each phase since the last call, by its number.
    pub fn take_phases(&mut self) -> [f64; StepPhase::COUNT] {
        std::mem::take(&mut self.phases)
    }

    /// How long the host took to enqueue a step, and the device to do it, without its data: means
    /// since the last call. None: no step was done.
    pub fn take_pace(&mut self) -> Option<Pace> {
        std::mem::take(&mut self.paces).mean()
    }

    /// What travelled in a step that was looked at, once it is known.
    pub fn take_communication(&mut self) -> Option<CommunicationReport> {
        self.looks.take()
    }

    /// From now on one of so many steps is looked at, at least 4, on all ranks alike or not.
    pub fn look_each(&mut self, steps: u64) {
        self.looks.each(steps);
    }

    /// Once all traced steps are done: whether their file could be written.
    pub fn take_traced(&mut self) -> Option<std::io::Result<()>> {
        let trace = self.trace.take_if(|trace| trace.is_over())?;
        Some(trace.write(&mut self.model.device))
    }

    /// Breaks a gradient of the next run of `step`, as a fault of the machine would: for tests of
    /// what happens then.
    pub fn spoil(&mut self, step: u64) {
        self.spoiled.push(step);
    }

    /// Breaks the device in `step`, as programs and hardware do.
    pub fn inject(&mut self, step: u64, fault: Fault) {
        self.fault = Some((step, fault));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each set of ranks that has a communicator for tokens.
    #[test]
    fn with_rails_a_node_has_a_communicator_in_place_of_its_group() {
        let sets = |mesh: Mesh, ranks| {
            let mut sets = expert_groups(&mesh, Rails::of(&mesh, ranks));
            sets.sort();
            sets.dedup();
            sets
        };
        let of = Mesh::data_parallel;
        assert_eq!(sets(of(4, 4), 2), [[0, 1], [2, 3]]);
        assert_eq!(sets(of(8, 4), 2), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        // Rails of one rank on each node add by their group's.
        assert_eq!(sets(of(4, 2), 1), [[0, 1], [2, 3]]);
        // No rails: on one node, or uneven.
        assert_eq!(sets(of(4, 4), 4), [[0, 1, 2, 3]]);
        assert_eq!(sets(of(3, 3), 2), [[0, 1, 2]]);
        assert!(sets(of(4, 1), 2).is_empty());
    }
}
