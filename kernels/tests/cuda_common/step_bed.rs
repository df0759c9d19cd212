//! A device beside the CPU in f64: the same body runs on both, inputs being what elements hold.
#![allow(dead_code, reason = "each test crate uses a part")]

use std::sync::OnceLock;

use half::{bf16, f16};
use moejob_kernels::cuda::Gpu;
use moejob_kernels::{ArenaPlan, Buffer, DType, Device, Element, philox};

/// Enough for the largest case; on a CPU address space alone.
pub const ARENA_BYTES: usize = 1 << 28;

pub const ELEMENTS: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

/// The elements to test; `MOEJOB_TEST_ELEMENT=Bf16` takes one, for tools that make tests slow.
pub fn elements() -> impl Iterator<Item = DType> {
    let only = std::env::var("MOEJOB_TEST_ELEMENT").ok();
    let wanted = move |element: &DType| only.as_ref().is_none_or(|o| *o == format!("{element:?}"));
    ELEMENTS.into_iter().filter(wanted)
}

/// Holds the context of the first GPU as long as tests run: to make one takes longer than most.
static CONTEXT: OnceLock<Option<Gpu>> = OnceLock::new();

pub struct StepBed {
    pub device: Device,
    /// What inputs are rounded to, everywhere.
    pub element: DType,
    /// Of elements, of vectors beside them, of statistics on this device.
    pub float: DType,
    pub vector: DType,
    pub statistic: DType,
    plan: ArenaPlan,
    inputs: u64,
}

impl StepBed {
    /// None, with the reason printed, where there is no device to test.
    pub fn cuda(test: &str, element: DType, vector: DType) -> Option<StepBed> {
        CONTEXT.get_or_init(|| Gpu::open(0).ok());
        match Device::cuda(0, ARENA_BYTES) {
            Ok(device) => Some(StepBed {
                device,
                element,
                float: element,
                vector,
                statistic: DType::F32,
                plan: ArenaPlan::new(),
                inputs: 0,
            }),
            Err(error) => {
                eprintln!("skipped: {test}: no CUDA device: {error}");
                None
            }
        }
    }

    /// The reference: floats of `float`, inputs as they are in `element`.
    pub fn cpu(element: DType, float: DType) -> StepBed {
        let device = Device::cpu(2, ARENA_BYTES).expect("a CPU");
        let (vector, statistic) = (float, float);
        StepBed { device, element, float, vector, statistic, plan: ArenaPlan::new(), inputs: 0 }
    }

    /// Elements of about unit variance, the same in every bed.
    pub fn input(&mut self, len: usize) -> Buffer {
        let values = self.values(len);
        self.put(self.float, &values)
    }

    /// A vector of the model: elements, or fp32 beside them, of values that elements hold.
    pub fn vector(&mut self, len: usize) -> Buffer {
        let values = self.values(len);
        self.put(self.vector, &values)
    }

    /// The numbers of the next input.
    pub fn values(&mut self, len: usize) -> Vec<f64> {
        self.inputs += 1;
        let pairs = (0..len.div_ceil(2) as u64).flat_map(|i| philox::normals(3, self.inputs, i));
        pairs.take(len).map(|x| rounded(self.element, x)).collect()
    }

    pub fn put(&mut self, dtype: DType, values: &[f64]) -> Buffer {
        let buffer = self.plan.alloc(dtype, values.len());
        set(&mut self.device, buffer, values);
        buffer
    }

    pub fn words(&mut self, values: &[u32]) -> Buffer {
        let buffer = self.plan.alloc(DType::U32, values.len());
        self.device.write(buffer, values);
        buffer
    }

    /// Every byte 0xff: not a number.
    pub fn output(&mut self, dtype: DType, len: usize) -> Buffer {
        let buffer = self.plan.alloc(dtype, len);
        let bytes = buffer.reinterpret(DType::U8);
        self.device.write(bytes, &vec![0xff_u8; bytes.len()]);
        buffer
    }

    pub fn floats(&mut self, len: usize) -> Buffer {
        self.output(self.float, len)
    }

    pub fn statistics(&mut self, len: usize) -> Buffer {
        self.output(self.statistic, len)
    }

    /// An output that is added to, or garbage.
    pub fn target(&mut self, dtype: DType, len: usize, added_to: bool) -> Buffer {
        if added_to {
            let values = self.values(len);
            self.put(dtype, &values)
        } else {
            self.output(dtype, len)
        }
    }

    pub fn get(&self, buffer: Buffer) -> Vec<f64> {
        get(&self.device, buffer)
    }

    pub fn bytes(&self, buffer: Buffer) -> Vec<u8> {
        self.device.read_vec(buffer.reinterpret(DType::U8))
    }
}

pub fn rounded(element: DType, x: f64) -> f64 {
    match element {
        DType::Bf16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        DType::F32 => f64::from(x as f32),
        _ => x,
    }
}

pub fn set(device: &mut Device, buffer: Buffer, values: &[f64]) {
    fn write<E: Element>(device: &mut Device, buffer: Buffer, of: impl Iterator<Item = E>) {
        device.write(buffer, &of.collect::<Vec<E>>());
    }
    let values = values.iter().copied();
    match buffer.dtype() {
        DType::F32 => write(device, buffer, values.map(|x| x as f32)),
        DType::F64 => write(device, buffer, values),
        DType::Bf16 => write(device, buffer, values.map(|x| bf16::from_f32(x as f32))),
        DType::F16 => write(device, buffer, values.map(|x| f16::from_f32(x as f32))),
        other => panic!("{other:?} is no float"),
    }
}

pub fn get(device: &Device, buffer: Buffer) -> Vec<f64> {
    match buffer.dtype() {
        DType::F32 => device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect(),
        DType::F64 => device.read_vec(buffer),
        DType::Bf16 => device.read_vec::<bf16>(buffer).into_iter().map(f64::from).collect(),
        DType::F16 => device.read_vec::<f16>(buffer).into_iter().map(f64::from).collect(),
        other => panic!("{other:?} is no float"),
    }
}

/// Half a unit in the last place of an element near 1.
pub fn rounding(element: DType) -> f64 {
    match element {
        DType::Bf16 => 2_f64.powi(-9),
        DType::F16 => 2_f64.powi(-12),
        _ => 2_f64.powi(-24),
    }
}

/// Runs `case` on the device with elements and with fp32 vectors beside them, twice: both runs give
/// the same bits, and those lie within `roundings` roundings and 2e-6 of the CPU's in f64, relative
/// to the largest number of each output.
pub fn check(name: &str, roundings: f64, case: impl Fn(&mut StepBed) -> Vec<Buffer>) {
    for element in elements() {
        for vector in [element, DType::F32] {
            let Some(mut bed) = StepBed::cuda(name, element, vector) else { return };
            let outputs = case(&mut bed);
            bed.device.finish().unwrap_or_else(|error| panic!("{name} {element:?}: {error:?}"));
            let found: Vec<Vec<u8>> = outputs.iter().map(|output| bed.bytes(*output)).collect();
            let mut wide = StepBed::cpu(element, DType::F64);
            let expected = case(&mut wide);
            for (at, (output, reference)) in outputs.iter().zip(&expected).enumerate() {
                let limit = roundings * rounding(output.dtype()) + 2e-6;
                let error = error(&bed.get(*output), &wide.get(*reference));
                eprintln!("  {name} {element:?} {vector:?} [{at}] {error:.2e}, limit {limit:.0e}");
                // Written so that an error which is no number fails.
                let close = error <= limit;
                assert!(close, "{name} {element:?} {vector:?}: output {at} off by {error:.3e}");
            }
            drop(bed);
            let Some(mut again) = StepBed::cuda(name, element, vector) else { return };
            let outputs = case(&mut again);
            let same: Vec<Vec<u8>> = outputs.iter().map(|output| again.bytes(*output)).collect();
            assert!(found == same, "{name} {element:?}: another run, other bits");
        }
    }
}

/// The largest difference, relative to the largest expected number.
pub fn error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    let off = pairs.map(|(found, expected)| (found - expected).abs());
    // A difference that is no number must not be lost.
    let worst = off.fold(0.0_f64, |worst, x| if x > worst || x.is_nan() { x } else { worst });
    if most == 0.0 { worst } else { worst / most }
}

/// Whole numbers below `end`.
pub fn below(seed: u64, len: usize, end: u32) -> Vec<u32> {
    let word = |i: usize| philox::philox4x32_10(seed, [i as u32, 0, 0, 9])[0];
    (0..len).map(|i| word(i) % end).collect()
}
