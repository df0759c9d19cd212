//! The monitor of a GPU on a library made here, which answers as NVML does or lacks functions.

use moejob_kernels::cuda::{
    GpuProcess, Limits, Monitor, Nvml, Reading, Remapped, Trouble, uuid_text,
};
use std::path::{Path, PathBuf};
use std::process::Command;

const COMMON: &str = r#"
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")) return 6;
    *device = (void *)7;
    return 0;
}
"#;

const MODERN: &str = r#"
#ifndef KINDS
#define KINDS 0xa
#endif
int nvmlDeviceGetPowerUsage(void *d, unsigned *mw) { *mw = 698500; return 0; }
int nvmlDeviceGetTemperature(void *d, unsigned kind, unsigned *c) { *c = kind + 61; return 0; }
int nvmlDeviceGetClockInfo(void *d, unsigned kind, unsigned *mhz) { *mhz = 1400 + kind; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *bits) {
    *bits = 0x4 | 0x40 | 0x1;
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *d, unsigned kind, unsigned since, unsigned long long *n) {
    *n = kind == 1 && since == 0 ? 3 : 999;
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    if (length < 80) return 7;
    strcpy(text, "550.54.15");
    return 0;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory *m) {
    m->total = 80; m->free = 70; m->used = 10;
    return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *mw) { *mw = 700000; return 0; }
struct process { unsigned pid; unsigned long long used; unsigned gi, ci; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, struct process *all) {
    if (*count < 2) return 7;
    all[0] = (struct process){4711, 5ull << 30, 0, 0};
    all[1] = (struct process){4712, ~0ull, 0, 0};
    *count = 2;
    return 0;
}
int nvmlDeviceGetMaxClockInfo(void *d, unsigned kind, unsigned *mhz) {
    *mhz = kind == 1 ? 1980 : 0;
    return 0;
}
struct data { void *d; unsigned long long kind, data; unsigned gi, ci; };
int nvmlEventSetCreate(void **set) { *set = (void *)9; return 0; }
int nvmlEventSetFree(void *set) { return 0; }
int nvmlDeviceGetSupportedEventTypes(void *d, unsigned long long *kinds) {
    *kinds = KINDS | 0x14;
    return 0;
}
int nvmlDeviceRegisterEvents(void *d, unsigned long long kinds, void *set) {
    return kinds == KINDS ? 0 : 3;
}
int nvmlDeviceGetRemappedRows(void *d, unsigned *ours, unsigned *theirs, unsigned *pending,
                              unsigned *failed) {
    *ours = 1; *theirs = 2; *pending = 1; *failed = 0;
    return 0;
}
int nvmlEventSetWait_v2(void *set, struct data *out, unsigned ms) {
    static int calls;
    out->d = (void *)7;
    switch (calls++) {
    case 0: out->kind = 0x8; out->data = 79; return 0;
    case 1: out->kind = 0x2; return 0;
    case 2: return 15;
    default: return 10;
    }
}
"#;

/// An old driver: the former name of a function, and no events.
const OLD: &str = r#"
int nvmlDeviceGetPowerUsage(void *d, unsigned *mw) { return 3; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *bits) {
    *bits = 0x80;
    return 0;
}
"#;

const UUID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

fn library(folder: &Path, name: &str, source: &str) -> PathBuf {
    let (c, so) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    std::fs::write(&c, format!("{COMMON}{source}")).expect("a folder for the test");
    let cc = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&so).arg(&c).status();
    assert!(cc.expect("a C compiler").success());
    so
}

/// One test, as the library's name is the process's.
#[test]
fn a_gpu_is_told_of_as_far_as_the_driver_does() {
    let folder = std::env::temp_dir().join(format!("moejob-nvml-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    let load = |file: &Path| {
        // SAFETY: this test is alone in its process.
        unsafe { std::env::set_var("MOEJOB_NVML", file) };
        Nvml::load()
    };

    let missing = load(&folder.join("none.so")).expect_err("no such file").to_string();
    assert!(missing.contains("none.so cannot be loaded"), "{missing}");

    let nvml = load(&library(&folder, "modern", MODERN)).expect("it loads");
    let unknown = Monitor::open(&nvml, [9; 16]).expect_err("another GPU").to_string();
    assert_eq!(unknown, "nvmlDeviceGetHandleByUUID: NVML's error 6");
    let gpu = Monitor::open(&nvml, UUID).expect("the GPU");
    let expected = Reading {
        watts: Some(698.5),
        celsius: Some(61),
        megahertz: Some(1401),
        slowed_by: vec!["hardware thermal", "power cap"],
        ecc_uncorrected: Some(3),
        remapped: Some(Remapped { pending: true, failed: false }),
    };
    assert_eq!(gpu.read(), expected);
    assert_eq!(gpu.memory(), Some((70, 80)));
    let processes = [(4711, Some(5 << 30)), (4712, None)];
    let processes = processes.map(|(pid, bytes)| GpuProcess { pid, bytes });
    assert_eq!(gpu.processes().as_deref(), Some(&processes[..]));
    assert_eq!(gpu.limits(), Limits { megahertz: Some(1980), watts: Some(700.0) });
    assert_eq!(nvml.driver_version().as_deref(), Some("550.54.15"));
    let told: Vec<Option<Trouble>> = (0..4).map(|_| gpu.wait(1)).collect();
    let expected = [Some(Trouble::Xid(79)), Some(Trouble::DoubleBitEcc), Some(Trouble::Lost), None];
    assert_eq!(told, expected);

    // A GPU that reports Xid errors alone.
    let few = format!("#define KINDS 0x8\n{MODERN}");
    let nvml = load(&library(&folder, "few", &few)).expect("it loads");
    let gpu = Monitor::open(&nvml, UUID).expect("the GPU");
    assert_eq!(gpu.wait(1), Some(Trouble::Xid(79)));

    let nvml = load(&library(&folder, "old", OLD)).expect("it loads");
    let gpu = Monitor::open(&nvml, UUID).expect("the GPU");
    let expected = Reading { slowed_by: vec!["power brake"], ..Reading::default() };
    assert_eq!(gpu.read(), expected);
    assert_eq!(gpu.wait(1), None);
    assert_eq!((gpu.memory(), gpu.limits()), (None, Limits::default()));
    assert_eq!(nvml.driver_version(), None);
    assert_eq!(uuid_text(UUID), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    let _ = std::fs::remove_dir_all(&folder);
}
