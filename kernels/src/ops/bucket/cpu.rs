//! See [`crate::BucketAdamW`]: block by block, what is not of the float of the sums in a copy.

use half::{bf16, f16};

use crate::buffer::{Buffer, DType, Pair};
use crate::cpu::{CpuDevice, lanes};
use crate::cpu::arena::Views;
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::isa::Isa;
use crate::ops::bucket::op::{
    BucketAdamW, BucketBlock, DecideUpdate, GradientNumbers, Master, SQUARE_SUM_BLOCK,
};
use crate::ops::bucket::step_numbers::{
    CLASSES_MAX, StepClass, StepControl, StepNumbers, StepParams,
};
use crate::philox::philox4x32_10;
use crate::stored::{join, split};

/// The coefficients of one update, computed in f64 and rounded once.
pub(crate) struct Factors<T> {
    beta1: T,
    beta2: T,
    /// What g' is g times of
    grad_scale: T,
    one_minus_beta1: T,
    one_minus_beta2: T,
    /// lr / (1 - beta1^step)
    rate: T,
    /// 1 / (1 - beta2^step)
    v_correction: T,
    eps: T,
    /// 1 - lr * weight_decay
    keep: T,
}

impl<T: Float> Factors<T> {
    pub(crate) fn new(
        class: &StepClass,
        (beta1, beta2): (f64, f64),
        eps: f64,
        grad_scale: f64,
        decays: bool,
    ) -> Factors<T> {
        Factors {
            beta1: T::of(beta1),
            beta2: T::of(beta2),
            grad_scale: T::of(grad_scale),
            one_minus_beta1: T::of(1.0 - beta1),
            one_minus_beta2: T::of(1.0 - beta2),
            rate: T::of(class.rate),
            v_correction: T::of(class.correction),
            eps: T::of(eps),
            keep: if decays { T::of(class.keep) } else { T::ONE },
        }
    }
}

lanes_fn! {
pub(crate) fn square_sum<T: Float>(g: &[T]) -> f64 {
    lanes::square_sum(g)
}
}

lanes_fn! {
pub(crate) fn update<T: Float>(f: &Factors<T>, w: &mut [T], m: &mut [T], v: &mut [T], g: &[T]) {
    for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
        let g = *g * f.grad_scale;
        *m = m.fma(f.beta1, f.one_minus_beta1 * g);
        *v = v.fma(f.beta2, f.one_minus_beta2 * g * g);
        let root = (*v * f.v_correction).sqrt();
        *w = w.fma(f.keep, -(f.rate * *m / (root + f.eps)));
    }
}
}

lanes_fn! {
pub(crate) fn non_finite<T: Float>(x: &[T]) -> u32 {
    let mut count = 0;
    for x in x {
        count += u32::from(!x.is_finite());
    }
    count
}
}

impl CpuDevice {
    pub(crate) fn gradient_numbers(&mut self, op: &GradientNumbers) {
        match op.gradient.dtype() {
            DType::F64 => self.gradient_numbers_of::<f64>(op),
            _ => self.gradient_numbers_of::<f32>(op),
        }
    }

    fn gradient_numbers_of<T: Float>(&mut self, op: &GradientNumbers) {
        op.blocks();
        let (mut views, exec) = self.split();
        let blocks = read_table(&mut views, op.table);
        let params: &[f64] = views.read(op.params);
        let gradient = Values::<T>::read(&mut views, op.gradient);
        let sums: &mut [f64] = views.write(op.sums);
        let numbers: &mut [f64] = views.write(op.numbers);
        let classes = classes_of(params);
        let mut counts = vec![0_u32; blocks.len()];
        let jobs = blocks.iter().enumerate().zip(sums.iter_mut().zip(&mut counts)).collect();
        exec.run(jobs, 2 * op.gradient.len(), |((at, block), (sum, count))| {
            let mut copy = Vec::new();
            let g = &gradient.block(at, &mut copy)[..block.len as usize];
            (*sum, *count) = (square_sum::<T>(exec.isa, g), non_finite::<T>(exec.isa, g));
        });
        let counted =
            |block: &BucketBlock| !block.uncounted && classes[block.class as usize].active;
        let parts = blocks.iter().zip(sums.iter()).filter(|(block, _)| counted(block));
        // The scale is a power of two, by which nothing is rounded.
        let unscale = 1.0 / params[StepParams::LOSS_SCALE];
        let parts = parts.map(|(_, sum)| sum * unscale * unscale);
        match op.squares {
            Some(squares) => {
                let squares: &mut [Pair] = views.write(squares);
                squares[0] = parts.fold(squares[0], |squares, part| squares.plus(part.into()));
            }
            None => numbers[StepNumbers::SQUARED_NORM] += parts.sum::<f64>(),
        }
        let of_tensors = op.layout.non_finite();
        for (block, count) in blocks.iter().zip(&counts).filter(|(_, count)| **count > 0) {
            numbers[StepNumbers::NON_FINITE] += f64::from(*count);
            numbers[of_tensors.clone()][block.tensor as usize] += f64::from(*count);
        }
    }

    pub(crate) fn decide_update(&mut self, op: &DecideUpdate) {
        let (mut views, _) = self.split();
        let params: &[f64] = views.read(op.params);
        let numbers: &mut [f64] = views.write(op.numbers);
        let control: &mut [f64] = views.write(op.control);
        numbers[StepNumbers::HALTED] = control[StepControl::HALTED];
        let StepControl { apply, gradient_scale, norm } = StepControl::decide(params, numbers);
        let apply = f64::from(u8::from(apply));
        control[StepControl::APPLY] = apply;
        control[StepControl::GRADIENT_SCALE] = gradient_scale;
        control[StepControl::NORM] = norm;
        control[StepControl::UPDATES] += apply;
        control[StepControl::HALTED] = 1.0 - apply;
        numbers[StepNumbers::UPDATES] = control[StepControl::UPDATES];
    }

    pub(crate) fn bucket_adamw(&mut self, op: &BucketAdamW) {
        match op.weight.dtype() {
            DType::F64 => self.bucket_adamw_of::<f64>(op),
            _ => self.bucket_adamw_of::<f32>(op),
        }
    }

    fn bucket_adamw_of<T: Float>(&mut self, op: &BucketAdamW) {
        op.blocks();
        let (mut views, exec) = self.split();
        let blocks = read_table(&mut views, op.table);
        let params: &[f64] = views.read(op.params);
        let control: &[f64] = views.read(op.control);
        if control[StepControl::APPLY] == 0.0 {
            return;
        }
        let classes = classes_of(params);
        let scale = control[StepControl::GRADIENT_SCALE];
        let betas = (op.beta1, op.beta2);
        let step = params[StepParams::STEP] as u64;
        let gradient = Values::<T>::read(&mut views, op.gradient);
        let mut masters = MasterParts::<T>::new(&mut views, op);
        let mut moments =
            [op.moment1, op.moment2].map(|moment| Moment::<T>::new(&mut views, moment));
        let jobs: Vec<_> = masters
            .blocks()
            .zip(moments.each_mut().map(Moment::blocks).into_pairs())
            .zip(blocks.iter().enumerate())
            .filter(|(_, (_, block))| !block.frozen && classes[block.class as usize].active)
            .collect();
        exec.run(jobs, 24 * op.gradient.len(), |((mut weight, [mut m, mut v]), (at, block))| {
            let class = &classes[block.class as usize];
            let factors = Factors::new(class, betas, op.eps, scale, block.decays);
            let len = block.len as usize;
            let mut copy = Vec::new();
            let g = &gradient.block(at, &mut copy)[..len];
            update_block(exec.isa, &factors, (block, step), &mut weight, &mut m, &mut v, g);
        });
    }
}

/// One block in the float of the sums, moments and weights brought there and back.
fn update_block<T: Float>(
    isa: Isa,
    factors: &Factors<T>,
    (block, step): (&BucketBlock, u64),
    weight: &mut MasterBlock<T>,
    m: &mut Moment<T>,
    v: &mut Moment<T>,
    g: &[T],
) {
    let len = g.len();
    let (mut w_copy, mut m_copy, mut v_copy) = (Vec::new(), Vec::new(), Vec::new());
    {
        let w = weight.values(len, &mut w_copy);
        let (m, v) = (m.values(len, &mut m_copy), v.values(len, &mut v_copy));
        update::<T>(isa, factors, w, m, v, g);
    }
    weight.put(&w_copy, len);
    m.put(&m_copy, block, step, 0);
    v.put(&v_copy, block, step, 16);
}

fn read_table(views: &mut Views<'_>, table: Buffer) -> Vec<BucketBlock> {
    let words: &[u32] = views.read(table);
    let (blocks, _) = words.as_chunks::<{ BucketBlock::WORDS }>();
    blocks.iter().map(BucketBlock::decode).collect()
}

fn classes_of(params: &[f64]) -> [StepClass; CLASSES_MAX] {
    std::array::from_fn(|class| StepParams::class(params, class))
}

/// What is only read.
enum Values<'a, T> {
    Same(&'a [T]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a, T: Float> Values<'a, T> {
    fn read(views: &mut Views<'a>, buffer: Buffer) -> Values<'a, T> {
        match buffer.dtype() {
            DType::Bf16 => Values::Bf16(views.read(buffer)),
            DType::F16 => Values::F16(views.read(buffer)),
            _ => Values::Same(views.read(buffer)),
        }
    }

    fn block<'b>(&'b self, at: usize, copy: &'b mut Vec<T>) -> &'b [T] {
        let range = at * SQUARE_SUM_BLOCK..(at + 1) * SQUARE_SUM_BLOCK;
        match self {
            Values::Same(values) => return &values[range],
            Values::Bf16(values) => copy.extend(values[range].iter().map(|x| T::of(x.to_f64()))),
            Values::F16(values) => copy.extend(values[range].iter().map(|x| T::of(x.to_f64()))),
        }
        copy
    }
}

/// A moment, or a block of it.
enum Moment<'a, T> {
    Same(&'a mut [T]),
    Bf16(&'a mut [bf16]),
}

impl<'a, T: Float> Moment<'a, T> {
    fn new(views: &mut Views<'a>, buffer: Buffer) -> Moment<'a, T> {
        match buffer.dtype() {
            DType::Bf16 => Moment::Bf16(views.write(buffer)),
            _ => Moment::Same(views.write(buffer)),
        }
    }

    fn blocks(&mut self) -> Vec<Moment<'_, T>> {
        match self {
            Moment::Same(all) => all.chunks_mut(SQUARE_SUM_BLOCK).map(Moment::Same).collect(),
            Moment::Bf16(all) => all.chunks_mut(SQUARE_SUM_BLOCK).map(Moment::Bf16).collect(),
        }
    }

    fn values<'b>(&'b mut self, len: usize, copy: &'b mut Vec<T>) -> &'b mut [T] {
        match self {
            Moment::Same(values) => &mut values[..len],
            Moment::Bf16(values) => {
                copy.extend(values[..len].iter().map(|x| T::of(x.to_f64())));
                copy
            }
        }
    }

    /// Takes the copy in, rounded at random by the words' bits from `shift` on.
    fn put(&mut self, copy: &[T], block: &BucketBlock, step: u64, shift: u32) {
        let Moment::Bf16(values) = self else { return };
        let words = |x: u64| [x as u32, (x >> 32) as u32];
        let [s0, s1] = words(step);
        for (quad, (values, copy)) in values.chunks_mut(4).zip(copy.chunks(4)).enumerate() {
            let [q0, q1] = words(block.first / 4 + quad as u64);
            let random = philox4x32_10(block.name_hash, [q0, q1, s0, s1]);
            for ((value, x), word) in values.iter_mut().zip(copy).zip(random) {
                let bits = (x.wide() as f32).to_bits();
                let raised = bits.wrapping_add(word >> shift & 0xffff);
                *value = bf16::from_bits((raised >> 16) as u16);
            }
        }
    }
}

/// Two lists in step.
trait IntoPairs<T> {
    fn into_pairs(self) -> impl Iterator<Item = [T; 2]>;
}

impl<T> IntoPairs<T> for [Vec<T>; 2] {
    fn into_pairs(self) -> impl Iterator<Item = [T; 2]> {
        let [a, b] = self;
        a.into_iter().zip(b).map(|(a, b)| [a, b])
    }
}

/// The weights of a bucket with their masters.
enum MasterParts<'a, T> {
    Own(&'a mut [T]),
    Low(&'a mut [bf16], &'a mut [i16]),
    /// Weights in 16 bits beside fp32 masters
    Bf16(&'a mut [bf16], &'a mut [T]),
    F16(&'a mut [f16], &'a mut [T]),
}

/// The same of one block.
type MasterBlock<'a, T> = MasterParts<'a, T>;

impl<'a, T: Float> MasterParts<'a, T> {
    fn new(views: &mut Views<'a>, op: &BucketAdamW) -> MasterParts<'a, T> {
        match (op.master, op.weight.dtype()) {
            (Master::Weight, _) => MasterParts::Own(views.write(op.weight)),
            (Master::LowBits(low), _) => {
                MasterParts::Low(views.write(op.weight), views.write(low))
            }
            (Master::Separate(master), DType::Bf16) => {
                MasterParts::Bf16(views.write(op.weight), views.write(master))
            }
            (Master::Separate(master), _) => {
                MasterParts::F16(views.write(op.weight), views.write(master))
            }
        }
    }

    fn blocks(&mut self) -> impl Iterator<Item = MasterBlock<'_, T>> {
        const LEN: usize = SQUARE_SUM_BLOCK;
        let blocks: Vec<_> = match self {
            MasterParts::Own(w) => w.chunks_mut(LEN).map(MasterParts::Own).collect(),
            MasterParts::Low(w, low) => {
                let pairs = w.chunks_mut(LEN).zip(low.chunks_mut(LEN));
                pairs.map(|(w, low)| MasterParts::Low(w, low)).collect()
            }
            MasterParts::Bf16(w, master) => {
                let pairs = w.chunks_mut(LEN).zip(master.chunks_mut(LEN));
                pairs.map(|(w, master)| MasterParts::Bf16(w, master)).collect()
            }
            MasterParts::F16(w, master) => {
                let pairs = w.chunks_mut(LEN).zip(master.chunks_mut(LEN));
                pairs.map(|(w, master)| MasterParts::F16(w, master)).collect()
            }
        };
        blocks.into_iter()
    }

    fn values<'b>(&'b mut self, len: usize, copy: &'b mut Vec<T>) -> &'b mut [T] {
        match self {
            MasterParts::Own(w) => &mut w[..len],
            MasterParts::Bf16(_, master) | MasterParts::F16(_, master) => &mut master[..len],
            MasterParts::Low(w, low) => {
                let joined = w[..len].iter().zip(low.iter());
                copy.extend(joined.map(|(w, low)| T::of(f64::from(join(w.to_bits(), *low)))));
                copy
            }
        }
    }

    /// Weights of the new masters.
    fn put(&mut self, copy: &[T], len: usize) {
        match self {
            MasterParts::Own(_) => {}
            MasterParts::Low(w, low) => {
                for ((w, low), x) in w.iter_mut().zip(low.iter_mut()).zip(copy) {
                    let (high, rest) = split(x.wide() as f32);
                    (*w, *low) = (bf16::from_bits(high), rest);
                }
            }
            MasterParts::Bf16(w, master) => {
                let masters = master[..len].iter().map(|x| bf16::from_f32(x.wide() as f32));
                w.iter_mut().zip(masters).for_each(|(w, x)| *w = x);
            }
            MasterParts::F16(w, master) => {
                let masters = master[..len].iter().map(|x| f16::from_f32(x.wide() as f32));
                w.iter_mut().zip(masters).for_each(|(w, x)| *w = x);
            }
        }
    }
}
