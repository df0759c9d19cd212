//! Small files beside checkpoints, each replaced as a whole.

use std::fs::File;
use std::io;
use std::path::Path;

/// Puts what `write` writes in the place of `name` in `folder`: all of it or nothing, also after a
/// power cut.
///
/// # Errors
/// What `write` says, or the file system. The file is then as it was, or the new one.
pub fn replace(
    folder: &Path,
    name: &str,
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let staged = folder.join(format!(".{name}.tmp"));
    // One that was left behind may be unwritable: copies keep the rights of what they copy.
    match std::fs::remove_file(&staged) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write(&staged)?;
    File::open(&staged)?.sync_all()?;
    std::fs::rename(&staged, folder.join(name))?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let home = tempfile::tempdir().expect("a folder");
        let (folder, file) = (home.path(), home.path().join("a.json"));
        replace(folder, "a.json", |to| std::fs::write(to, "one")).expect("written");
        let failed = replace(folder, "a.json", |to| {
            std::fs::write(to, "tw")?;
            Err(io::Error::other("no more room"))
        });
        assert_eq!(failed.expect_err("it says so").to_string(), "no more room");
        assert_eq!(std::fs::read_to_string(&file).expect("a file"), "one");
        // What the failure left behind is in nobody's way, even where it cannot be written.
        let staged = folder.join(".a.json.tmp");
        let mut rights = std::fs::metadata(&staged).expect("left behind").permissions();
        rights.set_readonly(true);
        std::fs::set_permissions(&staged, rights).expect("rights");
        replace(folder, "a.json", |to| std::fs::write(to, "three")).expect("written");
        assert_eq!(std::fs::read_to_string(&file).expect("a file"), "three");
        assert!(!staged.exists());
        assert!(replace(&folder.join("none"), "a", |to| std::fs::write(to, "")).is_err());
    }
}
