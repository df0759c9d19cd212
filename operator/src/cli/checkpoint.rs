//! `moejob checkpoint ls|show|verify|import|export|grow`.

use super::args::{Written, or_its_runs, place, whole, word};
use super::bar::{Bar, Unit};
use super::room::{Need, check_alone};
use super::validate::Output;
use clap::{Subcommand, ValueEnum};
use moe_worker::checkpoint::aside::{self, Aside};
use moe_worker::checkpoint::{self, Cause, Disk, Failed, Found, Growth, Problem};
use moe_worker::checkpoint::fence;
use moe_worker::hf::{self, Options, Weights};
use moejob_kernels::DType;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{Part, TensorEntry};
use moejob_protocol::model::Role;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit code of a checkpoint that is refused.
const EXIT_REFUSED: u8 = 3;

#[derive(Subcommand)]
pub enum CheckpointCommand {
    /// List the checkpoints of a location, oldest first.
    Ls {
        /// The folder of `step-*` folders, such as runs/NAME/checkpoints, or a run.
        location: PathBuf,
        /// How the list is written.
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Describe one checkpoint.
    Show {
        /// A run, a `step-*` folder, or a folder of them (the newest counts).
        checkpoint: PathBuf,
        /// Every tensor, not their number alone.
        #[arg(long)]
        tensors: bool,
        /// How it is written; JSON is the whole manifest.
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Read every byte and compare it with the manifest; exit 3 if anything differs.
    Verify {
        /// Runs, `step-*` folders, or folders of them (the newest counts).
        #[arg(required = true)]
        checkpoints: Vec<PathBuf>,
        /// How it is written.
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Turn a Hugging Face directory into a checkpoint of step 0; exit 3 if it is refused.
    Import {
        /// The folder of config.json and *.safetensors.
        directory: PathBuf,
        /// Where `step-00000000` is made.
        out: PathBuf,
        #[command(flatten)]
        written: Written,
    },
    /// Turn a checkpoint into a directory that `transformers` loads.
    Export {
        /// A run, a `step-*` folder, a folder of them (the newest counts), or a Hugging Face
        /// directory.
        checkpoint: PathBuf,
        /// The folder to make.
        out: PathBuf,
        /// Type of the weights. Default: the one they have.
        #[arg(long, value_enum)]
        dtype: Option<Float>,
        /// A Hugging Face directory whose tokenizer and further fields of config.json are taken.
        #[arg(long)]
        like: Option<PathBuf>,
        #[command(flatten)]
        written: Written,
    },
    /// Split each expert in two, with its optimizer state: the same function of twice the experts.
    Grow {
        /// A run, a `step-*` folder, or a folder of them (the newest counts).
        checkpoint: PathBuf,
        /// Where a folder of the same step is made, such as runs/NEW/checkpoints.
        out: PathBuf,
        /// Noise on one of each two, as a share of each weight: what lets them part.
        #[arg(long, default_value_t = 0.01, value_parser = share)]
        noise: f64,
        /// Of the noise.
        #[arg(long, default_value_t = 1, value_parser = super::args::seed)]
        seed: u64,
        /// Experts a token. Default: twice as many as before, which keeps the function.
        #[arg(long, value_parser = whole(1, 1 << 16))]
        per_token: Option<u32>,
        #[command(flatten)]
        written: Written,
    },
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "a number from 0 to 1".to_string())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Float {
    Fp32,
    Bf16,
    Fp16,
}

pub fn run(command: &CheckpointCommand) -> ExitCode {
    let result = match command {
        CheckpointCommand::Ls { location, output } => list(location, *output),
        CheckpointCommand::Show { checkpoint, tensors, output } => {
            show(checkpoint, *tensors, *output)
        }
        CheckpointCommand::Verify { checkpoints, output } => verify(checkpoints, *output),
        CheckpointCommand::Import { directory, out, written } => {
            import(&place(directory), out, *written)
        }
        CheckpointCommand::Export { checkpoint, out, dtype, like, written } => {
            let dtype = dtype.map(|float| match float {
                Float::Fp32 => DType::F32,
                Float::Bf16 => DType::Bf16,
                Float::Fp16 => DType::F16,
            });
            let like = like.as_deref().map(place);
            let options = Options { dtype, like: like.as_deref() };
            export(&place(checkpoint), out, options, *written)
        }
        CheckpointCommand::Grow { checkpoint, out, noise, seed, per_token, written } => {
            let growth = Growth { noise: *noise, seed: *seed, per_token: *per_token };
            grow(&place(checkpoint), out, &growth, *written)
        }
    };
    result.unwrap_or_else(|error| {
        super::complain(error.as_ref());
        ExitCode::FAILURE
    })
}

type Outcome = Result<ExitCode, Box<dyn std::error::Error>>;

fn list(location: &Path, output: Output) -> Outcome {
    let location = place(location);
    let location = location.as_path();
    let inside = location.join("checkpoints");
    let is_run = location.join("job.json").is_file() && inside.is_dir();
    let location = if is_run { inside.as_path() } else { location };
    let none = checkpoint::list(&Disk::real(), location).is_ok_and(|found| found.is_empty());
    if !location.is_dir() || none && !is_run && !is_location(location) {
        let what = what_it_is(location);
        let advice = "name the folder of step-* folders, such as runs/NAME/checkpoints";
        match or_its_runs(location) {
            Some(runs) => eprintln!("moejob: {}: {runs}", location.display()),
            None => eprintln!("moejob: {}: {what}; {advice}", location.display()),
        }
        return Ok(ExitCode::from(2));
    }
    if let Output::Json = output {
        return list_json(location);
    }
    if none {
        eprintln!("moejob: no checkpoint in {} yet", location.display());
        return Ok(ExitCode::SUCCESS);
    }
    let claims = fence::claims(&Disk::real(), location)?;
    println!("{:<22}{:>10}{:>10}{:>14}  STATE", "NAME", "STEP", "ATTEMPT", "BYTES");
    for Read { found, all } in read(location)? {
        let (attempt, bytes, state) = match &found.manifest {
            Ok(manifest) => {
                let state = match fence::counts(&claims, manifest.attempt, found.step) {
                    false => "fenced by a later attempt",
                    true if all => "committed",
                    true => "committed; its bytes were not read: `moejob checkpoint verify` does",
                };
                (manifest.attempt.to_string(), size(manifest), state.to_string())
            }
            Err(problems) => {
                let first = problems.first().map(Problem::to_string).unwrap_or_default();
                ("-".to_string(), aside::bytes_of(&found.path), format!("refused: {first}"))
            }
        };
        println!("{:<22}{:>10}{attempt:>10}{bytes:>14}  {state}", found.name, found.step);
    }
    for Aside { name, step, path, bytes, .. } in aside::list(&Disk::real(), location)? {
        let state = format!("refused and set aside; `rm -r {}` removes it", word(&path));
        println!("{name:<22}{step:>10}{:>10}{bytes:>14}  {state}", "-");
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes that are read to find damage where nobody asked for that; `verify` reads all.
const READ_MAX: u64 = 1 << 30;

/// A checkpoint, and whether all of it was read.
struct Read {
    found: Found,
    all: bool,
}

/// Those of a location, oldest first, of which the newest are read whole: damage lies in bytes, and
/// a checkpoint that nobody has read is not called good.
fn read(location: &Path) -> std::io::Result<Vec<Read>> {
    let mut left = READ_MAX;
    let mut all = checkpoint::list(&Disk::real(), location)?;
    let read = all.drain(..).rev().map(|found| match &found.manifest {
        Ok(manifest) if size(manifest) <= left => {
            left -= size(manifest);
            let manifest = checkpoint::verify(&Disk::real(), &found.path);
            Read { found: Found { manifest, ..found }, all: true }
        }
        _ => Read { found, all: false },
    });
    let mut read: Vec<Read> = read.collect();
    read.reverse();
    Ok(read)
}

fn size(manifest: &CheckpointManifest) -> u64 {
    manifest.files.iter().map(|file| file.bytes).sum()
}

/// A run that has claimed an attempt has made it.
fn is_location(path: &Path) -> bool {
    path.join("attempts").is_dir() || path.join("text.json").is_file()
}

fn list_json(location: &Path) -> Outcome {
    let claims = fence::claims(&Disk::real(), location)?;
    let mut all = Vec::new();
    for Read { found, all: is_read } in read(location)? {
        let mut line = json!({ "name": found.name, "step": found.step });
        match &found.manifest {
            Ok(manifest) => {
                line["attempt"] = json!(manifest.attempt);
                line["bytes"] = json!(size(manifest));
                let counts = fence::counts(&claims, manifest.attempt, found.step);
                line["state"] = json!(if counts { "committed" } else { "fenced" });
                line["read"] = json!(is_read);
            }
            Err(problems) => {
                line["state"] = json!("refused");
                line["bytes"] = json!(aside::bytes_of(&found.path));
                let told: Vec<String> = problems.iter().map(Problem::to_string).collect();
                line["problems"] = json!(told);
            }
        }
        all.push(line);
    }
    for Aside { name, step, path, cause, bytes } in aside::list(&Disk::real(), location)? {
        let remove = format!("rm -r {}", word(&path));
        let state = "aside";
        all.push(json!({
            "name": name, "step": step, "bytes": bytes, "state": state, "cause": cause,
            "remove": remove,
        }));
    }
    println!("{}", serde_json::Value::Array(all));
    Ok(ExitCode::SUCCESS)
}

/// What lies at a place that is no checkpoint, nor a folder of them.
fn what_it_is(path: &Path) -> &'static str {
    let has = |name: &str| path.join(name).symlink_metadata().is_ok();
    match path.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => "there is no such folder",
        Err(_) => "it cannot be read",
        Ok(of) if !of.is_dir() => "it is a file, and a checkpoint is a folder",
        Ok(_) if has("manifest.json") => "it is one checkpoint: `show` and `verify` take it",
        Ok(_) if has("config.json") => {
            "it is a Hugging Face directory: `moejob checkpoint import` makes a checkpoint of it"
        }
        Ok(_) if has("job.json") => "it is the folder of a run",
        Ok(_) => "it is a folder without a checkpoint",
    }
}

/// The checkpoint that a person means: a `step-*` folder itself, and of a run or a location the
/// newest one.
///
/// # Errors
/// What it is instead, and what to name.
fn newest(path: &Path) -> Result<PathBuf, String> {
    let inside = path.join("checkpoints");
    if path.join("job.json").is_file() && inside.is_dir() {
        return newest(&inside);
    }
    if path.join("manifest.json").symlink_metadata().is_ok() {
        return Ok(path.to_path_buf());
    }
    let mut found = checkpoint::list(&Disk::real(), path).unwrap_or_default();
    found.pop().map(|newest| newest.path).ok_or_else(|| {
        let advice = "name a run, or a step-* folder such as runs/NAME/checkpoints/step-00000100";
        let what = match or_its_runs(path) {
            Some(runs) => runs,
            None => format!("{}; {advice}", what_it_is(path)),
        };
        format!("{}: {what}", path.display())
    })
}

fn show(path: &Path, tensors: bool, output: Output) -> Outcome {
    let path = match newest(&place(path)) {
        Ok(path) => path,
        Err(why) => {
            eprintln!("moejob: {why}");
            return Ok(ExitCode::from(2));
        }
    };
    let path = path.as_path();
    let described = checkpoint::show(&Disk::real(), path);
    let is_read = described.as_ref().is_ok_and(|manifest| size(manifest) <= READ_MAX);
    let read = if is_read { checkpoint::verify(&Disk::real(), path) } else { described };
    let manifest = match read {
        Ok(manifest) => manifest,
        Err(problems) => return Ok(refuse(path, &problems)),
    };
    if !is_read {
        eprintln!("moejob: its bytes were not read: `moejob checkpoint verify` does");
    }
    if let Output::Json = output {
        println!("{}", serde_json::to_value(&manifest)?);
        return Ok(ExitCode::SUCCESS);
    }
    let mesh = manifest.layout.mesh;
    println!("job       {} ({})", manifest.job_name, manifest.job_uid);
    println!("step      {}, {} tokens seen", manifest.step, manifest.tokens);
    println!("attempt   {}, seed {}", manifest.attempt, manifest.seed);
    println!("mesh      dp {} ep {} tp {} pp {}", mesh.dp, mesh.ep, mesh.tp, mesh.pp);
    let model = &manifest.model;
    println!(
        "model     {} layers, D {}, {} heads, {} experts, top-{}, V {}: {} parameters, {} active",
        model.num_hidden_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.experts.count,
        model.experts.per_token,
        model.vocab_size,
        model.numel(),
        model.active_numel()
    );
    if let each @ 2.. = model.slices().each {
        println!("slices    {each} of each expert (parallelism.expertSlices)");
    }
    println!("data      {}", manifest.data_fingerprint);
    println!("files     {}, {} bytes", manifest.files.len(), size(&manifest));
    let weights = manifest.tensors.iter().filter(|tensor| tensor.part == Part::Master);
    println!("tensors   {}, with two moments each", weights.clone().count());
    for tensor in weights.filter(|_| tensors) {
        println!("  {:<60}{:>6}  {:?}", tensor.name, tensor.dtype, tensor.shape);
    }
    Ok(ExitCode::SUCCESS)
}

fn verify(paths: &[PathBuf], output: Output) -> Outcome {
    let (mut code, mut all) = (ExitCode::SUCCESS, Vec::new());
    for path in paths {
        let path = &match newest(&place(path)) {
            Ok(path) => path,
            Err(why) => {
                eprintln!("moejob: {why}");
                all.push(json!({ "path": path, "good": false, "problems": [why] }));
                code = ExitCode::from(2);
                continue;
            }
        };
        match checkpoint::verify(&Disk::real(), path) {
            Ok(manifest) => match output {
                Output::Text => {
                    println!("{}: good, {} bytes read", path.display(), size(&manifest));
                }
                Output::Json => {
                    all.push(json!({ "path": path, "good": true, "bytes": size(&manifest) }));
                }
            },
            Err(problems) if output == Output::Json => {
                let told: Vec<String> = problems.iter().map(Problem::to_string).collect();
                all.push(json!({ "path": path, "good": false, "problems": told }));
                code = ExitCode::from(EXIT_REFUSED);
            }
            Err(problems) => code = refuse(path, &problems),
        }
    }
    if let Output::Json = output {
        println!("{}", serde_json::Value::Array(all));
    }
    Ok(code)
}

fn refuse(path: &Path, problems: &[Problem]) -> ExitCode {
    eprintln!("{}: refused", path.display());
    for problem in problems {
        eprintln!("  {problem}");
    }
    ExitCode::from(EXIT_REFUSED)
}

fn import(directory: &Path, out: &Path, how: Written) -> Outcome {
    convert(directory, "import", how, |weights, progress| hf::import(weights, out, progress))
}

fn export(checkpoint: &Path, out: &Path, options: Options, how: Written) -> Outcome {
    convert(checkpoint, "export", how, |weights, progress| {
        hf::export(weights, out, options, progress)
    })
}

fn grow(checkpoint: &Path, out: &Path, growth: &Growth, how: Written) -> Outcome {
    let before = match Weights::open(checkpoint) {
        Ok(weights) => weights.model().clone(),
        Err(refusal) => return Ok(refuse(checkpoint, &refusal.problems)),
    };
    let model = checkpoint::grown(&before, growth);
    let (experts, router) = (&model.experts, &model.router);
    if experts.per_token == 0 || experts.per_token > experts.count {
        eprintln!("moejob: --per-token {}: 1 to {}", experts.per_token, experts.count);
        return Ok(ExitCode::from(2));
    }
    let code = convert(checkpoint, "grow", how, |weights, progress| match weights {
        Weights::Ours { path, manifest, .. } => {
            checkpoint::grow(path, manifest, growth, out, progress)
        }
        Weights::HuggingFace(_) => {
            let why = "it is a Hugging Face directory: `moejob checkpoint import` makes a \
                       checkpoint of it, which can grow";
            let what = ".".to_string();
            Err(Failed::Refused(Problem { what, why: why.to_string(), cause: Cause::Damage }))
        }
    })?;
    if code == ExitCode::SUCCESS && !how.is_json() {
        let mut changed = vec![format!("experts.perToken: {}", experts.per_token)];
        if router.groups != before.router.groups {
            changed.push(format!("router.groups: {}", router.groups));
            changed.push(format!("router.topkGroups: {}", router.topk_groups));
        }
        if router.aux_loss_coef != before.router.aux_loss_coef {
            changed.push(format!("router.auxLossCoef: {}", router.aux_loss_coef));
        }
        let old = &before.router;
        for (field, value, before) in [
            ("scale", router.scale, old.scale),
            ("hysteresis", router.hysteresis, old.hysteresis),
            ("biasUpdateRate", router.bias_update_rate, old.bias_update_rate),
        ] {
            if value != before {
                changed.push(format!("router.{field}: {value}"));
            }
        }
        println!("spec.model: experts.count: {}, {}", experts.count, changed.join(", "));
        let keeps = 2 * before.experts.per_token;
        if experts.per_token != keeps {
            println!("the function differs: {keeps} experts a token keep it");
        }
    }
    Ok(code)
}

/// Says which newer checkpoints are not used, and why.
pub fn tell_passed_over(weights: &Weights) {
    weights.passed_over().iter().for_each(|line| eprintln!("moejob: {line}"));
}

/// Bytes of memory that weights take on their way into another form: a piece of a tensor as it is
/// read, in fp64, and as it is written; and what a router takes whole, twice, and as it is hashed.
fn at_once(weights: &Weights) -> u64 {
    // Of Hugging Face's tensors a run of some elements is read at once.
    let Weights::Ours { manifest, .. } = weights else { return 0 };
    let of = |(at, tensor): (usize, &TensorEntry)| {
        let bytes = tensor.pieces.iter().map(|piece| piece.end.saturating_sub(piece.begin));
        let piece = bytes.clone().max().unwrap_or(0).saturating_mul(4);
        let role = weights.params().get(at / Part::ALL.len()).map(|param| param.role);
        let whole = match role {
            Some(Role::Router { .. }) => bytes.fold(0, u64::saturating_add).saturating_mul(3),
            _ => 0,
        };
        piece.saturating_add(whole)
    };
    manifest.tensors.iter().enumerate().map(of).max().unwrap_or(0)
}

/// Opens weights and writes them in another form.
fn convert(
    from: &Path,
    what: &'static str,
    how: Written,
    write: impl FnOnce(&Weights, &mut dyn FnMut(u64, u64)) -> Result<PathBuf, Failed>,
) -> Outcome {
    let weights = match Weights::open(from) {
        Ok(weights) => weights,
        Err(refusal) => return Ok(refuse(from, &refusal.problems)),
    };
    tell_passed_over(&weights);
    let warnings = weights.warnings();
    super::generate::warn(&warnings);
    let wanted = Need { used: at_once(&weights), reserved: 0 };
    if let Err(why) = check_alone("what is read at once of the weights", wanted, |_| None) {
        eprintln!("moejob: {why}");
        return Ok(ExitCode::from(2));
    }
    let mut bar = Bar::new(what, Unit::Bytes);
    let written = write(&weights, &mut |done, total| bar.set(done, total));
    drop(bar);
    match written {
        Ok(path) => {
            match how.is_json() {
                true => {
                    let (from, passed_over) = (weights.path(), weights.passed_over());
                    let line = json!({
                        "path": path,
                        "from": from,
                        "passedOver": passed_over,
                        "warnings": warnings,
                    });
                    println!("{line}");
                }
                false => println!("{}", path.display()),
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(Failed::Refused(problem)) => Ok(refuse(from, &[problem])),
        Err(Failed::NoFamily(problems)) => {
            eprintln!("moejob: no family of transformers computes this model:");
            Ok(refuse(from, &problems))
        }
        Err(error @ Failed::Exists { .. }) => {
            super::complain(&error);
            Ok(ExitCode::from(2))
        }
        Err(error) => Err(Box::new(error)),
    }
}
