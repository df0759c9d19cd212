//! Drivers and libraries of CUDA 12.4 to 13, and such as lack something, by stubs.

mod stubs;

use moejob_kernels::cuda::{Cuda, called, inspect};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use stubs::cudarc::{Cudarc, after, identifier, is_called};
use stubs::{LIBRARIES, Stubs, VERSIONS};

/// A function that cudarc's bindings of 13 leave out, and drivers of 13 have.
const KEPT: &str = "cuEventElapsedTime";

/// All that this crate calls, read from its sources.
fn called_by_sources(cudarc: &Cudarc) -> BTreeSet<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut left, mut text) = (vec![source.join("cuda"), source.join("ops")], String::new());
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).expect("our sources");
            left.extend(entries.map(|entry| entry.expect("a source").path()));
        } else if path.extension().is_some_and(|kind| kind == "rs")
            // The lists themselves call nothing, but for the versions.
            && !path.ends_with("libraries.rs")
        {
            text += &std::fs::read_to_string(path).expect("a source");
        }
    }
    let mut found = BTreeSet::from(["cuDriverGetVersion", "nvrtcVersion"].map(String::from));
    let called = after(&text, "sys::").filter(|rest| is_called(rest));
    // What is looked up by its name.
    let named = after(&text, "b\"cu").filter(|rest| rest.starts_with(char::is_uppercase));
    found.extend(called.map(|rest| identifier(rest).to_owned()));
    found.extend(named.map(|rest| format!("cu{}", identifier(rest))));
    // What the text of an error asks for.
    let mut paths = BTreeSet::from([("driver", "DriverError::error_string".to_owned())]);
    for (alias, library) in [("cu::", "driver"), ("rtc::", "nvrtc"), ("lt::", "cublaslt")] {
        for rest in after(&text, alias) {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
            let path = rest[..end.unwrap_or(rest.len())].trim_end_matches(':');
            paths.insert((library, path.to_owned()));
        }
    }
    for library in ["driver", "nvrtc", "cublaslt"] {
        let layer = cudarc.result(library);
        for (_, path) in paths.iter().filter(|(of, _)| *of == library) {
            let Some(calls) = layer.get(path) else {
                // A type, such as the kind of a stream.
                let name = path.rsplit("::").find(|part| !part.is_empty()).unwrap_or_default();
                let is_type = name.starts_with(char::is_uppercase);
                assert!(is_type, "{library}: {path} is not understood");
                continue;
            };
            assert!(!calls.is_empty(), "{library}: what does {path} call?");
            found.extend(calls.iter().cloned());
        }
    }
    // Ours stands in for it, see `Event::milliseconds_to`.
    assert!(!found.contains("cuEventElapsedTime_v2"), "drivers before 12.8 have none");
    found
}

#[test]
fn the_lists_are_what_is_called_and_nothing_of_it_is_newer_than_12_4() {
    let cudarc = Cudarc::find();
    let listed: BTreeSet<String> = called().map(|of| of.symbol.to_owned()).collect();
    let sources = called_by_sources(&cudarc);
    let missing: Vec<_> = sources.difference(&listed).collect();
    let idle: Vec<_> = listed.difference(&sources).collect();
    assert!(missing.is_empty() && idle.is_empty(), "not listed {missing:?}, not called {idle:?}");
    let folder = |library: &str| LIBRARIES.iter().find(|of| of.0 == library).expect("known").1;
    let mut bound: BTreeMap<&str, _> = BTreeMap::new();
    for of in called() {
        let module = folder(of.library);
        let versions = &bound.entry(module).or_insert_with(|| cudarc.bound(module))[of.symbol];
        let first = versions.first().expect("a version");
        assert_eq!(Cuda(first / 1000, first % 1000 / 10), of.since, "{}", of.symbol);
        assert!(of.since <= Cuda(12, 4), "{}", of.symbol);
        for version in VERSIONS {
            assert!(versions.contains(&version) || of.symbol == KEPT, "{} {version}", of.symbol);
        }
    }
}

/// Runs as a process of its own, since a library is loaded once a process: tells what is here.
#[test]
fn helper() {
    if std::env::var_os("DRIVERS_HELPER").is_none() {
        return;
    }
    for line in inspect() {
        let state = if line.refused { "refused" } else { "fine" };
        println!(
            "told {} {state}: {} -> {}",
            line.name,
            line.found.unwrap_or_default(),
            line.advice.unwrap_or_default()
        );
    }
}

/// What `inspect` says, by name, in a process that finds its libraries in `folder`.
fn told(folder: &Path, variables: &[(&str, &str)]) -> BTreeMap<String, String> {
    let output = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "helper", "--nocapture"])
        .env("DRIVERS_HELPER", "1")
        .env("LD_LIBRARY_PATH", folder)
        .env("MOEJOB_NVML", folder.join("libnvidia-ml.so.1"))
        .env("MOEJOB_CUBIN_CACHE", folder.join("cubins"))
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("MOEJOB_CUDA_ARCH")
        .envs(variables.iter().copied())
        .output()
        .expect("this test as a process");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !err.contains("panicked"), "{out}{err}");
    let lines = out.lines().filter_map(|line| line.split("told ").nth(1));
    lines
        .map(|line| {
            let (name, rest) = line.split_once(": ").expect("a name");
            let (name, state) = name.rsplit_once(' ').expect("a state");
            (name.to_owned(), format!("{state}: {rest}"))
        })
        .collect()
}

/// The stubs of all versions, and a folder for this test's own.
fn stubs(name: &str, versions: &[u32]) -> (Stubs, PathBuf) {
    let folder = std::env::temp_dir().join(format!("moejob-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    (Stubs::make(&Cudarc::find(), versions, &folder), folder)
}

#[test]
fn each_version_is_taken_and_told() {
    let (stubs, folder) = stubs("versions", &VERSIONS);
    for version in VERSIONS {
        let said = told(&stubs.folder(&version.to_string(), [version; 3]), &[]);
        let cuda = Cuda(version / 1000, version % 1000 / 10);
        let place = folder.join(version.to_string()).display().to_string();
        let driver = format!("fine: up to CUDA {cuda}, {place}/libcuda.so -> ");
        assert_eq!(said["driver"], driver);
        assert_eq!(said["nvrtc"], format!("fine: {cuda}, {place}/libnvrtc.so -> "));
        assert_eq!(said["cublasLt"], format!("fine: {cuda}, {place}/libcublasLt.so -> "));
        assert!(said["gpu 0"].starts_with("fine: NVIDIA Stub, sm_90, 4 SMs"), "{said:?}");
        assert!(said["nvml"].contains("cannot be loaded"), "{said:?}");
    }
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_function_that_is_absent_is_told_by_name_before_anything_is_called() {
    let (stubs, folder) = stubs("absent", &VERSIONS[..1]);
    let names = BTreeMap::from([
        ("libcuda", "driver"),
        ("libnvrtc", "nvrtc"),
        ("libcublasLt", "cublasLt"),
    ]);
    for of in called() {
        let said = told(&stubs.without(VERSIONS[0], of.library, &[of.symbol]), &[]);
        let line = &said[names[of.library]];
        let tells_version = ["cuDriverGetVersion", "nvrtcVersion", "cublasLtGetVersion"];
        let version = match tells_version.contains(&of.symbol) {
            true => "",
            false => " (CUDA 12.4)",
        };
        let since = match of.since {
            Cuda::EARLIEST => String::new(),
            since => format!(" (there from CUDA {since} on)"),
        };
        let expected = format!("{}.so{version} has no {}{since}; install ", of.library, of.symbol);
        assert!(line.starts_with("refused: /") && line.contains(&expected), "{line}: {expected}");
        for (library, name) in names.iter().filter(|(library, _)| **library != of.library) {
            assert!(said[*name].starts_with("fine: "), "{library}: {said:?}");
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn what_is_too_old_too_new_or_broken_is_refused_with_what_to_install() {
    const OLD: u32 = 11_080;
    let (stubs, folder) = stubs("wrong", &[OLD, 12_000, 12_040, 12_060, 13_000]);
    let check = |name: &str, versions: [u32; 3], line: &str, expected: &[&str]| {
        let said = told(&stubs.folder(name, versions), &[]);
        for part in expected {
            assert!(said[line].contains(part), "{name} {line}: {}", said[line]);
        }
    };
    let tensor_maps = "libcuda.so (CUDA 11.8) has no cuTensorMapEncodeTiled (there from CUDA 12.0 \
                       on); install the NVIDIA driver, release 550 or newer";
    check("old driver", [OLD, 12_040, 12_040], "driver", &["refused", tensor_maps]);
    let older = ["fine: up to CUDA 12.0", "older than what is tried"];
    check("older driver", [12_000; 3], "driver", &older);
    let old = |library: &str| format!("{library}.so (CUDA 11.8) is too old: CUDA 12.0 or newer");
    for (at, line, library) in [(1, "nvrtc", "libnvrtc"), (2, "cublasLt", "libcublasLt")] {
        let mut versions = [12_060; 3];
        versions[at] = OLD;
        let words = old(library);
        check(&format!("old {line}"), versions, line, &[&words, "install ", "LD_LIBRARY_PATH"]);
        versions[at] = 13_000;
        let newer = format!(
            "{library}.so (CUDA 13.0) is newer than the driver, which knows CUDA up to 12.6; \
             install a newer driver, or give the library of CUDA 12 alone in LD_LIBRARY_PATH"
        );
        check(&format!("new {line}"), versions, line, &["refused", &newer]);
    }
    // A driver takes what older libraries make.
    check("new driver", [13_000, 12_040, 12_040], "nvrtc", &["fine: 12.4"]);

    let refused = stubs.folder("no device", [12_040; 3]);
    let said = told(&refused, &[("STUB_INIT", "100")]);
    let words = "refused: /";
    assert!(said["driver"].starts_with(words), "{said:?}");
    assert!(said["driver"].contains("initializing the CUDA driver: "), "{said:?}");
    assert!(said["driver"].contains("CUDA_ERROR_NO_DEVICE"), "{said:?}");

    let bare = folder.join("bare");
    std::fs::create_dir_all(&bare).expect("a folder");
    if told(&bare, &[])["driver"].starts_with("fine") {
        println!("skipped: this machine has a driver, which is found where a stub is broken");
    } else {
        let said = told(&bare, &[]);
        for line in ["driver", "nvrtc", "cublasLt"] {
            let what = if line == "driver" { "cuda" } else { line };
            let expected = format!("refused:  -> the library lib{what} cannot be loaded; ");
            assert!(said[line].starts_with(&expected), "{said:?}");
            assert!(said[line].contains("cannot be loaded; install "), "{said:?}");
        }
        // A file that is there and is no library, and one that needs another.
        stubs::write(&bare, "libnvrtc", &[b'x'; 4096]);
        let needy = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-Wl,--no-as-needed", "-L"])
            .arg(stubs.folder("whole", [12_040; 3]))
            .args(["-o", &bare.join("libcublasLt.so").display().to_string(), "-xc", "/dev/null"])
            .arg("-lnvrtc")
            .status();
        assert!(needy.expect("a C compiler").success());
        std::fs::write(bare.join("libcuda.so"), "").expect("a file");
        let said = told(&bare, &[]);
        for (line, expected) in [
            ("driver", "libcuda.so: file too short"),
            ("nvrtc", "libnvrtc.so: invalid ELF header"),
            ("cublasLt", "libnvrtc.so: invalid ELF header"),
        ] {
            assert!(said[line].starts_with("refused:  -> the library "), "{line}: {said:?}");
            assert!(said[line].contains(expected), "{line}: {}", said[line]);
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_gpu_is_told_by_the_path_it_takes() {
    let (stubs, folder) = stubs("paths", &[12_040, 12_080]);
    let said = |version: u32, capability: &str| {
        let folder = stubs.folder(&version.to_string(), [version; 3]);
        told(&folder, &[("STUB_CAPABILITY", capability)])["gpu 0"].clone()
    };
    assert!(said(12_040, "80").starts_with("fine: NVIDIA Stub, sm_80"));
    assert!(said(12_040, "80").ends_with(" -> "));
    let newer = said(12_080, "100");
    assert!(newer.starts_with("fine: ") && newer.contains("kernels of sm_80"), "{newer}");
    let unknown = said(12_040, "100");
    let expected = "(CUDA 12.4) cannot compile for NVIDIA Stub, which CUDA 12.8 can first; install \
                    NVRTC of CUDA 12.8";
    assert!(unknown.starts_with("refused: ") && unknown.contains(expected), "{unknown}");
    for capability in ["75", "86", "89", "120"] {
        let refused = said(12_080, capability);
        let (major, minor) = capability.split_at(capability.len() - 1);
        let expected = format!("there are no kernels for compute capability {major}.{minor}");
        assert!(refused.starts_with("refused: ") && refused.contains(&expected), "{refused}");
    }
    let _ = std::fs::remove_dir_all(&folder);
}
