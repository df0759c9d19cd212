//! `moejob validate FILE...`: every problem, with line and column.

use super::args::place;
use super::profiles::OwnProfiles;
use clap::{Args, ValueEnum};
use moejob_manifest::Job;
use moejob_manifest::devices;
use moejob_manifest::edit;
use moejob_manifest::job::same_output;
use moejob_manifest::problem::{Code, Problem};
use moejob_manifest::profile::{Backend, Profiles};
use moejob_manifest::read::Manifest;
use moejob_manifest::several::documents;
use moejob_manifest::yaml::BYTES_MAX;
use moejob_protocol::ModelConfig;
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit code of the user's input.
const EXIT_INPUT: u8 = 2;

#[derive(Args)]
pub struct ValidateArgs {
    /// MoeJob manifests; `-` is standard input.
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Another value of a field in all of them, such as training.steps=800. May be given several
    /// times.
    #[arg(long, value_name = "FIELD=VALUE")]
    pub set: Vec<String>,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// How the problems are written.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Text,
    Json,
}

/// What was found in one file.
struct Finding {
    file: PathBuf,
    /// The job's name, if it is valid.
    job: Option<String>,
    problems: Vec<Problem>,
    /// What the workers cannot do yet: nothing is wrong with the manifest, but it cannot run.
    unsupported: Vec<Problem>,
    warnings: Vec<Problem>,
    unreadable: Option<String>,
    /// Documents of the file that are no MoeJobs, by kind and name.
    skipped: Vec<String>,
    /// What of a valid job only another machine, or a later moment, can say.
    unchecked: Option<&'static str>,
}

pub fn run(args: &ValidateArgs) -> ExitCode {
    let mut findings = Vec::new();
    let mut jobs: Vec<Job> = Vec::new();
    let profiles = match args.profiles.read() {
        Ok(profiles) => profiles,
        Err(problems) => return refuse(&problems),
    };
    for file in &args.files {
        match examine(file, &args.set, &mut jobs, &profiles) {
            Ok(found) => findings.extend(found),
            Err(why) => return refuse(&format!("moejob: {why}")),
        }
    }
    // Beside manifests there may be files of other kinds; of those alone nothing is judged.
    if findings.iter().any(|finding| !finding.is_of_others()) {
        findings.iter_mut().filter(|finding| finding.is_of_others()).for_each(|finding| {
            finding.unreadable = None;
        });
    }
    match args.output {
        Output::Text => findings.iter().for_each(print_text),
        Output::Json => {
            println!("{}", Value::from(findings.iter().map(to_json).collect::<Vec<_>>()));
        }
    }
    let good = findings.iter().all(|finding| finding.can_run() || finding.is_passed_over());
    if good { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INPUT) }
}

/// A valid job and the text that it was read from.
pub struct ReadJob {
    pub job: Job,
    file: PathBuf,
    /// None of a file that was changed by the command line: it has no lines to name.
    manifest: Option<Manifest>,
}

impl ReadJob {
    /// Each problem as a line that says where it stands.
    pub fn lines(&self, problems: Vec<Problem>) -> Vec<String> {
        let problems = match &self.manifest {
            Some(manifest) => manifest.locate(problems),
            None => problems,
        };
        problems.iter().map(|problem| line(&self.file, "", problem)).collect()
    }
}

/// The job in `file`; what of it the workers cannot do yet is for each command to judge. Problems
/// and warnings are printed; the error is the exit code.
pub fn read_job(file: &Path, profiles: &OwnProfiles) -> Result<ReadJob, ExitCode> {
    read_changed_job(file, profiles, &Changed::default())
}

/// What the command line says in place of the file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changed<'a> {
    /// `FIELD=VALUE`
    pub sets: &'a [String],
    pub name: Option<&'a str>,
}

/// The job in `file` with what was changed of it. A file that was changed has no lines to name.
pub fn read_changed_job(
    file: &Path,
    profiles: &OwnProfiles,
    changed: &Changed,
) -> Result<ReadJob, ExitCode> {
    let mut jobs = Vec::new();
    let profiles = profiles.read().map_err(|problems| refuse(&problems))?;
    let is_changed = !changed.sets.is_empty() || changed.name.is_some();
    let read = match read(file) {
        Ok(bytes) => only_job(bytes),
        Err(error) => Err(unread(&error)),
    };
    let (finding, bytes) = match read {
        Ok(bytes) if is_changed => match edit::with(&bytes, changed.sets, changed.name) {
            Ok(bytes) => (judge_changed(file, &bytes, &mut jobs, &profiles), bytes),
            Err(why) => return Err(refuse(&format!("moejob: {why}"))),
        },
        Ok(bytes) => (judge(file, &bytes, &mut jobs, &profiles), bytes),
        Err(why) => (Finding::unreadable(file, why), Vec::new()),
    };
    if finding.job.is_none() {
        print_text(&finding);
    } else {
        let warnings = finding.warnings.iter();
        warnings.for_each(|warning| eprintln!("{}", line(file, "warning: ", warning)));
    }
    let job = jobs.pop().ok_or(ExitCode::from(EXIT_INPUT))?;
    let manifest = (!is_changed).then(|| Manifest::read(&bytes));
    Ok(ReadJob { job, file: file.to_path_buf(), manifest })
}

fn refuse(problems: &str) -> ExitCode {
    eprintln!("{}", moejob_manifest::problem::printable_lines(problems));
    ExitCode::from(EXIT_INPUT)
}

/// Prints the problems and warnings of a manifest for a cluster; whether it can run there.
pub fn report(file: &Path, bytes: &[u8], profiles: &Profiles) -> bool {
    let mut jobs = Vec::new();
    let mut finding = judge(file, bytes, &mut jobs, profiles);
    let of_cluster = jobs.pop().map(|job| devices::on_cluster(&job)).unwrap_or_default();
    finding.unsupported.extend(Manifest::read(bytes).locate(of_cluster));
    let good = finding.can_run();
    // Of a good one its warnings are all that there is to say.
    match good {
        true => finding.warnings.iter().for_each(|warning| {
            eprintln!("{}", line(file, "warning: ", warning));
        }),
        false => print_text(&finding),
    }
    good
}

/// A finding for each MoeJob of a file, and one for a file without.
///
/// # Errors
/// A value of `sets` cannot be set.
fn examine(
    file: &Path,
    sets: &[String],
    jobs: &mut Vec<Job>,
    profiles: &Profiles,
) -> Result<Vec<Finding>, String> {
    let bytes = match read(file) {
        Ok(bytes) => bytes,
        Err(error) => return Ok(vec![Finding::unreadable(file, unread(&error))]),
    };
    let (others, own): (Vec<_>, Vec<_>) =
        documents(&bytes).into_iter().partition(|document| document.other.is_some());
    let skipped: Vec<String> = others.into_iter().filter_map(|document| document.other).collect();
    let mut findings = Vec::new();
    for document in own {
        findings.push(match sets.is_empty() {
            true => judge(file, &document.bytes, jobs, profiles),
            false => judge_changed(file, &edit::with(&document.bytes, sets, None)?, jobs, profiles),
        });
    }
    if findings.is_empty() {
        findings.push(Finding::unreadable(file, NO_JOB.to_string()));
    }
    findings[0].skipped = skipped;
    Ok(findings)
}

/// Judges a manifest that was changed by the command line: it has no lines to name.
fn judge_changed(
    file: &Path,
    bytes: &[u8],
    jobs: &mut Vec<Job>,
    profiles: &Profiles,
) -> Finding {
    let mut finding = judge(file, bytes, jobs, profiles);
    let lists = [&mut finding.problems, &mut finding.warnings, &mut finding.unsupported];
    lists.into_iter().flatten().for_each(|problem| problem.place = None);
    finding
}

/// The only MoeJob of a file; of several all of it, which is judged as one.
///
/// # Errors
/// All that it holds is of other kinds: which.
fn only_job(bytes: Vec<u8>) -> Result<Vec<u8>, String> {
    let (others, own): (Vec<_>, Vec<_>) =
        documents(&bytes).into_iter().partition(|document| document.other.is_some());
    match (&own[..], others.is_empty()) {
        ([only], _) => Ok(only.bytes.clone()),
        ([], false) => {
            let others: Vec<String> = others.into_iter().filter_map(|of| of.other).collect();
            Err(format!("{NO_JOB}, but {}", others.join(", ")))
        }
        _ => Ok(bytes),
    }
}

const NO_JOB: &str = "it holds no MoeJob";

fn unread(error: &std::io::Error) -> String {
    format!("cannot be read: {}", crate::cli::out::io(error))
}

impl Finding {
    fn unreadable(file: &Path, why: String) -> Finding {
        Finding { unreadable: Some(why), ..Finding::of(file) }
    }

    fn of(file: &Path) -> Finding {
        let [problems, unsupported, warnings] = [const { Vec::new() }; 3];
        let (job, unreadable, skipped, unchecked) = (None, None, Vec::new(), None);
        let file = file.into();
        Finding { file, job, problems, unsupported, warnings, unreadable, skipped, unchecked }
    }

    fn can_run(&self) -> bool {
        self.job.is_some() && self.unsupported.is_empty()
    }

    /// All that the file holds is of other kinds.
    fn is_of_others(&self) -> bool {
        self.job.is_none() && self.problems.is_empty() && !self.skipped.is_empty()
    }

    fn is_passed_over(&self) -> bool {
        self.is_of_others() && self.unreadable.is_none()
    }
}

fn judge(file: &Path, bytes: &[u8], jobs: &mut Vec<Job>, profiles: &Profiles) -> Finding {
    let mut finding = Finding::of(file);
    let (weights, passed_over) = match weights(bytes) {
        Ok(found) => found,
        Err(problem) => {
            finding.problems = Manifest::read(bytes).locate(vec![problem]);
            return finding;
        }
    };
    match Job::read_with(bytes, weights.as_ref(), profiles) {
        Ok(job) => {
            let problems = jobs.iter().filter_map(|other| same_output(other, &job)).collect();
            finding.problems = Manifest::read(bytes).locate(problems);
            finding.warnings = job.warnings.clone();
            finding.warnings.extend(Manifest::read(bytes).locate(passed_over));
            finding.unsupported = Manifest::read(bytes).locate(job.unsupported());
            finding.unchecked = unchecked(&job);
            finding.job = finding.problems.is_empty().then(|| job.name.clone());
            jobs.push(job);
        }
        Err(problems) => finding.problems = unknown_model(bytes, problems),
    }
    finding
}

/// A model whose dimensions stand with weights that are not here: that is the one problem of it.
fn unknown_model(bytes: &[u8], problems: Vec<Problem>) -> Vec<Problem> {
    let manifest = Manifest::read(bytes);
    let from = manifest.spec.model.as_ref().and_then(|model| model.from.as_ref()?.path.clone());
    let there = |path: &String| place(Path::new(path)).exists();
    let Some(path) = from.filter(|path| !there(path)) else { return problems };
    let count = problems.len();
    let is_dimension = |problem: &Problem| {
        problem.code == Code::Missing && problem.path.starts_with("spec.model.")
    };
    let mut rest: Vec<Problem> =
        problems.into_iter().filter(|problem| !is_dimension(problem)).collect();
    if rest.len() < count {
        let missing = Problem::new(Code::Path, FROM_PATH)
            .found(format!("`{path}`, which is not there"))
            .allowed("weights that can be read here, or the model's dimensions beside it")
            .advice(
                "make or fetch them first, or start where they are; nothing is downloaded here",
            );
        rest.extend(manifest.locate(vec![missing]));
    }
    rest
}

/// Where a manifest names weights to begin with.
const FROM_PATH: &str = "spec.model.from.path";

/// What of a job on GPUs is seen where they are.
fn unchecked(job: &Job) -> Option<&'static str> {
    let on_gpus = job.profile.backend == Backend::Cuda;
    on_gpus.then_some(match job.profile.is_this_machine() {
        true => {
            "driver and libraries, the GPUs' compute capability and their free memory: `moejob \
             run` looks at them before it starts a worker, `moejob doctor` at any time"
        }
        false => {
            "driver and libraries of the nodes, and what else uses their GPUs: each worker looks \
             at its own before it joins"
        }
    })
}

/// The model of the weights that a manifest starts from, where they lie on this machine, and which
/// newer ones are refused.
fn weights(manifest: &[u8]) -> Result<(Option<ModelConfig>, Vec<Problem>), Problem> {
    let from = Manifest::read(manifest).spec.model.and_then(|model| model.from?.path);
    let from = from.map(|path| place(Path::new(&path)));
    let Some(path) = from.filter(|path| path.exists()) else {
        return Ok((None, Vec::new()));
    };
    match moe_worker::hf::read_model(&path) {
        Ok((model, passed_over)) => {
            let warning = |line: String| {
                Problem::new(Code::Path, FROM_PATH)
                    .found(line)
                    .allowed("a newest checkpoint that is whole")
                    .advice("name the one that is meant")
            };
            Ok((Some(model), passed_over.into_iter().map(warning).collect()))
        }
        Err(problems) => {
            let found = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            let allowed = "a Hugging Face directory or a checkpoint of ours";
            Err(Problem::new(Code::Path, FROM_PATH).found(found).allowed(allowed))
        }
    }
}

/// At most one byte more than a manifest may have: that one is refused with the others' words.
pub fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = BYTES_MAX as u64 + 1;
    if file == Path::new("-") {
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes)?;
    } else {
        let file = std::fs::File::open(file)?;
        if file.metadata()?.is_dir() {
            return Err(std::io::Error::other("it is a directory; name the files in it"));
        }
        file.take(limit).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn print_text(finding: &Finding) {
    let file = finding.file.display();
    if let Some(error) = &finding.unreadable {
        eprintln!("{file}: {error}");
    }
    for problem in finding.problems.iter().chain(&finding.unsupported) {
        eprintln!("{}", line(&finding.file, "", problem));
    }
    for warning in &finding.warnings {
        eprintln!("{}", line(&finding.file, "warning: ", warning));
    }
    if !finding.skipped.is_empty() {
        eprintln!("{file}: skipped, as they are no MoeJobs: {}", finding.skipped.join(", "));
    }
    match (&finding.job, finding.problems.len()) {
        (Some(name), _) if finding.unsupported.is_empty() => {
            println!("{file}: MoeJob {name} is valid");
            if let Some(unchecked) = finding.unchecked {
                println!("  not checked here: {unchecked}");
            }
        }
        (Some(name), _) => eprintln!("{file}: MoeJob {name} is valid, but cannot run yet"),
        (None, 0) => {}
        (None, 1) => eprintln!("{file}: 1 problem"),
        (None, count) => eprintln!("{file}: {count} problems"),
    }
}

/// `file:12:7: E0106 spec.nodes.min: found ..`, as compilers write it.
fn line(file: &Path, kind: &str, problem: &Problem) -> String {
    let place = problem.place.map(|place| format!("{}:{}:", place.line, place.column));
    format!("{}:{} {kind}{}", file.display(), place.unwrap_or_default(), problem.sentence())
}

fn to_json(finding: &Finding) -> Value {
    let list = |problems: &[Problem]| problems.iter().map(problem_json).collect::<Vec<_>>();
    json!({
        "file": finding.file,
        "valid": finding.job.is_some(),
        "name": finding.job,
        "unreadable": finding.unreadable,
        "problems": list(&finding.problems),
        "unsupported": list(&finding.unsupported),
        "warnings": list(&finding.warnings),
        "skipped": finding.skipped,
        "unchecked": finding.unchecked,
    })
}

fn problem_json(problem: &Problem) -> Value {
    json!({
        "code": problem.code.to_string(),
        "path": problem.path,
        "line": problem.place.map(|place| place.line),
        "column": problem.place.map(|place| place.column),
        "found": problem.found,
        "allowed": problem.allowed,
        "advice": problem.advice,
    })
}
