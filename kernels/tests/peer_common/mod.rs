//! Ranks whose links are windows, all on one GPU.
#![allow(dead_code)]

use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use moejob_kernels::cuda::{Arena, Compiler, Gpu, Stream, default_cache_dir};
use moejob_kernels::peer::{PeerDesc, PeerLinks};
use moejob_kernels::{ArenaPlan, Buffer, DType};

pub const ROOMS: usize = 8 << 20;
const ARENA: usize = 32 << 20;

pub struct Rank {
    pub links: PeerLinks,
    pub arena: Arena,
    pub stream: Stream,
    pub plan: ArenaPlan,
    /// What travels lies where the others read it.
    pub in_place: bool,
}

impl Rank {
    pub fn words(&mut self, values: &[u32]) -> Buffer {
        let buffer = self.plan.alloc(DType::U32, values.len());
        self.arena.write(buffer, values).expect("written");
        buffer
    }

    /// Memory for what travels.
    pub fn alloc(&mut self, dtype: DType, len: usize) -> Buffer {
        match self.in_place {
            true => self.plan.alloc_shared(dtype, len),
            false => self.plan.alloc(dtype, len),
        }
    }

    pub fn room(&self, plan: &mut ArenaPlan, bytes: usize) -> Vec<u8> {
        let copy = plan.alloc(DType::U8, bytes);
        self.links.copy_room((&self.stream, &self.arena), 0, copy).expect("enqueued");
        self.stream.synchronize().expect("done");
        let mut out = vec![0_u8; bytes];
        self.arena.read_into(copy, &mut out).expect("read");
        out
    }
}

/// `count` ranks on GPU 0, connected; none without a GPU.
pub fn node(count: usize, patience: Duration) -> Option<Vec<Rank>> {
    // Ranks wait for each other, so that no two may share a queue of the GPU.
    static QUEUES: Once = Once::new();
    // SAFETY: before the driver is opened, and other threads of this test wait here.
    QUEUES.call_once(|| unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") });
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return None;
        }
    };
    let compiler = Compiler::new(&gpu, default_cache_dir()).expect("NVRTC");
    let rank = |me| {
        let desc = PeerDesc { positions: count, me, rooms: ROOMS, patience };
        let mut links = PeerLinks::new(&compiler, desc).expect("a window");
        let (arena, stream) = (Arena::in_parts(&gpu, ARENA, 0, ARENA), gpu.stream());
        let (arena, stream) = (arena.expect("memory"), stream.expect("a stream"));
        links.share(&arena);
        Rank { links, arena, stream, plan: ArenaPlan::new(), in_place: false }
    };
    let mut ranks: Vec<Rank> = (0..count).map(rank).collect();
    for to in 0..count {
        for from in (0..count).filter(|from| *from != to) {
            let files = ranks[from].links.export().expect("files");
            ranks[to].links.connect(from, files).expect("opened");
        }
    }
    Some(ranks)
}

/// One test at a time: while a kernel waits for a peer, the driver may hold up who loads others.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub const LONG: Duration = Duration::from_secs(20);

/// Reproducible numbers below `below`.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}
