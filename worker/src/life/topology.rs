//! The file by which this worker tells NCCL of its machine's topology, where the profile wants one.

use super::machine::pci::Address;
use super::machine::{Machine, Processor, topology::xml};
use moejob_protocol::pod::ENV_HCAS;
use moejob_protocol::topology::{ENV_TOPOLOGY, Topology};
use std::io;
use std::path::PathBuf;

/// Names NCCL's file.
pub const ENV_FILE: &str = "NCCL_TOPO_FILE";

/// Writes the file into the folder for temporary files. None where the profile wants none, or a
/// person has named one. NCCL must be told of it by [`ENV_FILE`] before it starts.
///
/// # Errors
/// In words: what the operator has sent cannot be read, or the file not be written.
pub fn write(machine: &Machine) -> Result<Option<(&'static str, String)>, String> {
    let Ok(told) = std::env::var(ENV_TOPOLOGY) else { return Ok(None) };
    if std::env::var_os(ENV_FILE).is_some() {
        return Ok(None);
    }
    let profile: Topology =
        serde_json::from_str(&told).map_err(|error| format!("{ENV_TOPOLOGY}: {error}"))?;
    let listed = std::env::var(ENV_HCAS).unwrap_or_default();
    let listed: Vec<Address> = listed.split(',').filter_map(Address::parse).collect();
    let text = xml(machine, Processor::here().as_ref(), &profile, &listed);
    let path = put(&text).map_err(|error| {
        format!("NCCL's topology file is not written to {}: {error}", folder().display())
    })?;
    Ok(Some((ENV_FILE, path.display().to_string())))
}

fn folder() -> PathBuf {
    std::env::temp_dir()
}

/// Whole or not at all: a process of this worker may be reading the one before.
fn put(text: &str) -> io::Result<PathBuf> {
    let path = folder().join(format!("moejob-topology-{}.xml", std::process::id()));
    let partial = path.with_extension("partial");
    std::fs::write(&partial, text)?;
    std::fs::rename(&partial, &path)?;
    Ok(path)
}
