//! See [`crate::SliceChoices`].

use crate::cpu::CpuDevice;
use crate::cpu::float::Float;
use crate::ops::slices::op::{SliceChoices, SumSlices};
use crate::types::NO_EXPERT;

impl CpuDevice {
    pub(crate) fn slice_choices<T: Float>(&mut self, op: &SliceChoices) {
        let (mut views, _) = self.split();
        let ids: &[u32] = views.read(op.ids);
        let weights: &[T] = views.read(op.weights);
        let places: Option<&[u32]> = op.places.map(|places| views.read(places));
        let slice_ids: &mut [u32] = views.write(op.slice_ids);
        let slice_weights: &mut [T] = views.write(op.slice_weights);
        let choices = ids.iter().zip(weights);
        let slices = slice_ids.chunks_exact_mut(op.slices).zip(
            slice_weights.chunks_exact_mut(op.slices),
        );
        for ((id, weight), (ids, weights)) in choices.zip(slices) {
            for (j, of_slice) in (0..).zip(ids) {
                *of_slice = match *id {
                    NO_EXPERT => NO_EXPERT,
                    id => {
                        let slice = id * op.slices as u32 + j;
                        places.map_or(slice, |places| places[slice as usize])
                    }
                };
            }
            weights.fill(*weight);
        }
    }

    pub(crate) fn sum_slices<T: Float>(&mut self, op: &SumSlices) {
        let (mut views, _) = self.split();
        let x: &[T] = views.read(op.x);
        let sums: &mut [T] = views.write(op.sums);
        for (sum, of_slices) in sums.iter_mut().zip(x.chunks_exact(op.slices)) {
            *sum = of_slices[1..].iter().fold(of_slices[0], |sum, x| sum + *x);
        }
    }
}
