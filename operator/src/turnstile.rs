//! Places for what is under way at once, shared fairly between jobs: whoever waits for one gets it
//! in turns, a job at a time, however much each of them waits for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

#[derive(Clone)]
pub struct Turnstile(Arc<Mutex<Inner>>);

struct Inner {
    free: usize,
    /// By job; none is empty.
    waiting: BTreeMap<Arc<str>, VecDeque<oneshot::Sender<Place>>>,
    /// The jobs that wait, whose turn is next first.
    turns: VecDeque<Arc<str>>,
}

/// A place, given back when it is dropped.
pub struct Place(Option<Turnstile>);

impl Turnstile {
    pub fn new(places: usize) -> Turnstile {
        let (waiting, turns) = Default::default();
        Turnstile(Arc::new(Mutex::new(Inner { free: places, waiting, turns })))
    }

    /// Waits for a place. Cancel-safe.
    pub async fn pass(&self, job: &Arc<str>) -> Place {
        let receiver = {
            let mut inner = self.inner();
            // Whoever waits was here before.
            if inner.free > 0 {
                inner.free -= 1;
                return Place(Some(self.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            if !inner.waiting.contains_key(job) {
                inner.turns.push_back(Arc::clone(job));
            }
            inner.waiting.entry(Arc::clone(job)).or_default().push_back(sender);
            receiver
        };
        // Senders live in the turnstile, which this holds.
        receiver.await.unwrap_or(Place(None))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self) {
        loop {
            let next = {
                let mut inner = self.inner();
                let Some(job) = inner.turns.pop_front() else {
                    inner.free += 1;
                    return;
                };
                let mut queue = inner.waiting.remove(&job).unwrap_or_default();
                let next = queue.pop_front();
                if !queue.is_empty() {
                    inner.waiting.insert(Arc::clone(&job), queue);
                    inner.turns.push_back(job);
                }
                next
            };
            let Some(next) = next else { continue };
            match next.send(Place(Some(self.clone()))) {
                Ok(()) => return,
                // It does not wait any more: the place goes to the next one.
                Err(mut place) => place.0 = None,
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(turnstile) = self.0.take() {
            turnstile.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::mpsc;
    use tokio::time::sleep;

    #[tokio::test]
    async fn a_job_with_much_to_write_delays_another_by_one_turn() {
        let turnstile = Turnstile::new(1);
        let (loud, quiet): (Arc<str>, Arc<str>) = (Arc::from("loud"), Arc::from("quiet"));
        let first = turnstile.pass(&loud).await;
        let (sender, mut order) = mpsc::unbounded_channel();
        let wait = |job: &Arc<str>| {
            let (turnstile, job, sender) = (turnstile.clone(), Arc::clone(job), sender.clone());
            tokio::spawn(async move {
                let _place = turnstile.pass(&job).await;
                let _ = sender.send(job);
            })
        };
        let mut tasks: Vec<_> = (0..100).map(|_| wait(&loud)).collect();
        sleep(Duration::from_millis(20)).await;
        tasks.push(wait(&quiet));
        sleep(Duration::from_millis(20)).await;
        // One that gives up its turn holds nobody up.
        tasks.swap_remove(0).abort();
        sleep(Duration::from_millis(20)).await;
        drop(first);
        let mut passed = Vec::new();
        for _ in 0..100 {
            passed.push(order.recv().await.expect("all pass"));
        }
        let at = passed.iter().position(|job| **job == *quiet).expect("it passes");
        assert!(at <= 1, "{at}");
        sleep(Duration::from_millis(20)).await;
        assert_eq!(turnstile.inner().free, 1);
        assert!(turnstile.inner().waiting.is_empty() && turnstile.inner().turns.is_empty());
    }
}
