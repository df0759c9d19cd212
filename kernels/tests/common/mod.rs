//! A test bed: a device, a plan that grows, inputs that are functions of their order, outputs that
//! start as garbage.
#![allow(dead_code, reason = "each test crate uses a part")]

use moejob_kernels::parts::*;
use moejob_kernels::{
    ArenaPlan, Buffer, CpuDevice, DType, Device, Element, GatherRows, Isa, ScatterSum, philox,
};

/// Address space of a bed; memory is what a test touches of it.
const ARENA_BYTES: usize = 1 << 30;

pub struct Bed {
    pub device: Device,
    pub float: DType,
    plan: ArenaPlan,
    inputs: u64,
}

impl Bed {
    pub fn new(float: DType, threads: usize, isa: Isa) -> Bed {
        let cpu = CpuDevice::new(threads, ARENA_BYTES, isa).expect("a device");
        Bed { device: Device::Cpu(cpu), float, plan: ArenaPlan::new(), inputs: 0 }
    }

    pub fn f64() -> Bed {
        Bed::new(DType::F64, 1, Isa::detect())
    }

    /// Floats in (-1, 1) that f32 holds exactly, so that both float types see the same input.
    pub fn input(&mut self, len: usize) -> Buffer {
        self.inputs += 1;
        let values = uniform(self.inputs, len);
        self.floats(&values)
    }

    pub fn floats(&mut self, values: &[f64]) -> Buffer {
        let buffer = self.plan.alloc(self.float, values.len());
        self.set(buffer, values);
        buffer
    }

    pub fn set(&mut self, buffer: Buffer, values: &[f64]) {
        match buffer.dtype() {
            DType::F32 => {
                let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
                self.device.write(buffer, &values);
            }
            DType::F64 => self.device.write(buffer, values),
            other => panic!("{other:?} is no float"),
        }
    }

    /// F64, whatever the bed's floats are.
    pub fn plan_f64(&mut self, values: &[f64]) -> Buffer {
        let buffer = self.plan.alloc(DType::F64, values.len());
        self.device.write(buffer, values);
        buffer
    }

    pub fn words(&mut self, values: &[u32]) -> Buffer {
        let buffer = self.plan.alloc(DType::U32, values.len());
        self.device.write(buffer, values);
        buffer
    }

    /// Every byte 0xff: not a number, and an index out of any bounds.
    pub fn output(&mut self, len: usize) -> Buffer {
        self.output_of(self.float, len)
    }

    pub fn output_of(&mut self, dtype: DType, len: usize) -> Buffer {
        let buffer = self.plan.alloc(dtype, len);
        let bytes = buffer.reinterpret(DType::U8);
        self.device.write(bytes, &vec![0xff_u8; bytes.len()]);
        buffer
    }

    pub fn get(&self, buffer: Buffer) -> Vec<f64> {
        match buffer.dtype() {
            DType::F32 => self.values::<f32>(buffer).into_iter().map(f64::from).collect(),
            DType::F64 => self.values(buffer),
            DType::U32 => self.values::<u32>(buffer).into_iter().map(f64::from).collect(),
            other => panic!("{other:?} is no number"),
        }
    }

    pub fn values<E: Element + Default>(&self, buffer: Buffer) -> Vec<E> {
        self.device.read_vec(buffer)
    }

    pub fn bytes(&self, buffer: Buffer) -> Vec<u8> {
        self.values(buffer.reinterpret(DType::U8))
    }
}

/// Parts of the ops of a processor, in the floats of the bed.
macro_rules! parts {
    ($($name:ident($part:ty);)*) => {
        impl Bed {$(
            pub fn $name(&mut self, part: &$part) {
                let cpu = self.device.as_cpu_mut().expect("a processor");
                match self.float {
                    DType::F64 => cpu.$name::<f64>(part),
                    _ => cpu.$name::<f32>(part),
                }
            }
        )*}
    };
}
parts! {
    route(Route);
    route_backward(RouteBackward);
    gather_rows(GatherRows);
    scatter_rows(ScatterRows);
    combine(Combine);
    scatter_sum(ScatterSum);
    experts_up(ExpertsUp<'_>);
    experts_down(ExpertsDown<'_>);
    experts_down_backward(ExpertsDownBackward<'_>);
    experts_down_wgrad(ExpertsDownWgrad<'_>);
    experts_dgrad(ExpertsDgrad<'_>);
    experts_up_wgrad(ExpertsUpWgrad<'_>);
    cross_entropy(CrossEntropy);
}

impl Bed {
    pub fn place(&mut self, part: &Place) {
        self.device.as_cpu_mut().expect("a processor").place(part);
    }
}

/// Numbers in (-1, 1), multiples of 2^-23.
pub fn uniform(seed: u64, len: usize) -> Vec<f64> {
    let word = |i: usize| philox::philox4x32_10(seed, [(i / 4) as u32, 0, 0, 7])[i % 4];
    (0..len).map(|i| f64::from((word(i) >> 8) as i32 - (1 << 23)) / f64::from(1 << 23)).collect()
}

/// Whole numbers below `end`.
pub fn below(seed: u64, len: usize, end: usize) -> Vec<u32> {
    let scaled = |x: f64| ((x + 1.0) * 0.5 * end as f64) as u32;
    uniform(seed, len).into_iter().map(|x| scaled(x).min(end as u32 - 1)).collect()
}

/// Runs a case, which gives its outputs, on every instruction set and with several numbers of
/// threads: all bits are equal. And in f32: within `tolerance` (of the largest) of f64.
pub fn check_exact(name: &str, tolerance: f64, case: impl Fn(&mut Bed) -> Vec<Buffer>) {
    let run = |float, threads, isa| {
        let mut bed = Bed::new(float, threads, isa);
        let outputs = case(&mut bed);
        let bytes: Vec<Vec<u8>> = outputs.iter().map(|output| bed.bytes(*output)).collect();
        let values: Vec<Vec<f64>> = outputs.iter().map(|output| bed.get(*output)).collect();
        (bytes, values)
    };
    let [narrow, wide] = [DType::F32, DType::F64].map(|float| {
        let (expected, values) = run(float, 1, Isa::Scalar);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for threads in [1, 2, 5] {
                let (found, _) = run(float, threads, isa);
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(found == expected, "{name}: output {i}, {isa:?}, {threads} threads");
                }
            }
        }
        values
    });
    for (i, (narrow, wide)) in narrow.iter().zip(&wide).enumerate() {
        assert_close(&format!("{name}: output {i} in f32"), narrow, wide, tolerance);
    }
}

/// Each |found - expected| is at most tolerance * (the largest |expected|, at least 0.01).
pub fn assert_close(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}");
    assert!(expected.iter().all(|x| x.is_finite()), "{name}: expected is not finite");
    let largest = expected.iter().fold(0.01, |max: f64, x| max.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        let close = error <= tolerance * largest;
        assert!(close, "{name}[{i}]: {found} against {expected}, largest {largest}");
    }
}

/// Compares gradients with central differences of <weights, outputs> in f64.
///
/// `forward(inputs)` gives all outputs in one vector, `backward(inputs, weights)` the gradient for
/// every input. At most 60 elements of each input are tried.
pub fn check_gradients(
    name: &str,
    inputs: &[Vec<f64>],
    forward: impl Fn(&[Vec<f64>]) -> Vec<f64>,
    backward: impl Fn(&[Vec<f64>], &[f64]) -> Vec<Vec<f64>>,
) {
    const STEP: f64 = 1e-5;
    let weights = uniform(1000, forward(inputs).len());
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        forward(inputs).iter().zip(&weights).map(|(y, w)| y * w).sum()
    };
    let gradients = backward(inputs, &weights);
    assert_eq!(gradients.len(), inputs.len(), "{name}");
    for (which, gradient) in gradients.iter().enumerate() {
        assert_eq!(gradient.len(), inputs[which].len(), "{name}: gradient {which}");
        let stride = gradient.len().div_ceil(60);
        let tried: Vec<usize> = (0..gradient.len()).step_by(stride).collect();
        let numeric = tried.iter().map(|i| {
            let moved = |step: f64| {
                let mut inputs = inputs.to_vec();
                inputs[which][*i] += step;
                loss(&inputs)
            };
            (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
        });
        let numeric: Vec<f64> = numeric.collect();
        let ours: Vec<f64> = tried.iter().map(|i| gradient[*i]).collect();
        let name = format!("{name}: gradient {which} (every {stride}th)");
        assert_close(&name, &ours, &numeric, 1e-7);
    }
}
