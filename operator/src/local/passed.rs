//! Checkpoints that are refused when a run begins.

use super::LocalError;
use moe_worker::checkpoint::aside::{Put, set_aside};
use moe_worker::checkpoint::{Disk, Newest};
use std::path::Path;

/// What becomes of each refused checkpoint, in words: all are set aside, unless nothing is to be
/// trained.
///
/// # Errors
/// Nothing can be used of what is there, and nobody asked to begin anew; or somebody did, and
/// something can be used.
pub fn pass_over(
    location: &Path,
    newest: &Newest,
    fresh: bool,
    steps: u64,
) -> Result<Vec<String>, LocalError> {
    match (&newest.usable, fresh) {
        (Some(found), true) => {
            let (name, location) = (found.name.clone(), location.display().to_string());
            return Err(LocalError::Usable { name, location });
        }
        (None, false) => newest.none_usable(location).map_or(Ok(()), |refusal| {
            Err(LocalError::Refused(refusal))
        })?,
        _ => {}
    }
    let (used, done) = match &newest.usable {
        Some(found) => (format!("{} is used", found.name), found.step >= steps),
        None => ("the run begins at step 0".to_string(), false),
    };
    let mut became = Vec::new();
    for refusal in &newest.refused {
        if done {
            became.push(used.clone());
            continue;
        }
        became.push(match set_aside(&Disk::real(), location, refusal) {
            Ok(Put::Stays { other }) if fresh => {
                let why = format!("{other} is kept already");
                return Err(LocalError::NotAside { name: refusal.name.clone(), why });
            }
            Ok(put) => format!("{}; {used}", put.words()),
            Err(error) if fresh => {
                let (name, why) = (refusal.name.clone(), error.to_string());
                return Err(LocalError::NotAside { name, why });
            }
            // The worker tries it again, and has patience.
            Err(error) => format!("it is not set aside yet: {error}; {used}"),
        });
    }
    Ok(became)
}
