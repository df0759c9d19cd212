//! What a person gets who installs the program: a version, manual pages, and a file that runs on
//! any Linux with glibc.

use moejob_tests::moejob;
use std::process::Command;

/// What the program may ask the loader for: all of it is part of glibc or of GCC's runtime.
const LIBRARIES: [&str; 4] = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];

fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide)
}

/// The names in `DT_NEEDED` of a 64-bit ELF file of little-endian order (ELF-64 Object File Format,
/// "Dynamic Section").
fn needed(file: &[u8]) -> Vec<String> {
    /// Kinds of program headers.
    const LOAD: u64 = 1;
    const DYNAMIC: u64 = 2;
    /// Tags of the dynamic section.
    const NEEDED: u64 = 1;
    const STRINGS: u64 = 5;
    assert_eq!(&file[..6], b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file");
    let (table, size, count) =
        (number::<8>(file, 0x20), number::<2>(file, 0x36), number::<2>(file, 0x38));
    let header = |index: u64| {
        let at = (table + index * size) as usize;
        let field = |offset: usize| number::<8>(file, at + offset);
        // Kind, place in the file, address, size in the file.
        (number::<4>(file, at), field(0x08), field(0x10), field(0x20))
    };
    let headers: Vec<_> = (0..count).map(header).collect();
    let place = |address: u64| {
        let within = |(kind, _, start, size): &&(u64, u64, u64, u64)| {
            *kind == LOAD && (*start..start + size).contains(&address)
        };
        let (_, offset, start, _) = headers.iter().find(within).expect("a loaded address");
        (address - start + offset) as usize
    };
    let dynamic = headers.iter().find(|header| header.0 == DYNAMIC).expect("a dynamic section");
    let entries = (dynamic.1 as usize..(dynamic.1 + dynamic.3) as usize).step_by(16);
    let entries: Vec<(u64, u64)> =
        entries.map(|at| (number::<8>(file, at), number::<8>(file, at + 8))).collect();
    let strings = entries.iter().find(|entry| entry.0 == STRINGS).expect("a string table").1;
    let text = |offset: u64| {
        let at = place(strings) + offset as usize;
        let length = file[at..].iter().position(|byte| *byte == 0).expect("an end");
        String::from_utf8_lossy(&file[at..at + length]).into_owned()
    };
    entries.iter().filter(|entry| entry.0 == NEEDED).map(|entry| text(entry.1)).collect()
}

#[test]
fn the_program_needs_glibc_and_nothing_else() {
    let file = std::fs::read(moejob()).expect("the program");
    let needed = needed(&file);
    assert!(needed.contains(&"libc.so.6".to_string()), "{needed:?}");
    let more: Vec<&String> =
        needed.iter().filter(|name| !LIBRARIES.contains(&name.as_str())).collect();
    assert!(more.is_empty(), "{more:?}");
}

/// A release names its commit; what is built for development names none.
#[test]
fn the_version_names_the_commit_of_a_release() {
    let output = Command::new(moejob()).arg("--version").output().expect("moejob");
    let said = String::from_utf8_lossy(&output.stdout).trim().to_string();
    let plain = concat!("moejob ", env!("CARGO_PKG_VERSION"));
    let rest = said.strip_prefix(plain).unwrap_or_else(|| panic!("{said}"));
    if rest.is_empty() {
        return;
    }
    let commit = rest.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
    let commit = commit.unwrap_or_else(|| panic!("{said}"));
    let hexadecimal = commit.chars().all(|c| c.is_ascii_hexdigit());
    assert!(commit.len() >= 7 && hexadecimal, "{said}");
}

#[test]
fn each_command_has_a_manual_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let to = folder.path().join("man1");
    let status = Command::new(moejob()).arg("man").arg(&to).status().expect("moejob");
    assert!(status.success());
    let help = Command::new(moejob()).arg("--help").output().expect("moejob");
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let (_, commands) = help.split_once("Commands:").expect("a list");
    let (commands, _) = commands.split_once("Options:").expect("an end");
    let names = commands.lines().filter_map(|line| {
        let name = line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?;
        let name = name.split_whitespace().next()?;
        (name != "help").then_some(name)
    });
    let names: Vec<&str> = names.collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let page = to.join(format!("moejob-{name}.1"));
        let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{name}");
    }
    // A file where a folder should be is told, and nothing is lost.
    let file = folder.path().join("file");
    std::fs::write(&file, "kept").expect("a file");
    let output = Command::new(moejob()).arg("man").arg(&file).output().expect("moejob");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot be written"));
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "kept");
}
