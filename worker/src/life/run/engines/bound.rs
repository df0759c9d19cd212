//! Where the engines of a worker run: planned before they start, looked at while they train.
//!
//! Only engines that are processes are bound. One engine that computes on processors is left as it
//! is: it has the worker's processors for itself.

use crate::life::affinity::Allowed;
use crate::life::binding::{self, Binding, apply, hca_setting};
use super::seats::{Look, Seats};
use crate::life::machine::{ENV_SYS, Machine};
use crate::life::topology;
use moejob_protocol::cpus::cpu_text;
use crate::life::machine::pci::Address;
use crate::life::run::engines::child::ENV_OPENS_GPU;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::Backend;
use moejob_protocol::pod::ENV_HCAS;

/// Between two looks at the threads of all engines: 10 s of heartbeats.
const TICKS_A_LOOK: u64 = 20;
/// Threads that compute or copy for an engine on a GPU: what moves state through pinned memory.
const GPU_THREADS: usize = 8;
const ENV_HCA: &str = "NCCL_IB_HCA";
/// Heaps of the C library. NCCL has new threads for each communicator, and a new thread takes a
/// heap of its own while there are few: an engine that outlives others grew by 15 MiB with each of
/// its first 20 recoveries. With one heap, what is free in it given back behind each attempt, it
/// does not grow (docs/benchmarks/memory.md).
const ENV_HEAPS: &str = "MALLOC_ARENA_MAX";
const HEAPS: u32 = 1;

/// Something to tell the leader, once: a reason in CamelCase, and for a person.
pub(super) type Warning = (&'static str, String);

#[derive(Default)]
pub(super) struct Bound {
    /// What this process might use before it bound its engines.
    allowed: Allowed,
    /// Read once: it does not change while a worker lives.
    machine: Option<Machine>,
    /// What `binding` was made for.
    of: Option<Of>,
    binding: Binding,
    /// The worker's own threads are bound.
    moved: bool,
    hcas: Option<String>,
    /// The variable that names NCCL's file of this machine.
    topology: Option<(&'static str, String)>,
    warnings: Vec<Warning>,
    seats: Seats,
    ticks: u64,
}

/// The engines that are to be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Of {
    /// The first one's number among those of this machine.
    pub first: u32,
    pub ranks: u32,
    /// Engines of all workers of this machine.
    pub all: u32,
    pub gpu: bool,
    pub threads: usize,
}

impl Of {
    pub fn new(config: &WorkerConfig, (index, of): (u32, u32)) -> Of {
        let ranks = config.ranks.max(1);
        let gpu = config.training.compute.backend == Backend::Cuda;
        let threads = match config.threads as usize {
            _ if gpu => GPU_THREADS,
            // As many as there are.
            0 => usize::MAX,
            threads => (threads / ranks as usize).max(1),
        };
        Of { first: index * ranks, ranks, all: of.max(1) * ranks, gpu, threads }
    }
}

impl Bound {
    pub fn new(allowed: Allowed) -> Bound {
        Bound { allowed, ..Bound::default() }
    }

    /// Plans the seats of the engines that are about to start, and takes the worker's own.
    pub fn prepare(&mut self, of: Of, processes: bool) {
        if !processes || (!of.gpu && of.ranks == 1) || self.of == Some(of) {
            return;
        }
        self.of = Some(of);
        let machine = self.machine.take().or_else(|| Machine::here().ok()).unwrap_or_default();
        let addresses = self.addresses(&machine, of);
        self.binding = self.plan(&machine, of, addresses.as_deref());
        if of.gpu {
            let own = addresses.iter().flatten().skip(of.first as usize);
            let own: Vec<Address> = own.take(of.ranks as usize).copied().collect();
            self.cards(&machine, &own);
            match topology::write(&machine) {
                Ok(file) => self.topology = file,
                Err(error) => self.warnings.push(("NoTopologyFile", error)),
            }
        }
        self.machine = Some(machine);
        self.seats.made = std::env::var_os(ENV_SYS).is_some();
        let Binding { worker, why, .. } = &self.binding;
        if !why.is_empty() {
            tracing::info!(why, "not all threads are bound to processors");
        }
        // Threads that were bound for other engines before go back to where they were.
        let own = worker.as_ref().or(self.moved.then_some(&self.allowed.share));
        if let Some(Err(error)) = own.map(|cpus| apply::bind_process(cpus)) {
            tracing::warn!(%error, "the worker's own threads are not bound");
        }
        self.moved = worker.is_some();
    }

    /// Of all GPUs of this machine's workers; none where it is not known which is which.
    fn addresses(&self, machine: &Machine, of: Of) -> Option<Vec<Address>> {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let files = apply::device_files();
        let all = binding::addresses(&machine.gpus, files, visible.as_deref());
        all.filter(|all| of.gpu && all.len() >= of.all as usize)
    }

    fn plan(&self, machine: &Machine, of: Of, addresses: Option<&[Address]>) -> Binding {
        let (first, ranks) = (of.first as usize, of.ranks as usize);
        if !of.gpu {
            // Workers of one machine have divided its processors before.
            return binding::bind(machine, &self.allowed.share, &vec![None; ranks], of.threads);
        }
        let Some(addresses) = addresses else {
            let why = "which of the GPUs in /sys this worker has is not plain".to_string();
            return Binding { engines: vec![None; ranks], worker: None, why };
        };
        // The seats of other workers' engines stay free, too.
        let all: Vec<Option<Address>> =
            addresses[..of.all as usize].iter().copied().map(Some).collect();
        let mut binding = binding::bind(machine, &self.allowed.all, &all, of.threads);
        binding.engines = binding.engines.split_off(first.min(binding.engines.len()));
        binding.engines.truncate(ranks);
        binding
    }

    /// The exact cards for NCCL, where the profile has some; what would make it take TCP is told.
    fn cards(&mut self, machine: &Machine, gpus: &[Address]) {
        let Ok(listed) = std::env::var(ENV_HCAS) else { return };
        let listed: Vec<Address> = listed.split(',').filter_map(Address::parse).collect();
        let small = apply::too_little_lockable(apply::locked_bytes_max());
        self.warnings.extend(small.map(|text| ("LockedMemory", text)));
        // What a person has named stays; a list of what to leave out is made exact.
        let named = std::env::var(ENV_HCA).ok().filter(|of| !of.starts_with('^'));
        if named.is_some() {
            return;
        }
        self.hcas = hca_setting(machine, gpus, &listed);
        if self.hcas.is_none() {
            let ports = machine.hcas.iter().flat_map(|hca| {
                hca.ports.iter().map(move |port| format!("{} {port}", hca.name))
            });
            let found: Vec<String> = ports.collect();
            let found = if found.is_empty() { "no card".to_string() } else { found.join(", ") };
            let text = format!(
                "no card of the profile is InfiniBand and ACTIVE: NCCL will take TCP. Below \
                 /sys/class/infiniband: {found}. `moejob doctor --profile NAME` in the pod tells \
                 more"
            );
            self.warnings.push(("NoInfiniBand", text));
        }
    }

    /// What the engine at `index` is started with.
    pub fn environment(&self, index: usize) -> Vec<(&'static str, String)> {
        let seat = self.binding.engines.get(index).and_then(Option::as_ref);
        let cpus = seat.map(|seat| (apply::ENV_CPUS, cpu_text(&seat.cpus)));
        let hcas = self.hcas.as_ref().map(|list| (ENV_HCA, list.clone()));
        let gpu = self.of.is_some_and(|of| of.gpu);
        let opens = gpu.then(|| (ENV_OPENS_GPU, "1".to_string()));
        // Not what a person has said.
        let unsaid = std::env::var_os(ENV_HEAPS).is_none();
        let heaps = (gpu && unsaid).then(|| (ENV_HEAPS, HEAPS.to_string()));
        let more = hcas.into_iter().chain(opens).chain(heaps);
        cpus.into_iter().chain(more).chain(self.topology.clone()).collect()
    }

    pub fn take_warnings(&mut self) -> Vec<Warning> {
        std::mem::take(&mut self.warnings)
    }

    /// Whether it is time to look at where threads run.
    pub fn is_due(&mut self) -> bool {
        self.ticks += 1;
        self.ticks.is_multiple_of(TICKS_A_LOOK)
    }

    /// How the engine at `index` is seated, the `life`-th that was started; none where engines of
    /// this kind are not bound.
    pub fn look(&mut self, index: usize, (life, pid): (u64, u32), rank: u32) -> Look {
        let Some(planned) = self.binding.engines.get(index) else { return Look::default() };
        let seat = planned.as_ref().ok_or(self.binding.why.as_str());
        self.seats.look(seat, (life, pid), rank)
    }

    /// An attempt begins.
    pub fn begin(&mut self) {
        self.seats.begin();
    }
}
