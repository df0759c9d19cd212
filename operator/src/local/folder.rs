//! `DIR/NAME`: who may write there, whose it is, and what the next start must know.

use moe_worker::attempt::records::{Records, RecordsError};
use moe_worker::checkpoint::Disk;
use moe_worker::data::durable;
use moejob_identity::authority::random;
use moejob_manifest::changes::changes;
use moejob_manifest::identity::{Steered, shared, steered};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `moejob ls` asks for a shared lock for a moment, to see whether a run goes on: that is no run.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

const FILE: &str = "job.json";
/// Of this file. It rises once a release has read both and written the old one.
const VERSION: u32 = 1;

/// `job.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JobFile {
    /// Files of releases before 0.2 do not say it.
    #[serde(default = "first_version")]
    pub v: u32,
    pub uid: String,
    /// The newest attempt that was ever recorded.
    pub attempt: u32,
    pub spec: Value,
    /// Fields of a newer release, written back as they are.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

fn first_version() -> u32 {
    VERSION
}

#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("{path}: {what}")]
    Io { path: String, what: &'static str, source: std::io::Error },
    #[error("{path} is in use by another `moejob run`; wait for it, or choose another --dir")]
    InUse { path: String },
    #[error("{path} is damaged; remove the run's folder, or restore the file")]
    Damaged { path: String, source: serde_json::Error },
    #[error("{path} is of version {v}, this program knows {VERSION}; use a newer one")]
    Newer { path: String, v: u32 },
    #[error(
        "{path} belongs to another version of this job; these fields cannot change once it has \
         begun:{changes}\n  undo the change, give the job another --name, or remove the folder"
    )]
    Changed { path: String, changes: String },
    #[error(transparent)]
    Records(#[from] RecordsError),
}

impl FolderError {
    pub fn exit_code(&self) -> i32 {
        match self {
            FolderError::Changed { .. } | FolderError::InUse { .. } => 2,
            FolderError::Damaged { .. } | FolderError::Newer { .. } => 3,
            FolderError::Io { .. } | FolderError::Records(_) => 1,
        }
    }
}

/// The folder of a run, locked for as long as this lives.
pub struct Folder {
    path: PathBuf,
    file: JobFile,
    /// The spec of this run, which counts from its first step on.
    spec: Value,
    _lock: File,
}

impl Folder {
    /// Opens or creates it. Refused when another process has it, or when it belongs to a job that
    /// differs in what cannot change. The spec is not kept before [`Folder::begin`]: what was
    /// never trained, or was refused later, binds nobody. `defaults` is the spec of a job that says
    /// nothing: a field that was added since the folder was made had its default then.
    pub fn open(path: &Path, spec: &Value, defaults: &Value) -> Result<Folder, FolderError> {
        Disk::real()
            .create_directories(&path.join("logs"))
            .map_err(|source| io(path, "cannot create the run's folder", source))?;
        let lock_path = path.join("lock");
        let lock = File::create(&lock_path)
            .map_err(|source| io(&lock_path, "cannot create the lock", source))?;
        let mut tries = 0..LOCK_TRIES;
        while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            if tries.next().is_none() {
                return Err(FolderError::InUse { path: path.display().to_string() });
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        let file = match read(path)? {
            // Never trained.
            Some(file) if file.spec.is_null() => file,
            Some(file) => {
                let [was, is, defaults] = [&file.spec, spec, defaults].map(shared);
                let changes = changes(&was, &is, &defaults);
                if !changes.is_empty() {
                    let changes: String =
                        changes.iter().map(|change| format!("\n    {change}")).collect();
                    return Err(FolderError::Changed { path: path.display().to_string(), changes });
                }
                file
            }
            None => {
                let (uid, rest) = (new_uid(path)?, BTreeMap::new());
                JobFile { v: VERSION, uid, attempt: 0, spec: Value::Null, rest }
            }
        };
        let (path, spec) = (path.to_path_buf(), spec.clone());
        let mut folder = Folder { path, file, spec, _lock: lock };
        folder.record(folder.file.clone())?;
        Ok(folder)
    }

    /// A step is done: from now on the spec is that of the folder. Gives what is steered by it.
    pub fn begin(&mut self) -> Result<Vec<Steered>, FolderError> {
        if self.file.spec == self.spec {
            return Ok(Vec::new());
        }
        let steered = self.steered();
        self.record(JobFile { spec: self.spec.clone(), ..self.file.clone() })?;
        Ok(steered)
    }

    /// What of the spec differs from the run before, and may.
    pub fn steered(&self) -> Vec<Steered> {
        steered(&self.file.spec, &self.spec)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where workers' standard error goes, a file a node.
    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    pub fn file(&self) -> &JobFile {
        &self.file
    }

    /// Makes `file` durable.
    pub fn record(&mut self, file: JobFile) -> Result<(), FolderError> {
        let target = self.path.join(FILE);
        let text = serde_json::to_vec_pretty(&file)
            .map_err(|source| FolderError::Damaged { path: target.display().to_string(), source })?;
        durable::replace(&self.path, FILE, |to| std::fs::write(to, &text))
            .map_err(|source| io(&target, "cannot be written", source))?;
        self.file = file;
        Ok(())
    }

    /// `metrics.jsonl` and `events.jsonl`.
    pub fn records(&self) -> Result<Records, FolderError> {
        Ok(Records::open(&self.path)?)
    }
}

fn io(path: &Path, what: &'static str, source: std::io::Error) -> FolderError {
    FolderError::Io { path: path.display().to_string(), what, source }
}

fn read(path: &Path) -> Result<Option<JobFile>, FolderError> {
    let path = path.join(FILE);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io(&path, "cannot be read", source)),
    };
    let damaged = |source| FolderError::Damaged { path: path.display().to_string(), source };
    /// A newer release may mean something else by all other fields.
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(default = "first_version")]
        v: u32,
    }
    let Versioned { v } = serde_json::from_slice(&text).map_err(damaged)?;
    if v != VERSION {
        return Err(FolderError::Newer { path: path.display().to_string(), v });
    }
    serde_json::from_slice(&text).map(Some).map_err(damaged)
}

/// 128 random bits, as Kubernetes gives to its objects.
fn new_uid(path: &Path) -> Result<String, FolderError> {
    let bytes = random()
        .map_err(|source| io(path, "no random numbers for the job's uid", source))?;
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let part = |from: usize, to: usize| &hex[from..to];
    Ok([part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nothing_is_frozen_before_a_step_and_what_was_refused_leaves_no_trace() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("job");
        let spec = |steps: u64, seed: u64| json!({"training": {"steps": steps, "seed": seed}});
        let open = |spec| Folder::open(&path, &spec, &Value::Null);
        // A first try that never trained: whatever was wrong with it may be put right.
        drop(open(spec(10, 1)).expect("opens"));
        let mut folder = open(spec(10, 2)).expect("nothing was trained");
        folder.begin().expect("records");
        drop(folder);
        assert!(matches!(open(spec(10, 3)), Err(FolderError::Changed { .. })));
        // More steps, and then something of the run fails before it trains: they can be undone.
        drop(open(spec(800, 2)).expect("more steps"));
        assert_eq!(read(&path).expect("a file").expect("is there").spec, spec(10, 2));
        let mut folder = open(spec(10, 2)).expect("undone");
        folder.begin().expect("records");
        drop(folder);
        let mut folder = open(spec(800, 2)).expect("more steps");
        folder.begin().expect("records");
        drop(folder);
        // Fewer steps than before are no other job.
        let mut folder = open(spec(10, 2)).expect("fewer steps");
        let found = folder.begin().expect("records");
        let of = |found: &[Steered]| -> Vec<String> {
            found.iter().map(|of| format!("{} {} {}", of.field, of.was, of.is)).collect()
        };
        assert_eq!(of(&found), ["training.steps 800 10"]);
        assert_eq!(of(&folder.begin().expect("nothing to record")), [""; 0]);
        drop(folder);
        assert!(matches!(open(spec(10, 3)), Err(FolderError::Changed { .. })));
    }

    #[test]
    fn a_file_of_a_newer_release_is_refused_and_one_without_a_version_is_read() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("job");
        let open = || Folder::open(&path, &Value::Null, &Value::Null);
        drop(open().expect("opens"));
        let text = std::fs::read_to_string(path.join(FILE)).expect("a file");
        let mut value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["v"], json!(VERSION));
        let mut put = |v: Option<u32>| {
            let fields = value.as_object_mut().expect("fields");
            fields.insert("added".to_string(), json!([1]));
            match v {
                Some(v) => fields.insert("v".to_string(), json!(v)),
                None => fields.remove("v"),
            };
            std::fs::write(path.join(FILE), value.to_string()).expect("written");
        };
        put(None);
        let opened = open().expect("as releases before 0.2 wrote it");
        assert_eq!(opened.file().rest["added"], json!([1]), "it is kept");
        assert_eq!(opened.file().rest.len(), 1, "the version is none of others' fields");
        drop(opened);
        put(Some(2));
        let refused = open().err().expect("it may mean anything");
        assert_eq!(refused.exit_code(), 3);
        assert!(refused.to_string().contains("is of version 2, this program knows 1"), "{refused}");
    }

    #[test]
    fn a_folder_serves_one_run_at_a_time_and_keeps_its_identity() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("job");
        let spec = json!({"training": {"seed": 1, "precision": "fp32"}});
        let mut first = Folder::open(&path, &spec, &Value::Null).expect("opens");
        let uid = first.file().uid.clone();
        assert!(matches!(Folder::open(&path, &spec, &Value::Null), Err(FolderError::InUse { .. })));
        first.record(JobFile { attempt: 3, ..first.file().clone() }).expect("records");
        first.begin().expect("records");
        drop(first);
        let again = Folder::open(&path, &spec, &Value::Null).expect("opens again");
        assert_eq!((again.file().attempt, &again.file().uid), (3, &uid));
        drop(again);
        let other = Folder::open(&path, &json!({"training": {"seed": 2}}), &Value::Null);
        assert!(matches!(other, Err(FolderError::Changed { .. })));
        // It goes on on a GPU.
        let compute = json!({"backend": "cuda"});
        let bf16 = json!({"training": {"seed": 1, "precision": "bf16", "compute": compute}});
        drop(Folder::open(&path, &bf16, &Value::Null).expect("another device"));
        // And with its experts in slices.
        let model = json!({"experts": {"slices": 2}});
        let sliced = json!({"training": {"seed": 1}, "model": model});
        let whole = json!({"training": {"seed": 1}, "model": {"experts": {}}});
        drop(Folder::open(&path, &sliced, &whole).expect("other slices"));
        // And with its data elsewhere.
        let data = |path: &str, fraction: f64| {
            let source = json!({"format": "Text", "paths": [path, "b"], "field": ""});
            let tokenizer = json!({"path": path});
            let validation = json!({"fraction": fraction});
            let train = json!([{"weight": 1.0, "source": source}]);
            let data = json!({"train": train, "tokenizer": tokenizer, "validation": validation});
            json!({"training": {"seed": 1}, "data": data})
        };
        let before = home.path().join("moved");
        let mut moved = Folder::open(&before, &data("/a", 0.1), &Value::Null).expect("opens");
        moved.begin().expect("records");
        drop(moved);
        drop(Folder::open(&before, &data("/b", 0.1), &Value::Null).expect("moved data"));
        assert!(Folder::open(&before, &data("/b", 0.2), &Value::Null).is_err());
        // A release since has a field more.
        let more = json!({"training": {"seed": 1, "clip": 1.0}});
        let defaults = json!({"training": {"clip": 1.0}});
        drop(Folder::open(&path, &more, &defaults).expect("an old run goes on"));
        let edited = json!({"training": {"seed": 1, "clip": 2.0}});
        assert!(Folder::open(&path, &edited, &defaults).is_err());
    }
}
