//! Descriptions of matrices for Hopper's copy engine. It moves 16-bit elements whatever they mean;
//! where it adds it must know.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::sys;

use crate::buffer::DType;
use crate::cuda::error::{CudaError, Doing};

/// A row-major matrix, of 16-bit elements unless a map says otherwise: address, rows, columns (all
/// rows follow each other).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub address: u64,
    pub rows: usize,
    pub cols: usize,
}

impl Matrix {
    /// Boxes of `box_rows` rows by 64 columns, 128-byte swizzle.
    pub(crate) fn map(self, box_rows: usize) -> Result<sys::CUtensorMap, CudaError> {
        self.boxes(64, box_rows, WORDS)
    }

    /// The same of bf16 or fp16, which the copy engine can add.
    pub(crate) fn map_of(
        self,
        box_rows: usize,
        element: DType,
    ) -> Result<sys::CUtensorMap, CudaError> {
        self.boxes(64, box_rows, kind_of(element))
    }

    /// Boxes of 32 columns, 128-byte swizzle, of a matrix of fp32.
    pub(crate) fn fp32_map(self, box_rows: usize) -> Result<sys::CUtensorMap, CudaError> {
        self.boxes(32, box_rows, Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
    }

    /// Boxes of 16 columns of bf16 or fp16, 32-byte swizzle.
    pub(crate) fn narrow_map(
        self,
        box_rows: usize,
        element: DType,
    ) -> Result<sys::CUtensorMap, CudaError> {
        self.boxes(16, box_rows, kind_of(element))
    }

    fn boxes(
        self,
        box_cols: usize,
        box_rows: usize,
        kind: Kind,
    ) -> Result<sys::CUtensorMap, CudaError> {
        let dims = [self.cols as u64, self.rows as u64];
        let boxes = [box_cols as u32, box_rows as u32];
        encode(self, kind, &dims, &[self.cols as u64 * bytes_of(kind)], &boxes)
    }

    /// The same, the rows of each 32 in the order that gives a wgmma thread 8 neighbouring columns:
    /// row 8i + 2q + b of shared memory holds row 8q + 2i + b (i, q in 0..4, b in 0..2).
    pub(crate) fn permuted_map(self, box_rows: usize) -> Result<sys::CUtensorMap, CudaError> {
        assert!(self.rows.is_multiple_of(32) && box_rows.is_multiple_of(32), "{self:?}");
        let row = self.cols as u64 * 2;
        let dims = [self.cols as u64, 2, 4, 4, self.rows as u64 / 32];
        encode(
            self,
            WORDS,
            &dims,
            &[row, 8 * row, 2 * row, 32 * row],
            &[64, 2, 4, 4, box_rows as u32 / 32],
        )
    }
}

type Kind = sys::CUtensorMapDataType_enum;
const WORDS: Kind = Kind::CU_TENSOR_MAP_DATA_TYPE_UINT16;

fn kind_of(element: DType) -> Kind {
    match element {
        DType::F16 => Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::Bf16 => Kind::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        other => panic!("the copy engine's boxes are of Bf16 or F16, not {other:?}"),
    }
}

fn bytes_of(kind: Kind) -> u64 {
    if kind == Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT32 { 4 } else { 2 }
}

/// Heads of 16-bit elements: address, [batch, seq, heads, head_dim] row-major.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadMatrix {
    pub address: u64,
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl HeadMatrix {
    /// Boxes of 64 columns by `box_rows` positions of one head, 128-byte swizzle.
    pub(crate) fn map(self, box_rows: usize) -> Result<sys::CUtensorMap, CudaError> {
        let HeadMatrix { address, batch, seq, heads, head_dim } = self;
        let row = (heads * head_dim * 2) as u64;
        let dims = [head_dim as u64, seq as u64, heads as u64, batch as u64];
        let strides = [row, head_dim as u64 * 2, seq as u64 * row];
        let matrix = Matrix { address, rows: batch * seq, cols: heads * head_dim };
        encode(matrix, WORDS, &dims, &strides, &[64, box_rows as u32, 1, 1])
    }
}

fn encode(
    matrix: Matrix,
    kind: Kind,
    dims: &[u64],
    strides: &[u64],
    boxes: &[u32],
) -> Result<sys::CUtensorMap, CudaError> {
    let steps = [1_u32; 5];
    let swizzle = match boxes[0] {
        16 => sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_32B,
        _ => sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let mut map = MaybeUninit::<sys::CUtensorMap>::uninit();
    // SAFETY: every array has as many entries as its role asks for (strides one less); the map is
    // initialized when the call succeeds.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
            dims.len() as u32,
            matrix.address as *mut c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()
        .doing(|| format!("describing {matrix:?} in boxes of {boxes:?}"))?;
        Ok(map.assume_init())
    }
}
