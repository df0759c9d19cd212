//! Where a number that is not finite came from, by tensor, layer and expert. Looked for when a step
//! has failed, never in one that has not.

use crate::data::Batches;
use crate::engine::forward::Pass;
use crate::engine::model::Model;
use crate::engine::round::{Aim, Round};
use crate::engine::step::{Engine, StepError};
use crate::state::rank::place;
use half::{bf16, f16};
use moejob_kernels::{Buffer, DType};

/// The longest answer that ranks tell each other.
pub const BYTES_MAX: usize = 512;

impl Engine {
    /// Where numbers that are not finite come from, by the first rank that knows; the same on all.
    /// Each round of the step is computed once more, and looked at.
    ///
    /// # Errors
    /// A peer is lost, or the data changed.
    pub fn diagnose(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
    ) -> Result<Option<String>, StepError> {
        let mut broken = None;
        self.rounds(step, batches, |_| Aim::Activations, |engine, schedule| {
            let mut pass = Pass::new(&mut engine.model, &mut engine.links, &schedule.round);
            pass.forward();
            pass.loss(None);
            if schedule.own.is_some()
                && broken.is_none()
                && !engine.model.read_loss().is_finite()
            {
                broken = engine.model.broken_activation(&schedule.round);
            }
        })?;
        let own = self.model.broken_weight().or(broken).unwrap_or_default();
        let own: String = own.chars().filter(char::is_ascii).take(BYTES_MAX).collect();
        let all = self.links.comm().gather_all(own.as_bytes(), BYTES_MAX)?;
        let told = all.iter().map(|text| String::from_utf8_lossy(text).into_owned());
        // A weight says more than what it led to.
        let mut told: Vec<String> = told.filter(|text| !text.is_empty()).collect();
        told.sort_by_key(|text| !text.starts_with("the weight"));
        Ok(told.into_iter().next())
    }
}

impl Model {
    /// The first weight kept here that is not finite.
    pub fn broken_weight(&self) -> Option<String> {
        self.params.iter().enumerate().find_map(|(index, param)| {
            let (first, kept) = self.kept_weight(index)?;
            let at = first + self.first_bad(kept)?;
            Some(format!("the weight {} at element {at}", place(param)))
        })
    }

    /// The first place of the round's forward pass whose numbers are not finite.
    pub fn broken_activation(&self, round: &Round) -> Option<String> {
        let (t, d) = (round.tokens, self.dim());
        if self.first_bad(self.layer_input(0).slice(0, t * d)).is_some() {
            return Some("the embeddings".to_string());
        }
        for layer in 0..self.buffers.layers.len() {
            let b = self.buffers.layers[layer].clone();
            if self.first_bad(b.mid.slice(0, t * d)).is_some() {
                return Some(format!("the attention of layer {layer}"));
            }
            if let Some(fused) = b.fused {
                if self.first_bad(fused.router.logits).is_some() {
                    return Some(format!("the router of layer {layer}"));
                }
                let width = 2 * self.slices().width;
                let offsets = fused.spread.as_ref().map_or(fused.offsets, |spread| spread.offsets);
                let ends: Vec<u32> = self.device.read_vec(offsets);
                if let Some(at) = self.first_bad(fused.h) {
                    let held = self.layout.experts(&self.config, layer as u32, self.rank);
                    let at = ends[1..].partition_point(|end| *end as usize <= at / width);
                    let expert = *held.get(at)? as usize / self.slices().each;
                    return Some(format!("expert {expert} of layer {layer}"));
                }
            }
            if self.first_bad(self.layer_input(layer + 1).slice(0, t * d)).is_some() {
                return Some(format!("the feed-forward part of layer {layer}"));
            }
        }
        Some("the logits".to_string())
    }

    fn first_bad(&self, buffer: Buffer) -> Option<usize> {
        let read = &self.device;
        match buffer.dtype() {
            DType::F64 => read.read_vec::<f64>(buffer).iter().position(|x| !x.is_finite()),
            DType::Bf16 => read.read_vec::<bf16>(buffer).iter().position(|x| !x.is_finite()),
            DType::F16 => read.read_vec::<f16>(buffer).iter().position(|x| !x.is_finite()),
            _ => read.read_vec::<f32>(buffer).iter().position(|x| !x.is_finite()),
        }
    }
}
