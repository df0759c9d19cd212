//! `cublaslt.txt` beside a manifest: which algorithm each dense product of a GPU took.
//!
//! ```text
//! dense products 1
//! device NVIDIA H200, sm_90, 132 multiprocessors
//! cublasLt 130201
//! workspace 33554432
//! nt 1x4096x2048x2048 bf16 bf16 pitches 2048,2048,2048 aligned 256 | 130201 | 1 0 0 0 0 0 0 0
//! blake3 5f0c..                                                    of all text above
//! ```
//! It is a help, not a part of the state: a checkpoint without one, or with one that cannot be
//! read, is as good as any other. No manifest names it, so releases that do not know it pass it
//! over.

use super::write::Beside;
use super::{Disk, Identity};
use std::io;
use std::path::Path;

pub const NAME: &str = "cublaslt.txt";
/// A model has some dozens of products of 150 bytes each.
pub const BYTES_MAX: usize = 256 << 10;
const FIRST: &str = "dense products 1\n";
const HASH: &str = "blake3 ";

/// `choices`, whole lines, as the file has them; none: they are too many.
pub fn seal(choices: &str) -> Option<String> {
    let mut text = format!("{FIRST}{choices}");
    let hash = blake3::hash(text.as_bytes()).to_hex();
    text += &format!("{HASH}{hash}\n");
    (text.len() <= BYTES_MAX).then_some(text)
}

/// What was sealed.
///
/// # Errors
/// Why it is not, in words.
pub fn unseal(text: &str) -> Result<&str, String> {
    let end = text.trim_end_matches('\n').rfind('\n').map_or(0, |at| at + 1);
    let (body, last) = text.split_at(end);
    let hash = last.strip_prefix(HASH).and_then(|last| last.strip_suffix('\n'));
    let hash = hash.ok_or("its last line is no hash: it is cut off")?;
    if hash != blake3::hash(body.as_bytes()).to_hex().as_str() {
        return Err("it is damaged: its hash is another".to_string());
    }
    let choices = body.strip_prefix(FIRST);
    choices.ok_or(format!("it does not begin with `{}`: of a newer release?", FIRST.trim_end()))
}

/// Writes what rank 0 has chosen beside its shard of `step`, before that is acknowledged. The
/// checkpoint is whole without it, so nobody waits for another try.
pub(super) fn keep(disk: &Disk, identity: &Identity, step: u64, beside: &Beside) {
    let Some(sealed) = &beside.products else { return };
    let path = identity.staging(step).join(NAME);
    let write = || {
        let mut file = disk.create_anew(&path)?;
        disk.write(&mut file, sealed.as_bytes())?;
        disk.sync(&file)
    };
    if let Err(error) = write() {
        tracing::warn!("{NAME} of step {step} is not kept: {error}");
        // Half a file would be told as a damaged one.
        let _ = disk.remove_file(&path);
    }
}

/// What lies in a checkpoint's directory, sealed; none: nothing does.
///
/// # Errors
/// Why it cannot be read, in words.
pub fn read(disk: &Disk, directory: &Path) -> Result<Option<String>, String> {
    let bytes = match disk.read(&directory.join(NAME), BYTES_MAX as u64) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| format!("it cannot be read: {error}"))?,
    };
    let text = String::from_utf8(bytes).map_err(|_| "it is damaged: it is no text".to_string())?;
    unseal(&text)?;
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_read_again_and_nothing_else() {
        let choices = "device A\ncublasLt 1\nworkspace 2\n";
        let sealed = seal(choices).expect("short");
        assert_eq!(unseal(&sealed), Ok(choices));
        assert_eq!(unseal(&seal("").expect("short")), Ok(""));
        assert!(seal(&"x".repeat(BYTES_MAX)).is_none());
        // No byte of it is unguarded, nor may any be missing.
        for at in 0..sealed.len() {
            let mut other = sealed.clone().into_bytes();
            other[at] ^= 1;
            let other = String::from_utf8(other).expect("ASCII");
            assert!(unseal(&other).is_err(), "byte {at}");
            assert!(unseal(&sealed[..at]).is_err(), "{at} bytes");
        }
        let newer = "dense products 2\n";
        let hash = blake3::hash(newer.as_bytes()).to_hex();
        let why = unseal(&format!("{newer}{HASH}{hash}\n")).expect_err("another format");
        assert!(why.contains("newer release"), "{why}");
    }

    #[test]
    fn a_file_is_there_or_not_or_no_good() {
        let (disk, folder) = (Disk::real(), tempfile::tempdir().expect("a folder"));
        assert_eq!(read(&disk, folder.path()), Ok(None));
        let sealed = seal("device A\n").expect("short");
        let path = folder.path().join(NAME);
        std::fs::write(&path, &sealed).expect("a file");
        assert_eq!(read(&disk, folder.path()), Ok(Some(sealed)));
        for damaged in [&b"\xff\xfe"[..], b"", &[b'x'; BYTES_MAX + 1]] {
            std::fs::write(&path, damaged).expect("a file");
            assert!(read(&disk, folder.path()).is_err());
        }
        std::fs::remove_file(&path).expect("there");
        std::fs::create_dir(&path).expect("a folder in its place");
        assert!(read(&disk, folder.path()).is_err());
    }
}
