//! Slices of experts: ranks hold, compute and exchange parts of experts as experts of their own.
//!
//! ```text
//! router: E experts of width F, K a token --r slices each--> E r of width F / r, K r a token
//!         loads, losses, Hugging Face                        placement, rows, table, buckets
//! ```
//! Slice j of expert e has the id `e r + j`. It has the rows `j F / r ..` of gate and up and the
//! columns `j F / r ..` of down. The hidden elements of an expert do not know of each other, so its
//! output is the sum of what its slices put out, each with the expert's weight. With r = 1 slices
//! are experts.
//!
//! The table of parameters is that of slices. [`Cut`] says where each of them lies in the tensor of
//! its whole expert: by that initial values are drawn, and states with another r are read.

use crate::model::{ModelConfig, Param, Role};
use std::ops::Range;

/// The numbers of slices that an expert may have.
pub const SLICES: [u32; 4] = [1, 2, 4, 8];

/// What is computed of a model's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// Of each expert, `r`
    pub each: u32,
    /// Of a layer, `E r`
    pub count: u32,
    /// Of those that a token chooses, `K r`
    pub per_token: u32,
    /// The most that a token can have
    pub slots: u32,
    /// Hidden width of each, `F / r`
    pub width: u32,
}

/// Where the elements of a slice's tensor lie in that of its expert: runs of equal length at equal
/// distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The name of the expert's tensor.
    pub whole: String,
    /// Its element that the slice begins with.
    pub from: u64,
    /// Elements of a run, and from the beginning of a run to that of the next.
    pub run: u64,
    pub stride: u64,
    /// Elements of the slice.
    pub numel: u64,
}

/// `len` elements that lie one behind the other in a slice and in its expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutRun {
    pub in_slice: u64,
    pub in_whole: u64,
    pub len: u64,
}

impl ModelConfig {
    pub fn slices(&self) -> Slices {
        let (experts, each) = (&self.experts, self.experts.slices.max(1));
        Slices {
            each,
            count: experts.count.saturating_mul(each),
            per_token: experts.per_token.saturating_mul(each),
            slots: self.slots().saturating_mul(each),
            width: experts.intermediate_size / each,
        }
    }

    /// The same model with `each` slices an expert.
    #[must_use]
    pub fn in_slices(&self, each: u32) -> ModelConfig {
        let mut model = self.clone();
        model.experts.slices = each;
        model
    }

    /// Where `param`, of this model's table, lies in its expert's tensor; none: it is no expert's.
    pub fn cut(&self, param: &Param) -> Option<Cut> {
        let Role::Expert { layer, expert } = param.role else { return None };
        let Slices { each, width, .. } = self.slices();
        let (expert, slice) = (expert / each, u64::from(expert % each));
        let (_, matrix) = param.name.rsplit_once('.').and_then(|(at, _)| at.rsplit_once('.'))?;
        let (numel, width) = (param.numel(), u64::from(width));
        // [F / r, D] below each other, and [D, F / r] beside each other.
        let (run, stride) = match matrix {
            "down_proj" => (width, u64::from(each) * width),
            _ => (numel, u64::from(each) * numel),
        };
        Some(Cut {
            whole: format!("model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"),
            from: slice * run,
            run,
            stride,
            numel,
        })
    }
}

impl Cut {
    /// The expert's element that is the slice's at `at`.
    pub fn element(&self, at: u64) -> u64 {
        self.from + at / self.run.max(1) * self.stride + at % self.run.max(1)
    }

    /// All of the slice.
    pub fn runs(&self) -> impl Iterator<Item = CutRun> + '_ {
        let count = self.numel / self.run.max(1);
        (0..count).map(move |at| CutRun {
            in_slice: at * self.run,
            in_whole: self.from + at * self.stride,
            len: self.run,
        })
    }

    /// What of these elements of the expert is the slice's.
    pub fn within(&self, whole: Range<u64>) -> impl Iterator<Item = CutRun> + '_ {
        let count = self.numel / self.run.max(1);
        // Runs that begin before the range and may reach into it, up to the last that begin in it.
        let before = |end: u64| end.saturating_sub(self.from).div_ceil(self.stride.max(1));
        let first = before(whole.start).saturating_sub(1).min(count);
        let last = before(whole.end).min(count);
        (first..last).filter_map(move |at| {
            let begin = self.from + at * self.stride;
            let (start, end) = (begin.max(whole.start), (begin + self.run).min(whole.end));
            let in_slice = at * self.run + start.saturating_sub(begin);
            (start < end).then(|| CutRun { in_slice, in_whole: start, len: end - start })
        })
    }
}
