//! Dense products by cuBLASLt: what grouped ones are measured against.

use std::ffi::c_void;

use cudarc::cublaslt::{result as lt, sys};

use super::driver::{Arena, Gpu, Stream};
use super::error::CudaError;
use crate::buffer::{ArenaPlan, DType};
use crate::matmul::Layout;

/// `batch` products C [m, n] = A B, row-major, each operand of one after that of the other;
/// `layout` as in [`crate::Matmul`]. Sums in fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseShape {
    pub layout: Layout,
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Of A, B and C: bf16, fp16 or fp32
    pub element: DType,
}

impl DenseShape {
    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Elements of A, B and C.
    pub const fn sizes(&self) -> [usize; 3] {
        let DenseShape { batch, m, n, k, .. } = *self;
        [batch * m * k, batch * n * k, batch * m * n]
    }
}

/// A product ready to be launched: what cuBLASLt's heuristic takes first for the shape.
#[derive(Debug)]
pub struct Dense {
    shape: DenseShape,
    handle: sys::cublasLtHandle_t,
    /// Made in this order; those of a failed `new` are freed as well
    matmul: Option<sys::cublasLtMatmulDesc_t>,
    layouts: Vec<sys::cublasLtMatrixLayout_t>,
    algorithm: Option<sys::cublasLtMatmulAlgo_t>,
    workspace: Arena,
}

/// What cuBLAS recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

fn require_library() -> Result<(), CudaError> {
    // SAFETY: opens and closes the library, which has no preconditions.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    let advice = "install cuBLAS of CUDA 12 or 13 (package libcublas, or the wheel \
                  nvidia-cublas) and add its folder to LD_LIBRARY_PATH";
    Err(CudaError::Missing { library: "libcublasLt", advice })
}

impl Dense {
    pub fn new(gpu: &Gpu, shape: DenseShape) -> Result<Dense, CudaError> {
        require_library()?;
        let failed = |source| CudaError::Cublas { doing: format!("preparing {shape:?}"), source };
        let workspace = Arena::new(gpu, WORKSPACE_BYTES)?;
        let handle = lt::create_handle().map_err(failed)?;
        let (matmul, layouts) = (None, Vec::new());
        let mut dense = Dense { shape, handle, matmul, layouts, algorithm: None, workspace };
        dense.describe().map_err(failed)?;
        Ok(dense)
    }

    pub fn shape(&self) -> DenseShape {
        self.shape
    }

    /// cuBLAS thinks in columns: its C^T [n, m] = (B seen so) (A seen so).
    fn describe(&mut self) -> Result<(), lt::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let DenseShape { layout, m, n, k, element, .. } = self.shape;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let matmul = lt::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?;
        self.matmul = Some(matmul);
        let (first, second) = match layout {
            Layout::Nt => ((k, n, true), (k, m, false)),
            Layout::Nn => ((n, k, false), (k, m, false)),
            Layout::Tn => ((n, k, false), (m, k, true)),
        };
        for (attribute, transposed) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, first.2),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, second.2),
        ] {
            let operation = i32::from(transposed); // CUBLAS_OP_N, CUBLAS_OP_T
            let value = std::ptr::from_ref(&operation).cast::<c_void>();
            // SAFETY: the descriptor is alive, the value of the attribute's size.
            unsafe { lt::set_matmul_desc_attribute(matmul, attribute, value, size_of::<i32>())? };
        }
        for (rows, cols) in [(first.0, first.1), (second.0, second.1), (n, m)] {
            let matrix = self.matrix(rows, cols, data_type(element))?;
            self.layouts.push(matrix);
        }
        self.algorithm = Some(self.choose(matmul)?);
        Ok(())
    }

    fn matrix(
        &self,
        rows: usize,
        cols: usize,
        kind: sys::cudaDataType_t,
    ) -> Result<sys::cublasLtMatrixLayout_t, lt::CublasError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let matrix = lt::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64)?;
        let (batch, stride) = (self.shape.batch as i32, (rows * cols) as i64);
        let count = std::ptr::from_ref(&batch).cast::<c_void>();
        let offset = std::ptr::from_ref(&stride).cast::<c_void>();
        let count_of = Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
        let offset_of = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        // SAFETY: the layout is alive, each value of its attribute's size.
        let set = unsafe {
            lt::set_matrix_layout_attribute(matrix, count_of, count, size_of::<i32>()).and_then(
                |()| lt::set_matrix_layout_attribute(matrix, offset_of, offset, size_of::<i64>()),
            )
        };
        if let Err(error) = set {
            // SAFETY: made above, known to nobody else.
            let _ = unsafe { lt::destroy_matrix_layout(matrix) };
            return Err(error);
        }
        Ok(matrix)
    }

    fn choose(
        &self,
        matmul: sys::cublasLtMatmulDesc_t,
    ) -> Result<sys::cublasLtMatmulAlgo_t, lt::CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let preference = lt::create_matmul_pref()?;
        let bytes = std::ptr::from_ref(&WORKSPACE_BYTES).cast::<c_void>();
        let (a, b, c) = (self.layouts[0], self.layouts[1], self.layouts[2]);
        // SAFETY: all descriptors are alive, the value is of the attribute's size.
        let found = unsafe {
            lt::set_matmul_pref_attribute(
                preference,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                bytes,
                size_of::<usize>(),
            )
            .and_then(|()| {
                lt::get_matmul_algo_heuristic(self.handle, matmul, a, b, c, c, preference)
            })
        };
        // SAFETY: made above, destroyed once.
        let _ = unsafe { lt::destroy_matmul_pref(preference) };
        Ok(found?.algo)
    }

    /// Enqueues the products of the operands at these device addresses.
    ///
    /// # Safety
    /// Each holds as many elements as [`DenseShape::sizes`] says, and nothing else uses C.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        [a, b, c]: [u64; 3],
    ) -> Result<(), CudaError> {
        let (Some(matmul), Some(algorithm)) = (self.matmul, &self.algorithm) else {
            unreachable!("`new` returns whole products only")
        };
        let (one, zero) = (1_f32, 0_f32);
        let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        let mut plan = ArenaPlan::new();
        let workspace = self.workspace.address(plan.alloc(DType::U8, WORKSPACE_BYTES));
        // SAFETY: the caller's promise; descriptors and workspace live as long as `self`.
        unsafe {
            lt::matmul(
                self.handle,
                matmul,
                scalar(&one),
                scalar(&zero),
                b as *const c_void,
                self.layouts[0],
                a as *const c_void,
                self.layouts[1],
                c as *const c_void,
                self.layouts[2],
                c as *mut c_void,
                self.layouts[2],
                algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.handle().cast(),
            )
        }
        .map_err(|source| {
            let doing = format!("launching {:?}", self.shape);
            CudaError::Cublas { doing, source }
        })
    }
}

impl Drop for Dense {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once; the workspace's release waits for the device.
        unsafe {
            for layout in &self.layouts {
                let _ = lt::destroy_matrix_layout(*layout);
            }
            if let Some(matmul) = self.matmul {
                let _ = lt::destroy_matmul_desc(matmul);
            }
            let _ = lt::destroy_handle(self.handle);
        }
    }
}

fn data_type(element: DType) -> sys::cudaDataType_t {
    match element {
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        other => panic!("dense products are in Bf16, F16 or F32, not {other:?}"),
    }
}
