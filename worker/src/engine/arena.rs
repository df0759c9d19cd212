//! Where the buffers of a step lie in a device's memory.
//!
//! Routed rows have addresses for the worst case, that all tokens of an expert group choose this
//! rank's experts. A processor's memory comes with the first touch. A GPU has memory for the worst
//! case where that fits. Else it has memory for `routedHeadroom` times the rows of even routing,
//! and more when a step has found too little ([`Growing`]).

use crate::engine::model::Model;
use moejob_kernels::numbers::tally;
use moejob_kernels::{ArenaPlan, Buffer, DType, Device, StepNumbers};
use moejob_protocol::memory::{CONTEXT_BYTES, Kind, Planner, Rows, Shape};

/// The device's arena, from the list that the plan counts.
pub(super) struct ArenaPlanner<'a> {
    pub shape: &'a Shape,
    pub plan: ArenaPlan,
    /// What has memory in part, if anything is to.
    pub growing: Option<Growing>,
}

/// Buffers of routed rows that have memory for some of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Growing {
    /// Each of the rows of the worst case, in as many equal parts as there are chunks.
    buffers: Vec<Buffer>,
    rows: usize,
    chunks: usize,
}

/// Kernels read whole tiles of rows, of which the last may end behind the last row.
const TILE_ROWS: usize = 1024;
/// Of a GPU's memory, in percent: where more is planned in the worst case, routed rows grow. The
/// rest is what is allocated later: graphs, tables, what copies of state pass through.
const PLANNED_MAX: usize = 85;
/// `grows`: they grow however much memory there is, to try it.
const ENV_ROUTED: &str = "MOEJOB_ROUTED";

/// Whether routed rows have memory for fewer than the worst case, which takes so many bytes.
pub(super) fn grows(device: &Device, worst: usize) -> bool {
    let Some(share) = device.memory_share() else { return false };
    let said = std::env::var(ENV_ROUTED).is_ok_and(|said| said == "grows");
    said || worst + CONTEXT_BYTES as usize > share / 100 * PLANNED_MAX
}

impl Growing {
    /// Of `rows` in the worst case.
    pub fn new(shape: &Shape) -> Growing {
        let (rows, chunks) = (shape.worst.routed as usize, shape.chunks as usize);
        Growing { buffers: Vec::new(), rows, chunks }
    }

    /// What has memory where there is room for `rows` of all chunks.
    pub fn pieces(&self, rows: usize) -> Vec<Buffer> {
        let of_chunk = rows.div_ceil(self.chunks) + TILE_ROWS;
        let piece = |(buffer, chunk): (&Buffer, usize)| {
            let part = buffer.len() / self.chunks;
            let of_row = buffer.len() / self.rows.max(1);
            buffer.slice(chunk * part, (of_chunk * of_row).min(part))
        };
        let chunks = |buffer| (0..self.chunks).map(move |chunk| (buffer, chunk));
        self.buffers.iter().flat_map(chunks).map(piece).collect()
    }
}

impl Model {
    /// Rows of one of so many chunks for which this rank has memory.
    pub(crate) fn routed_room(&self, chunks: usize) -> usize {
        match (&self.growing, &self.device) {
            (None, Device::Cuda(_)) => self.shape.worst.routed as usize,
            _ => self.group.room().rows.div_ceil(chunks),
        }
    }

    /// F64 [1]: where a step, or a validation, counts rows that found no room.
    pub(crate) fn routed_overflows(&self) -> Buffer {
        match self.places {
            Some(_) => self.buffers.numbers.reduced.slice(StepNumbers::ROUTED_OVERFLOWS, 1),
            None => self.tally().slice(tally::OVERFLOWS, 1),
        }
    }

    /// Memory for more routed rows; false where there is some for the worst case already.
    pub(crate) fn grow_routed(&mut self) -> bool {
        if !self.group.grow() {
            return false;
        }
        let rows = self.group.room().rows;
        if let Some(growing) = &self.growing {
            self.device.commit(&growing.pieces(rows));
            tracing::info!("routed rows found no memory; there is some for {rows} a layer now");
        }
        true
    }
}

impl ArenaPlanner<'_> {
    /// Of so many rows in the worst case.
    fn elements(&self, rows: Rows, width: u64) -> usize {
        let rows = match rows {
            Rows::Fixed(rows) => rows,
            Rows::Routed => self.shape.worst.routed,
            Rows::Arrived => self.shape.worst.arrived,
        };
        (rows * width) as usize
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
                growing.buffers.push(buffer);
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
        Kind::Bf16 => DType::Bf16,
        Kind::F16 => DType::F16,
        Kind::I16 => DType::I16,
        Kind::U32 => DType::U32,
        Kind::U8 => DType::U8,
    }
}
