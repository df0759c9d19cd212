//! What the operator tells of itself: figures for `scrape`, health for the kubelet (`/healthz`,
//! `/readyz`).

use crate::http::{self, Page, Place, Request};
use crate::pulse::Pulse;
pub use moejob_plan::lead::Figures as JobFigures;
use moejob_manifest::problem::printable;
use moejob_plan::track::Recovery;
use moejob_protocol::bounds::shorten;
use moejob_protocol::communication::{Link, Verb, VerbReport};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Upper bounds in seconds.
const RECONCILE_S: [f64; 8] = [0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.25, 1.0];
const RECOVERY_S: [f64; 9] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0];

/// For so long a kind of objects may not be heard of before the process is not ready: an API server
/// that begins anew is away for less.
const UNHEARD_MAX: Duration = Duration::from_secs(60);
/// Of why it is not.
const WHY_BYTES_MAX: usize = 300;

#[derive(Default)]
struct Inner {
    ready: bool,
    /// Kinds of objects that are not heard of: since when, and why.
    unheard: BTreeMap<&'static str, (Instant, String)>,
    /// Why this process must not lead, while it must not.
    unfit: Option<String>,
    leader: bool,
    reconcile: Histogram<8>,
    results: BTreeMap<&'static str, u64>,
    causes: BTreeMap<&'static str, u64>,
    replanned: Histogram<9>,
    first_step: Histogram<9>,
    jobs: BTreeMap<String, JobFigures>,
    /// Jobs that nothing is done for, as their record is not understood.
    fenced: BTreeSet<String>,
    /// The answers of the loop, where one runs.
    pulse: Option<Pulse>,
}

#[derive(Clone, Default)]
pub struct Metrics(Arc<Mutex<Inner>>);

impl Metrics {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn set_ready(&self) {
        self.inner().ready = true;
    }

    /// A list or a watch of these objects has brought something.
    pub fn heard(&self, kind: &'static str) {
        self.inner().unheard.remove(kind);
    }

    /// A list or a watch of these objects has failed, and may have before.
    pub fn unheard(&self, kind: &'static str, why: &str, now: Instant) {
        let mut why = printable(why);
        shorten(&mut why, WHY_BYTES_MAX);
        let mut inner = self.inner();
        inner.unheard.entry(kind).or_insert_with(|| (now, String::new())).1 = why;
    }

    /// Why it must not lead; a rolling update waits for it meanwhile.
    pub fn set_unfit(&self, why: Option<String>) {
        self.inner().unfit = why;
    }

    pub fn set_leader(&self, leader: bool) {
        self.inner().leader = leader;
    }

    /// A plan was made in that time.
    pub fn reconciled(&self, took: Duration) {
        let mut inner = self.inner();
        inner.reconcile.observe(&RECONCILE_S, took.as_secs_f64());
    }

    /// Whether the loop answers is told by `/healthz`.
    pub fn watch(&self, pulse: Pulse) {
        self.inner().pulse = Some(pulse);
    }

    /// The record of a job is not understood, or is again.
    pub fn fenced(&self, uid: &str, is: bool) {
        let mut inner = self.inner();
        match is {
            true => drop(inner.fenced.insert(uid.to_string())),
            false => drop(inner.fenced.remove(uid)),
        }
    }

    /// A write's result, or `ok`.
    pub fn result(&self, label: &'static str) {
        *self.inner().results.entry(label).or_default() += 1;
    }

    /// A recovery is complete.
    pub fn recovered(&self, of: &Recovery) {
        let mut inner = self.inner();
        *inner.causes.entry(cause_word(&of.cause)).or_default() += 1;
        inner.replanned.observe(&RECOVERY_S, of.took(of.replanned_at).as_secs_f64());
        inner.first_step.observe(&RECOVERY_S, of.took(of.first_step_at).as_secs_f64());
    }

    pub fn job(&self, uid: &str, figures: JobFigures) {
        self.inner().jobs.insert(uid.to_string(), figures);
    }

    pub fn forget_job(&self, uid: &str) {
        let mut inner = self.inner();
        inner.jobs.remove(uid);
        inner.fenced.remove(uid);
    }

    /// In Prometheus' text format.
    pub fn text(&self) -> String {
        let inner = self.inner();
        let mut out = String::new();
        head(&mut out, "moejob_leader", "gauge", "1 in the operator that leads.");
        let _ = writeln!(out, "moejob_leader {}", u8::from(inner.leader));
        let name = "moejob_reconcile_duration_seconds";
        head(&mut out, name, "histogram", "Time to plan one job.");
        inner.reconcile.write(&mut out, name, "", &RECONCILE_S);
        head(&mut out, "moejob_reconcile_total", "counter", "Plans and writes by result.");
        for (result, count) in &inner.results {
            let _ = writeln!(out, "moejob_reconcile_total{{result=\"{result}\"}} {count}");
        }
        head(&mut out, "moejob_recoveries_total", "counter", "Recoveries by cause.");
        for (cause, count) in &inner.causes {
            let _ = writeln!(out, "moejob_recoveries_total{{cause={}}} {count}", quoted(cause));
        }
        let name = "moejob_recovery_seconds";
        head(&mut out, name, "histogram", "From the notice of a loss to the end of a phase.");
        inner.replanned.write(&mut out, name, "phase=\"replanned\"", &RECOVERY_S);
        inner.first_step.write(&mut out, name, "phase=\"first_step\"", &RECOVERY_S);
        let name = "moejob_records_not_understood";
        head(&mut out, name, "gauge", "Jobs that nothing is done for until their record is.");
        let _ = writeln!(out, "{name} {}", inner.fenced.len());
        jobs(&mut out, inner.jobs.values());
        out
    }

    /// Answers the kubelet until the process ends.
    ///
    /// # Errors
    /// When nothing can listen there.
    pub async fn serve(self, at: SocketAddr) -> io::Result<()> {
        http::serve(at, |stream, place| self.clone().answer(stream, place)).await
    }

    async fn answer(self, mut stream: TcpStream, mut place: Place) -> io::Result<()> {
        let Some(request) = place.read(&mut stream).await? else { return Ok(()) };
        http::write(&mut stream, self.page(&request)).await
    }

    fn page(&self, request: &Request) -> Page {
        let unavailable = |why: &str| ("503 Service Unavailable", format!("{why}\n"));
        let ok = || ("200 OK", "ok\n".to_string());
        let inner = self.inner();
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/healthz") if inner.pulse.as_ref().is_some_and(Pulse::is_lost) => {
                unavailable("the loop does not answer")
            }
            ("GET", "/healthz") => ok(),
            ("GET", "/readyz") => match (&inner.unfit, inner.ready, inner.deaf()) {
                (Some(why), ..) => unavailable(why),
                (None, _, Some(why)) => unavailable(&why),
                (None, false, None) => unavailable("the cluster has not been listed yet"),
                (None, true, None) => ok(),
            },
            ("GET", _) => ("404 Not Found", "/healthz, /readyz\n".to_string()),
            _ => ("405 Method Not Allowed", "GET alone\n".to_string()),
        }
    }
}

impl Inner {
    /// Which objects have not been heard of for too long.
    fn deaf(&self) -> Option<String> {
        let mut all = self.unheard.iter().map(|(kind, (since, why))| (kind, since.elapsed(), why));
        let (kind, seconds, why) = all.find(|(_, time, _)| *time >= UNHEARD_MAX)?;
        Some(format!("{kind} have not been heard of for {} s: {why}", seconds.as_secs()))
    }
}

/// Counts by upper bound; the last is of everything.
struct Histogram<const N: usize> {
    counts: [u64; N],
    count: u64,
    sum: f64,
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Histogram<N> {
        Histogram { counts: [0; N], count: 0, sum: 0.0 }
    }
}

impl<const N: usize> Histogram<N> {
    fn observe(&mut self, bounds: &[f64; N], value: f64) {
        for (count, bound) in self.counts.iter_mut().zip(bounds) {
            *count += u64::from(value <= *bound);
        }
        self.count += 1;
        self.sum += value;
    }

    fn write(&self, out: &mut String, name: &str, labels: &str, bounds: &[f64; N]) {
        let comma = if labels.is_empty() { "" } else { "," };
        for (count, bound) in self.counts.iter().zip(bounds) {
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {}", self.count);
        let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(out, "{name}_sum{braces} {}", self.sum);
        let _ = writeln!(out, "{name}_count{braces} {}", self.count);
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{text}\"")
}

fn jobs<'a>(out: &mut String, jobs: impl Iterator<Item = &'a JobFigures> + Clone) {
    type Figure = fn(&JobFigures) -> Option<f64>;
    let gauges: [(&str, &str, Figure); 10] = [
        ("moejob_step", "Steps done.", |job| Some(job.step as f64)),
        ("moejob_loss", "Cross-entropy of the newest step.", |job| job.loss),
        ("moejob_tokens_per_second", "Of the newest step.", |job| job.tokens_per_second),
        ("moejob_expert_imbalance", "Largest load over the mean.", |job| job.expert_imbalance),
        ("moejob_router_entropy", "Mean entropy of the scores, nats.", |job| job.router_entropy),
        ("moejob_dropped_tokens", "Share of choices without room.", |job| job.dropped_tokens),
        ("moejob_nodes_ready", "Nodes with a rank.", |job| Some(job.nodes_ready.into())),
        ("moejob_nodes_desired", "Nodes wanted.", |job| Some(job.nodes_desired.into())),
        ("moejob_checkpoint_degraded", "1 while storage takes no checkpoint.", |job| {
            Some(u8::from(job.checkpoint_degraded).into())
        }),
        ("moejob_data_degraded", "1 while data do not come.", |job| {
            Some(u8::from(job.data_degraded).into())
        }),
    ];
    let labels = |job: &JobFigures| {
        format!("namespace={},job={}", quoted(&job.namespace), quoted(&job.name))
    };
    for (name, help, figure) in gauges {
        head(out, name, "gauge", help);
        for job in jobs.clone() {
            if let Some(value) = figure(job) {
                let _ = writeln!(out, "{name}{{{}}} {value}", labels(job));
            }
        }
    }
    communication(out, jobs.clone(), labels);
    ranks(out, jobs.clone(), labels);
    head(out, "moejob_job_phase", "gauge", "1 for the present phase.");
    for job in jobs {
        for phase in PHASES {
            let holds = u8::from(job.phase == phase);
            let labels = labels(job);
            let _ = writeln!(out, "moejob_job_phase{{{labels},phase=\"{phase}\"}} {holds}");
        }
    }
}

/// What rank 0 of each job sends, and how long its ops wait for it, in the newest step that was
/// looked at. A series a verb that we know: a worker may name others.
fn communication<'a>(
    out: &mut String,
    jobs: impl Iterator<Item = &'a JobFigures> + Clone,
    labels: impl Fn(&JobFigures) -> String,
) {
    type Figure = fn(&VerbReport) -> Option<f64>;
    let of_verbs: [(&str, &str, Figure); 3] = [
        ("moejob_communication_step_bytes", "Sent by rank 0 in a step.", |of| {
            Some(of.bytes as f64)
        }),
        ("moejob_communication_bytes_per_second", "Of rank 0, while a verb lasts.", |of| {
            of.bytes_per_second()
        }),
        ("moejob_communication_step_seconds", "That a verb takes in a step.", |of| {
            Some(of.seconds)
        }),
    ];
    for (name, help, figure) in of_verbs {
        head(out, name, "gauge", help);
        for job in jobs.clone() {
            let Some(communication) = &job.communication else { continue };
            for verb in Verb::ALL.map(Verb::name) {
                let Some(of) = communication.verbs.get(verb) else { continue };
                let link = Link::ALL.into_iter().find(|link| link.name() == of.link);
                if let Some((link, value)) = link.zip(figure(of)) {
                    let (labels, link) = (labels(job), link.name());
                    let _ =
                        writeln!(out, "{name}{{{labels},verb=\"{verb}\",link=\"{link}\"}} {value}");
                }
            }
        }
    }
    let name = "moejob_communication_exposed_ratio";
    head(out, name, "gauge", "Share of a step in which rank 0's ops wait for what travels.");
    for job in jobs {
        if let Some(communication) = &job.communication {
            let _ = writeln!(out, "{name}{{{}}} {}", labels(job), communication.exposed_share);
        }
    }
}

/// Where each rank is, and the engines that were lost last. A series a rank: a job of 512 machines
/// has 4,096 of them, as much as the metrics of its pods.
fn ranks<'a>(
    out: &mut String,
    jobs: impl Iterator<Item = &'a JobFigures> + Clone,
    labels: impl Fn(&JobFigures) -> String,
) {
    let place = |rank: u32, node: &str, device: u64, uuid: &str| {
        let (node, uuid) = (quoted(node), quoted(uuid));
        format!("rank=\"{rank}\",node={node},device=\"{device}\",uuid={uuid}")
    };
    let name = "moejob_rank_info";
    head(out, name, "gauge", "1 for the node and the device of each rank; uuid of its GPU.");
    for job in jobs.clone() {
        let of_job = labels(job);
        for of in job.ranks.iter() {
            let place = place(of.rank, &of.node, of.device.into(), &of.uuid);
            let pod = quoted(&of.worker);
            let _ = writeln!(out, "{name}{{{of_job},{place},pod={pod}}} 1");
        }
    }
    let name = "moejob_engine_lost_timestamp_seconds";
    head(out, name, "gauge", "When an engine was lost there; of each job the last 8.");
    for job in jobs {
        // The same labels stand once, with the newest time.
        let lost = job.engines_lost.iter().map(|loss| {
            let place = place(loss.rank, &loss.node, loss.device, &loss.uuid);
            (format!("{place},by_device=\"{}\"", loss.by_device), loss.at)
        });
        for (place, at) in lost.collect::<BTreeMap<_, _>>() {
            let _ = writeln!(out, "{name}{{{},{place}}} {}", labels(job), at as f64 / 1e3);
        }
    }
}

/// Of `MoeJobStatus::phase`.
const PHASES: [&str; 9] = [
    "Invalid", "Pending", "Starting", "Running", "Recovering", "Stopping", "Suspended", "Complete",
    "Failed",
];

/// One word for the metrics out of a cause in words.
fn cause_word(cause: &str) -> &'static str {
    const WORDS: [(&str, &str); 6] = [
        ("silent", "silent"),
        ("heartbeat", "silent"),
        ("pod was deleted", "deleted"),
        ("exit code", "exited"),
        ("killed", "killed"),
        ("no step", "stuck"),
    ];
    let found = WORDS.iter().find(|(part, _)| cause.contains(part));
    found.map_or("other", |(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubelet_is_answered() {
        let metrics = Metrics::default();
        let ask = |method: &str, path: &str| {
            let (method, path) = (method.to_string(), path.to_string());
            let (status, text) = metrics.page(&Request { method, path, token: None });
            format!("{} {}", &status[..3], text.trim())
        };
        assert_eq!(ask("GET", "/healthz"), "200 ok");
        assert_eq!(ask("GET", "/readyz"), "503 the cluster has not been listed yet");
        metrics.set_ready();
        assert_eq!(ask("GET", "/readyz"), "200 ok");
        metrics.set_unfit(Some("the definition".to_string()));
        assert_eq!(ask("GET", "/readyz"), "503 the definition");
        assert_eq!(ask("GET", "/healthz"), "200 ok", "nothing is gained by another process");
        metrics.set_unfit(None);
        assert_eq!(ask("GET", "/readyz"), "200 ok");
        // A list that fails once is tried again; one that fails for a minute leaves it blind.
        let now = Instant::now();
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds)).expect("a time");
        metrics.unheard("pods", "refused", ago(30));
        assert_eq!(ask("GET", "/readyz"), "200 ok");
        metrics.heard("pods");
        metrics.unheard("pods", "refused", ago(75));
        metrics.unheard("pods", "too \nlong", ago(1));
        let unready = "503 pods have not been heard of for 75 s: too  long";
        assert_eq!(ask("GET", "/readyz"), unready, "since the first of them");
        metrics.heard("pods");
        assert_eq!(ask("GET", "/readyz"), "200 ok");
        assert!(ask("GET", "/metrics").starts_with("404"), "it is on a port of its own");
        assert!(ask("POST", "/healthz").starts_with("405"));
    }

    #[test]
    fn causes_are_counted_by_one_word() {
        assert_eq!(cause_word("rank 1 (a-a1-0) went silent"), "silent");
        assert_eq!(cause_word("rank 0 (a-a1-0) was killed"), "killed");
        assert_eq!(cause_word("rank 0 (a) ended with exit code 1"), "exited");
        assert_eq!(cause_word("no step for 60000 ms"), "stuck");
        assert_eq!(cause_word("the moon"), "other");
    }
}
