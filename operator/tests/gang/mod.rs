//! Workers as threads of the test, with a trainer that only exchanges, and their leader.
#![allow(dead_code)]

use moe_worker::life::affinity::Share;
use moe_worker::gang::comm::Comm;
use moe_worker::life::run::{Announcement, Attempt, Bootstrap, run_with};
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moejob::control::{Leader, LeaderEvent, Told, Verifier};
use moejob_identity::authority::Authority;
use moejob_plan::lead::Link;
use moejob_protocol::config::Member;
use moejob_protocol::message::{Held, LeftReason, Phase};
use moejob_protocol::report::StepReport;
use moejob_protocol::{Down, Layout, Mesh, Up, WorkerConfig};
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::time::timeout;

pub const JOB: &str = "job-1";
/// More than any of this takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A trainer that counts: each step gathers the ranks' sums and stop bits from everybody.
struct Counting {
    total: u64,
    step: u64,
}

impl Attempt for Counting {
    fn run_attempt(
        &mut self,
        config: &WorkerConfig,
        mut comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> AttemptEnd {
        assert_ne!(config.job_name, "panic", "as asked");
        control.set_phase(Phase::Training);
        self.step = config.resume.step();
        while self.step < config.training.steps {
            let stop = control.take_requests().stop_after_this_step;
            let mine = [u64::from(comm.rank()) + self.step, u64::from(stop)];
            let bytes: Vec<u8> = mine.iter().flat_map(|word| word.to_le_bytes()).collect();
            let all = match comm.gather_all(&bytes, 16) {
                Ok(all) => all,
                Err(error) => return AttemptEnd::Aborted(error),
            };
            let word = |bytes: &[u8], at: usize| {
                u64::from_le_bytes(bytes[at..at + 8].try_into().expect("16 bytes"))
            };
            self.total = all.iter().map(|bytes| word(bytes, 0)).sum();
            self.step += 1;
            control.set_step(self.step);
            let shards = vec![comm.rank()];
            let held = Held { attempt: comm.attempt(), step: self.step, shards };
            out(TrainerEvent::Held(vec![held]));
            if comm.rank() == 0 {
                out(TrainerEvent::Step(report(self.step, self.total as f64, &comm)));
            }
            if all.iter().any(|bytes| word(bytes, 8) != 0) {
                return AttemptEnd::Stopped { step: self.step };
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        AttemptEnd::Completed { step: self.step }
    }
}

fn report(step: u64, loss: f64, comm: &Comm) -> StepReport {
    let (world_size, attempt) = (comm.world(), comm.attempt());
    StepReport { step, loss, world_size, attempt, ..StepReport::default() }
}

/// A worker on a thread of this process, and the pipe whose end it takes for its owner's.
pub struct Worker {
    pub name: String,
    pub address: String,
    pub owner: Option<UnixStream>,
    pub thread: JoinHandle<i32>,
}

struct Announce(mpsc::Sender<Vec<u8>>);

impl Write for Announce {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = self.0.send(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub fn start(name: &str, authority: &str, token: &str) -> Worker {
    let (owner, watched) = UnixStream::pair().expect("a pair");
    let (announce, announced) = mpsc::channel();
    let bootstrap = Bootstrap {
        worker: name.to_string(),
        job_uid: JOB.to_string(),
        authority: authority.to_string(),
        token: token.to_string(),
        token_file: None,
        listen: None,
        share: Share::default(),
    };
    let thread = std::thread::spawn(move || {
        let make = |_| Counting { total: 0, step: 0 };
        run_with(bootstrap, Some(watched), Announce(announce), make).expect("it listens")
    });
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        line.extend(announced.recv_timeout(PATIENCE).expect("a port"));
    }
    let Announcement { port } = serde_json::from_slice(&line).expect("a line of JSON");
    let address = format!("127.0.0.1:{port}");
    Worker { name: name.to_string(), address, owner: Some(owner), thread }
}

pub fn config(attempt: u32, workers: &[&Worker], steps: u64) -> WorkerConfig {
    let text = include_str!("../worker-config.json");
    let mut config: WorkerConfig = serde_json::from_str(text).expect("a configuration");
    let member = |(worker, rank): (&&Worker, u32)| Member {
        rank,
        worker: worker.name.clone(),
        node: worker.name.clone(),
        address: worker.address.clone(),
    };
    config.attempt = attempt;
    config.members = workers.iter().zip(0..).map(member).collect();
    config.layout = Layout::contiguous(Mesh::data_parallel(workers.len() as u32, 1));
    config.training.steps = steps;
    config.digest = config.digest_of(|shared| serde_json::to_vec(shared).expect("JSON"));
    config
}

/// A leader that reads its own channel.
pub struct Streams {
    pub leader: Leader,
    told: tokio::sync::mpsc::Receiver<Told>,
    secret: String,
}

impl Streams {
    pub fn new(authority: Authority, secret: &str, heartbeat_timeout_ms: u64) -> Streams {
        Streams::of(Arc::new(authority), (JOB, 1), secret, heartbeat_timeout_ms)
    }

    pub fn of(
        authority: Arc<Authority>,
        (job_uid, term): (&str, u64),
        secret: &str,
        heartbeat_timeout_ms: u64,
    ) -> Streams {
        let (sender, told) = tokio::sync::mpsc::channel(1024);
        let mut leader = Leader::new(authority, (job_uid.into(), job_uid), term, sender);
        let timeout = Duration::from_millis(heartbeat_timeout_ms);
        leader.execute(Link::HeartbeatTimeout(timeout), |_| unreachable!("nobody is dialled"));
        Streams { leader, told, secret: secret.to_string() }
    }

    pub fn dial(&mut self, name: &str, address: &str) {
        let verifier = Verifier::Local { secret: self.secret.clone() };
        self.leader.dial(name, address, verifier, false);
    }

    pub async fn next(&mut self) -> (String, LeaderEvent) {
        loop {
            let told = self.told.recv().await.expect("the leader holds a sender");
            if let Some(event) = self.leader.accept(told) {
                return event;
            }
        }
    }
}

impl Deref for Streams {
    type Target = Leader;

    fn deref(&self) -> &Leader {
        &self.leader
    }
}

impl DerefMut for Streams {
    fn deref_mut(&mut self) -> &mut Leader {
        &mut self.leader
    }
}

pub struct Gang {
    pub leader: Streams,
    pub workers: Vec<Worker>,
}

impl Gang {
    pub async fn new(count: usize) -> Gang {
        Gang::of(count, Authority::new().expect("an authority")).await
    }

    pub async fn of(count: usize, authority: Authority) -> Gang {
        let secret = authority.new_secret();
        let trust = authority.certificate_pem().to_string();
        let mut leader = Streams::new(authority, &secret, 3_000);
        let names = (0..count).map(|index| format!("w{index}"));
        let workers: Vec<Worker> = names.map(|name| start(&name, &trust, &secret)).collect();
        for worker in &workers {
            leader.dial(&worker.name, &worker.address);
        }
        let mut gang = Gang { leader, workers };
        for _ in 0..count {
            let connected = |event: &LeaderEvent| match event {
                LeaderEvent::Opened(hello) => {
                    assert_eq!(hello.token, "");
                    Some(())
                }
                _ => None,
            };
            gang.until(connected).await;
        }
        gang
    }

    pub fn configure(&mut self, attempt: u32, members: &[usize], steps: u64) {
        self.configure_with(attempt, members, steps, |_| ());
    }

    pub fn configure_with(
        &mut self,
        attempt: u32,
        members: &[usize],
        steps: u64,
        edit: impl Fn(&mut WorkerConfig),
    ) {
        let workers: Vec<&Worker> = members.iter().map(|index| &self.workers[*index]).collect();
        let mut config = config(attempt, &workers, steps);
        edit(&mut config);
        let config = Arc::new(config);
        for (rank, worker) in (0..).zip(workers) {
            self.leader.configure(&worker.name, rank, &config);
        }
    }

    /// The first event for which `pick` gives something, and whose it is.
    pub async fn until<T>(
        &mut self,
        mut pick: impl FnMut(&LeaderEvent) -> Option<T>,
    ) -> (String, T) {
        let search = async {
            loop {
                let (name, event) = self.leader.next().await;
                if let Some(found) = pick(&event) {
                    return (name, found);
                }
                assert!(!matches!(event, LeaderEvent::Silent), "{name} is silent");
            }
        };
        timeout(PATIENCE, search).await.expect("the event comes")
    }

    pub async fn until_step(&mut self, step: u64) -> f64 {
        let pick = |event: &LeaderEvent| match event {
            LeaderEvent::Up { up: Up::Step(report), .. } if report.step >= step => {
                Some(report.loss)
            }
            _ => None,
        };
        self.until(pick).await.1
    }

    pub async fn until_left(&mut self, attempt: u32) -> (String, LeftReason, Vec<Held>) {
        let pick = |event: &LeaderEvent| match event {
            LeaderEvent::Up { attempt: of, up: Up::Left { reason, held } } if *of == attempt => {
                Some((reason.clone(), held.clone()))
            }
            _ => None,
        };
        let (name, (reason, held)) = self.until(pick).await;
        (name, reason, held)
    }

    pub async fn until_completed(&mut self, count: usize, step: u64) {
        for _ in 0..count {
            let pick = |event: &LeaderEvent| match event {
                LeaderEvent::Up { up: Up::Completed { step }, .. } => Some(*step),
                _ => None,
            };
            assert_eq!(self.until(pick).await.1, step);
        }
    }

    /// Shuts all workers down and gives their exit codes.
    pub async fn shut_down(mut self) -> Vec<i32> {
        for worker in &self.workers {
            self.leader.send(&worker.name, 0, Down::Shutdown);
        }
        self.exit_codes().await
    }

    pub async fn exit_codes(self) -> Vec<i32> {
        let Gang { leader, workers } = self;
        let join = || workers.into_iter().map(|worker| worker.thread.join().expect("no panic"));
        let codes = tokio::task::block_in_place(|| join().collect());
        drop(leader);
        codes
    }
}

