//! Gradients of experts' weights, of which each is a product, or a sum of the products of each
//! source's rows.

use crate::buffer::Buffer;
use crate::cpu::CpuDevice;
use crate::cpu::gemm::kernel::GemmFloat;
use crate::ops::convert::op::AddUp;
use crate::ops::elementwise::op::Add;
use crate::ops::mixture::cpu::experts::{ExpertsDownWgrad, ExpertsUpWgrad};
use crate::ops::mixture::desc::{Gradients, MoeDesc, MoeTensors};
use crate::types::Output;

/// Rows of one expert from one source, whose gradient is a product of its own.
struct SourceRows {
    expert: usize,
    end: u32,
    /// The expert's sum begins with it.
    first: bool,
}

/// Those of all experts, which have rows; of an expert without any one that has none. An expert's
/// rows ascend by token, and so by source.
fn by_source(cpu: &CpuDevice, desc: &MoeDesc, tensors: &MoeTensors) -> Vec<SourceRows> {
    let offsets: Vec<u32> = cpu.slice(tensors.saved.offsets).to_vec();
    let rows: Vec<u32> = cpu.slice(tensors.saved.rows).to_vec();
    let each = (desc.tokens / desc.sources) as u32;
    let ends: Vec<u32> = match tensors.starts {
        Some(starts) => cpu.slice::<u32>(starts)[1..].to_vec(),
        None => (1..=desc.sources as u32).map(|source| source * each).collect(),
    };
    let mut all = Vec::new();
    for (expert, range) in offsets.windows(2).enumerate() {
        let of_expert = &rows[range[0] as usize..range[1] as usize];
        let (mut at, mut first) = (0, true);
        while let Some(token) = of_expert.get(at) {
            let source = ends.partition_point(|end| end <= token);
            at += of_expert[at..].partition_point(|token| *token < ends[source]);
            all.push(SourceRows { expert, end: range[0] + at as u32, first });
            first = false;
        }
        if first {
            all.push(SourceRows { expert, end: range[0], first });
        }
    }
    all
}

/// How products become gradients of weights.
pub(super) struct Into {
    /// They are added to what is there.
    accumulate: bool,
    /// The destination holds sums, to which the product of each source is added by itself.
    by_source: Option<Vec<SourceRows>>,
    /// Room for a product of each expert, and for where the rows of each begin.
    products: Buffer,
    bounds: Buffer,
}

impl Into {
    /// `products` has room for a product of each expert, `bounds` for where the rows of each begin.
    pub fn new(
        cpu: &CpuDevice,
        (desc, tensors): (&MoeDesc, &MoeTensors),
        gradients: &Gradients,
        [products, bounds]: [Buffer; 2],
    ) -> Into {
        let sums = desc.weight_gradients == Output::Sums;
        Into {
            accumulate: gradients.accumulate,
            by_source: sums.then(|| by_source(cpu, desc, tensors)),
            products,
            bounds,
        }
    }

    /// Gradients of down. What is added to something is written to room of its own first.
    pub fn down<T: GemmFloat>(&self, cpu: &mut CpuDevice, op: &ExpertsDownWgrad<'_>) {
        self.add_products::<T>(cpu, &[op.dw_down], |cpu, offsets, own| {
            let (offsets, dw_down) = (offsets.unwrap_or(op.offsets), &own[0]);
            cpu.experts_down_wgrad::<T>(&ExpertsDownWgrad { dw_down, offsets, ..*op });
        });
    }

    /// The same of gate and up.
    pub fn up<T: GemmFloat>(&self, cpu: &mut CpuDevice, op: &ExpertsUpWgrad<'_>) {
        self.add_products::<T>(cpu, &[op.dw_gate, op.dw_up], |cpu, offsets, own| {
            let (offsets, dw_gate, dw_up) = (offsets.unwrap_or(op.offsets), &own[0], &own[1]);
            cpu.experts_up_wgrad::<T>(&ExpertsUpWgrad { dw_gate, dw_up, offsets, ..*op });
        });
    }

    /// Adds what `product` makes of some segments of rows to `into`, of whose lists each has a
    /// buffer an expert, or none.
    fn add_products<T: GemmFloat>(
        &self,
        cpu: &mut CpuDevice,
        into: &[&[Buffer]],
        product: impl Fn(&mut CpuDevice, Option<Buffer>, &[Vec<Buffer>]),
    ) {
        let experts = into.iter().map(|of| of.len()).max().unwrap_or(0);
        let Some(sources) = &self.by_source else {
            if !self.accumulate {
                let into: Vec<Vec<Buffer>> = into.iter().map(|of| of.to_vec()).collect();
                return product(cpu, None, &into);
            }
            let own = self.room(into, &(0..experts).collect::<Vec<_>>());
            product(cpu, None, &own);
            let all = into.iter().zip(&own).flat_map(|(into, own)| into.iter().zip(own));
            return all.for_each(|(sum, x)| cpu.add::<T>(&Add { a: *sum, b: *x }));
        };
        let mut begin = 0;
        for some in sources.chunks(experts.max(1)) {
            let ends = some.iter().map(|of| of.end);
            let bounds: Vec<u32> = std::iter::once(begin).chain(ends).collect();
            begin = bounds[some.len()];
            let offsets = self.bounds.slice(0, bounds.len());
            cpu.slice_mut(offsets).copy_from_slice(&bounds);
            let of: Vec<usize> = some.iter().map(|of| of.expert).collect();
            let own = self.room(into, &of);
            product(cpu, Some(offsets), &own);
            for (into, own) in into.iter().zip(&own) {
                for (of, x) in some.iter().zip(own) {
                    let adds = self.accumulate || !of.first;
                    cpu.add_up(&AddUp { x: *x, sum: into[of.expert], adds });
                }
            }
        }
    }

    /// Parts of the room for products, each as long as what it is added to: of some experts.
    fn room(&self, into: &[&[Buffer]], experts: &[usize]) -> Vec<Vec<Buffer>> {
        let mut begin = 0;
        let mut next = |of: &Buffer| {
            begin += of.len();
            self.products.slice(begin - of.len(), of.len())
        };
        let mut list = |of: &&[Buffer]| -> Vec<Buffer> {
            let some = experts.iter().filter_map(|expert| of.get(*expert));
            some.map(&mut next).collect()
        };
        into.iter().map(&mut list).collect()
    }
}
