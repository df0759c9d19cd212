//! Files that take their name as a whole, and keep it after a power cut: the file is synced before
//! the rename, and its folder behind it.

use std::ffi::OsStr;
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
    name: impl AsRef<OsStr>,
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let name = name.as_ref();
    let mut staged = OsStr::new(".").to_os_string();
    staged.push(name);
    staged.push(".tmp");
    let staged = folder.join(staged);
    // One that was left behind may be unwritable: copies keep the rights of what they copy.
    match std::fs::remove_file(&staged) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write(&staged)?;
    File::open(&staged)?.sync_all()?;
    rename(&staged, &folder.join(name))
}

/// Gives what is synced another name, and makes that durable.
///
/// # Errors
/// What the file system says.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(from, to)?;
    sync_folder_of(to)
}

/// Makes the name of a file durable.
///
/// # Errors
/// What the file system says.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
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
