//! Images that `manifests/image/build` makes, run as a container runtime would: the files of their
//! layers, a root that cannot be written but below /tmp, a user without rights, and the driver
//! mounted from outside. NVIDIA's libraries are stubs: the real ones are 1.3 GB.

#[path = "../../kernels/tests/stubs/mod.rs"]
mod stubs;

use moejob_tests::{moejob, root};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use stubs::Stubs;
use stubs::cudarc::Cudarc;

const VERSION: u32 = 12_080;

fn build(words: &[&str], umask: &str) {
    let script = format!("umask {umask}; exec \"$@\"");
    let build = root().join("manifests/image/build");
    let mut command = Command::new("bash");
    command.args(["-c", &script, "build"]).arg(build).args(words);
    let output = command.output().expect("bash");
    assert!(output.status.success(), "{words:?}: {}", text(&output));
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of).into_owned()).concat()
}

/// The files of an image in `folder`, lowest layer first; its configuration.
fn unpack(image: &Path, folder: &Path) -> Value {
    let untar = |from: &Path, to: &Path| {
        std::fs::create_dir_all(to).expect("a folder");
        let status = Command::new("tar").arg("-xpf").arg(from).arg("-C").arg(to).status();
        assert!(status.expect("tar").success(), "{}", from.display());
    };
    let parts = folder.with_extension("parts");
    untar(image, &parts);
    let read = |name: &str| -> Value {
        let bytes = std::fs::read(parts.join(name)).expect("a part of the image");
        serde_json::from_slice(&bytes).expect("JSON")
    };
    let manifest = read("manifest.json");
    for layer in manifest[0]["Layers"].as_array().expect("layers") {
        untar(&parts.join(layer.as_str().expect("a name")), folder);
    }
    let config = read(manifest[0]["Config"].as_str().expect("a name"))["config"].take();
    std::fs::remove_dir_all(parts).expect("unpacked");
    config
}

/// Runs the image below `folder` with these words, and more variables than its own. `driver` is
/// what the node mounts.
fn run(
    folder: &Path,
    config: &Value,
    driver: &Path,
    set: &[(&str, &str)],
    words: &[&str],
) -> Output {
    const SCRIPT: &str = r#"
        set -e
        root=$1 driver=$2 user=$3
        shift 3
        mount --bind "$root" "$root"
        mkdir -p "$root/proc" "$root/dev" "$root/usr/local/nvidia/lib64"
        mount -t proc proc "$root/proc"
        mount --bind "$driver" "$root/usr/local/nvidia/lib64"
        mount -o remount,ro,bind "$root"
        mount -t tmpfs -o mode=1777 tmp "$root/tmp"
        exec chroot --userspec="$user" "$root" "$@"
    "#;
    let given = config["Env"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let entrypoint = config["Entrypoint"][0].as_str().expect("an entrypoint");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "bash", "-c", SCRIPT, "run"]);
    command.arg(folder).arg(driver).arg(config["User"].as_str().expect("a user"));
    command.arg(entrypoint).args(words).env_clear();
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.envs(given.filter_map(|variable| variable.split_once('=')));
    command.envs(set.iter().copied()).output().expect("unshare")
}

/// Whether this machine lets a process have mounts of its own, as containers do.
fn can_run() -> bool {
    let tried = Command::new("unshare").args(["--mount", "--pid", "--fork", "true"]).output();
    let can = tried.is_ok_and(|output| output.status.success());
    if !can {
        println!("skipped: an image is run by root, in a mount namespace of its own");
    }
    can
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    let mut all: Vec<PathBuf> = entries
        .flat_map(|entry| match entry.file_type().expect("a kind").is_dir() {
            true => files(&entry.path()),
            false => vec![entry.path()],
        })
        .collect();
    all.sort();
    all
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).expect("text")
}

#[test]
fn the_image_for_processors_is_the_program_and_its_libraries() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let program = moejob();
    let [program, once, again] = [&program, &at("once.tar"), &at("again.tar")]
        .map(|path| path.to_str().expect("text").to_string());
    build(&["cpu", &program, &once], "022");
    build(&["cpu", &program, &again, "--name", "moejob:cpu"], "077");
    let bytes = |path: &str| std::fs::read(path).expect("an image");
    assert!(bytes(&once) == bytes(&again), "the same files give another image");

    let image = at("image");
    let config = unpack(Path::new(&once), &image);
    assert_eq!(config["User"], "65532:65532");
    let is_library = |path: &Path| name(path).contains(".so");
    let others = files(&image).into_iter().filter(|path| !is_library(path));
    assert_eq!(others.collect::<Vec<_>>(), [image.join("moejob")]);
    if can_run() {
        let driver = at("driver");
        std::fs::create_dir_all(&driver).expect("a folder");
        let told = text(&run(&image, &config, &driver, &[], &["doctor", "--dir", "/tmp/runs"]));
        assert!(told.contains("storage") && told.contains("/tmp: "), "{told}");
        let told = text(&run(&image, &config, &driver, &[], &["doctor", "--dir", "/runs"]));
        assert!(told.contains("choose another --dir"), "its root can be written: {told}");
    }
}

/// With what `doctor` asks for, kernels of presets, and a user who may write below /tmp alone.
#[test]
fn the_image_for_gpus_trains_with_what_is_in_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let word = |name: &str| at(name).to_str().expect("text").to_string();
    std::fs::create_dir_all(at("stubs")).expect("a folder");
    let stubs = Stubs::make(&Cudarc::find(), &[VERSION], &at("stubs"));
    let libraries = stubs.folder("libraries", [0, VERSION, VERSION]);
    stubs::nccl(&libraries, 22_809);
    let driver = stubs.folder("driver", [VERSION, 0, 0]);
    let libraries = libraries.to_str().expect("text");

    let program = moejob();
    let program_word = program.to_str().expect("text");
    let words = ["cuda", program_word, &word("once.tar"), "--libraries", libraries, "--tcp-only"];
    build(&words, "022");
    // Of kernels that were compiled before, the same image.
    let mut kernels = Command::new(&program);
    kernels.args(["kernels", "--out", &word("cubins")]).env("LD_LIBRARY_PATH", libraries);
    let made = kernels.output().expect("moejob");
    assert!(made.status.success(), "{}", text(&made));
    let again = word("again.tar");
    let words = ["cuda", program_word, &again, "--libraries", libraries, "--tcp-only", "--cubins"];
    build(&[&words[..], &[&word("cubins")]].concat(), "077");
    let bytes = |name: &str| std::fs::read(at(name)).expect("an image");
    assert!(bytes("once.tar") == bytes("again.tar"), "the same files give another image");

    let image = at("image");
    let config = unpack(&at("once.tar"), &image);
    assert_eq!(config["User"], "65532:65532");
    assert!(!config["Env"].to_string().contains("VISIBLE_DEVICES"), "{config}");
    let is_known = |path: &Path| name(path).contains(".so") || name(path).ends_with(".cubin");
    let others = files(&image).into_iter().filter(|path| !is_known(path));
    assert_eq!(others.collect::<Vec<_>>(), [image.join("moejob")]);
    if !can_run() {
        return;
    }
    let told = text(&run(&image, &config, &driver, &[], &["doctor", "--dir", "/tmp/runs"]));
    let line = |name: &str, end: &str| {
        let found = told.lines().find(|line| line.split("  ").next() == Some(name));
        assert!(found.is_some_and(|line| line.ends_with(end)), "{name}: {end}: {told}");
    };
    line("driver", "up to CUDA 12.8, /usr/local/nvidia/lib64/libcuda.so");
    line("nvrtc", "12.8, /usr/lib/moejob/libnvrtc.so");
    line("cublasLt", "12.8, /usr/lib/moejob/libcublasLt.so");
    line("nccl", "2.28.9, libnccl.so.2");
    line("shipped kernels", " modules by NVRTC 12.8, in /cubins");
    let bench = "bench --preset tiny --device gpu --sequence 64 --micro-batch 2 --steps 1 --json";
    // As a pod has them.
    let set = [("MOEJOB_CUBIN_CACHE", "/tmp/cubins"), ("STUB_NO_COMPILER", "1")];
    let words: Vec<&str> = bench.split(' ').collect();
    let trained = run(&image, &config, &driver, &set, &words);
    assert!(trained.status.success(), "{}", text(&trained));
}
