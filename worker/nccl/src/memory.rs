//! Device memory and streams of others, as far as collectives need to know them.

use std::ffi::{c_int, c_void};

/// The kind of the elements of a [`Span`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    U8,
    U32,
    U64,
    F16,
    Bf16,
    F32,
    F64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::U32 | DType::F32 => 4,
            DType::U64 | DType::F64 => 8,
        }
    }

    /// `ncclDataType_t`
    pub(crate) const fn code(self) -> c_int {
        match self {
            DType::U8 => 1,
            DType::U32 => 3,
            DType::U64 => 5,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::Bf16 => 9,
        }
    }
}

/// `len` elements of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    address: u64,
    dtype: DType,
    len: usize,
}

impl Span {
    /// # Safety
    /// The memory is of the GPU of every communicator that is given the span. It stays allocated,
    /// and no other stream touches it, until each verb that was given it is done on its stream.
    pub unsafe fn new(address: u64, dtype: DType, len: usize) -> Span {
        Span { address, dtype, len }
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// The elements `start .. start + len` of this span.
    pub fn slice(&self, start: usize, len: usize) -> Span {
        let end = start.checked_add(len).expect("the end of a slice fits in a usize");
        assert!(end <= self.len, "slice {start}..{end} of a span of {} elements", self.len);
        Span { address: self.address + (start * self.dtype.size()) as u64, len, ..*self }
    }

    pub(crate) fn pointer(&self) -> *mut c_void {
        // An address of the device: never followed on the host.
        std::ptr::without_provenance_mut(self.address as usize)
    }
}

/// A CUDA stream that somebody else owns.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub(crate) *mut c_void);

impl Stream {
    /// # Safety
    /// `handle` is a stream of the GPU of every communicator that is given it, and is not destroyed
    /// before the last verb on it is done.
    pub unsafe fn new(handle: *mut c_void) -> Stream {
        Stream(handle)
    }
}
