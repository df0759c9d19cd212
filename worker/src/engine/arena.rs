//! Where the buffers of a step lie in a device's memory.
//!
//! Routed rows have addresses for the worst case, that all tokens of an expert group choose this
//! rank's experts. A processor's memory comes with the first touch. A GPU has memory for the worst
//! case where that fits. Else it has memory for `routedHeadroom` times the rows of even routing,
//! and more when a step has found too little ([`Growing`]).

use crate::engine::machine::device_error;
use crate::engine::model::Model;
use crate::engine::step::{Engine, StepError};
use crate::failure::chain;
use moejob_kernels::{ArenaPlan, Buffer, DType, Device};
use moejob_protocol::buffers::Buffers;
use moejob_protocol::memory::{CONTEXT_BYTES, Kind, Planner, Rows, Shape};
use moejob_protocol::model::ModelConfig;

/// The device's arena, from the list that the plan counts.
struct ArenaPlanner<'a> {
    shape: &'a Shape,
    plan: ArenaPlan,
    /// What has memory in part, if anything is to.
    growing: Option<Growing>,
}

/// Buffers of routed rows that have memory for some of those of the worst case.
#[derive(Debug, Default)]
pub(crate) struct Growing(Vec<Buffer>);

/// Kernels read whole tiles of rows, of which the last may end behind the last row.
const TILE_ROWS: usize = 1024;
/// Of a GPU's memory, in percent: where more is planned in the worst case, routed rows grow. The
/// rest is what is allocated later: graphs, tables, what copies of state pass through.
const PLANNED_MAX: usize = 85;
/// `grows`: they grow however much memory there is, to try it.
const ENV_ROUTED: &str = "MOEJOB_ROUTED";

/// All buffers, their plan, and what of it grows, with memory for `rows` at first. A GPU needs
/// `beside` bytes beside the arena.
pub(super) fn lay_out(
    config: &ModelConfig,
    shape: &Shape,
    device: &Device,
    (beside, rows): (usize, usize),
) -> (Buffers<Buffer>, ArenaPlan, Option<Growing>) {
    let planned = |growing| {
        let mut planner = ArenaPlanner { shape, plan: ArenaPlan::new(), growing };
        let buffers = Buffers::plan(config, shape, &mut planner);
        (buffers, planner.plan, planner.growing)
    };
    let whole = planned(None);
    let worst = whole.1.bytes() + whole.1.shared_bytes() + beside;
    if shape.expert_parallel == 1 || !grows(device, worst) {
        return whole;
    }
    let (buffers, mut plan, growing) = planned(Some(Growing::default()));
    plan.commit(growing.iter().flat_map(|growing| growing.pieces(shape, rows)));
    (buffers, plan, growing)
}

/// Whether routed rows have memory for fewer than the worst case, which takes so many bytes.
fn grows(device: &Device, worst: usize) -> bool {
    let Some(share) = device.memory_share() else { return false };
    let said = std::env::var(ENV_ROUTED).is_ok_and(|said| said == "grows");
    said || worst + CONTEXT_BYTES as usize > share / 100 * PLANNED_MAX
}

impl Growing {
    /// What has memory where there is room for `rows`.
    fn pieces(&self, shape: &Shape, rows: usize) -> Vec<Buffer> {
        let worst = shape.worst.routed as usize;
        let piece = |all: &Buffer| {
            let of_row = all.len() / worst.max(1);
            all.slice(0, ((rows + TILE_ROWS) * of_row).min(all.len()))
        };
        self.0.iter().map(piece).collect()
    }
}

impl Model {
    /// Rows for which this rank has memory.
    pub(crate) fn routed_room(&self) -> usize {
        match (&self.growing, &self.device) {
            (None, Device::Cuda(_)) => self.shape.worst.routed as usize,
            _ => self.group.room(),
        }
    }
}

impl Engine {
    /// Memory for more routed rows; false where there is some for the worst case already.
    ///
    /// # Errors
    /// The device has too little.
    pub(crate) fn grow_routed(&mut self) -> Result<bool, StepError> {
        // Whatever reads the rooms is given other ones.
        self.forget_graphs();
        let Model { group, growing, shape, device, .. } = &mut self.model;
        if !group.grow() {
            return Ok(false);
        }
        if let Some(growing) = growing {
            let rows = group.room();
            let grown = device.commit(&growing.pieces(shape, rows));
            grown.map_err(|error| device_error(error.of_gpu(), chain(&error), 1))?;
            tracing::info!("routed rows found no memory; there is some for {rows} a layer now");
        }
        Ok(true)
    }
}

impl ArenaPlanner<'_> {
    /// Of so many rows in the worst case.
    fn elements(&self, rows: Rows, width: u64) -> usize {
        (self.shape.rows(rows)[1] * width) as usize
    }
}

impl Planner for ArenaPlanner<'_> {
    type Buffer = Buffer;

    fn part(&mut self, _name: &'static str) {}

    fn alloc(&mut self, kind: Kind, rows: Rows, width: u64) -> Buffer {
        let len = self.elements(rows, width);
        match &mut self.growing {
            Some(growing) if rows == Rows::Routed => {
                let buffer = self.plan.alloc_growing(dtype(kind), len);
                growing.0.push(buffer);
                buffer
            }
            _ => self.plan.alloc(dtype(kind), len),
        }
    }

    fn alloc_shared(&mut self, kind: Kind, rows: Rows, width: u64) -> Buffer {
        self.plan.alloc_shared(dtype(kind), self.elements(rows, width))
    }

    fn alloc_on_host(&mut self, _name: &'static str, kind: Kind, len: u64) -> Buffer {
        self.plan.alloc_on_host(dtype(kind), len as usize)
    }

    fn part_of(&mut self, whole: Buffer, at: u64, parts: u64) -> Buffer {
        let len = whole.len() / parts as usize;
        whole.slice(at as usize * len, len)
    }
}

/// As kernels call it.
pub(crate) fn dtype(kind: Kind) -> DType {
    match kind {
        Kind::F32 => DType::F32,
        Kind::F64 => DType::F64,
        Kind::Pair => DType::Pair,
        Kind::Bf16 => DType::Bf16,
        Kind::F16 => DType::F16,
        Kind::I16 => DType::I16,
        Kind::U32 => DType::U32,
        Kind::U8 => DType::U8,
    }
}
