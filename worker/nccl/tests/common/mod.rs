//! Two processes, a GPU each, of the program that runs: its parent starts them again with a part to
//! play, carries lines between them and ends them.
#![allow(dead_code, reason = "each test uses a part")]

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moejob_kernels::cuda::{Arena, Compiler, Gpu, default_cache_dir};
use moejob_kernels::peer::{PeerDesc, PeerLinks};
use moejob_kernels::{ArenaPlan, Buffer};
use moejob_nccl::{Comm, Config, DType, Library, Seat, Span, Stream, UniqueId};

pub const PART: &str = "MOEJOB_LINKS_PART";
const RANK: &str = "MOEJOB_LINKS_RANK";
/// What a child says to its parent begins so; the rest of its output is passed on.
const MARK: &str = "@ ";

/// Why the two cannot run here; none: they can.
pub fn lacking() -> Option<String> {
    match Gpu::count() {
        Err(error) => return Some(error.to_string()),
        Ok(count) if count < 2 => return Some(format!("{count} GPUs, two are needed")),
        Ok(_) => {}
    }
    Library::load().err().map(|error| error.to_string())
}

/// Leads a program of tests to its test `part`.
pub const HERE: [&str; 3] = ["--exact", "part", "--nocapture"];

/// The GPUs, which one test at a time has; none, told with the reason, where a test cannot run.
pub fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    if let Some(reason) = lacking() {
        println!("skipped: {reason}");
        return None;
    }
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The part that this process was started to play, with its rank.
pub fn part() -> Option<(String, u32)> {
    let rank = std::env::var(RANK).ok()?.parse().ok()?;
    Some((std::env::var(PART).ok()?, rank))
}

/// One of the two, as its parent sees it. Killed when it is dropped.
pub struct Peer {
    pub process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    name: String,
}

impl Peer {
    /// Starts this program again; `arguments` lead it to where `part` is asked for.
    pub fn start(part: &str, rank: u32, arguments: &[&str]) -> Peer {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args(arguments)
            .env(PART, part)
            .env(RANK, rank.to_string())
            // The tests are to see that this does no harm, and windows need it.
            .env("CUDA_MODULE_LOADING", "EAGER")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        let (told, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The first word may stand behind what the test's runner has printed.
                match line.split_once(MARK) {
                    Some((_, word)) => {
                        if told.send(word.to_owned()).is_err() {
                            return;
                        }
                    }
                    None if line.starts_with("  ") => println!("{line}"),
                    None => {}
                }
            }
        });
        Peer { process, input, lines, name: format!("{part} {rank}") }
    }

    pub fn tell(&mut self, word: &str) {
        // A peer that is dead does not hear it; what waits for its answer says so.
        let _ = writeln!(self.input, "{word}").and_then(|()| self.input.flush());
    }

    pub fn hear(&mut self, within: Duration) -> String {
        match self.lines.recv_timeout(within) {
            Ok(word) => word,
            Err(error) => panic!("{} said nothing within {within:?}: {error}", self.name),
        }
    }

    pub fn expect(&mut self, word: &str) {
        assert_eq!(self.hear(Duration::from_secs(60)), word, "{}", self.name);
    }

    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    pub fn ends_well(mut self) {
        let status = self.process.wait().expect("a child of ours");
        assert!(status.success(), "{}: {status}", self.name);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A word to the parent.
pub fn say(word: &str) {
    println!("{MARK}{word}");
}

/// A word of the parent's.
pub fn listen() -> String {
    let mut line = String::new();
    let bytes = std::io::stdin().read_line(&mut line).expect("the parent's words");
    assert!(bytes > 0, "the parent is gone");
    line.trim_end().to_owned()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Vec<u8> {
    let digit = |c: u8| (c as char).to_digit(16).expect("a digit") as u8;
    text.as_bytes().chunks(2).map(|two| digit(two[0]) << 4 | digit(two[1])).collect()
}

/// The parent's side of [`meet`]: carries an id.
pub fn introduce(first: &mut Peer, second: &mut Peer) {
    let id = first.hear(Duration::from_secs(60));
    second.tell(&id);
}

/// A communicator of the two. Rank 0 makes the id and says it, rank 1 is told it.
pub fn meet(library: &Library, rank: u32, config: &Config) -> Comm {
    let id = match rank {
        0 => {
            let id = UniqueId::new(library).expect("an id");
            say(&hex(id.bytes()));
            id
        }
        _ => UniqueId::from_bytes(unhex(&listen()).try_into().expect("an id's bytes")),
    };
    Comm::init(library, Seat { rank, world: 2 }, &id, config).expect("the other one")
}

/// The other one's file for this one's. Rank 0 says where they meet, rank 1 is told it.
pub fn swap_files(rank: u32, file: &OwnedFd) -> OwnedFd {
    let mut socket = match rank {
        0 => {
            let name = format!("moejob-links-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            // One of an earlier process with this number.
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(&path).expect("a socket");
            say(path.to_str().expect("a name"));
            let socket = listener.accept().expect("the other one").0;
            std::fs::remove_file(&path).expect("ours");
            socket
        }
        _ => UnixStream::connect(listen()).expect("the other one"),
    };
    use rustix::net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(&socket, &[IoSlice::new(&[1])], &mut control, SendFlags::empty()).expect("sent");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("received");
    let theirs = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    // Both have theirs before either goes on and closes.
    socket.write_all(&[2]).and_then(|()| socket.read_exact(&mut [0])).expect("met");
    theirs.expect("a file")
}

/// Links of the two, with `rooms` bytes of rooms each.
pub fn link(bed: &Bed, rank: u32, rooms: usize, patience: Duration) -> PeerLinks {
    let compiler = Compiler::new(&bed.gpu, default_cache_dir()).expect("NVRTC");
    let desc = PeerDesc { positions: 2, me: rank as usize, rooms, patience };
    let mut links = PeerLinks::new(&compiler, desc).expect("a window");
    // Nothing but the window: it shares no arena.
    let files = links.export().expect("a file");
    let theirs = swap_files(rank, &files[0]);
    links.connect(1 - rank as usize, vec![theirs]).expect("opened");
    links
}

/// A GPU with an arena and a stream.
pub struct Bed {
    pub gpu: Gpu,
    pub arena: Arena,
    pub stream: moejob_kernels::cuda::Stream,
    plan: ArenaPlan,
}

impl Bed {
    pub fn new(rank: u32, bytes: usize) -> Bed {
        let gpu = Gpu::open(rank as usize).expect("a GPU");
        let (arena, stream) = (Arena::new(&gpu, bytes), gpu.stream());
        let (arena, stream) = (arena.expect("memory"), stream.expect("a stream"));
        Bed { gpu, arena, stream, plan: ArenaPlan::new() }
    }

    pub fn bytes(&mut self, len: usize) -> Buffer {
        self.plan.alloc(moejob_kernels::DType::U8, len)
    }

    /// What is allocated from here on lies where the first buffers lie.
    pub fn forget(&mut self) {
        self.plan = ArenaPlan::new();
    }

    pub fn words(&mut self, values: &[u32]) -> Buffer {
        let buffer = self.plan.alloc(moejob_kernels::DType::U32, values.len());
        self.arena.write(buffer, values).expect("written");
        buffer
    }

    /// The first `len` elements of `buffer`.
    pub fn span(&self, buffer: Buffer, dtype: DType, len: usize) -> Span {
        assert!(len * dtype.size() <= buffer.bytes(), "{buffer:?}");
        // SAFETY: the arena's; it is dropped behind the communicators.
        unsafe { Span::new(self.arena.address(buffer), dtype, len) }
    }

    pub fn on(&self) -> Stream {
        // SAFETY: of this GPU, and dropped behind the communicators.
        unsafe { Stream::new(self.stream.raw()) }
    }

    pub fn drained(&self) -> bool {
        self.stream.is_idle().unwrap_or(false)
    }
}
