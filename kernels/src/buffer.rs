//! Typed ranges of one planned arena: no tensor type, no ownership, no shape.

/// The kind of the elements of a [`Buffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F64,
    /// See [`Pair`]
    Pair,
    Bf16,
    F16,
    /// Low halves of masters: see [`crate::Master`]
    I16,
    U32,
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::Pair => 16,
            DType::F64 => 8,
            DType::F32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 | DType::I16 => 2,
            DType::U8 => 1,
        }
    }
}

/// A type whose every bit pattern is a value, and which a [`Buffer`] of `DTYPE` holds.
///
/// # Safety
/// Implementors have no padding, no invalid bit pattern, and the size of `DTYPE`.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    const DTYPE: DType;
}

macro_rules! element {
    ($($type:ty => $dtype:ident),*) => {$(
        // SAFETY: a plain number: no padding, every bit pattern is a value.
        unsafe impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$type>() == DType::$dtype.size());
    )*};
}
/// A sum of doubles and what was rounded off it: `high` is the sum to 53 bits, `low` the next 53.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Pair {
    pub high: f64,
    pub low: f64,
}

impl Pair {
    /// The sum to about 106 bits (TwoSum of Knuth 1969, then Dekker 1971). So the order in which
    /// doubles are added changes no bit of `high`, but by a chance of about 2^-50 a sum.
    #[must_use]
    pub fn plus(self, other: Pair) -> Pair {
        let sum = self.high + other.high;
        let part = sum - self.high;
        let lost = (self.high - (sum - part)) + (other.high - part);
        let low = lost + (self.low + other.low);
        let high = sum + low;
        // A sum that is no number stays none.
        Pair { high, low: if high.is_finite() { low - (high - sum) } else { 0.0 } }
    }

    pub const fn from_ne_bytes(bytes: [u8; 16]) -> Pair {
        let (high, low) = (bytes.first_chunk::<8>(), bytes.last_chunk::<8>());
        let [high, low] = [*high.expect("16 bytes"), *low.expect("16 bytes")];
        Pair { high: f64::from_ne_bytes(high), low: f64::from_ne_bytes(low) }
    }
}

impl From<f64> for Pair {
    fn from(high: f64) -> Pair {
        Pair { high, low: 0.0 }
    }
}

element!(f32 => F32, f64 => F64, Pair => Pair, half::bf16 => Bf16, half::f16 => F16,
    i16 => I16, u32 => U32, u8 => U8);

/// Offsets from here on are of the memory of the host that belongs to a device's arena. No device
/// has as much memory of its own.
const ON_HOST: usize = 1 << 62;
/// Offsets from here on are of the part that peers may read where it lies.
const SHARED: usize = 1 << 61;
/// Offsets from here on are of the part whose memory comes as it is needed.
const GROWING: usize = 1 << 60;

/// `len` elements of `dtype` that start `offset` bytes into the arena of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    dtype: DType,
    offset: usize,
    len: usize,
}

impl Buffer {
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes from the start of the arena.
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Where it starts in the host's part of the arena; none: it lies in the device's own memory.
    pub const fn offset_on_host(&self) -> Option<usize> {
        self.offset.checked_sub(ON_HOST)
    }

    /// Where it starts in the part of the arena that peers may read; none: it lies elsewhere.
    pub const fn offset_shared(&self) -> Option<usize> {
        if self.offset < ON_HOST { self.offset.checked_sub(SHARED) } else { None }
    }

    /// Where it starts in the part of the arena that grows; none: it lies elsewhere.
    pub const fn offset_growing(&self) -> Option<usize> {
        if self.offset < SHARED { self.offset.checked_sub(GROWING) } else { None }
    }

    /// Elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub const fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// The elements `start .. start + len` of this buffer.
    pub fn slice(&self, start: usize, len: usize) -> Buffer {
        let end = start.checked_add(len).expect("the end of a slice fits in a usize");
        assert!(end <= self.len, "slice {start}..{end} of a buffer of {} elements", self.len);
        Buffer { offset: self.offset + start * self.dtype.size(), len, ..*self }
    }

    /// The same bytes seen as elements of another kind, to carry them without converting.
    pub fn reinterpret(&self, dtype: DType) -> Buffer {
        let bytes = self.bytes();
        let fits = bytes.is_multiple_of(dtype.size()) && self.offset.is_multiple_of(dtype.size());
        assert!(fits, "{bytes} bytes at {} are no whole number of {dtype:?}", self.offset);
        Buffer { dtype, len: bytes / dtype.size(), ..*self }
    }

    /// Whether the two share a byte.
    pub const fn overlaps(&self, other: &Buffer) -> bool {
        self.offset < other.offset + other.bytes() && other.offset < self.offset + self.bytes()
    }
}

/// Lays buffers out one after the other. Equal calls give equal layouts, on every machine.
#[derive(Clone, Debug, Default)]
pub struct ArenaPlan {
    bytes: usize,
    host_bytes: usize,
    shared_bytes: usize,
    growing_bytes: usize,
    committed: Vec<Buffer>,
}

impl ArenaPlan {
    /// Every buffer starts at a multiple of this: a cache line and a CUDA vector access divide it.
    pub const ALIGNMENT: usize = 256;

    pub fn new() -> ArenaPlan {
        ArenaPlan::default()
    }

    /// Reserves `len` elements of `dtype`; they are zero until first written.
    pub fn alloc(&mut self, dtype: DType, len: usize) -> Buffer {
        let buffer = Buffer { dtype, offset: self.bytes, len };
        self.bytes = Self::behind(self.bytes, buffer);
        buffer
    }

    /// The same in memory of the host that a GPU reads and writes over its bus.
    pub fn alloc_on_host(&mut self, dtype: DType, len: usize) -> Buffer {
        let buffer = Buffer { dtype, offset: ON_HOST + self.host_bytes, len };
        self.host_bytes = Self::behind(self.host_bytes, buffer);
        buffer
    }

    /// The same in the part of a GPU's memory that its peers may read where it lies.
    pub fn alloc_shared(&mut self, dtype: DType, len: usize) -> Buffer {
        let buffer = Buffer { dtype, offset: SHARED + self.shared_bytes, len };
        self.shared_bytes = Self::behind(self.shared_bytes, buffer);
        buffer
    }

    /// The same in the part that grows: a GPU has addresses for it, and memory only where some of
    /// it was committed.
    pub fn alloc_growing(&mut self, dtype: DType, len: usize) -> Buffer {
        let buffer = Buffer { dtype, offset: GROWING + self.growing_bytes, len };
        self.growing_bytes = Self::behind(self.growing_bytes, buffer);
        buffer
    }

    /// Of the part that grows, what has memory from the beginning.
    pub fn commit(&mut self, pieces: impl IntoIterator<Item = Buffer>) {
        self.committed.extend(pieces);
    }

    /// Where the next buffer starts behind `buffer`, which starts at `start` of its part.
    fn behind(start: usize, buffer: Buffer) -> usize {
        let bytes = buffer.len.checked_mul(buffer.dtype.size());
        let bytes = bytes.expect("a buffer's size fits in a usize");
        let end = start.checked_add(bytes).expect("an arena's size fits in a usize");
        end.next_multiple_of(Self::ALIGNMENT)
    }

    /// Bytes of the arena that holds everything allocated so far, on the device itself.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of what was allocated on the host.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes
    }

    /// Bytes of what peers may read.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Bytes of addresses of the part that grows.
    pub fn growing_bytes(&self) -> usize {
        self.growing_bytes
    }

    /// What [`ArenaPlan::commit`] was told.
    pub fn committed(&self) -> &[Buffer] {
        &self.committed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_disjoint() {
        let mut plan = ArenaPlan::new();
        let a = plan.alloc(DType::F32, 3);
        let b = plan.alloc(DType::U8, 257);
        let c = plan.alloc(DType::F64, 1);
        assert_eq!((a.offset(), b.offset(), c.offset(), plan.bytes()), (0, 256, 768, 1024));
        assert!(!a.overlaps(&b) && !b.overlaps(&c) && a.overlaps(&a.slice(2, 1)));
    }

    #[test]
    fn what_lies_on_the_host_has_a_place_of_its_own() {
        let mut plan = ArenaPlan::new();
        let (near, a) = (plan.alloc(DType::F32, 3), plan.alloc_on_host(DType::F32, 65));
        let b = plan.alloc_on_host(DType::Bf16, 1);
        assert_eq!((plan.bytes(), plan.host_bytes()), (256, 768));
        assert_eq!([near, a, b].map(|of| of.offset_on_host()), [None, Some(0), Some(512)]);
        assert!(!near.overlaps(&a) && !a.overlaps(&b) && a.overlaps(&a.slice(64, 1)));
        assert_eq!(a.slice(64, 1).reinterpret(DType::U8).offset_on_host(), Some(256));
    }

    #[test]
    fn what_peers_read_has_a_place_of_its_own() {
        let mut plan = ArenaPlan::new();
        let (own, a) = (plan.alloc(DType::F32, 3), plan.alloc_shared(DType::F32, 65));
        let (b, far) = (plan.alloc_shared(DType::Bf16, 1), plan.alloc_on_host(DType::U8, 1));
        assert_eq!((plan.bytes(), plan.host_bytes(), plan.shared_bytes()), (256, 256, 768));
        let places = [own, a, b, far].map(|of| of.offset_shared());
        assert_eq!(places, [None, Some(0), Some(512), None]);
        assert_eq!([a, far].map(|of| of.offset_on_host()), [None, Some(0)]);
        assert!(!own.overlaps(&a) && !a.overlaps(&b) && a.overlaps(&a.slice(64, 1)));
        assert_eq!(a.slice(64, 1).reinterpret(DType::U8).offset_shared(), Some(256));
    }

    #[test]
    fn what_grows_has_a_place_of_its_own() {
        let mut plan = ArenaPlan::new();
        let (own, a) = (plan.alloc(DType::F32, 3), plan.alloc_growing(DType::F32, 65));
        let (b, far) = (plan.alloc_growing(DType::Bf16, 1), plan.alloc_shared(DType::U8, 1));
        let host = plan.alloc_on_host(DType::U8, 1);
        plan.commit([a.slice(0, 2), b]);
        assert_eq!((plan.bytes(), plan.growing_bytes(), plan.committed().len()), (256, 768, 2));
        let places = [own, a, b, far, host].map(|of| of.offset_growing());
        assert_eq!(places, [None, Some(0), Some(512), None, None]);
        assert_eq!(a.slice(64, 1).reinterpret(DType::U8).offset_growing(), Some(256));
        assert_eq!([a, b].map(|of| (of.offset_shared(), of.offset_on_host())), [(None, None); 2]);
    }

    #[test]
    #[should_panic(expected = "slice 2..5 of a buffer of 4 elements")]
    fn a_slice_stays_inside() {
        let mut plan = ArenaPlan::new();
        plan.alloc(DType::F32, 4).slice(2, 3);
    }
}
