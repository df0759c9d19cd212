//! All kernels that a model's step takes, as a list: they can be compiled without a GPU, where an
//! image is built. `operator/tests/kernels.rs` holds the list against steps on a stub of a GPU.

use std::collections::HashSet;

use crate::buffer::DType;
use crate::cuda::arch::Arch;
use crate::cuda::compile::Source;
use crate::cuda::gemm::GemmConfig;
use crate::cuda::step_ops::{MasterKind, Unit};
use crate::ops::attention::shape::AttentionDesc;
use crate::ops::gate::cuda::GateShape;
use crate::ops::head::cuda as head;
use crate::ops::head::op::HeadDesc;
use crate::ops::mixture::cuda as here;
use crate::ops::mixture::desc::MoeDesc;
use crate::ops::mixture::layer::MoeLayer;
use crate::ops::norm::cuda::{norm_unit, rope_unit};
use crate::ops::peer::cuda as peer;

/// What the kernels of a step depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct StepKernels {
    /// Of weights and activations
    pub element: DType,
    pub gradient: DType,
    pub moment: DType,
    /// Widths of rows that are normed
    pub norms: Vec<usize>,
    pub head_dim: usize,
    /// Heads that are turned together, and whether they are normed before
    pub turns: Vec<(usize, bool)>,
    pub head: HeadDesc,
    pub attentions: Vec<AttentionDesc>,
    /// Mixture layers, those of a rank's own experts among them
    pub layers: Vec<MoeDesc>,
    /// Routers beyond dropless top-k
    pub gates: Vec<GateShape>,
    /// Experts are shared out over ranks.
    pub shared_out: bool,
}

impl StepKernels {
    /// Of GPUs that take `arch`, each once, in an order that does not change.
    pub fn sources(&self, arch: Arch) -> Vec<Source> {
        let target = arch.target();
        let for_elements = match self.element {
            DType::F32 => Arch::Plain(target),
            _ => arch,
        };
        let mut all: Vec<Source> = self.units().iter().map(|unit| unit.source(target)).collect();
        all.push(head::source(for_elements, &self.head));
        all.extend(self.attentions.iter().flat_map(|desc| desc.sources(desc.arch(arch))));
        let products = self.layers.iter().flat_map(|desc| MoeLayer::configs(for_elements, desc));
        all.extend(each_once(products).iter().map(GemmConfig::source));
        for desc in &self.layers {
            let route = desc.route();
            all.extend((!desc.part).then(|| route.source(target)));
            all.push(route.rows_source(target));
            all.push(here::source(desc.top_k, target));
        }
        all.extend(self.gates.iter().map(|gate| gate.source(target)));
        if self.shared_out {
            all.push(peer::source(target));
        }
        each_once(all)
    }

    /// Whether [`StepKernels::join`] takes both: they differ in attention, mixture layers and gates
    /// alone.
    pub fn is_alike(&self, other: &StepKernels) -> bool {
        let kinds = |step: &StepKernels| (step.element, step.gradient, step.moment);
        let (rows, others) = ((&self.norms, &self.turns), (&other.norms, &other.turns));
        kinds(self) == kinds(other) && rows == others && self.head_dim == other.head_dim
    }

    /// The kernels of `other`, which is alike, are among these from now on.
    pub fn join(&mut self, other: StepKernels) {
        assert!(self.is_alike(&other), "{self:?} {other:?}");
        for desc in other.attentions {
            if !self.attentions.contains(&desc) {
                self.attentions.push(desc);
            }
        }
        for desc in other.layers {
            if !self.layers.contains(&desc) {
                self.layers.push(desc);
            }
        }
        for gate in other.gates {
            if !self.gates.contains(&gate) {
                self.gates.push(gate);
            }
        }
        self.shared_out |= other.shared_out;
    }

    fn units(&self) -> Vec<Unit> {
        let StepKernels { element, gradient, moment, .. } = *self;
        let both = [false, true];
        let mut units = vec![Unit::Convert, Unit::Router];
        for dim in &self.norms {
            units.extend(both.map(|backward| norm_unit(element, *dim, backward)));
        }
        for (heads, norm) in &self.turns {
            units.extend(both.map(|back| rope_unit(element, self.head_dim, *heads, *norm, back)));
        }
        let kinds = [element, gradient, DType::F32];
        units.extend(kinds.map(|element| Unit::Elementwise { element }));
        units.extend(kinds.map(|element| Unit::ColumnSums { element }));
        units.extend(kinds.map(|gradient| Unit::Numbers { gradient }));
        units.extend(kinds.map(|table| Unit::Embed { element, table }));
        let master = match element {
            DType::F32 => MasterKind::Weight,
            DType::Bf16 => MasterKind::LowBits,
            _ => MasterKind::Separate,
        };
        units.push(Unit::AdamW { master, weight: element, moment, gradient });
        // Vectors, such as the weights of norms, are fp32 in every precision.
        let (master, whole) = (MasterKind::Weight, DType::F32);
        units.push(Unit::AdamW { master, weight: whole, moment, gradient: whole });
        each_once(units)
    }
}

/// In the order in which they come first.
fn each_once<T: Clone + Eq + std::hash::Hash>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = HashSet::new();
    all.into_iter().filter(|one| seen.insert(one.clone())).collect()
}
