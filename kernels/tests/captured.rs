//! Captured graphs on a driver that is a stub: what is recorded is not done, what is repeated is
//! done as often, and what cannot be in a graph spoils the capture and not the device.

mod stubs;

use moejob_kernels::cuda::{Captured, CudaDevice};
use moejob_kernels::{
    Add, ArenaPlan, BiasBackward, Buffer, DType, Device, LayerError, StepPhase, Stored,
};
use std::process::Command;
use stubs::Stubs;
use stubs::cudarc::Cudarc;

const CASE: &str = "CAPTURED_CASE";
const VERSION: u32 = 12_040;

/// A device of the stub, and two buffers of four words each.
struct Bed {
    device: Device,
    a: Buffer,
    b: Buffer,
    /// Rows, columns, and buffers of as many: what makes little scratch, and much.
    little: BiasBackward,
    much: BiasBackward,
}

impl Bed {
    fn new() -> Bed {
        let mut plan = ArenaPlan::new();
        let [a, b] = [(); 2].map(|()| plan.alloc(DType::U32, 4));
        let mut bias = |rows: usize, columns: usize| BiasBackward {
            rows,
            columns,
            accumulate: false,
            dy: plan.alloc(DType::Bf16, rows * columns),
            dbias: plan.alloc(DType::Bf16, columns),
        };
        let (little, much) = (bias(8, 64), bias(2112, 32_768));
        let mut device = Device::cuda(0, 0).expect("the stub");
        device.reserve_planned(&plan, 0).expect("memory");
        Bed { device, a, b, little, much }
    }

    fn cuda(&mut self) -> &mut CudaDevice {
        self.device.as_cuda_mut().expect("a GPU")
    }

    fn capture(&mut self, enqueue: impl FnOnce(&mut Bed)) -> Result<Captured, LayerError> {
        self.cuda().begin_capture()?;
        enqueue(self);
        self.cuda().end_capture()
    }

    fn copy(&mut self) {
        self.device.copy(self.a, self.b);
    }

    /// What the copy leaves of `value`, from another one.
    fn copied(&mut self, value: u32, copy: impl FnOnce(&mut Bed)) -> bool {
        self.device.write(self.a, &[value; 4]);
        self.device.write(self.b, &[!value; 4]);
        copy(self);
        let found: Vec<u32> = self.device.read_vec(self.b);
        assert!(found == [value; 4] || found == [!value; 4], "{found:?}");
        found[0] == value
    }
}

fn what_is_recorded_is_done_when_it_is_repeated() {
    let mut bed = Bed::new();
    let mut graph = None;
    let done = bed.copied(1, |bed| graph = Some(bed.capture(Bed::copy).expect("a graph")));
    let graph = graph.expect("captured");
    assert!(!done && graph.launches() == 1, "{graph:?}");
    // Whatever lies there then, as often as it is asked for.
    for value in [2, 3] {
        assert!(bed.copied(value, |bed| assert!(bed.cuda().repeat(&graph))));
    }
    // Others beside it keep their places.
    let (a, b) = (bed.a, bed.b);
    let back = bed.capture(|bed| bed.device.copy(b, a)).expect("a graph");
    bed.device.write(b, &[7_u32; 4]);
    assert!(bed.cuda().repeat(&back) && bed.device.read_vec::<u32>(a) == [7; 4]);
    assert!(bed.copied(8, |bed| assert!(bed.cuda().repeat(&graph))));
    bed.cuda().forget_captured();
    for graph in [graph, back] {
        assert!(!bed.copied(9, |bed| assert!(!bed.cuda().repeat(&graph))), "it is gone");
    }
    assert!(bed.device.finish().is_ok());
}

fn what_cannot_be_in_a_graph_spoils_the_capture_alone() {
    let mut bed = Bed::new();
    let spoils: [(&str, fn(&mut Bed)); 9] = [
        ("bytes of the host", |bed| bed.device.write(bed.b, &[5_u32; 4])),
        ("bytes of the host", |bed| {
            let (b, bytes) = (bed.b.reinterpret(DType::U8), [5; 16]);
            bed.device.write_all(&[(Stored::Plain(b), &bytes)]);
        }),
        ("a copy to the host", |bed| drop(bed.device.read_vec::<u32>(bed.a))),
        ("a copy to the host", |bed| drop(bed.device.post(bed.a))),
        ("a wait", |bed| assert!(bed.device.finish().is_ok())),
        ("a time", |bed| bed.device.phase(StepPhase::Other)),
        ("a time", |bed| drop(bed.device.point())),
        ("would have to be made", |bed| {
            let b = bed.much.dbias.slice(0, 64);
            bed.device.add(&Add { a: bed.little.dbias, b });
        }),
        ("would have to be made", |bed| bed.device.bias_backward(&bed.little.clone())),
    ];
    for (why, spoil) in spoils {
        let (mut refused, mut waited) = (None, 0);
        let done = bed.copied(1, |bed| {
            let before = bed.device.waits();
            let captured = bed.capture(|bed| {
                bed.copy();
                spoil(bed);
                bed.copy();
            });
            refused = captured.err();
            waited = bed.device.waits() - before;
        });
        let refused = refused.expect("no graph").to_string();
        let begins = refused.starts_with("no graph was captured: ");
        assert!(begins && refused.contains(why), "{refused}");
        assert!(!done, "{why}: a capture that was spoiled has done something");
        assert_eq!(waited, 0, "{why}: the host has waited");
        assert!(bed.copied(2, Bed::copy), "{why}: ops are done again");
        assert!(bed.device.check().is_ok(), "{why}");
    }
    assert!(bed.device.cut_phases().first_round().is_none());
    let graph = bed.capture(Bed::copy).expect("a graph behind one that was spoiled");
    assert!(bed.copied(3, |bed| assert!(bed.cuda().repeat(&graph))));
}

/// Scratch that grows lies elsewhere then, and graphs name where it lay.
fn graphs_end_with_the_memory_that_they_name() {
    let mut bed = Bed::new();
    let (little, much) = (bed.little.clone(), bed.much.clone());
    bed.device.bias_backward(&little);
    let graph = bed.capture(|bed| bed.device.bias_backward(&little)).expect("a graph");
    assert_eq!(graph.launches(), 2);
    assert!(bed.cuda().repeat(&graph));
    let spoiled = bed.capture(|bed| bed.device.bias_backward(&much)).expect_err("it has to grow");
    assert!(spoiled.to_string().ends_with("more scratch would have to be made"), "{spoiled}");
    assert!(bed.cuda().repeat(&graph), "nothing has moved");
    bed.device.bias_backward(&much);
    assert!(!bed.cuda().repeat(&graph), "it has moved");
    let again = bed.capture(|bed| bed.device.bias_backward(&little)).expect("a graph");
    bed.device.bias_backward(&much);
    assert!(bed.cuda().repeat(&again), "it is as large as it has to be");
    bed.device.reserve(1 << 20).expect("memory");
    assert!(!bed.cuda().repeat(&again), "the arena is another one");
    assert!(bed.device.finish().is_ok());
}

/// Drivers that refuse to begin, to end, or to make a graph.
fn a_driver_that_captures_nothing_goes_on_op_by_op() {
    let mut bed = Bed::new();
    for value in 0..3 {
        let done = bed.copied(value, |bed| {
            assert!(bed.capture(Bed::copy).is_err());
            assert!(bed.device.check().is_ok());
        });
        assert!(!done, "what was recorded is not done");
        assert!(bed.copied(value, Bed::copy));
    }
    assert!(bed.device.finish().is_ok());
}

/// A device that fails in a graph has failed, as in an op.
fn a_graph_that_fails_fails_the_device() {
    let mut bed = Bed::new();
    let graph = bed.capture(Bed::copy).expect("a graph");
    assert!(bed.cuda().repeat(&graph), "it was enqueued");
    let failed = bed.device.finish().expect_err("the driver refused it").to_string();
    assert_eq!(failed, "launching a graph");
    let refused = bed.capture(Bed::copy).expect_err("nothing is captured behind a failure");
    assert!(refused.to_string().ends_with("the device has failed"), "{refused}");
}

/// A library is loaded once a process, so each case is one.
#[test]
fn helper() {
    match std::env::var(CASE).as_deref() {
        Ok("repeats") => what_is_recorded_is_done_when_it_is_repeated(),
        Ok("spoils") => what_cannot_be_in_a_graph_spoils_the_capture_alone(),
        Ok("moves") => graphs_end_with_the_memory_that_they_name(),
        Ok("refuses") => a_driver_that_captures_nothing_goes_on_op_by_op(),
        Ok("fails") => a_graph_that_fails_fails_the_device(),
        Ok(other) => panic!("no case {other}"),
        Err(_) => {}
    }
}

#[test]
fn graphs_on_a_stub() {
    let folder = std::env::temp_dir().join(format!("moejob-captured-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    let stubs = Stubs::make(&Cudarc::find(), &[VERSION], &folder);
    let libraries = stubs.folder("libraries", [VERSION; 3]);
    for (case, how) in [
        ("repeats", ""),
        ("spoils", ""),
        ("moves", ""),
        ("refuses", "begin"),
        ("refuses", "end"),
        ("refuses", "instantiate"),
        ("fails", "launch"),
    ] {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "helper", "--nocapture"])
            .env(CASE, case)
            .env("STUB_GRAPHS", how)
            .env("LD_LIBRARY_PATH", &libraries)
            .env("MOEJOB_CUBIN_CACHE", folder.join("cubins"))
            .env_remove("MOEJOB_CUDA_ARCH")
            .output()
            .expect("this test as a process");
        let told = [output.stdout, output.stderr].concat();
        let told = String::from_utf8_lossy(&told);
        assert!(output.status.success() && told.contains("1 passed"), "{case} {how}: {told}");
    }
    let _ = std::fs::remove_dir_all(&folder);
}
