//! The algorithms of a GPU's dense products, from one attempt and one run to the next.
//!
//! ```text
//! checkpoint: rank 0 reads cublaslt.txt   --+--> all ranks --> the same library and device: taken
//! memory: what an engine has kept         --'                  else: chosen anew, and told
//! ```
//! cuBLASLt's choice for a shape can change a bit. It depends on the library and the device, so a
//! run that goes on elsewhere may have other last bits; here it is made sure that one that goes on
//! where it was has the same.

use crate::attempt::records::event;
use crate::attempt::stop::Stop;
use crate::checkpoint::{Disk, products};
use crate::engine::model::Model;
use crate::failure::chain;
use crate::gang::comm::Comm;
use moejob_kernels::cuda::DenseChoices;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{Backend, Resume};
use moejob_protocol::report::{Detail, Event, EventKind};
use std::path::Path;

const REASON: &str = "ProductsChosenAnew";

/// What the device has chosen so far, sealed; none on processors, or before the first product.
pub(super) fn of(model: &Model) -> Option<String> {
    let choices = model.device.as_cuda()?.dense_choices()?;
    products::seal(&choices.to_string())
}

/// Every rank takes what was chosen before, from one of them: before its first product, and `kept`
/// is what its own engine has from the attempt before. Where nothing is known, or it is of another
/// library or device, it chooses anew, and says so.
///
/// # Errors
/// A peer is lost.
pub(super) fn agree(
    config: &WorkerConfig,
    disk: &Disk,
    kept: Option<String>,
    model: &mut Model,
    comm: &mut Comm,
    tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
) -> Result<(), Stop> {
    // The same answer on every rank.
    if config.training.compute.backend != Backend::Cuda || config.resume == Resume::Fresh {
        return Ok(());
    }
    let rank = comm.rank();
    let mut told = |why: String| {
        let message = format!(
            "rank {rank}: {why}; algorithms of dense products are chosen anew, and last bits may \
             be others than those of a run that was not stopped"
        );
        let details = [("rank", Detail::Number(rank.into()))];
        tell(event(config.attempt, EventKind::Warning, REASON, message, details))
    };
    let own = match &config.resume {
        Resume::Checkpoint { name, .. } if rank == 0 => {
            let directory = Path::new(&config.checkpoint.location).join(name);
            match products::read(disk, &directory) {
                Ok(Some(sealed)) => Some(sealed),
                Ok(None) => {
                    let file = products::NAME;
                    told(format!(
                        "{name} has no {file}: it is of processors, or of an earlier release"
                    ))?;
                    None
                }
                Err(why) => {
                    told(format!("{} of {name}: {why}", products::NAME))?;
                    None
                }
            }
        }
        Resume::Memory { .. } => kept,
        Resume::Checkpoint { .. } | Resume::Fresh => None,
    };
    let own = own.unwrap_or_default();
    let all = comm.gather_all(own.as_bytes(), products::BYTES_MAX)?;
    // The engine of the lowest rank may be a new one, which has kept nothing.
    let mut said = all.into_iter().enumerate().filter(|(_, sealed)| !sealed.is_empty());
    let Some((from, sealed)) = said.next() else { return Ok(()) };
    let Some(cuda) = model.device.as_cuda_mut() else { return Ok(()) };
    let sealed = String::from_utf8_lossy(&sealed).into_owned();
    let taken = products::unseal(&sealed)
        .and_then(|text| text.parse::<DenseChoices>().map_err(|error| error.to_string()))
        .map_err(|why| format!("{} of rank {from}: {why}", products::NAME))
        .and_then(|choices| {
            cuda.take_dense_choices(&choices).map_err(|why| chain(&why))
        });
    match taken {
        Ok(count) => tracing::debug!(count, "algorithms of dense products are those of before"),
        Err(why) => told(why)?,
    }
    Ok(())
}
