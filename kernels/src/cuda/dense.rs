//! Dense products by cuBLASLt: one handle and one workspace a device, a plan a shape.
//!
//! What is computed for a shape is decided once, by the first answer of cuBLASLt's heuristic and
//! never by a timing, so that the same shape gives the same bits in every run; see
//! [`DenseRecord`]. Only sums that have one order are asked for: parts of a reduction may be kept
//! apart in the workspace, but not added to the output by whoever comes first.

use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::cublaslt::{result as lt, sys};

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::dense_record::{self, DenseRecord};
use crate::cuda::driver::{Arena, Gpu, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::libraries::CUBLASLT;
use crate::types::Layout;

/// `batch` products C [m, n] = A B (or C += A B), row-major; `layout` as in [`crate::Matmul`].
/// Sums in fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DenseShape {
    pub layout: Layout,
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Of A and B: bf16, fp16 or fp32
    pub element: DType,
    /// Of C: as A and B, or fp32
    pub output: DType,
    /// C += A B
    pub accumulate: bool,
    /// fp32 operands are rounded to 11 bits of mantissa, for the tensor cores; else they are exact
    pub tf32: bool,
    /// Elements from one stored row of A, B, C to the next
    pub pitches: [usize; 3],
}

impl DenseShape {
    /// One product whose operands and output are of `element`, their rows following each other.
    pub fn new(layout: Layout, [m, n, k]: [usize; 3], element: DType) -> DenseShape {
        let (a, b) = match layout {
            Layout::Nt => (k, k),
            Layout::Nn => (k, n),
            Layout::Tn => (m, n),
        };
        DenseShape {
            layout,
            batch: 1,
            m,
            n,
            k,
            element,
            output: element,
            accumulate: false,
            tf32: false,
            pitches: [a, b, n],
        }
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        2.0 * self.batch as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Stored rows of A, B and C.
    fn stored_rows(&self) -> [usize; 3] {
        let DenseShape { m, n, k, .. } = *self;
        match self.layout {
            Layout::Nt => [m, n, m],
            Layout::Nn => [m, k, m],
            Layout::Tn => [k, k, m],
        }
    }

    /// Elements of A, B and C, those between rows with them; a batch's follow each other.
    pub fn sizes(&self) -> [usize; 3] {
        let rows = self.stored_rows();
        [0, 1, 2].map(|i| self.batch * rows[i] * self.pitches[i])
    }
}

/// A shape and what its operands' addresses are multiples of, which decides what may read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) shape: DenseShape,
    pub(crate) alignment: u32,
}

/// Alignments above this one change nothing.
const ALIGNMENT_MAX: u32 = 256;

impl Key {
    fn new(shape: DenseShape, addresses: [u64; 3]) -> Key {
        let common = addresses.iter().fold(u64::from(ALIGNMENT_MAX), |all, a| all | a);
        Key { shape, alignment: 1 << common.trailing_zeros() }
    }
}

/// What cuBLAS recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The dense products of a device. They share a workspace, so they run on one stream.
#[derive(Debug)]
pub struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: Arena,
    plans: HashMap<Key, Plan>,
    /// Algorithms that an earlier run recorded, by the text of their key
    fixed: HashMap<String, [u64; 8]>,
}

// SAFETY: cuBLASLt's handles and descriptors belong to no thread; the library may be called from
// several, and what is described here is only read after it was made.
unsafe impl Send for Products {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Products {}

impl Products {
    /// Loads cuBLASLt; an error names the library or the symbol that is absent.
    pub fn new(gpu: &Gpu) -> Result<Products, CudaError> {
        CUBLASLT.suits()?;
        let workspace = Arena::new(gpu, WORKSPACE_BYTES)?;
        let handle = lt::create_handle().map_err(|source| CudaError::Cublas {
            doing: "making a handle".to_owned(),
            source,
        })?;
        Ok(Products { handle, workspace, plans: HashMap::new(), fixed: HashMap::new() })
    }

    /// Bytes of device memory that the products of a device share.
    pub const fn workspace_bytes() -> usize {
        WORKSPACE_BYTES
    }

    /// The version of the library that is loaded, such as 130201.
    pub fn version() -> usize {
        // SAFETY: has no preconditions; `new` has found the symbol.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// What was chosen for each shape so far, sorted.
    pub fn record(&self) -> Vec<DenseRecord> {
        let version = Products::version();
        let of = |(key, plan): (&Key, &Plan)| {
            dense_record::of(&dense_record::key_text(key), version, plan.algorithm)
        };
        let mut all: Vec<DenseRecord> = self.plans.iter().map(of).collect();
        all.sort_by(|a, b| a.product.cmp(&b.product));
        all
    }

    /// Takes what an earlier run recorded, with this same version of the library, for shapes that
    /// have no plan yet. The number of records that hold.
    pub fn fix(&mut self, records: &[DenseRecord]) -> usize {
        let version = Products::version();
        let mine = records.iter().filter(|record| record.version == version);
        mine.map(|record| self.fixed.insert(record.product.clone(), record.algorithm)).count()
    }

    /// Enqueues the products of the operands at these device addresses; plans a shape at first.
    ///
    /// # Safety
    /// Each holds as many elements as [`DenseShape::sizes`] says (between the last row's end and
    /// its pitch nothing is touched), and nothing else uses C.
    pub unsafe fn launch(
        &mut self,
        stream: &Stream,
        shape: DenseShape,
        addresses: [u64; 3],
    ) -> Result<(), CudaError> {
        if shape.batch == 0 || shape.m == 0 || shape.n == 0 {
            return Ok(());
        }
        let key = Key::new(shape, addresses);
        if !self.plans.contains_key(&key) {
            let fixed = self.fixed.get(&dense_record::key_text(&key)).copied();
            let plan = Plan::new(self.handle, key, fixed).map_err(|source| {
                CudaError::Cublas { doing: format!("preparing {key:?}"), source }
            })?;
            self.plans.insert(key, plan);
        }
        let mut whole = ArenaPlan::new();
        let workspace = self.workspace.address(whole.alloc(DType::U8, WORKSPACE_BYTES));
        // SAFETY: the caller's promise; the workspace lives as long as `self`, and what runs on
        // one stream uses it in turn.
        unsafe { self.plans[&key].launch(self.handle, stream, addresses, workspace) }
            .map_err(|source| CudaError::Cublas { doing: format!("launching {key:?}"), source })
    }

    /// [`Products::launch`] on whole buffers of one arena.
    pub fn product(
        &mut self,
        stream: &Stream,
        arena: &Arena,
        shape: DenseShape,
        [a, b, c]: [Buffer; 3],
    ) -> Result<(), CudaError> {
        let dtypes = [a, b, c].map(|buffer| buffer.dtype());
        assert_eq!(dtypes, [shape.element, shape.element, shape.output], "{shape:?}");
        assert_eq!([a, b, c].map(|buffer| buffer.len()), shape.sizes(), "{shape:?}");
        assert!(!c.overlaps(&a) && !c.overlaps(&b), "{shape:?} writes over what it reads");
        if shape.k == 0 {
            // A sum of nothing: a rank without tokens has gradients all the same.
            return if shape.accumulate { Ok(()) } else { arena.fill_bytes(stream, c, 0) };
        }
        // SAFETY: the sizes were checked, and the arena's borrow is the caller's device.
        unsafe { self.launch(stream, shape, [a, b, c].map(|buffer| arena.address(buffer))) }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: made by us, destroyed once, after all descriptors; the workspace's release waits
        // for the device.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

/// Descriptors and the algorithm of one shape.
#[derive(Debug, Default)]
struct Plan {
    /// Made in this order; those of a plan that could not be finished are freed as well
    matmul: Option<sys::cublasLtMatmulDesc_t>,
    layouts: Vec<sys::cublasLtMatrixLayout_t>,
    algorithm: [u64; 8],
    accumulate: bool,
}

impl Plan {
    fn new(
        handle: sys::cublasLtHandle_t,
        key: Key,
        fixed: Option<[u64; 8]>,
    ) -> Result<Plan, lt::CublasError> {
        let mut plan = Plan::default();
        plan.accumulate = key.shape.accumulate;
        let matmul = plan.describe(&key.shape)?;
        plan.algorithm = match fixed {
            Some(algorithm) => algorithm,
            None => plan.choose(handle, matmul, key.alignment)?,
        };
        Ok(plan)
    }

    /// cuBLAS thinks in columns: its C^T [n, m] = (B seen so) (A seen so).
    fn describe(
        &mut self,
        shape: &DenseShape,
    ) -> Result<sys::cublasLtMatmulDesc_t, lt::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let DenseShape { layout, m, n, k, element, output, pitches, .. } = *shape;
        let compute = match (element, shape.tf32) {
            (DType::F32, true) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
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
        for (rows, cols, pitch, kind) in [
            (first.0, first.1, pitches[1], element),
            (second.0, second.1, pitches[0], element),
            (n, m, pitches[2], output),
        ] {
            let matrix = matrix(shape.batch, [rows, cols, pitch], data_type(kind))?;
            self.layouts.push(matrix);
        }
        Ok(matmul)
    }

    /// The heuristic's first answer among algorithms whose sums have one order.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        matmul: sys::cublasLtMatmulDesc_t,
        alignment: u32,
    ) -> Result<[u64; 8], lt::CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let preference = lt::create_matmul_pref()?;
        let (a, b, c) = (self.layouts[0], self.layouts[1], self.layouts[2]);
        let workspace = WORKSPACE_BYTES as u64;
        // In place, parts would be added to the output in any order.
        let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let word = |value: &u32| (std::ptr::from_ref(value).cast::<c_void>(), size_of::<u32>());
        let long = |value: &u64| (std::ptr::from_ref(value).cast::<c_void>(), size_of::<u64>());
        let found = [
            (Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, long(&workspace)),
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, word(&schemes)),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, word(&alignment)),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, word(&alignment)),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, word(&alignment)),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, word(&alignment)),
        ]
        .into_iter()
        .try_for_each(|(attribute, (value, bytes))| {
            // SAFETY: the preference is alive, the value of the attribute's size.
            unsafe { lt::set_matmul_pref_attribute(preference, attribute, value, bytes) }
        })
        // SAFETY: all descriptors are alive.
        .and_then(|()| unsafe {
            lt::get_matmul_algo_heuristic(handle, matmul, a, b, c, c, preference)
        });
        // SAFETY: made above, destroyed once.
        let _ = unsafe { lt::destroy_matmul_pref(preference) };
        Ok(found?.algo.data)
    }

    /// # Safety
    /// As of [`Products::launch`]; `workspace` holds `WORKSPACE_BYTES`.
    unsafe fn launch(
        &self,
        handle: sys::cublasLtHandle_t,
        stream: &Stream,
        [a, b, c]: [u64; 3],
        workspace: u64,
    ) -> Result<(), lt::CublasError> {
        let Some(matmul) = self.matmul else { unreachable!("`new` returns whole plans only") };
        let (one, beta) = (1_f32, f32::from(u8::from(self.accumulate)));
        let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
        let algorithm = sys::cublasLtMatmulAlgo_t { data: self.algorithm };
        // SAFETY: the caller's promise; descriptors live as long as `self`.
        unsafe {
            lt::matmul(
                handle,
                matmul,
                scalar(&one),
                scalar(&beta),
                b as *const c_void,
                self.layouts[0],
                a as *const c_void,
                self.layouts[1],
                c as *const c_void,
                self.layouts[2],
                c as *mut c_void,
                self.layouts[2],
                &algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.handle().cast(),
            )
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once.
        unsafe {
            for layout in &self.layouts {
                let _ = lt::destroy_matrix_layout(*layout);
            }
            if let Some(matmul) = self.matmul {
                let _ = lt::destroy_matmul_desc(matmul);
            }
        }
    }
}

/// `rows` and `cols` as cuBLAS sees them, columns `pitch` elements apart.
fn matrix(
    batch: usize,
    [rows, cols, pitch]: [usize; 3],
    kind: sys::cudaDataType_t,
) -> Result<sys::cublasLtMatrixLayout_t, lt::CublasError> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let matrix = lt::create_matrix_layout(kind, rows as u64, cols as u64, pitch as i64)?;
    let (batch, stride) = (batch as i32, (cols * pitch) as i64);
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

fn data_type(element: DType) -> sys::cudaDataType_t {
    match element {
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        other => panic!("dense products are in Bf16, F16 or F32, not {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_count_whole_rows() {
        let shape = DenseShape::new(Layout::Tn, [3, 5, 7], DType::Bf16);
        assert_eq!(shape.sizes(), [21, 35, 15]);
        let padded = DenseShape { pitches: [4, 5, 8], batch: 2, ..shape };
        assert_eq!(padded.sizes(), [56, 70, 48]);
    }

    #[test]
    fn alignment_is_what_all_addresses_share() {
        let shape = DenseShape::new(Layout::Nn, [8, 8, 8], DType::Bf16);
        let of = |addresses| Key::new(shape, addresses).alignment;
        assert_eq!(of([512, 1024, 256]), 256);
        assert_eq!(of([512, 16, 256]), 16);
        assert_eq!(of([512, 16, 258]), 2);
    }
}
