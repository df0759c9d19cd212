//! Which profiles this machine could be of.

use moe_worker::life::machine::Machine;
use moe_worker::life::machine::pci::Address;
use moejob_manifest::profile::Profiles;

/// Shipped profiles and an admin's own whose GPUs have the addresses of this machine's.
pub fn fitting<'a>(machine: &Machine, profiles: &'a Profiles) -> Vec<&'a str> {
    let here: Vec<Address> = machine.gpus.iter().map(|gpu| gpu.place.address).collect();
    let is_here = |name: &&str| {
        let listed = profiles.get(name).map(|profile| {
            let all = profile.numa.iter().flat_map(|node| &node.gpus);
            all.filter_map(|text| Address::parse(text)).collect::<Vec<_>>()
        });
        listed.is_some_and(|mut listed| {
            listed.sort();
            !listed.is_empty() && listed == here
        })
    };
    profiles.names().filter(is_here).collect()
}
