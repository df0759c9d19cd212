//! Where the buffers of a step lie in a device's memory.

use moejob_kernels::{ArenaPlan, Buffer, DType};
use moejob_protocol::memory::{Kind, Planner, Rows, Shape};

/// The device's arena, from the list that the plan counts.
pub(super) struct ArenaPlanner<'a> {
    pub shape: &'a Shape,
    pub plan: ArenaPlan,
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
        self.plan.alloc(dtype(kind), self.elements(rows, width))
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
