use super::*;
use crate::state::checksum::{CHECKSUM_CHUNK, Soundness};
use crate::state::slot::BYTES;
use moejob_kernels::Pages;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::time::Duration;

fn fill(memory: &Memory, attempt: u32, step: u64, shard: u32, len: usize) -> Filling {
    memory.fill(attempt, step, shard, len).expect("memory").expect("a slot")
}

fn take(memory: &Memory, attempt: u32, step: u64, shard: u32) -> Arc<Slot> {
    memory.make_room(attempt, step);
    let mut filling = fill(memory, attempt, step, shard, 8);
    filling.bytes_mut().fill(step as u8);
    let slot = filling.complete();
    // Who makes its checksum reads it, and what is read is not filled.
    while memory.0.sums.is_some() && (!slot.is_summed() || slot.is_read()) {
        std::thread::yield_now();
    }
    memory.trim();
    slot
}

fn held(memory: &Memory) -> Vec<(u32, u64, Vec<u32>)> {
    memory.held().into_iter().map(|held| (held.attempt, held.step, held.shards)).collect()
}

#[test]
fn the_newest_whole_state_stays_until_the_next_is_whole() {
    let memory = Memory::default();
    take(&memory, 1, 10, 0);
    take(&memory, 1, 10, 1);
    memory.confirm(1, 10);
    // The first of two ranks is ahead: neither state of the other is lost.
    take(&memory, 1, 20, 1);
    assert_eq!(held(&memory), [(1, 10, vec![0, 1]), (1, 20, vec![1])]);
    take(&memory, 1, 20, 0);
    memory.confirm(1, 20);
    let slot = take(&memory, 1, 30, 0);
    assert_eq!(held(&memory), [(1, 20, vec![0, 1]), (1, 30, vec![0])]);
    assert_eq!(slot[..], [30; 8]);
}

#[test]
fn a_shard_that_is_half_cut_is_none() {
    let memory = Memory::default();
    let mut filling = fill(&memory, 1, 10, 0, 8);
    filling.bytes_mut().fill(1);
    assert_eq!(held(&memory), []);
    drop(filling);
    assert_eq!(held(&memory), [], "its engine died");
    memory.begin(&Resume::Fresh, &[]);
    assert!(memory.slots().is_empty());
}

#[test]
fn what_a_checkpoint_is_written_from_is_not_overwritten() {
    let memory = Memory::default();
    let written = take(&memory, 1, 1, 0);
    for step in 2..6 {
        take(&memory, 1, step, 0);
        memory.confirm(1, step);
    }
    assert_eq!(written[..], [1; 8]);
    drop(written);
    take(&memory, 1, 6, 0);
    assert_eq!(memory.slots().len(), 2, "and then it is used again or given back");
}

#[test]
fn a_byte_that_changes_later_is_noticed() {
    for len in [0, 8, CHECKSUM_CHUNK, 3 * CHECKSUM_CHUNK + 5] {
        let memory = Memory::default();
        let mut filling = fill(&memory, 1, 10, 0, len);
        filling.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        let slot = filling.complete();
        assert_eq!(slot.soundness(), Soundness::Sound, "{len} bytes");
        for at in [0, len / 2, len.saturating_sub(1)] {
            let flip = || {
                let mut byte = [0];
                slot.memory().read(BYTES + at, &mut byte);
                slot.memory().write(BYTES + at, &[byte[0] ^ 16]);
            };
            if len > 0 {
                flip();
                assert_eq!(slot.soundness(), Soundness::Damaged, "byte {at} of {len}");
                flip();
            }
        }
        assert_eq!(slot.soundness(), Soundness::Sound, "{len} bytes");
        slot.set_step(11);
        assert_eq!(slot.soundness(), Soundness::Damaged, "it would be of another step");
    }
}

/// Bytes that nobody has summed are not damaged. Who needs them waits as long as they are summed,
/// however long that takes.
#[test]
fn a_checksum_is_waited_for_while_it_is_being_made() {
    let engine = Memory::of_engine(|_| ());
    let (pause, slot) = (Duration::from_millis(200), take(&engine, 1, 10, 0));
    assert_eq!(slot.soundness_within(pause), Soundness::NotSummed);
    let summing = Arc::clone(&slot);
    let slow = std::thread::spawn(move || {
        for _ in 0..8 {
            std::thread::sleep(pause / 2);
            summing.summed_bytes().fetch_add(1, Ordering::SeqCst);
        }
        summing.sum();
    });
    assert_eq!(slot.soundness_within(pause), Soundness::Sound);
    slow.join().expect("it sums");
}

#[test]
fn what_an_engine_gives_up_its_worker_lets_go_of() {
    let worker = Memory::default();
    take(&worker, 1, 10, 0);
    take(&worker, 1, 10, 1);
    worker.confirm(1, 10);
    let engine = Memory::default();
    for file in worker.files(1, 10, &[0]).expect("descriptors") {
        engine.adopt(file).expect("a slot");
    }
    engine.give_up(1, 10, 0);
    worker.follow(2);
    assert_eq!(held(&worker), [(1, 10, vec![1])]);
    assert_eq!(worker.slots().len(), 1);
}

#[test]
fn a_worker_sees_what_its_engine_holds_and_keeps_it() {
    let worker = Memory::default();
    let engine = engine_of(&worker);
    take(&engine, 3, 10, 1);
    engine.confirm(3, 10);
    take(&engine, 3, 20, 1);
    drop(engine);
    worker.follow(3);
    assert_eq!(held(&worker), [(3, 10, vec![1]), (3, 20, vec![1])]);
    assert_eq!(worker.shard(3, 20, 1).expect("held")[..], [20; 8]);
    let resume = Resume::Memory {
        step: 10,
        attempt: 3,
        layout: moejob_protocol::layout::Layout::contiguous(
            moejob_protocol::mesh::Mesh::data_parallel(2, 1),
        ),
        sources: Vec::new(),
    };
    worker.begin(&resume, &[]);
    assert_eq!(held(&worker), [(3, 10, vec![1])]);
    let files = worker.files(3, 10, &[0, 1]).expect("descriptors");
    assert_eq!(files.len(), 1);
}

#[test]
fn what_is_lent_is_read_to_its_end() {
    let memory = Memory::default();
    memory.set_bounds(3, 0);
    drop(fill(&memory, 1, 10, 0, 8).complete_for_checkpoint());
    assert_eq!(held(&memory), [], "nobody resumes from it");
    let reading = memory.lent(1, 10, 0).expect("lent");
    memory.trim();
    let second = take(&memory, 1, 11, 0);
    let third = take(&memory, 1, 12, 0);
    assert!(memory.fill(1, 13, 0, 8).expect("memory").is_none(), "three are in use");
    assert_eq!(reading.len(), 8);
    drop(reading);
    assert!(memory.lent(1, 10, 0).is_none(), "once");
    drop(fill(&memory, 1, 13, 0, 8));
    assert_eq!((second[0], third[0]), (11, 12));
}

#[test]
fn what_a_lost_engine_lent_is_free_again() {
    let memory = Memory::default();
    memory.set_bounds(1, 0);
    drop(fill(&memory, 1, 10, 0, 8).complete_for_checkpoint());
    assert!(memory.fill(1, 11, 0, 8).expect("memory").is_none());
    memory.take_back(1);
    assert!(memory.fill(1, 11, 0, 8).expect("memory").is_none(), "another engine's");
    memory.take_back(0);
    drop(fill(&memory, 1, 11, 0, 8));
}

/// Bytes of pages that this process maps of the slot.
fn mapped(slot: &Slot) -> usize {
    let start = format!("{:x}-", slot.as_ptr().addr() - BYTES);
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("the maps of a process");
    let own = maps.lines().skip_while(|line| !line.starts_with(&start));
    let rss = own.skip(1).find_map(|line| line.strip_prefix("Rss:")).expect("its mapping");
    1024 * rss.trim().trim_end_matches(" kB").parse::<usize>().expect("a number")
}

#[test]
fn of_a_large_slot_what_is_not_being_filled_is_not_mapped() {
    const LEN: usize = 4 << 20;
    // A page that is touched brings a few beside it.
    const FEW: usize = LEN / 4;
    let memory = Memory::of_engine(|_| ());
    memory.prepare(&[(0, LEN)], &AtomicBool::new(false));
    let prepared = Arc::downgrade(&memory.slots()[0]);
    let mut filling = fill(&memory, 1, 10, 0, LEN);
    let slot = prepared.upgrade().expect("it was prepared");
    assert_eq!(filling.pages(), Pages::Leave, "it is large");
    assert!(mapped(&slot) < FEW, "it was only reserved");
    let bytes = filling.bytes_mut();
    Pages::come(&mut bytes[..LEN / 2]);
    assert!((LEN / 2..LEN / 2 + FEW).contains(&mapped(&slot)));
    bytes.iter_mut().zip(0..).for_each(|(byte, at)| *byte = (at % 251) as u8);
    Pages::Leave.settle(&mut bytes[..LEN / 2]);
    assert!(mapped(&slot) < LEN / 2 + FEW);
    Pages::Leave.settle(&mut bytes[LEN / 2..]);
    assert!(mapped(&slot) < FEW);
    assert!(bytes.iter().zip(0..).all(|(byte, at)| *byte == (at % 251) as u8));
    let filling = fill(&Memory::default(), 1, 10, 0, LEN);
    assert_eq!(filling.pages(), Pages::Stay, "who stays may map all of it");
}

#[test]
fn an_attempt_goes_on_to_make_what_the_last_one_was_making() {
    let worker = Memory::default();
    let engine = engine_of(&worker);
    let over = AtomicBool::new(true);
    engine.prepare(&[(1, 8)], &over);
    // The worker has it before its memory is there.
    assert_eq!(worker.slots().len(), 1);
    assert!(!engine.slots()[0].is_reserved());
    worker.begin(&Resume::Fresh, &[1]);

    let next = engine_of(&worker);
    let files = worker.free_files(1).expect("descriptors");
    files.into_iter().for_each(|file| next.adopt(file).expect("a slot"));
    over.store(false, Ordering::Relaxed);
    next.prepare(&[(1, 8)], &over);
    assert!(worker.slots()[0].is_reserved(), "the same one");
    assert_eq!(worker.slots().len(), 1);
    next.prepare(&[(1, 8)], &over);
    assert_eq!(worker.slots().len(), GENERATIONS as usize);
    next.prepare(&[(1, 8)], &over);
    assert_eq!(worker.slots().len(), GENERATIONS as usize, "no more than are needed");
}

/// That of an engine of `worker`, in a process of its own.
fn engine_of(worker: &Memory) -> Memory {
    let to = worker.clone();
    to.engine_begins(LIFE);
    Memory::of_engine(move |of| match of {
        OfSlot::Made(slot) => to.adopt_from(LIFE, copy_of(slot)).expect("a slot"),
        OfSlot::Closed(slot) => to.engine_closed(LIFE, slot),
    })
}

/// That of [`engine_of`].
const LIFE: u64 = 1;

fn copy_of(slot: &Slot) -> OwnedFd {
    slot.file().expect("a file").try_clone_to_owned().expect("a descriptor")
}

/// Whether this process has the slot with this number open.
fn is_open_here(slot: u64) -> bool {
    let files = std::fs::read_dir("/proc/self/fd").expect("the files of a process");
    let paths = files.flatten().map(|file| file.path());
    let slots = paths.filter(|path| {
        let name = std::fs::read_link(path).unwrap_or_default();
        name.to_string_lossy().contains("moejob-snapshot")
    });
    slots.filter_map(|path| std::fs::metadata(path).ok()).any(|file| file.ino() == slot)
}

/// Who closes a slot last gives its memory back. If that is an engine that was killed, its GPU is
/// not free before.
#[test]
fn an_engine_is_never_the_last_that_has_a_slot_open() {
    let worker = Memory::default();
    worker.engine_begins(LIFE);
    let made = Slot::new(8).expect("memory");
    let (slot, file) = (made.id(), copy_of(&made));
    let mut engine = {
        // What it is given is open here until the command is dropped.
        let mut command = Command::new("sleep");
        command.arg("600").stdin(copy_of(&made)).stdout(Stdio::null());
        command.spawn().expect("a process")
    };
    drop(made);
    worker.adopt_from(LIFE, file).expect("a slot");
    // Half filled when its engine was killed.
    worker.begin(&Resume::Fresh, &[]);
    assert!(worker.slots().is_empty());
    let is_last = !is_open_here(slot);
    engine.kill().expect("it runs");
    engine.wait().expect("a child");
    assert!(!is_last, "the engine gives the memory back while it ends");
    assert!(is_open_here(slot), "nobody has said that it is gone");
    worker.engine_ended(LIFE);
    assert!(!is_open_here(slot));
}

#[test]
fn what_an_engine_still_uses_its_worker_keeps() {
    let worker = Memory::default();
    let engine = engine_of(&worker);
    let half = fill(&engine, 1, 10, 0, 8);
    take(&engine, 1, 10, 1);
    let kept = |memory: &Memory| -> Vec<Weak<Slot>> {
        memory.slots().iter().map(Arc::downgrade).collect()
    };
    let slots = kept(&worker);
    let are_there = || slots.iter().map(|slot| slot.strong_count() > 0).collect::<Vec<_>>();
    engine.give_up(1, 10, 1);
    worker.begin(&Resume::Fresh, &[]);
    assert!(worker.slots().is_empty());
    assert_eq!(are_there(), [true, false], "it closes what it gives up");
    engine.clear();
    assert_eq!(are_there(), [true, false], "it is being filled");
    drop(half);
    assert_eq!(are_there(), [false, false]);
}

#[test]
fn what_nobody_resumes_from_is_filled_again_in_the_next_attempt() {
    let worker = Memory::default();
    let engine = engine_of(&worker);
    // A snapshot that is whole, one that came too late, one that is half cut, one of another rank.
    take(&engine, 3, 10, 1);
    engine.confirm(3, 10);
    take(&engine, 3, 20, 1);
    take(&engine, 3, 20, 0);
    let half = fill(&engine, 3, 20, 1, 8);
    assert_eq!(worker.slots().len(), 4);
    let resume = of_attempt(3, 10);
    worker.begin(&resume, &[1]);
    drop(half);
    assert_eq!(held(&worker), [(3, 10, vec![1])], "what is filled again is no state");
    assert_eq!(worker.slots().len(), 2, "a slot to resume from, and one to fill");
    assert_eq!(worker.free_files(0).expect("descriptors").len(), 0);

    let engine = engine_of(&worker);
    let files = worker.files(3, 10, &[1]).expect("descriptors");
    let free = worker.free_files(1).expect("descriptors");
    assert_eq!((files.len(), free.len()), (1, 1));
    files.into_iter().chain(free).for_each(|file| engine.adopt(file).expect("a slot"));
    engine.confirm(3, 10);
    engine.prepare(&[(1, 8)], &AtomicBool::new(false));
    take(&engine, 4, 25, 1);
    assert_eq!(worker.slots().len(), 2, "none is made anew");
    assert_eq!(held(&worker), [(3, 10, vec![1]), (4, 25, vec![1])]);
    assert_eq!(worker.shard(4, 25, 1).expect("held")[..], [25; 8]);
    // Without such a wish everything else goes.
    worker.begin(&resume, &[]);
    assert_eq!(held(&worker), [(3, 10, vec![1])]);
    assert_eq!(worker.slots().len(), 1);
}

fn of_attempt(attempt: u32, step: u64) -> Resume {
    let mesh = moejob_protocol::mesh::Mesh::data_parallel(2, 1);
    let layout = moejob_protocol::layout::Layout::contiguous(mesh);
    Resume::Memory { step, attempt, layout, sources: Vec::new() }
}

/// As an attempt that resumes begins, with rank 1 in an engine of the worker.
fn resume(worker: &Memory, attempt: u32, step: u64) -> Memory {
    worker.begin(&of_attempt(attempt, step), &[1]);
    let engine = engine_of(worker);
    let mut files = worker.files(attempt, step, &[1]).expect("descriptors");
    files.extend(worker.free_files(1).expect("descriptors"));
    worker.hand_over(LIFE, files.iter()).expect("files");
    files.into_iter().for_each(|file| engine.adopt(file).expect("a slot"));
    engine.confirm(attempt, step);
    engine
}

/// The worker looks, and makes its checksums.
fn follow(worker: &Memory, attempt: u32) {
    worker.follow(attempt);
    let is_busy = |slot: &Arc<Slot>| slot.label().is_some() && !slot.is_summed() || slot.is_read();
    while worker.slots().iter().any(is_busy) {
        std::thread::yield_now();
    }
}

/// A worker that let go of it would not know of the snapshot that comes there next. And an engine
/// that is killed before would leave it the work of giving the memory back, and the next attempt
/// that of taking it.
#[test]
fn what_an_engine_was_handed_is_filled_anew_in_its_worker() {
    let worker = Memory::default();
    let engine = engine_of(&worker);
    take(&engine, 3, 10, 1);
    engine.confirm(3, 10);
    take(&engine, 3, 20, 1);
    take(&engine, 3, 20, 0);
    drop(engine);
    let engine = resume(&worker, 3, 20);
    assert_eq!(worker.slots().len(), 3, "a free one, too, and what nobody was handed");
    take(&engine, 4, 40, 1);
    engine.confirm(4, 40);
    follow(&worker, 4);
    assert_eq!(held(&worker), [(3, 20, vec![1]), (4, 40, vec![1])]);
    take(&engine, 4, 60, 1);
    engine.confirm(4, 60);
    follow(&worker, 4);
    assert_eq!(held(&worker), [(4, 40, vec![1]), (4, 60, vec![1])]);
    assert_eq!(worker.slots().len(), 2);
    // Killed: nothing is given back, and nothing made anew.
    let slots: Vec<u64> = worker.slots().iter().map(|slot| slot.id()).collect();
    drop(engine);
    let engine = resume(&worker, 4, 60);
    take(&engine, 5, 80, 1);
    engine.confirm(5, 80);
    drop(engine);
    follow(&worker, 5);
    let engine = resume(&worker, 5, 80);
    take(&engine, 6, 99, 1);
    assert_eq!(held(&worker), [(5, 80, vec![1]), (6, 99, vec![1])]);
    assert_eq!(worker.slots().iter().map(|slot| slot.id()).collect::<Vec<_>>(), slots);
}

#[test]
fn a_slot_of_another_length_is_of_no_use_again() {
    let worker = Memory::default();
    let engine = engine_of(&worker);
    take(&engine, 3, 10, 1);
    drop(fill(&engine, 3, 20, 1, 16).complete());
    worker.begin(&of_attempt(3, 20), &[1]);
    assert_eq!(held(&worker), [(3, 20, vec![1])]);
    assert_eq!(worker.slots().len(), 1);
}
