//! What NCCL is told of this machine by those who measure.

use crate::life::binding::hca_setting;
use crate::life::machine::Machine;
use crate::life::machine::pci::Address;
use crate::life::topology;
use moejob_protocol::pod::ENV_HCAS;

const ENV_HCA: &str = "NCCL_IB_HCA";

/// As engines tell it: the exact cards, where the profile has some, and the file of its topology.
pub fn here(machine: &Machine) -> Vec<(&'static str, String)> {
    // The engines tell of a file that cannot be written.
    let file = topology::write(machine).ok().flatten();
    let named = std::env::var(ENV_HCA).is_ok_and(|of| !of.starts_with('^'));
    let listed = std::env::var(ENV_HCAS).ok().filter(|_| !named);
    let cards = listed.and_then(|listed| {
        let listed: Vec<Address> = listed.split(',').filter_map(Address::parse).collect();
        // A pair is of whole nodes: all GPUs count.
        hca_setting(machine, &[], &listed).map(|list| (ENV_HCA, list))
    });
    cards.into_iter().chain(file).collect()
}
