//! `moejob bench` on processors: what it prints, and that its routing is what it says.

mod traces;

use std::process::{Command, Output};

fn bench(arguments: &str) -> Output {
    let small = "--device cpu --sequence 64 --micro-batch 2 --steps 3 --warm-up 1 --threads 1";
    let words = ["bench"].into_iter().chain(small.split(' ')).chain(arguments.split(' '));
    Command::new(env!("CARGO_BIN_EXE_moejob")).args(words).output().unwrap()
}

fn json(arguments: &str) -> serde_json::Value {
    let output = bench(&format!("{arguments} --json"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn balanced_routing_is_balanced_and_natural_routing_is_not() {
    for preset in ["tiny", "tiny-olmoe"] {
        let natural = json(&format!("--preset {preset}"));
        let balanced = json(&format!("--preset {preset} --routing balanced"));
        assert_eq!(balanced["routing"], "balanced");
        assert_eq!(balanced["expertImbalance"], 1.0, "{preset}");
        assert!(natural["expertImbalance"].as_f64().unwrap() > 1.0, "{natural}");
        assert!(natural["loss"].as_f64().unwrap() > 4.0, "{natural}");
    }
}

#[test]
fn a_bench_tells_its_rate_by_the_convention() {
    let told = json("--preset tiny --layers 1 --accumulation 2");
    assert_eq!((&told["layers"], &told["accumulation"]), (&1.into(), &2.into()));
    let steps: Vec<f64> =
        told["secondsPerStep"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    assert_eq!(steps.len(), 3);
    let median = told["medianSeconds"].as_f64().unwrap();
    assert!(steps.contains(&median), "{told}");
    let tokens = told["tokensPerSecond"].as_f64().unwrap();
    assert!((tokens * median - 256.0).abs() < 1e-6, "{told}");
    // Head 256 x 64, q k v o 4 x 64 x 64, router 8 x 64, 2 experts of 3 x 64 x 64, norms 3 x 64;
    // 6 operations each, and attention over 64 tokens.
    let multiplied = 256 * 64 + 4 * 64 * 64 + 8 * 64 + 2 * 3 * 64 * 64 + 3 * 64;
    let flops = f64::from(6 * multiplied + 3 * 4 * 64 * 64 / 2);
    let rate = told["modelFlopsPerSecond"].as_f64().unwrap();
    assert!((rate / tokens / flops - 1.0).abs() < 1e-9, "{} and {flops}", rate / tokens);
    for bytes in ["memoryPlannedBytes", "memoryUsedBytes"] {
        assert!(told[bytes].as_u64().unwrap() > 1 << 20, "{told}");
    }
}

#[test]
fn a_person_reads_what_was_measured_and_how() {
    let output = bench("--preset tiny");
    let text = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> = text.lines().filter_map(|line| line.split("  ").next()).collect();
    let expected = [
        "device", "model", "batch", "numbers", "routing", "step", "phases", "speed", "model rate",
        "memory", "loss",
    ];
    assert_eq!(names, expected, "{text}");
    // The parts of a step are all of it.
    let phases = text.lines().find_map(|line| line.strip_prefix("phases      ")).expect("phases");
    let (parts, step) = phases.split_once(" of ").expect("the whole");
    let number = |part: &str| part.rsplit(' ').next().and_then(|number| number.parse().ok());
    let parts: Vec<f64> = parts.split(", ").filter_map(number).collect();
    let step: f64 = step.trim_end_matches(" ms (means)").parse().expect("milliseconds");
    assert_eq!(parts.len(), 6, "{phases}");
    let rounding = 0.05 * (parts.len() + 1) as f64;
    assert!((parts.iter().sum::<f64>() - step).abs() <= rounding + 1e-9, "{phases}");
    let numbers = "fp32, moments fp32, gradients auto, attention deterministic, recompute none";
    assert!(text.contains(numbers) && text.contains("1 x 2 sequences of 64: 128 tokens"), "{text}");
}

#[test]
fn a_trace_shows_host_and_device() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let output = bench(&format!("--preset tiny --trace {}", file.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = traces::rows(&file);
    let places: Vec<(u64, u64)> = rows.keys().copied().collect();
    assert_eq!(places, [(0, 0), (0, 1)], "a row of the host, and one of the device");
    for spans in rows.values() {
        let count = |name: &str| spans.iter().filter(|(.., of)| of == name).count();
        // Three steps of one micro-batch.
        assert_eq!((count("update"), count("head"), count("data")), (3, 3, 3));
        assert!(count("mixture") >= 3, "{spans:?}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    for (arguments, expected) in [
        ("--preset tiny --precision bf16", "spec.training.precision: found `bf16` on processors"),
        ("--preset deepseek-v3 --layers 4", "which has latent attention"),
        ("--preset huge", "one of tiny, tiny-qwen3, "),
        ("--preset tiny --accumulation 99999", "4096"),
    ] {
        let output = bench(arguments);
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {err}");
        assert!(err.contains(expected), "{arguments}: {err}");
    }
}

/// Links need two GPUs. Here none is shown, whatever the machine has.
#[test]
fn links_are_refused_where_there_are_no_two_gpus() {
    let links = |words: &str| {
        let words = ["bench", "--links"].into_iter().chain(words.split_whitespace());
        let mut command = Command::new(env!("CARGO_BIN_EXE_moejob"));
        command.args(words).env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    for words in ["", "--json", "--devices 1", "--devices 2", "--on-one-gpu", "--captured"] {
        let output = links(words);
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words}: {err}");
        assert!(output.stdout.is_empty() && err.starts_with("moejob: bench --links: "), "{err}");
        let verbs = "not measured: all-to-all, all-reduce, reduce-scatter, all-gather, counts, and";
        assert!(err.contains(verbs) && err.contains("with --simulate"), "{words}: {err}");
    }
    for (words, expected) in [
        ("--bytes 255", "a size from 256 to 8Gi, such as 64Ki or 16Mi"),
        ("--bytes 64Ki,16X", "a size from 256 to 8Gi"),
        ("--simulate --bytes 1Mi", "cannot be used with"),
        ("--simulate --captured", "cannot be used with"),
        ("--preset tiny", "cannot be used with"),
        ("--mib 16", "--simulate"),
        ("--devices 65", "a whole number from 1 to 64"),
        ("--profile huge", "there is no \"huge\"; known: cpu, "),
        ("--profile cpu", "profile cpu says nothing of its links"),
        ("--profile nd-h200-v5 --profile nd-h100-v5", "one is compared with what is measured"),
    ] {
        let output = links(words);
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && err.contains(expected), "{words}: {err}");
    }
}

/// A rank tells its parent why it cannot be one, and ends where that is another process.
#[test]
fn a_rank_that_measures_links_belongs_to_its_parent() {
    for (parent, code, said) in [(std::process::id(), 1, true), (1, 75, false)] {
        let output = Command::new(env!("CARGO_BIN_EXE_moejob"))
            .args(["engine", &parent.to_string()])
            .env("MOEJOB_LINKS_GPU", "0")
            .env("CUDA_VISIBLE_DEVICES", "")
            .output()
            .unwrap();
        let line = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}");
        assert_eq!(line.starts_with("{\"Failed\":{\"why\":\""), said, "{line}");
    }
}

/// Of ranks that share a GPU, which NCCL does not know: what goes through windows arrives.
#[test]
fn ranks_that_share_a_gpu_measure_windows() {
    if let Err(error) = moejob_kernels::cuda::Gpu::open(0) {
        return println!("skipped: {error}");
    }
    for (ranks, captured) in [("2", ""), ("3", ""), ("2", "--captured")] {
        let words = ["bench", "--links", "--on-one-gpu", "--json", "--bytes", "64Ki,1Mi"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_moejob"));
        command.args(words).args(["--devices", ranks]).args(captured.split_whitespace());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(told["nccl"]["missing"], "ranks that share a GPU have no communicator");
        let readings = told["readings"].as_array().unwrap();
        let of = |verb: &str| readings.iter().filter(|reading| reading["verb"] == verb).count();
        let verbs = ["all-to-all", "all-gather", "reduce-scatter", "counts", "all-reduce"];
        assert_eq!(verbs.map(of), [2, 2, 2, 1, 0], "{told}");
        let took = |reading: &serde_json::Value| reading["seconds"].as_f64().unwrap();
        assert!(readings.iter().all(|reading| took(reading) > 0.0), "{told}");
    }
}

/// The page of estimates shows what the command prints.
#[test]
fn links_are_simulated_by_what_profiles_say() {
    let links = |words: &str| {
        let words = ["bench", "--links"].into_iter().chain(words.split(' '));
        Command::new(env!("CARGO_BIN_EXE_moejob")).args(words).output().unwrap()
    };
    let output = links("--simulate --profile nd-h200-v5 --profile ndm-a100-v4");
    let said = String::from_utf8(output.stdout).unwrap();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/exchange.md");
    assert!(output.status.success() && std::fs::read_to_string(page).unwrap().contains(&said));
    let output = links("--simulate --gpus 64,2048 --mib 16 --json");
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 8, "four profiles have figures: {rows:?}");
    let two = |row: &serde_json::Value| row["estimates"][0]["hierarchicalSeconds"].as_f64();
    assert!(rows.iter().all(|row| two(row).unwrap() > 0.0));
    for (words, expected) in [
        ("--simulate --profile huge", "there is no \"huge\"; known: cpu, "),
        ("--simulate --profile cpu", "profile cpu says nothing of its links"),
        ("--simulate --gpus 12", "a multiple of it"),
        ("--simulate --gpus 0", "a whole number from 1 to 32768"),
        ("--gpus 8", "--simulate"),
    ] {
        let output = links(words);
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && err.contains(expected), "{words}: {err}");
    }
}

/// What does not fit is counted, and refused with what would, before any of it is taken: the bound
/// of this test leaves the program room and no more.
#[test]
fn a_bench_without_memory_for_it_is_refused_with_what_would_fit() {
    let bounded = |arguments: &str| {
        let program = env!("CARGO_BIN_EXE_moejob");
        let line = format!("ulimit -v 3000000; exec {program} bench --device cpu {arguments}");
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let small = "--steps 1 --warm-up 0 --threads 1";
    let (code, told) = bounded(&format!("--preset tiny --sequence 65536 --micro-batch 64 {small}"));
    assert!(code == Some(2) && told.contains("moejob: the bench wants "), "{told}");
    assert!(told.contains("what `ulimit -v` lets a process have"), "{told}");
    let number = |option: &str| -> u32 {
        let (_, rest) = told.split_once(option).unwrap_or_else(|| panic!("{option} in {told}"));
        rest.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
    };
    let (micro, sequence) = (number("--micro-batch "), number("--sequence "));
    assert!((1..64).contains(&micro) && (1..65536).contains(&sequence), "{told}");
    // Nothing of so large a model does.
    let (code, told) = bounded(&format!("--preset mixtral-8x7b --devices 2 {small}"));
    assert!(code == Some(2) && told.contains("the bench wants "), "{told}");
    assert!(told.contains("--preset") || told.contains(" would fit"), "{told}");
    let (code, told) = bounded(&format!("--preset tiny --sequence 16 {small}"));
    assert_eq!(code, Some(0), "{told}");
}
