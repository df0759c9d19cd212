//! Gradients of experts' weights, of which each is a product, or a sum of the products of each
//! source's rows.

use super::moe::{held, set};
use crate::buffer::Buffer;
use crate::convert::AddUp;
use crate::cuda::{Gradients, MoeDesc, MoeTensors, Output};
use crate::device::Device;
use crate::elementwise::Add;
use crate::experts::{ExpertsDownWgrad, ExpertsUpWgrad};

/// Rows of one expert from one source, whose gradient is a product of its own.
struct SourceRows {
    expert: usize,
    end: u32,
    /// The expert's sum begins with it.
    first: bool,
}

/// Those of all experts, which have rows; of an expert without any one that has none. An expert's
/// rows ascend by token, and so by source.
fn by_source(device: &Device, desc: &MoeDesc, tensors: &MoeTensors) -> Vec<SourceRows> {
    let offsets: Vec<u32> = held(device, tensors.saved.offsets);
    let rows: Vec<u32> = held(device, tensors.saved.rows);
    let each = (desc.tokens / desc.sources) as u32;
    let ends: Vec<u32> = match tensors.starts {
        Some(starts) => held(device, starts)[1..].to_vec(),
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
        device: &Device,
        (desc, tensors): (&MoeDesc, &MoeTensors),
        gradients: &Gradients,
        [products, bounds]: [Buffer; 2],
    ) -> Into {
        let sums = desc.weight_gradients == Output::Sums;
        Into {
            accumulate: gradients.accumulate,
            by_source: sums.then(|| by_source(device, desc, tensors)),
            products,
            bounds,
        }
    }

    /// Gradients of down. What is added to something is written to room of its own first.
    pub fn down(&self, device: &mut Device, op: &ExpertsDownWgrad<'_>) {
        self.add_products(device, &[op.dw_down], |device, offsets, own| {
            let (offsets, dw_down) = (offsets.unwrap_or(op.offsets), &own[0]);
            device.experts_down_wgrad(&ExpertsDownWgrad { dw_down, offsets, ..*op });
        });
    }

    /// The same of gate and up.
    pub fn up(&self, device: &mut Device, op: &ExpertsUpWgrad<'_>) {
        self.add_products(device, &[op.dw_gate, op.dw_up], |device, offsets, own| {
            let (offsets, dw_gate, dw_up) = (offsets.unwrap_or(op.offsets), &own[0], &own[1]);
            device.experts_up_wgrad(&ExpertsUpWgrad { dw_gate, dw_up, offsets, ..*op });
        });
    }

    /// Adds what `product` makes of some segments of rows to `into`, of whose lists each has a
    /// buffer an expert, or none.
    fn add_products(
        &self,
        device: &mut Device,
        into: &[&[Buffer]],
        product: impl Fn(&mut Device, Option<Buffer>, &[Vec<Buffer>]),
    ) {
        let experts = into.iter().map(|of| of.len()).max().unwrap_or(0);
        let Some(sources) = &self.by_source else {
            if !self.accumulate {
                let into: Vec<Vec<Buffer>> = into.iter().map(|of| of.to_vec()).collect();
                return product(device, None, &into);
            }
            let own = self.room(into, &(0..experts).collect::<Vec<_>>());
            product(device, None, &own);
            let all = into.iter().zip(&own).flat_map(|(into, own)| into.iter().zip(own));
            return all.for_each(|(sum, x)| device.add(&Add { a: *sum, b: *x }));
        };
        let mut begin = 0;
        for some in sources.chunks(experts.max(1)) {
            let ends = some.iter().map(|of| of.end);
            let bounds: Vec<u32> = std::iter::once(begin).chain(ends).collect();
            begin = bounds[some.len()];
            let offsets = self.bounds.slice(0, bounds.len());
            set(device, offsets, &bounds);
            let of: Vec<usize> = some.iter().map(|of| of.expert).collect();
            let own = self.room(into, &of);
            product(device, Some(offsets), &own);
            for (into, own) in into.iter().zip(&own) {
                for (of, x) in some.iter().zip(own) {
                    let adds = self.accumulate || !of.first;
                    device.add_up(&AddUp { x: *x, sum: into[of.expert], adds });
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
