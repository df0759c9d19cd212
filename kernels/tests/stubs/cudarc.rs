//! What cudarc binds of CUDA's libraries, and since which CUDA; read from its source.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

/// The source of the cudarc that is built in, and the feature that chooses its bindings.
pub struct Cudarc {
    root: PathBuf,
    /// `cuda-13000`
    feature: String,
}

impl Cudarc {
    pub fn find() -> Cudarc {
        let cargo = Command::new(env!("CARGO"))
            .args(["metadata", "--offline", "--locked", "--format-version", "1"])
            // Of others no package need be here.
            .args(["--filter-platform", &format!("{}-unknown-linux-gnu", std::env::consts::ARCH)])
            .arg("--manifest-path")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
            .output()
            .expect("cargo, which built this test");
        let text = String::from_utf8(cargo.stdout).expect("JSON");
        let manifest = text
            .split("\"manifest_path\":\"")
            .filter_map(|rest| rest.split('"').next())
            .find(|path| path.rsplit('/').nth(1).is_some_and(|of| of.starts_with("cudarc-")))
            .expect("cudarc among the packages");
        let root = PathBuf::from(manifest).with_file_name("src");
        let workspace = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
        let workspace = std::fs::read_to_string(workspace).expect("the workspace");
        let at = workspace.find("\"cuda-").expect("a feature of cudarc that names a CUDA") + 1;
        let feature = workspace[at..].split('"').next().expect("a feature").to_owned();
        Cudarc { root, feature }
    }

    fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    /// Every function of a library, and the versions (12040) whose headers have it.
    pub fn bound(&self, library: &str) -> BTreeMap<String, BTreeSet<u32>> {
        let text = self.read(&format!("{library}/sys/mod.rs"));
        let all = codes(&text);
        let (mut bound, mut versions) = (BTreeMap::new(), None);
        for line in text.lines() {
            if line.starts_with("#[cfg(any(feature") {
                versions = Some(codes(line));
                continue;
            }
            if let Some(rest) = line.strip_prefix("pub unsafe fn ") {
                let name = identifier(rest);
                let of: &mut BTreeSet<u32> = bound.entry(name.to_owned()).or_default();
                of.extend(versions.as_ref().unwrap_or(&all));
            }
            versions = None;
        }
        bound
    }

    /// What each function of cudarc's `result` layer calls, by its path: `event::record`.
    pub fn result(&self, library: &str) -> BTreeMap<String, BTreeSet<String>> {
        let text = self.read(&format!("{library}/result.rs"));
        let mut calls: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        // The module, the function and its indentation, and whether what follows an attribute is
        // compiled.
        let (mut module, mut function) = (String::new(), None::<(String, usize)>);
        let (mut compiled, mut skipped) = (true, false);
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let trimmed = line.trim_start();
            let indent = line.len() - trimmed.len();
            if trimmed.starts_with("#[cfg(") {
                let mut attribute = trimmed.to_owned();
                while !attribute.ends_with(")]") {
                    attribute += lines.next().expect("an attribute that ends").trim();
                }
                compiled = !attribute.contains("cuda-")
                    || attribute.contains(&format!("\"{}\"", self.feature))
                        != attribute.contains("cfg(not(");
                continue;
            }
            match &function {
                None => {
                    if line == "}" {
                        module.clear();
                    }
                    for head in ["pub mod ", "impl "] {
                        let block = line.strip_prefix(head).filter(|rest| !rest.ends_with("{}"));
                        if let Some(rest) = block {
                            module = format!("{}::", identifier(rest));
                        }
                    }
                    let public = trimmed.strip_prefix("pub ");
                    let public = public.map(|rest| rest.strip_prefix("unsafe ").unwrap_or(rest));
                    if let Some(rest) = public.and_then(|rest| rest.strip_prefix("fn ")) {
                        let name = format!("{module}{}", identifier(rest));
                        skipped = !compiled;
                        if compiled {
                            calls.entry(name.clone()).or_default();
                        }
                        function = Some((name, indent));
                        compiled = true;
                    }
                }
                Some((_, of)) if indent == *of && trimmed == "}" => {
                    function = None;
                    (compiled, skipped) = (true, false);
                }
                Some((name, _)) => {
                    if compiled && !skipped {
                        let found = after(line, "sys::").filter(|of| is_called(of));
                        let found = found.map(|of| identifier(of).to_owned());
                        calls.entry(name.clone()).or_default().extend(found);
                    }
                    // An attribute inside is of one statement.
                    compiled |= line.trim_end().ends_with(';');
                }
            }
        }
        calls
    }
}

/// What stands behind each `prefix` in `text` that begins a path.
pub fn after<'t>(text: &'t str, prefix: &'t str) -> impl Iterator<Item = &'t str> {
    let whole = |at: &usize| {
        let before = text[..*at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':')
    };
    let all = text.match_indices(prefix).map(|(at, _)| at);
    all.filter(whole).map(move |at| &text[at + prefix.len()..])
}

/// Whether a text begins with a function of CUDA's and its arguments.
pub fn is_called(text: &str) -> bool {
    let name = identifier(text);
    let ours = name.starts_with("cu") || name.starts_with("nvrtc");
    ours && name != "culib" && text[name.len()..].starts_with('(')
}

pub fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// Every `cuda-12040` in a text.
fn codes(text: &str) -> BTreeSet<u32> {
    let codes = text.split("\"cuda-").skip(1);
    codes.filter_map(|rest| rest.split('"').next()?.parse().ok()).collect()
}
