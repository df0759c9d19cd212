//! Exchanges that go on while the ops behind them compute: a thread makes them, one after the
//! other, with the rank's way to the gang.
//!
//! ```text
//! ops      begin 0 | begin 1 | products ..      | arrive 0 | products .. | arrive 1 | comm()
//! thread           exchange 0 -> exchange 1 ---->                                      ends
//! ```
//! A call of the gang has the same number on all ranks. So exchanges have the order in which they
//! were begun, and whoever wants the gang for something else waits for all that were.

use crate::gang::comm::{AbortHandle, Comm, CommError};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// The way to the gang of a rank, which its thread has while exchanges are under way.
#[derive(Debug)]
pub(super) struct Gang {
    rank: u32,
    world: u32,
    abort: AbortHandle,
    /// None: the thread has it.
    here: Option<Comm>,
    courier: Option<Courier>,
}

/// The thread's two ends.
#[derive(Debug)]
struct Courier {
    orders: Sender<Order>,
    back: Receiver<Comm>,
}

enum Order {
    Take(Comm),
    Do(Box<dyn FnOnce(&mut Comm) + Send>),
    GiveBack,
}

/// What an exchange that was begun will bring.
#[derive(Debug)]
#[must_use]
pub(super) struct Coming<T>(Receiver<Came<T>>);

/// What it brought, and when it was made.
#[derive(Debug)]
pub(super) struct Came<T> {
    pub result: Result<T, CommError>,
    pub began: Instant,
    pub ended: Instant,
}

impl Gang {
    pub fn new(comm: Comm) -> Gang {
        let (rank, world, abort) = (comm.rank(), comm.world(), comm.abort_handle());
        Gang { rank, world, abort, here: Some(comm), courier: None }
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn world(&self) -> u32 {
        self.world
    }

    /// For a call of one's own, behind all that were begun.
    pub fn comm(&mut self) -> &mut Comm {
        let courier = &self.courier;
        self.here.get_or_insert_with(|| {
            let courier = courier.as_ref().expect("somebody has it");
            let asked = courier.orders.send(Order::GiveBack);
            let comm = asked.ok().and_then(|()| courier.back.recv().ok());
            comm.expect("the thread that exchanges lives as long as its orders come")
        })
    }

    /// Enqueues an exchange, and waits for nothing.
    pub fn begin<T: Send + 'static>(
        &mut self,
        exchange: impl FnOnce(&mut Comm) -> Result<T, CommError> + Send + 'static,
    ) -> Coming<T> {
        let (arrives, coming) = channel();
        let work = move |comm: &mut Comm| {
            let began = Instant::now();
            let result = exchange(comm);
            // An attempt that has ended wants it no more.
            let _ = arrives.send(Came { result, began, ended: Instant::now() });
        };
        if self.courier.is_none() {
            self.courier = Courier::start();
        }
        let Some(courier) = &self.courier else {
            // A system that gives no thread has the exchange made at once.
            work(self.comm());
            return Coming(coming);
        };
        let take = self.here.take().map(Order::Take);
        for order in take.into_iter().chain([Order::Do(Box::new(work))]) {
            // A thread that is gone has dropped what would have arrived.
            let _ = courier.orders.send(order);
        }
        Coming(coming)
    }
}

impl Drop for Gang {
    /// What is under way ends, and the thread leaves the group.
    fn drop(&mut self) {
        if self.here.is_none() {
            self.abort.abort("the rank left the group");
        }
    }
}

impl Courier {
    /// None: the system gives no thread.
    fn start() -> Option<Courier> {
        let (orders, come) = channel();
        let (give, back) = channel();
        let thread = std::thread::Builder::new().name("exchange".to_string());
        thread.spawn(move || serve(&come, &give)).ok()?;
        Some(Courier { orders, back })
    }
}

/// The life of the thread.
fn serve(orders: &Receiver<Order>, back: &Sender<Comm>) {
    let mut held = None;
    while let Ok(order) = orders.recv() {
        match order {
            Order::Take(comm) => held = Some(comm),
            Order::Do(work) => work(held.as_mut().expect("it was given before")),
            Order::GiveBack => {
                let comm = held.take().expect("it was given before");
                if back.send(comm).is_err() {
                    return;
                }
            }
        }
    }
}

impl<T> Coming<T> {
    /// Waits for the exchange.
    pub fn wait(self) -> Came<T> {
        self.0.recv().unwrap_or_else(|_| {
            let reason = "the thread that exchanges has ended".to_string();
            let (began, ended) = (Instant::now(), Instant::now());
            Came { result: Err(CommError::Aborted { reason }), began, ended }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// What was begun is made in order, beside the caller, and before any later call.
    #[test]
    fn exchanges_are_made_in_order_and_before_what_follows() {
        let mut gangs: Vec<Gang> = Comm::in_process(2).into_iter().map(Gang::new).collect();
        let begin = |gang: &mut Gang, byte: u8| {
            let other = 1 - gang.rank();
            gang.begin(move |comm| {
                let mut came = [0];
                comm.exchange(&[(other, &[byte])], &mut [(other, &mut came)])?;
                Ok((came[0], comm.collective()))
            })
        };
        // One thread of the test is enough for two ranks: nothing waits here.
        let all: Vec<_> = (0..4).map(|at| gangs.iter_mut().map(|of| begin(of, at)).collect())
            .collect::<Vec<Vec<_>>>();
        for (at, both) in (0..).zip(all) {
            for coming in both {
                let came = coming.wait();
                assert_eq!(came.result, Ok((at, u64::from(at) + 1)));
                assert!(came.began <= came.ended);
            }
        }
        let last: Vec<_> = gangs.iter_mut().map(|gang| begin(gang, 9)).collect();
        assert!(gangs.iter_mut().all(|gang| gang.comm().collective() == 5));
        assert!(last.into_iter().all(|coming| coming.wait().result == Ok((9, 5))));
    }

    /// A rank that goes while an exchange waits for others leaves the group, and so do they.
    #[test]
    fn a_rank_that_is_dropped_ends_what_is_under_way() {
        let mut gangs = Comm::in_process(2).into_iter().map(Gang::new);
        let (mut one, mut other) = (gangs.next().expect("a rank"), gangs.next().expect("a rank"));
        let wait = |gang: &mut Gang| {
            let peer = 1 - gang.rank();
            gang.begin(move |comm| comm.exchange(&[], &mut [(peer, &mut [0; 8])]))
        };
        let (mine, theirs) = (wait(&mut one), wait(&mut other));
        std::thread::sleep(Duration::from_millis(5));
        drop(one);
        assert!(matches!(mine.wait().result, Err(CommError::Aborted { .. })));
        assert!(matches!(theirs.wait().result, Err(CommError::PeerLost { rank: 0, .. })));
        // Behind a failure nothing is exchanged.
        assert!(matches!(wait(&mut other).wait().result, Err(CommError::Aborted { .. })));
    }
}
