//! Who leads: the holder of one Lease. A standby takes over once the lease has not been renewed
//! for its time, measured on the standby's own clock, so that clocks need not agree.

use crate::apply::{ApplyError, Writer};
use crate::observe;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// After so long without a renewal somebody else may lead.
pub const LEASE_S: i32 = 10;
/// Between two looks, and two renewals.
const RENEW_EVERY: Duration = Duration::from_secs(2);
/// A leader that could not renew for so long stops before anybody else begins.
const GIVE_UP_AFTER: Duration = Duration::from_secs(8);
/// For one request of it.
const REQUEST_MAX: Duration = Duration::from_secs(3);

/// Until when this process leads, by the clock that also counts while the machine sleeps. Whoever
/// writes looks at it first: a process that was stopped and goes on may have a successor.
#[derive(Clone, Default)]
pub struct Deadline(Arc<AtomicU64>);

impl Deadline {
    /// One that is never over: for writers that need no lease.
    pub fn never() -> Deadline {
        Deadline(Arc::new(AtomicU64::new(u64::MAX)))
    }

    pub fn holds(&self) -> bool {
        self.holds_at(boot_millis())
    }

    /// At the deadline itself somebody else may lead.
    fn holds_at(&self, now: u64) -> bool {
        now < self.0.load(Ordering::SeqCst)
    }

    fn renewed(&self, began: u64) {
        self.0.store(began + GIVE_UP_AFTER.as_millis() as u64, Ordering::SeqCst);
    }

    fn end(&self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

/// Milliseconds of CLOCK_BOOTTIME.
fn boot_millis() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.max(0) as u64 * 1000 + time.tv_nsec.max(0) as u64 / 1_000_000
}

pub struct Election {
    pub client: Client,
    pub writer: Writer,
    pub namespace: String,
    pub name: String,
    /// Unlike that of any other process.
    pub identity: String,
    /// Of this process's leadership.
    pub deadline: Deadline,
}

/// What was last seen of the lease, and when it was last otherwise.
struct Seen {
    spec: LeaseSpec,
    since: Instant,
}

impl Election {
    /// Waits to be the leader. Returns the term: it rises with each leader.
    pub async fn acquire(&self) -> u64 {
        let mut seen = None;
        loop {
            let began = boot_millis();
            match self.step(&mut seen).await {
                Ok(Some(spec)) => {
                    self.deadline.renewed(began);
                    return term(&spec);
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "the lease"),
            }
            sleep(RENEW_EVERY).await;
        }
    }

    /// Renews for as long as it can; returns when this process must no longer lead.
    /// `heard` is called each time.
    pub async fn hold(&self, heard: impl Fn()) {
        let (mut seen, mut renewed) = (None, Instant::now());
        loop {
            sleep(RENEW_EVERY).await;
            let (began, deadline) = (Instant::now(), renewed + GIVE_UP_AFTER);
            let began_boot = boot_millis();
            // The machine, or this process, may have slept meanwhile.
            if !self.deadline.holds() {
                return;
            }
            match timeout_at(deadline, self.step(&mut seen)).await {
                Ok(Ok(Some(_))) => {
                    renewed = began;
                    self.deadline.renewed(began_boot);
                    heard();
                }
                Ok(Err(error)) if self.deadline.holds() => {
                    tracing::warn!(%error, "the lease was not renewed");
                }
                Ok(Ok(None) | Err(_)) | Err(_) => return self.deadline.end(),
            }
        }
    }

    /// Lets another lead at once; nothing more is written by this process.
    pub async fn release(&self) {
        self.deadline.end();
        let release = async {
            let lease = observe::lease(&self.client, &self.namespace, &self.name).await.ok()??;
            let spec = lease.spec.clone().unwrap_or_default();
            if spec.holder_identity.as_deref() == Some(&self.identity) {
                let spec = LeaseSpec { holder_identity: Some(String::new()), ..spec };
                self.writer.put_lease(&Lease { spec: Some(spec), ..lease }).await.ok()?;
            }
            Some(())
        };
        let _ = timeout(REQUEST_MAX, release).await;
    }

    /// The lease as it was written, if this process leads.
    async fn step(&self, seen: &mut Option<Seen>) -> Result<Option<LeaseSpec>, ApplyError> {
        let look = observe::lease(&self.client, &self.namespace, &self.name);
        let lease = timeout(REQUEST_MAX, look).await.map_err(|_| ApplyError::Slow)??;
        let spec = lease.as_ref().and_then(|lease| lease.spec.clone());
        let since = match seen.take() {
            Some(before) if Some(&before.spec) == spec.as_ref() => before.since,
            _ => Instant::now(),
        };
        let mine = judge(spec.as_ref(), &self.identity, since.elapsed(), Timestamp::now());
        if let Some(spec) = spec {
            *seen = Some(Seen { spec, since });
        }
        let Some(mine) = mine else { return Ok(None) };
        let metadata = match lease {
            Some(lease) => lease.metadata,
            None => ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
        };
        let lease = Lease { metadata, spec: Some(mine.clone()) };
        let put = timeout(REQUEST_MAX, self.writer.put_lease(&lease)).await;
        match put.map_err(|_| ApplyError::Slow)? {
            Ok(_) => Ok(Some(mine)),
            // Somebody else was quicker.
            Err(ApplyError::Conflict | ApplyError::Exists) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// What to write, so that it makes or keeps this process the leader; none while another one leads.
fn judge(
    spec: Option<&LeaseSpec>,
    me: &str,
    unchanged: Duration,
    now: Timestamp,
) -> Option<LeaseSpec> {
    let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(LEASE_S);
    let transitions = spec.and_then(|spec| spec.lease_transitions).unwrap_or(0);
    let now = MicroTime(now);
    let mine = LeaseSpec {
        holder_identity: Some(me.to_string()),
        lease_duration_seconds: Some(LEASE_S),
        renew_time: Some(now.clone()),
        acquire_time: spec.and_then(|spec| spec.acquire_time.clone()),
        lease_transitions: Some(transitions),
        ..LeaseSpec::default()
    };
    if holder == me {
        return Some(mine);
    }
    let expired = unchanged >= Duration::from_secs(seconds.max(0) as u64);
    if !holder.is_empty() && !expired {
        return None;
    }
    let lease_transitions = Some(transitions.saturating_add(1));
    Some(LeaseSpec { acquire_time: Some(now), lease_transitions, ..mine })
}

fn term(spec: &LeaseSpec) -> u64 {
    spec.lease_transitions.unwrap_or(0).max(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, transitions: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.to_string()),
            lease_duration_seconds: Some(LEASE_S),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }

    fn step(spec: Option<&LeaseSpec>, unchanged_s: u64) -> Option<(String, u64)> {
        let unchanged = Duration::from_secs(unchanged_s);
        let spec = judge(spec, "me", unchanged, Timestamp::UNIX_EPOCH)?;
        Some((spec.holder_identity.clone().unwrap_or_default(), term(&spec)))
    }

    #[test]
    fn nothing_is_written_from_the_deadline_on() {
        let deadline = Deadline::default();
        assert!(!deadline.holds_at(0), "it does not lead yet");
        deadline.renewed(1_000);
        let end = 1_000 + GIVE_UP_AFTER.as_millis() as u64;
        assert!(deadline.holds_at(end - 1));
        assert!(!deadline.holds_at(end) && !deadline.holds_at(end + 60_000), "it was stopped");
        deadline.renewed(1_500);
        assert!(deadline.holds_at(end));
        deadline.end();
        assert!(!deadline.holds_at(0));
        assert!(Deadline::never().holds());
        // A leader has stopped before anybody else may begin.
        assert!(GIVE_UP_AFTER + RENEW_EVERY <= Duration::from_secs(LEASE_S as u64));
    }

    #[test]
    fn each_leader_has_a_higher_term() {
        let me = |term| Some(("me".to_string(), term));
        assert_eq!(step(None, 0), me(1));
        assert_eq!(step(Some(&lease("me", 4)), 60), me(4), "a renewal is no new term");
        assert_eq!(step(Some(&lease("other", 4)), 9), None);
        assert_eq!(step(Some(&lease("other", 4)), 10), me(5));
        assert_eq!(step(Some(&lease("", 4)), 0), me(5), "released");
    }

    /// The whole of what is written: a standby of any release judges by it.
    #[test]
    fn a_lease_says_who_leads_since_when_and_for_how_long() {
        let at = |seconds: i64| Timestamp::from_second(seconds).expect("a time");
        let put = |spec: Option<&LeaseSpec>, unchanged: Duration, now: i64| {
            judge(spec, "me", unchanged, at(now))
        };
        let of = |acquired: i64, renewed: i64, transitions: i32| LeaseSpec {
            acquire_time: Some(MicroTime(at(acquired))),
            renew_time: Some(MicroTime(at(renewed))),
            ..lease("me", transitions)
        };
        let first = put(None, Duration::ZERO, 100).expect("nobody leads");
        assert_eq!(first, of(100, 100, 1));
        let second = put(Some(&first), Duration::ZERO, 102).expect("renewed");
        assert_eq!(second, of(100, 102, 1), "it leads since it began to");
        let theirs = LeaseSpec { holder_identity: Some("other".into()), ..second };
        let just = Duration::from_secs(LEASE_S as u64);
        assert_eq!(put(Some(&theirs), just - Duration::from_millis(1), 120), None);
        assert_eq!(put(Some(&theirs), just, 120), Some(of(120, 120, 2)));
        // What the holder says of its time counts, not what this release says.
        let longer = LeaseSpec { lease_duration_seconds: Some(30), ..theirs.clone() };
        assert_eq!(put(Some(&longer), Duration::from_secs(29), 120), None);
        assert_eq!(put(Some(&longer), Duration::from_secs(30), 120), Some(of(120, 120, 2)));
        let never = LeaseSpec { lease_duration_seconds: Some(-1), ..theirs.clone() };
        assert!(put(Some(&never), Duration::ZERO, 120).is_some(), "a time below zero is over");
        let silent = LeaseSpec { lease_duration_seconds: None, ..theirs.clone() };
        assert_eq!(put(Some(&silent), just - Duration::from_millis(1), 120), None);
        assert!(put(Some(&silent), just, 120).is_some());
        // Somebody has made it by hand, or damaged it.
        let nobody = LeaseSpec { holder_identity: None, ..theirs.clone() };
        assert_eq!(put(Some(&nobody), Duration::ZERO, 120), Some(of(120, 120, 2)));
        let last = LeaseSpec { lease_transitions: Some(i32::MAX), ..theirs.clone() };
        assert_eq!(put(Some(&last), just, 120), Some(of(120, 120, i32::MAX)), "no overflow");
        let below = LeaseSpec { lease_transitions: Some(-5), ..theirs };
        assert_eq!(term(&below), 0);
    }

    /// A deadline counts from before the request, on a clock that goes on while the machine sleeps.
    #[test]
    fn a_deadline_is_shared_by_all_that_write() {
        let clock = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let (deadline, before) = (Deadline::default(), boot_millis());
        assert!(before / 1000 >= clock.tv_sec as u64, "whole seconds count, too");
        let writer = deadline.clone();
        assert!(!writer.holds());
        deadline.renewed(before);
        // It ends in 8 s, so a machine that stands still for that long sees its end here.
        assert!(writer.holds() || boot_millis() >= before + 8_000);
        assert!(writer.holds_at(before + 7_999) && !writer.holds_at(before + 8_000));
        match before.checked_sub(8_000) {
            Some(long_ago) => {
                deadline.renewed(long_ago);
                assert!(!writer.holds(), "a request that took so long renews nothing");
            }
            None => eprintln!("skipped: the machine runs for less than 8 s"),
        }
        deadline.renewed(before);
        deadline.end();
        assert!(!writer.holds());
    }
}
