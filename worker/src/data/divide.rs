//! What of a source is held out: a function of names and numbers alone.

fn share(hash: &blake3::Hash) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// Whether document `number` of a file is held out: a function of the two alone.
pub(crate) fn is_held_out(name: &[u8], number: u64, fraction: f64) -> bool {
    if fraction <= 0.0 {
        return false;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(name);
    hasher.update(&number.to_le_bytes());
    (share(&hasher.finalize()) as f64) < fraction * 2.0_f64.powi(64)
}

/// Which of the files (name, tokens) are held out: those with the smallest hashes of their names,
/// below `fraction`, and further ones until they fill a window of `needed` tokens; at least one
/// file stays for training.
pub(crate) fn divide(files: &[(&[u8], u64)], fraction: f64, needed: u64) -> Vec<bool> {
    let mut held = vec![false; files.len()];
    if fraction <= 0.0 || files.len() < 2 {
        return held;
    }
    let mut by_share: Vec<(u64, usize)> = files
        .iter()
        .enumerate()
        .map(|(index, (name, _))| (share(&blake3::hash(name)), index))
        .collect();
    by_share.sort_unstable();
    let mut tokens = 0;
    for (share, index) in &by_share[..files.len() - 1] {
        let below = (*share as f64) < fraction * 2.0_f64.powi(64);
        if !below && tokens >= needed {
            break;
        }
        held[*index] = true;
        tokens += files[*index].1;
    }
    held
}
