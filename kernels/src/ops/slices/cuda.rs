//! Slices of experts, by kernels that lie beside those of [`crate::MoePlace`].

use crate::buffer::DType;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, Stream, parameters};
use crate::cuda::enqueue::Kernels;
use crate::cuda::error::CudaError;
use crate::ops::mixture::cuda::Here;
use crate::ops::slices::op::{SliceChoices, SumSlices};

impl CudaDevice {
    pub(crate) fn slice_choices(&mut self, op: &SliceChoices) {
        let SliceChoices { choices, slices, .. } = *op;
        let [ids, weights] = [op.ids, op.weights].map(|of| self.arena.address(of));
        let places = op.places.map_or(0, |places| self.arena.address(places));
        let [to, weights_to] = [op.slice_ids, op.slice_weights].map(|of| self.arena.address(of));
        assert_eq!(op.weights.dtype(), DType::F32, "{op:?}");
        self.on_slices(choices * slices, |here, stream, launch| {
            let (choices, slices) = (choices as u32, slices as u32);
            let parameters = parameters![ids, weights, choices, slices, places, to, weights_to];
            // SAFETY: the parameters are those of `here_slices`, the lengths were checked.
            unsafe { here.slices.launch(stream, launch, parameters) }
        });
    }

    pub(crate) fn sum_slices(&mut self, op: &SumSlices) {
        let SumSlices { choices, slices, .. } = *op;
        let [x, sums] = [op.x, op.sums].map(|of| self.arena.address(of));
        assert_eq!(op.sums.dtype(), DType::F32, "{op:?}");
        self.on_slices(choices, |here, stream, launch| {
            let (choices, slices) = (choices as u32, slices as u32);
            let parameters = parameters![x, choices, slices, sums];
            // SAFETY: the parameters are those of `here_sums`, the lengths were checked.
            unsafe { here.sums.launch(stream, launch, parameters) }
        });
    }

    /// A thread for each of `len`, by a kernel that is the same of every number of choices.
    fn on_slices(
        &mut self,
        len: usize,
        kernel: impl FnOnce(&Here, &Stream, Launch) -> Result<(), CudaError>,
    ) {
        let any = self.first::<Here>().map_or(1, |here| *here.desc());
        let launch = Launch::new(len.div_ceil(256), 256);
        self.on::<Here>(&any, |here, stream, _| match len {
            0 => Ok(()),
            _ => kernel(here, stream, launch),
        });
    }
}
