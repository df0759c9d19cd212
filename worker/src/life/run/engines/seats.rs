//! Where engines run, as the kernel tells: looked at while they train.
//!
//! Threads are looked at each time; memory once in an engine's life, when it has touched it, beside
//! the worker's own thread, because the kernel walks over all pages for it.

use super::bound::Warning;
use crate::life::binding::memory::{self, OfNodes};
use crate::life::binding::{self, Seat, apply};
use moejob_protocol::seat::{DIFFERENCES_MAX, Seated};
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

/// Looks after which an engine has touched its memory: half a minute.
const LOOKS_BEFORE_MEMORY: u32 = 3;

/// What is known of engines by their lives.
#[derive(Default)]
pub(super) struct Seats {
    of: BTreeMap<u64, Known>,
    /// The machine's nodes are not the kernel's: files tell of them.
    pub made: bool,
}

#[derive(Default)]
struct Known {
    looks: u32,
    /// The last look differed: NCCL moves a thread for a moment while it starts.
    doubted: bool,
    /// A difference was told as an event.
    warned: bool,
    memory: Memory,
    /// What was said of it in this attempt.
    said: Option<Seated>,
}

#[derive(Default)]
enum Memory {
    #[default]
    NotYet,
    Reading(Receiver<Result<OfNodes, String>>),
    /// What lies elsewhere, if much does.
    Known(Option<String>),
    Unknown(String),
}

/// What one look gives.
#[derive(Default)]
pub(super) struct Look {
    /// To be told once.
    pub warning: Option<Warning>,
    /// It is otherwise than what was told before.
    pub seated: Option<Seated>,
}

impl Seats {
    /// A new attempt: all is told anew.
    pub fn begin(&mut self) {
        self.of.values_mut().for_each(|known| known.said = None);
    }

    /// Of the `life`-th engine that was started, which computes `rank`. `seat` is what was planned,
    /// or why nothing was. A process that has ended says so by itself.
    pub fn look(
        &mut self,
        seat: Result<&Seat, &str>,
        (life, pid): (u64, u32),
        rank: u32,
    ) -> Look {
        let made = self.made;
        let known = self.of.entry(life).or_default();
        let seat = match seat {
            Ok(seat) => seat,
            Err(why) => {
                let unknown = format!("not bound: {why}");
                return known.tell(Seated { rank, unknown, ..Seated::default() });
            }
        };
        let threads = apply::threads(pid).ok().filter(|threads| !threads.is_empty());
        let Some(threads) = threads else { return Look::default() };
        known.looks += 1;
        let mut differences = binding::differences(seat, pid, &threads);
        if differences.is_empty() {
            known.doubted = false;
        } else if !std::mem::replace(&mut known.doubted, true) {
            return Look::default();
        }
        let unknown = match known.memory(seat, pid, made) {
            Ok(misplaced) => {
                differences.extend(misplaced);
                String::new()
            }
            Err(why) => format!("nothing is known of its memory: {why}"),
        };
        let more = (differences.len() + 1).saturating_sub(DIFFERENCES_MAX);
        if more > 1 {
            differences.truncate(DIFFERENCES_MAX - 1);
            differences.push(format!("{more} more"));
        }
        known.tell(Seated { rank, differences, unknown })
    }
}

impl Known {
    fn tell(&mut self, seated: Seated) -> Look {
        let text = seated.differences.join("; ");
        let warns = !text.is_empty() && !std::mem::replace(&mut self.warned, true);
        let warning = warns.then_some(("BindingDiffers", text));
        let news = self.said.as_ref() != Some(&seated);
        Look { warning, seated: news.then(|| self.said.insert(seated).clone()) }
    }

    /// What of its memory lies elsewhere, as far as that was read by now.
    fn memory(&mut self, seat: &Seat, pid: u32, made: bool) -> Result<Option<String>, String> {
        if let Memory::NotYet = self.memory
            && self.looks >= LOOKS_BEFORE_MEMORY
        {
            self.memory = match made {
                true => Memory::Unknown("the machine is one that files tell of".to_string()),
                false => reading(pid),
            };
        }
        if let Memory::Reading(answer) = &self.memory {
            self.memory = match answer.try_recv() {
                Ok(Ok(found)) => Memory::Known(memory::misplaced(seat, &found)),
                Ok(Err(why)) => Memory::Unknown(why),
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => {
                    Memory::Unknown("its reader has ended".to_string())
                }
            };
        }
        match &self.memory {
            Memory::NotYet | Memory::Reading(_) => Ok(None),
            Memory::Known(misplaced) => Ok(misplaced.clone()),
            Memory::Unknown(why) => Err(why.clone()),
        }
    }
}

fn reading(pid: u32) -> Memory {
    let (told, answer) = channel();
    let read = move || {
        // Nobody waits any more: the engine has ended.
        let _ = told.send(memory::read(pid));
    };
    match std::thread::Builder::new().name("numa-maps".to_string()).spawn(read) {
        Ok(_) => Memory::Reading(answer),
        Err(error) => Memory::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn own() -> (u64, u32) {
        (1, std::process::id())
    }

    fn seat(cpus: Vec<u32>) -> Seat {
        Seat { node: 0, near: cpus.clone(), cpus }
    }

    #[test]
    fn what_is_as_planned_is_told_once_an_attempt() {
        let mut seats = Seats::default();
        let anywhere = seat((0..8192).collect());
        let look = |seats: &mut Seats| seats.look(Ok(&anywhere), own(), 3);
        let first = look(&mut seats);
        assert!(first.warning.is_none());
        assert_eq!(first.seated, Some(Seated { rank: 3, ..Seated::default() }));
        assert_eq!(look(&mut seats).seated, None);
        seats.begin();
        assert!(look(&mut seats).seated.is_some());
    }

    #[test]
    fn a_difference_counts_at_the_second_look_and_warns_once() {
        let mut seats = Seats::default();
        let nowhere = seat(vec![8191]);
        let mut look = || seats.look(Ok(&nowhere), own(), 0);
        assert!(look().seated.is_none(), "it may pass");
        let second = look();
        let seated = second.seated.expect("it has not passed");
        assert!(second.warning.is_some_and(|(reason, _)| reason == "BindingDiffers"));
        assert!(!seated.differences.is_empty() && seated.differences.len() <= DIFFERENCES_MAX);
        assert!(look().warning.is_none());
    }

    #[test]
    fn who_is_not_bound_says_why() {
        let mut seats = Seats::default();
        let found = seats.look(Err("one NUMA node alone"), own(), 1).seated.expect("told");
        assert_eq!(found.unknown, "not bound: one NUMA node alone");
    }

    /// On any machine: either the kernel tells of this process's memory, or why it does not.
    #[test]
    fn memory_is_read_beside_or_it_is_said_why_not() {
        let anywhere = seat((0..8192).collect());
        for made in [true, false] {
            let mut seats = Seats { made, ..Seats::default() };
            let until = Instant::now() + Duration::from_secs(60);
            loop {
                seats.look(Ok(&anywhere), own(), 0);
                match &seats.of[&1].memory {
                    Memory::Known(_) if !made => break,
                    Memory::Unknown(why) => {
                        assert!(!why.is_empty());
                        break;
                    }
                    _ => assert!(Instant::now() < until, "it is never known"),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
