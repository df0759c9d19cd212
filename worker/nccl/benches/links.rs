//! What two GPUs of a node tell each other, by verb and size: with blocks, graphs and the host's
//! time, for who works on kernels. `moejob bench --links` measures the ways that engines take.
//!
//! ```text
//! cargo bench -p moejob-nccl --bench links -- [--only all_to_all,counts,peer] [--blocking]
//!     [--ctas N]
//! ```
//! `peer` are windows of peers: all_to_all of bytes, dispatch of rows of the Qwen3 shape, counts,
//! each with the multiprocessors that it takes.
//! Prints `verb | bytes | us | bus GB/s | us in a graph | bus GB/s | host us a call`. Bytes are
//! those of the larger buffer of a rank, the bus rate is that of nccl-tests: bytes x (n - 1) / n
//! over the time, twice that for all-reduce. The peer is `bench-peers/links_torch.py`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{Bed, Peer, introduce, lacking, link, listen, meet, say};
use moejob_kernels::cuda::{CudaError, Event, PinnedBuffer};
use moejob_kernels::peer::{MoveRows, PeerLinks};
use moejob_kernels::Buffer;
use moejob_nccl::{Comm, Config, DType, Library, Reduce};

const VERBS: [&str; 4] = ["all_to_all", "reduce_scatter", "all_gather", "all_reduce"];
const SIZES: [usize; 11] = [
    8, 512, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20,
];
/// Experts of a rank, of which it tells how many rows come: a word each.
const COUNTS: usize = 128;

fn main() {
    let options: Vec<String> = std::env::args().skip(1).collect();
    if let Some((_, rank)) = common::part() {
        return rank_of_two(rank, &options);
    }
    if let Some(reason) = lacking() {
        return println!("skipped: {reason}");
    }
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let mut peers = [0, 1].map(|rank| Peer::start("bench", rank, &options));
    let [first, second] = &mut peers;
    // An id of NCCL's, then the place where they swap the files of their windows.
    introduce(first, second);
    introduce(first, second);
    // The two begin each reading together, as far as the host can.
    loop {
        let words = [&mut *first, &mut *second].map(|peer| peer.hear(Duration::from_secs(120)));
        if words.iter().any(|word| word == "done") {
            break;
        }
        first.tell("on");
        second.tell("on");
    }
    for peer in peers {
        peer.ends_well();
    }
}

fn value<'a>(options: &'a [String], name: &str) -> Option<&'a str> {
    let at = options.iter().position(|option| option == name)?;
    options.get(at + 1).map(String::as_str)
}

struct Bench {
    bed: Bed,
    comm: Comm,
    from: Buffer,
    to: Buffer,
    links: PeerLinks,
}

fn rank_of_two(rank: u32, options: &[String]) {
    let library = Library::load().expect("NCCL");
    let mut bed = Bed::new(rank, 640 << 20);
    let [from, to] = [(); 2].map(|()| bed.bytes(256 << 20));
    let config = Config {
        blocking: options.iter().any(|option| option == "--blocking"),
        ctas_max: value(options, "--ctas").and_then(|text| text.parse().ok()),
        ..Config::default()
    };
    let comm = meet(&library, rank, &config);
    let links = link(&bed, rank, 256 << 20, Duration::from_secs(20));
    let mut bench = Bench { bed, comm, from, to, links };
    if rank == 0 {
        let kind = if config.blocking { "blocking" } else { "not blocking" };
        println!("  NCCL {}, {kind}, CTAs at most {:?}", library.version(), config.ctas_max);
        println!("  verb | bytes | us | bus GB/s | in a graph us | bus GB/s | host us a call");
    }
    let only = value(options, "--only");
    let wanted = |verb: &str| only.is_none_or(|list| list.split(',').any(|one| one == verb));
    for verb in VERBS.into_iter().filter(|verb| wanted(verb)) {
        for bytes in SIZES {
            bench.row(verb, bytes).expect("a reading");
        }
    }
    if wanted("counts") {
        bench.counts().expect("a reading");
    }
    if wanted("peer") {
        bench.peer_rows().expect("a reading");
        bench.peer_counts().expect("a reading");
    }
    bench.links.check().expect("the other one was there");
    bench.bed.stream.synchronize().expect("drained");
    say("done");
    bench.comm.finalize().expect("ended");
}

impl Bench {
    fn together(&self) {
        say("ready");
        assert_eq!(listen(), "on");
    }

    fn enqueue(&self, verb: &str, bytes: usize) {
        let (bed, comm, on) = (&self.bed, &self.comm, self.bed.on());
        let (whole, half) = (bytes / 2, bytes / 4);
        let span = |buffer, len| bed.span(buffer, DType::Bf16, len);
        let (from, to) = (self.from, self.to);
        let done = match verb {
            "all_to_all" => comm.all_to_all(span(from, whole), span(to, whole), on),
            "all_gather" => comm.all_gather(span(from, half), span(to, whole), on),
            "all_reduce" => comm.all_reduce(span(from, whole), span(to, whole), Reduce::Sum, on),
            _ => comm.reduce_scatter(span(from, whole), span(to, half), Reduce::Sum, on),
        };
        done.expect("enqueued");
    }

    /// Microseconds a call on the device and on the host, the median of five readings of `times`.
    fn time(&self, times: usize, run: &dyn Fn()) -> Result<(f64, f64), CudaError> {
        let stream = &self.bed.stream;
        let mut readings = Vec::new();
        for reading in 0..6 {
            let [first, last] = [Event::new(&self.bed.gpu)?, Event::new(&self.bed.gpu)?];
            self.together();
            // What comes first waits for the other rank.
            run();
            stream.record(&first)?;
            let began = Instant::now();
            for _ in 0..times {
                run();
            }
            let host = began.elapsed().as_secs_f64() * 1e6 / times as f64;
            stream.record(&last)?;
            stream.synchronize()?;
            let us = f64::from(first.milliseconds_to(&last)?) * 1e3 / times as f64;
            if reading > 0 {
                readings.push((us, host));
            }
        }
        readings.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(readings[2])
    }

    fn row(&self, verb: &str, bytes: usize) -> Result<(), CudaError> {
        let bus = bytes as f64 * if verb == "all_reduce" { 1.0 } else { 0.5 };
        self.print(&format!("{verb} | {bytes}"), (bytes, bus), &|| self.enqueue(verb, bytes))
    }

    /// One line: called one by one, and twenty in a graph.
    fn print(
        &self,
        name: &str,
        (bytes, bus): (usize, f64),
        run: &dyn Fn(),
    ) -> Result<(), CudaError> {
        const IN_GRAPH: usize = 20;
        let times = if bytes < 16 << 20 { 50 } else { 10 };
        let (us, host) = self.time(times, run)?;
        let graph = self.bed.stream.capture(|| {
            (0..IN_GRAPH).for_each(|_| run());
            Ok::<(), CudaError>(())
        })?;
        let launch = || self.bed.stream.launch_graph(&graph).expect("launched");
        let graph_us = self.time(times / 10, &launch)?.0 / IN_GRAPH as f64;
        if self.comm.rank() == 0 {
            let column = |us: f64| format!("{us:.1} | {:.1}", bus / us / 1e3);
            println!("  {name} | {} | {} | {host:.1}", column(us), column(graph_us));
        }
        Ok(())
    }

    /// Windows: all-to-all of bytes, and rows by index, all of them to the other rank.
    fn peer_rows(&mut self) -> Result<(), CudaError> {
        const ROW: usize = 4096;
        for bytes in SIZES.into_iter().filter(|bytes| *bytes >= 512) {
            let row_bytes = (bytes / 2).min(ROW);
            let half = (bytes / 2 / row_bytes) as u32;
            let starts = self.bed.words(&[0, half, 2 * half]);
            let places = self.bed.words(&[0, half]);
            for blocks in [8, 16, 32, 64, 132] {
                if (2 * half as usize) < blocks && blocks > 8 {
                    continue;
                }
                let op = self.moving((starts, places, None), row_bytes, blocks);
                let name = format!("peer all_to_all, {blocks} blocks | {bytes}");
                let run = || self.move_rows(&op);
                self.print(&name, (bytes, bytes as f64 * 0.5), &run)?;
            }
        }
        for (rows, row_bytes) in [(8192, 4096), (16384, 4096), (32768, 4096), (16384, 2048)] {
            let mut indices: Vec<u32> = (0..rows).collect();
            // Rows as routers leave them: from anywhere.
            indices.sort_by_key(|i| i.wrapping_mul(0x9e37_79b1));
            let take = Some(self.bed.words(&indices));
            let list = if self.comm.rank() == 0 { [0, 0, rows] } else { [0, rows, rows] };
            let (starts, places) = (self.bed.words(&list), self.bed.words(&[0, 0]));
            let bytes = rows as usize * row_bytes;
            for blocks in [8, 16, 24, 32] {
                let op = self.moving((starts, places, take), row_bytes, blocks);
                let name = format!("peer dispatch, {blocks} blocks, {row_bytes} | {bytes}");
                self.print(&name, (bytes, bytes as f64), &|| self.move_rows(&op))?;
            }
        }
        Ok(())
    }

    fn moving(
        &self,
        (starts, places, take): (Buffer, Buffer, Option<Buffer>),
        row_bytes: usize,
        blocks: usize,
    ) -> MoveRows {
        let (from, room_rows) = (self.from, (256 << 20) / row_bytes);
        MoveRows { from, row_bytes, take, starts, places, room: 0, room_rows, blocks, step: 0 }
    }

    fn move_rows(&self, op: &MoveRows) {
        self.links.move_rows((&self.bed.stream, &self.bed.arena), op).expect("enqueued");
    }

    fn peer_counts(&mut self) -> Result<(), CudaError> {
        let [values, out] = [(); 2].map(|()| self.bed.words(&[1; 2 * COUNTS]));
        let on = (&self.bed.stream, &self.bed.arena);
        let run = || self.links.exchange_counts(on, values, out, 0).expect("enqueued");
        self.print(&format!("peer counts | {}", 4 * COUNTS), (4 * COUNTS, 0.0), &run)?;
        let mut host = PinnedBuffer::<u32>::new(&self.bed.gpu, 2 * COUNTS)?;
        let mut all = Vec::new();
        self.together();
        for _ in 0..200 {
            let began = Instant::now();
            run();
            host.read_from(&self.bed.stream, &self.bed.arena, out)?;
            all.push(began.elapsed().as_secs_f64() * 1e6);
        }
        all.sort_by(f64::total_cmp);
        if self.comm.rank() == 0 {
            let (bytes, us) = (4 * COUNTS, all[all.len() / 2]);
            println!("  peer counts | {bytes} | {us:.1} us until the host has them");
        }
        Ok(())
    }

    /// Counts to the other rank and from it, and onto the host: what a dispatch by NCCL waits for.
    fn counts(&self) -> Result<(), CudaError> {
        let (bed, bytes) = (&self.bed, 4 * COUNTS);
        let mut host = PinnedBuffer::<u8>::new(&bed.gpu, bytes)?;
        let part = self.to.slice(0, bytes);
        let mut all = Vec::new();
        self.together();
        for _ in 0..200 {
            let began = Instant::now();
            let (from, to) = (self.from, self.to);
            let [from, to] = [from, to].map(|buffer| bed.span(buffer, DType::U32, COUNTS));
            self.comm.all_to_all(from, to, bed.on()).expect("enqueued");
            host.read_from(&bed.stream, &bed.arena, part)?;
            all.push(began.elapsed().as_secs_f64() * 1e6);
        }
        all.sort_by(f64::total_cmp);
        if self.comm.rank() == 0 {
            println!("  counts | {bytes} | {:.1} us until the host has them", all[all.len() / 2]);
        }
        Ok(())
    }
}
