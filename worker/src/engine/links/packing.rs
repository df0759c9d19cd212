//! Rows of tokens in the format in which they travel.
//!
//! ```text
//! rows [P T, D] --pack--> a room of bytes -> moved -> --unpack--> rows
//! ```

use super::tokens::chunk;
use crate::engine::group::ExpertGroup;
use moejob_kernels::{Buffer, DType, Device, PackRows, UnpackRows, WireFormat};

/// Rows of all tokens of a group, and as what they travel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    /// [P T, D]
    pub rows: Buffer,
    /// None: as they are.
    pub packed: Option<Packed>,
}

/// Another format, and memory for all rows in it, which nothing else uses meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    pub format: WireFormat,
    pub room: Buffer,
}

impl Rows {
    /// Packed rows of all of so many tokens.
    pub(super) fn travelling(&self, tokens: usize) -> Option<Packing> {
        let Packed { format, room } = self.packed?;
        let dim = self.rows.len() / tokens;
        let bytes = tokens * format.row_bytes(dim);
        let packed = room.reinterpret(DType::U8).slice(0, bytes);
        Some(Packing { format, dim, rows: self.rows, packed })
    }
}

/// Rows and what they are packed to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    format: WireFormat,
    dim: usize,
    pub rows: Buffer,
    /// u8
    pub packed: Buffer,
}

impl Packing {
    /// The part of the rank at `position` of a group.
    pub fn of(&self, group: &ExpertGroup, position: usize) -> Packing {
        let (rows, packed) =
            (chunk(group, self.rows, position), chunk(group, self.packed, position));
        Packing { rows, packed, ..*self }
    }

    pub fn pack(&self, device: &mut Device) {
        let Packing { format, dim, rows, packed } = *self;
        device.pack_rows(&PackRows { format, dim, rows, packed });
    }

    pub fn unpack(&self, device: &mut Device) {
        let Packing { format, dim, rows, packed } = *self;
        device.unpack_rows(&UnpackRows { format, dim, packed, rows });
    }

    /// What is summed of it.
    pub fn sums(&self) -> Buffer {
        assert_eq!(self.format, WireFormat::Bf16, "sums travel as bf16 or as they are");
        self.packed.reinterpret(DType::Bf16)
    }
}
