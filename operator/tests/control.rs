//! The leader against real workers' shells over real sockets, with a trainer that only exchanges.

use moe_worker::comm::Comm;
use moe_worker::run::{Announcement, Attempt, Bootstrap, run_with};
use moe_worker::trainer_api::{AttemptEnd, Control, TrainerEvent};
use moejob::authority::Authority;
use moejob::control::{Leader, LeaderEvent};
use moejob_protocol::config::Member;
use moejob_protocol::message::{Held, LeftReason, Phase, Request};
use moejob_protocol::report::StepReport;
use moejob_protocol::{Down, Layout, Mesh, Up, WorkerConfig};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::time::timeout;

const JOB: &str = "job-1";
/// More than any of this takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

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
            out(TrainerEvent::Held(vec![Held { attempt: comm.attempt(), step: self.step, shards }]));
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
    StepReport {
        step,
        loss,
        aux_loss: 0.0,
        z_loss: 0.0,
        grad_norm: 0.0,
        learning_rate: 0.0,
        tokens: 0,
        tokens_per_second: 0.0,
        world_size: comm.world(),
        attempt: comm.attempt(),
        expert_imbalance: 0.0,
        validation_loss: None,
        time: String::new(),
    }
}

/// A worker on a thread of this process, and the pipe whose end it takes for its owner's.
struct Worker {
    name: String,
    address: String,
    owner: Option<UnixStream>,
    thread: JoinHandle<i32>,
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

fn start(name: &str, authority: &str, token: &str) -> Worker {
    let (owner, watched) = UnixStream::pair().expect("a pair");
    let (announce, announced) = mpsc::channel();
    let bootstrap = Bootstrap {
        worker: name.to_string(),
        job_uid: JOB.to_string(),
        authority: authority.to_string(),
        token: token.to_string(),
    };
    let thread = std::thread::spawn(move || {
        let make = || Counting { total: 0, step: 0 };
        run_with(bootstrap, watched, Announce(announce), make).expect("it listens")
    });
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        line.extend(announced.recv_timeout(PATIENCE).expect("a port"));
    }
    let Announcement { port } = serde_json::from_slice(&line).expect("a line of JSON");
    let address = format!("127.0.0.1:{port}");
    Worker { name: name.to_string(), address, owner: Some(owner), thread }
}

fn config(attempt: u32, workers: &[&Worker], steps: u64) -> WorkerConfig {
    let text = include_str!("worker-config.json");
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

struct Gang {
    leader: Leader,
    workers: Vec<Worker>,
}

impl Gang {
    async fn of(count: usize) -> Gang {
        let authority = Authority::new().expect("an authority");
        let secret = authority.new_secret();
        let trust = authority.certificate_pem().to_string();
        let mut leader = Leader::new(authority, JOB.to_string(), Duration::from_secs(3));
        let names = (0..count).map(|index| format!("w{index}"));
        let workers: Vec<Worker> = names.map(|name| start(&name, &trust, &secret)).collect();
        for worker in &workers {
            leader.dial(&worker.name, &worker.address, &secret);
        }
        let mut gang = Gang { leader, workers };
        for _ in 0..count {
            let connected = |event: &LeaderEvent| match event {
                LeaderEvent::Connected(hello) => {
                    assert_eq!(hello.token, "");
                    Some(())
                }
                _ => None,
            };
            gang.until(connected).await;
        }
        gang
    }

    fn configure(&mut self, attempt: u32, members: &[usize], steps: u64) {
        self.configure_with(attempt, members, steps, |_| ());
    }

    fn configure_with(
        &mut self,
        attempt: u32,
        members: &[usize],
        steps: u64,
        edit: impl Fn(&mut WorkerConfig),
    ) {
        let workers: Vec<&Worker> = members.iter().map(|index| &self.workers[*index]).collect();
        let mut config = config(attempt, &workers, steps);
        edit(&mut config);
        for (rank, worker) in (0..).zip(workers) {
            config.rank = Some(rank);
            self.leader.configure(&worker.name, &config);
        }
    }

    /// The first event for which `pick` gives something, and whose it is.
    async fn until<T>(&mut self, mut pick: impl FnMut(&LeaderEvent) -> Option<T>) -> (String, T) {
        let search = async {
            loop {
                let (name, event) = self.leader.next_event().await;
                if let Some(found) = pick(&event) {
                    return (name, found);
                }
                assert!(!matches!(event, LeaderEvent::Silent), "{name} is silent");
            }
        };
        timeout(PATIENCE, search).await.expect("the event comes")
    }

    async fn until_step(&mut self, step: u64) -> f64 {
        let pick = |event: &LeaderEvent| match event {
            LeaderEvent::Up { up: Up::Step(report), .. } if report.step >= step => {
                Some(report.loss)
            }
            _ => None,
        };
        self.until(pick).await.1
    }

    async fn until_left(&mut self, attempt: u32) -> (String, LeftReason, Vec<Held>) {
        let pick = |event: &LeaderEvent| match event {
            LeaderEvent::Up { attempt: of, up: Up::Left { reason, held } } if *of == attempt => {
                Some((reason.clone(), held.clone()))
            }
            _ => None,
        };
        let (name, (reason, held)) = self.until(pick).await;
        (name, reason, held)
    }

    async fn until_completed(&mut self, count: usize, step: u64) {
        for _ in 0..count {
            let pick = |event: &LeaderEvent| match event {
                LeaderEvent::Up { up: Up::Completed { step }, .. } => Some(*step),
                _ => None,
            };
            assert_eq!(self.until(pick).await.1, step);
        }
    }

    /// Shuts all workers down and gives their exit codes.
    async fn shut_down(mut self) -> Vec<i32> {
        for worker in &self.workers {
            self.leader.send(&worker.name, 0, Down::Shutdown);
        }
        self.exit_codes().await
    }

    async fn exit_codes(self) -> Vec<i32> {
        let Gang { leader, workers } = self;
        let join = || workers.into_iter().map(|worker| worker.thread.join().expect("no panic"));
        let codes = tokio::task::block_in_place(|| join().collect());
        drop(leader);
        codes
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_trains_stops_shrinks_and_completes() {
    let mut gang = Gang::of(3).await;
    gang.configure(1, &[0, 1, 2], u64::MAX);
    assert_eq!(gang.until_step(1).await, 3.0, "0 + 1 + 2");
    // A stop that one rank alone was asked for takes effect on all after the same step.
    let stop = Request { checkpoint_now: false, stop_after_this_step: true };
    gang.leader.send("w1", 1, Down::Request(stop));
    let mut steps = Vec::new();
    for _ in 0..3 {
        let (_, reason, held) = gang.until_left(1).await;
        let LeftReason::Stopped { step } = reason else { panic!("{reason:?}") };
        assert_eq!((held[0].attempt, held[0].step), (1, step));
        steps.push(step);
    }
    assert!(steps.iter().all(|step| *step == steps[0]), "{steps:?}");
    // The next attempt is of two, in another order; the third stays idle.
    gang.configure(2, &[2, 0], 100);
    gang.until_completed(2, 100).await;
    assert_eq!(gang.shut_down().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_member_ends_the_attempt_and_the_rest_go_on() {
    let mut gang = Gang::of(3).await;
    gang.configure(1, &[0, 1, 2], u64::MAX);
    gang.until_step(3).await;
    // Its owner is gone, so it ends; its peers see its streams close.
    let lost = gang.workers.remove(1);
    drop(lost.owner);
    let mut reasons = Vec::new();
    let mut closed = false;
    while reasons.len() < 2 || !closed {
        let pick = |event: &LeaderEvent| match event {
            LeaderEvent::Up { up: Up::Left { reason, .. }, .. } => Some(Some(reason.clone())),
            LeaderEvent::Closed { .. } => Some(None),
            _ => None,
        };
        let (name, event) = gang.until(pick).await;
        match event {
            Some(reason) if name != "w1" => reasons.push(reason),
            Some(_) => {}
            None => {
                assert_eq!(name, "w1");
                closed = true;
            }
        }
    }
    let lost_peer = |reason: &LeftReason| matches!(reason, LeftReason::PeerLost { .. });
    assert!(reasons.iter().all(lost_peer), "{reasons:?}");
    assert_eq!(lost.thread.join().expect("no panic"), 75);
    gang.configure(2, &[0, 1], 10);
    gang.until_completed(2, 10).await;
    assert_eq!(gang.shut_down().await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_wakes_ranks_that_wait_for_each_other() {
    let mut gang = Gang::of(2).await;
    // Rank 1 is never configured, so rank 0 joins in vain; then both leave.
    let workers: Vec<&Worker> = gang.workers.iter().collect();
    let mut half = config(1, &workers, 10);
    half.rank = Some(0);
    gang.leader.configure("w0", &half);
    for name in ["w0", "w1"] {
        gang.leader.send(name, 1, Down::Leave { reason: "try again".to_string() });
    }
    for _ in 0..2 {
        assert_eq!(gang.until_left(1).await.1, LeftReason::Asked);
    }
    gang.configure(2, &[0, 1], u64::MAX);
    gang.until_step(2).await;
    for name in ["w0", "w1"] {
        gang.leader.send(name, 2, Down::Leave { reason: "again".to_string() });
    }
    for _ in 0..2 {
        let (_, reason, held) = gang.until_left(2).await;
        assert_eq!(reason, LeftReason::Asked);
        assert_eq!(held[0].attempt, 2);
    }
    // A configuration of the attempt that was left comes too late.
    gang.configure(1, &[0, 1], 10);
    gang.configure(3, &[1, 0], 10);
    gang.until_completed(2, 10).await;
    assert_eq!(gang.shut_down().await, [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_the_trainer_reaches_the_leader() {
    let mut gang = Gang::of(1).await;
    gang.configure_with(1, &[0], 10, |config| config.job_name = "panic".to_string());
    let failed = |event: &LeaderEvent| match event {
        LeaderEvent::Up { up: Up::Failed { exit_code, message }, .. } => {
            Some((*exit_code, message.clone()))
        }
        _ => None,
    };
    let (_, (exit_code, message)) = gang.until(failed).await;
    assert_eq!(exit_code, 1);
    assert!(message.contains("as asked"), "{message}");
    assert_eq!(gang.exit_codes().await, [1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_not_who_was_dialled_is_refused() {
    let authority = Authority::new().expect("an authority");
    let secret = authority.new_secret();
    let worker = start("w0", authority.certificate_pem(), &secret);
    let stranger = Authority::new().expect("an authority");
    let foreign = start("w1", stranger.certificate_pem(), &secret);
    let mut leader = Leader::new(authority, JOB.to_string(), Duration::from_millis(300));
    let mut check = async |name: &str, address: &str, token: &str, expected: &str| {
        leader.dial(name, address, token);
        let (of, event) = timeout(PATIENCE, leader.next_event()).await.expect("an answer");
        assert_eq!(of, name);
        match event {
            LeaderEvent::Closed { reason } => assert!(reason.contains(expected), "{reason}"),
            other => panic!("{other:?}"),
        }
    };
    check("w0", &worker.address, &"0".repeat(64), "its token is not the one").await;
    check("w0", &worker.address, "", "its token is not the one").await;
    check("w9", &worker.address, &secret, "it is \"w0\", not who was dialled").await;
    // A worker of another authority tells this leader nothing.
    check("w1", &foreign.address, &secret, "").await;
    check("w2", "127.0.0.1:1", &secret, "cannot be reached").await;
    check("w2", "no address", &secret, "cannot be reached").await;
    drop((worker.owner, foreign.owner));
    assert_eq!(worker.thread.join().expect("no panic"), 75);
    assert_eq!(foreign.thread.join().expect("no panic"), 75);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_that_says_nothing_is_left() {
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = mute.local_addr().expect("an address").to_string();
    let authority = Authority::new().expect("an authority");
    let mut leader = Leader::new(authority, JOB.to_string(), Duration::from_millis(300));
    leader.dial("w0", &address, "secret");
    let (_, event) = timeout(PATIENCE, leader.next_event()).await.expect("an answer");
    let LeaderEvent::Closed { reason } = event else { panic!("{event:?}") };
    assert_eq!(reason, "no proof within 5000 ms");
}
