//! All kernels that a model's step takes, as a list: they can be compiled without a GPU, where an
//! image is built. `operator/tests/kernels.rs` holds the list against steps on a stub of a GPU.

use std::collections::HashSet;

use crate::buffer::DType;
use crate::cuda::arch::Arch;
use crate::cuda::compile::Source;
use crate::cuda::enqueue::Unit;
use crate::cuda::gemm::GemmConfig;
use crate::ops::attention::op::AttentionDesc;
use crate::ops::bucket::cuda::{MasterKind, adamw_unit, numbers_unit};
use crate::ops::convert::cuda as convert;
use crate::ops::elementwise::cuda as elementwise;
use crate::ops::embed::cuda as embed;
use crate::ops::gate::cuda::GateShape;
use crate::ops::head::cuda as head;
use crate::ops::head::op::HeadDesc;
use crate::ops::matmul::cuda as matmul;
use crate::ops::mixture::cuda as here;
use crate::ops::mixture::desc::MoeDesc;
use crate::ops::mixture::layer::MoeLayer;
use crate::ops::norm::cuda::norm_unit;
use crate::ops::peer::cuda as peer;
use crate::ops::rope::cuda::rope_unit;
use crate::ops::router::cuda as router;

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
        let mut units = vec![convert::unit(), router::unit()];
        for dim in &self.norms {
            units.extend(both.map(|backward| norm_unit(element, *dim, backward).0));
        }
        for (heads, norm) in &self.turns {
            let unit = |back| rope_unit(element, self.head_dim, *heads, *norm, back).unit;
            units.extend(both.map(unit));
        }
        let kinds = [element, gradient, DType::F32];
        units.extend(kinds.map(elementwise::unit));
        units.extend(kinds.map(matmul::unit));
        units.extend(kinds.map(numbers_unit));
        units.extend(kinds.map(|table| embed::unit(element, table)));
        let master = match element {
            DType::F32 => MasterKind::Weight,
            DType::Bf16 => MasterKind::LowBits,
            _ => MasterKind::Separate,
        };
        units.push(adamw_unit(master, [element, moment, gradient]));
        // Vectors, such as the weights of norms, are fp32 in every precision.
        let (master, whole) = (MasterKind::Weight, DType::F32);
        units.push(adamw_unit(master, [whole, moment, whole]));
        each_once(units)
    }
}

/// In the order in which they come first.
fn each_once<T: Clone + Eq + std::hash::Hash>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = HashSet::new();
    all.into_iter().filter(|one| seen.insert(one.clone())).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::cuda::compile::{compile, compile_into, in_turn};
    use crate::cuda::libraries::NVRTC;
    use crate::ops::attention::cuda::cache_unit;
    use crate::ops::gate;
    use crate::ops::wire::cuda as wire;
    use crate::types::{Activation, Output};


    /// Compiles them, wherever NVRTC is; into the folder MOEJOB_CUBIN_CACHE where that is set, so
    /// that a machine without a device fills the cache of one that has it.
    fn check_that_all_compile(test: &str, sources: HashSet<Source>) {
        if let Err(error) = NVRTC.require() {
            return eprintln!("skipped: {test}: {error}");
        }
        let folder = std::env::var_os("MOEJOB_CUBIN_CACHE").map(PathBuf::from);
        let sources: Vec<Source> = sources.into_iter().collect();
        let Some(folder) = folder else {
            let cubins = in_turn(&sources, &|_, _| (), compile);
            for (source, cubin) in sources.iter().zip(cubins) {
                let cubin = cubin.unwrap_or_else(|error| panic!("{error}"));
                assert!(!cubin.is_empty(), "{}", source.label);
            }
            return;
        };
        compile_into(&folder, &sources, &|_, _| ()).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Every kernel of attention: heads for each path, masked and not, both backwards.
    #[test]
    fn the_kernels_of_attention_compile() {
        let mut sources = HashSet::new();
        let halves = [DType::Bf16, DType::F16];
        for (arch, elements, head_dims) in ATTENTIONS {
            for element in elements.unwrap_or(&halves) {
                for head_dim in head_dims {
                    for bits in 0..4 {
                        let desc = AttentionDesc {
                            element: *element,
                            batch: 2,
                            seq: 512,
                            heads: 8,
                            kv_heads: if bits & 1 == 0 { 8 } else { 2 },
                            head_dim: *head_dim,
                            scale: 0.1,
                            documents: bits & 2 != 0,
                            window: None,
                            deterministic: false,
                        };
                        sources.extend(desc.sources(arch));
                        let desc = AttentionDesc { deterministic: true, ..desc };
                        sources.extend(desc.sources(arch));
                    }
                }
            }
        }
        check_that_all_compile("the_kernels_of_attention_compile", sources);
    }

    /// Elements (none: both of 16 bits) and head dims.
    const ATTENTIONS: [(Arch, Option<&[DType]>, &[usize]); 3] = [
        (Arch::Hopper, None, &[64, 96, 128]),
        (Arch::Ampere("sm_80"), None, &[72, 128, 256]),
        (Arch::Plain("sm_80"), Some(&[DType::F32]), &[40, 256]),
    ];

    /// Every kernel of a layer, for both paths and all elements.
    #[test]
    fn the_kernels_of_layers_compile() {
        let mut sources = HashSet::new();
        for (arch, elements) in [
            (Arch::Hopper, [DType::Bf16, DType::F16].as_slice()),
            (Arch::Ampere("sm_80"), &[DType::Bf16, DType::F16]),
            (Arch::Plain("sm_80"), &[DType::F32]),
        ] {
            for (element, gated) in elements.iter().flat_map(|e| [(*e, true), (*e, false)]) {
                let desc = MoeDesc { element, gated, ..layer_desc() };
                let configs = MoeLayer::configs(arch, &desc);
                sources.extend(configs.iter().map(GemmConfig::source));
                sources.insert(desc.route().source(arch.target()));
                sources.insert(desc.route().rows_source(arch.target()));
                // Experts that choose leave a slot for each of them.
                let all = MoeDesc { top_k: 40, ..desc };
                sources.insert(all.route().rows_source(arch.target()));
                sources.insert(here::source(all.top_k, arch.target()));
            }
        }
        check_that_all_compile("the_kernels_of_layers_compile", sources);
    }

    /// The same of the ops of a step.
    #[test]
    fn the_kernels_of_a_step_compile() {
        let units = units();
        let of = |arch| units.iter().map(move |unit| unit.source(arch));
        let sources = of("sm_90a").chain(of("sm_80")).collect();
        check_that_all_compile("the_kernels_of_a_step_compile", sources);
    }

    /// And of heads and gates.
    #[test]
    fn the_kernels_of_heads_and_gates_compile() {
        let arches = [Arch::Hopper, Arch::Ampere("sm_80")];
        let heads = arches.into_iter().flat_map(head::tests::sources);
        let gates = |arch: Arch| gate::cuda::tests::sources(arch.target());
        let sources = heads.chain(arches.into_iter().flat_map(gates)).collect();
        check_that_all_compile("the_kernels_of_heads_and_gates_compile", sources);
    }

    /// And of links between GPUs.
    #[test]
    fn the_kernels_of_links_compile() {
        let source = |arch: Arch| peer::source(arch.target());
        let sources = [Arch::Hopper, Arch::Ampere("sm_80")].into_iter().map(source).collect();
        check_that_all_compile("the_kernels_of_links_compile", sources);
    }

    fn layer_desc() -> MoeDesc {
        MoeDesc {
            element: DType::Bf16,
            tokens: 4096,
            dim: 2048,
            hidden: 768,
            experts: 128,
            top_k: 8,
            part: false,
            activation: Activation::Silu,
            gated: true,
            sigmoid: false,
            norm_topk: true,
            scale: 1.0,
            groups: None,
            segments: 1,
            sources: 1,
            aux_coef: 0.01,
            z_coef: 0.001,
            weight_gradients: Output::Element,
        }
    }

    /// A unit of every kind, for every element and odd sizes: what tests compile.
    fn units() -> Vec<Unit> {
        let mut units = vec![convert::unit(), router::unit()];
        units.extend([DType::Bf16, DType::F32].map(wire::unit));
        for element in [DType::Bf16, DType::F16, DType::F32] {
            for dim in [33, 2048] {
                units.extend([false, true].map(|backward| norm_unit(element, dim, backward).0));
            }
            for (head_dim, heads, norm) in [(128, 16, true), (128, 1, true), (34, 3, false)] {
                let unit = |backward| rope_unit(element, head_dim, heads, norm, backward).unit;
                units.extend([false, true].map(unit));
            }
            units.extend([matmul::unit(element), elementwise::unit(element)]);
            units.push(embed::unit(element, element));
            units.push(embed::unit(element, DType::F32));
            units.push(numbers_unit(element));
            units.extend([16, 96, 128, 256].map(|head_dim| cache_unit(element, head_dim)));
        }
        for moment in [DType::F32, DType::Bf16] {
            for (master, weight, gradient) in [
                (MasterKind::Weight, DType::F32, DType::F32),
                (MasterKind::LowBits, DType::Bf16, DType::Bf16),
                (MasterKind::LowBits, DType::Bf16, DType::F32),
                (MasterKind::Separate, DType::F16, DType::F16),
                (MasterKind::Separate, DType::F16, DType::F32),
                (MasterKind::Separate, DType::Bf16, DType::Bf16),
            ] {
                units.push(adamw_unit(master, [weight, moment, gradient]));
            }
        }
        units
    }
}
