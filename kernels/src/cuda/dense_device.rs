//! The dense products of a device.

use crate::cuda::dense::Products;
use crate::cuda::dense_record::{DenseChoices, DenseRecord, OtherDevice};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Stream};
use crate::cuda::error::CudaError;
use crate::error::LayerError;

/// Why algorithms are chosen anew.
#[derive(Debug, thiserror::Error)]
pub enum NotTaken {
    #[error(transparent)]
    Other(#[from] OtherDevice),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The products of a device, made when the first is asked for: a job without them needs no
/// cuBLASLt.
#[derive(Debug, Default)]
pub(crate) struct DenseState {
    products: Option<Products>,
    /// Records that came before the products were made
    fixed: Vec<DenseRecord>,
    pub(crate) tf32: bool,
}

impl CudaDevice {
    pub(crate) fn set_tf32(&mut self, tf32: bool) {
        self.dense.tf32 = tf32;
    }

    /// Loads cuBLASLt now; an error names the library or the symbol that is absent.
    pub fn load_products(&mut self) -> Result<(), CudaError> {
        if self.dense.products.is_none() {
            self.gpu().make_current()?;
            let mut products = Products::new(self.gpu())?;
            products.fix(&self.dense.fixed);
            self.dense.products = Some(products);
        }
        Ok(())
    }

    /// Which algorithm each dense product took so far: a part of the record of a job.
    pub fn dense_record(&self) -> Vec<DenseRecord> {
        self.dense.products.as_ref().map(Products::record).unwrap_or_default()
    }

    /// The same, with the device and library that it depends on; none before the first product.
    pub fn dense_choices(&self) -> Option<DenseChoices> {
        let records = self.dense_record();
        (!records.is_empty()).then(|| self.choices(records))
    }

    fn choices(&self, records: Vec<DenseRecord>) -> DenseChoices {
        let (gpu, (major, minor)) = (self.gpu(), self.gpu().capability());
        let count = gpu.multiprocessors();
        DenseChoices {
            device: format!("{}, sm_{major}{minor}, {count} multiprocessors", gpu.name()),
            version: Products::version(),
            workspace: Products::workspace_bytes(),
            records,
        }
    }

    /// Takes what an earlier run has chosen on such a device, for shapes not yet computed; how many
    /// shapes those are.
    ///
    /// # Errors
    /// It was another device or library; or cuBLASLt cannot be loaded.
    pub fn take_dense_choices(&mut self, chosen: &DenseChoices) -> Result<usize, NotTaken> {
        self.load_products()?;
        chosen.suit(&self.choices(Vec::new()))?;
        self.fix_dense(&chosen.records);
        Ok(chosen.records.len())
    }

    /// Takes the algorithms that an earlier run recorded, for shapes not yet computed.
    pub fn fix_dense(&mut self, records: &[DenseRecord]) {
        self.dense.fixed.extend_from_slice(records);
        if let Some(products) = &mut self.dense.products {
            products.fix(records);
        }
    }

    /// `enqueue` with the products of this device.
    pub(crate) fn on_products(
        &mut self,
        enqueue: impl FnOnce(&mut Products, &Stream, &Arena) -> Result<(), CudaError>,
    ) {
        if let Err(error) = self.load_products() {
            return self.attempt(|| Err(LayerError::from(error)));
        }
        let Some(mut products) = self.dense.products.take() else { return };
        self.attempt(|| Ok(enqueue(&mut products, &self.stream, &self.arena)?));
        self.dense.products = Some(products);
    }
}
