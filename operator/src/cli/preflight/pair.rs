//! Two machines that measure together, without a leader: what a leader passes on goes by one
//! connection between them.
//!
//! ```text
//! waits                              comes
//!   <-- Comes { secret, devices } --
//!   -- Meets (a place for NCCL) -->        its GPUs open meanwhile
//!   <-- Found --        -- Found -->       what each has measured, judged by both
//! ```
//! The secret keeps out whoever comes by chance. Both sides trust the network between them no more
//! than NCCL does, which has no secrets at all.

use moejob_protocol::pair::{Meeting, PairOrder, PairSaid};
use moejob_protocol::preflight::{MEASURED_MAX, Measured};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Of what the two say to each other.
const VERSION: u32 = 1;
/// A line with all measurements of 64 GPUs is some 100 KiB.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// The other side measures for half a minute at most.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Strangers who say nothing, or nonsense, before the other machine comes.
const STRANGERS_MAX: usize = 64;
/// Whoever connects must say at once who it is.
const COMES_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize, Deserialize)]
enum Line {
    Comes { version: u32, secret: String, devices: u32, rdma: bool },
    Meets(Meeting),
    Found(Vec<Measured>),
    Refused(String),
}

/// What both machines have measured.
#[derive(Debug, PartialEq)]
pub struct Both {
    pub own: Vec<Measured>,
    pub other: Vec<Measured>,
}

/// Measures as the order says, and tells a place to meet and what was measured.
pub trait Measure: FnMut(&PairOrder, &mut dyn FnMut(PairSaid)) {}
impl<F: FnMut(&PairOrder, &mut dyn FnMut(PairSaid))> Measure for F {}

/// What the two must have in common.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    pub secret: &'a str,
    pub devices: u32,
    pub rdma: bool,
}

impl Terms<'_> {
    fn order(&self, side: u32, meeting: Option<Meeting>) -> PairOrder {
        PairOrder { number: 1, side, devices: self.devices, rdma: self.rdma, meeting }
    }
}

/// Waits for the other machine until `until`, and measures with it.
///
/// # Errors
/// In words: nobody comes in time, or the connection breaks.
pub fn wait(
    listener: &TcpListener,
    terms: Terms,
    until: Instant,
    mut measure: impl Measure,
) -> Result<Both, String> {
    let mut wire = welcome(listener, terms, until)?;
    let (mut own, mut broken, mut met) = (Vec::new(), None, false);
    measure(&terms.order(0, None), &mut |said| match said {
        PairSaid::Meets(meeting) => {
            met = true;
            broken = wire.say(&Line::Meets(meeting)).err();
        }
        PairSaid::Measured(measured) => own = measured,
    });
    if !met {
        let why = "the GPUs of the machine that waits have no place to meet";
        let _ = wire.say(&Line::Refused(why.to_string()));
        return Ok(Both { own, other: Vec::new() });
    }
    if let Some(error) = broken {
        return Err(format!("the other machine is gone: {error}"));
    }
    wire.say(&Line::Found(own.clone())).map_err(gone)?;
    Ok(Both { own, other: wire.found()? })
}

/// The first that knows the secret and has as many GPUs; others are told why not.
fn welcome(listener: &TcpListener, terms: Terms, until: Instant) -> Result<Wire, String> {
    listener.set_nonblocking(true).map_err(|error| error.to_string())?;
    let mut strangers = 0;
    loop {
        if Instant::now() >= until {
            return Err("no other machine has come".to_string());
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            Err(error) => return Err(error.to_string()),
        };
        let _ = stream.set_nonblocking(false);
        let Ok(mut wire) = Wire::new(stream, COMES_LIMIT) else { continue };
        let refusal = match wire.hear() {
            Ok(Line::Comes { version, secret, devices, rdma }) => {
                let known = moejob_identity::is_same(&secret, terms.secret);
                match (known, version == VERSION, devices == terms.devices) {
                    (false, ..) => Some("it has another secret".to_string()),
                    (_, false, _) => Some("it is of another release".to_string()),
                    (_, _, false) => {
                        let own = terms.devices;
                        Some(format!("it has {devices} GPUs, and the one that waits {own}"))
                    }
                    _ if rdma != terms.rdma => Some("it has a profile without rdma".to_string()),
                    _ => None,
                }
            }
            _ => Some("it does not say who it is".to_string()),
        };
        let Some(why) = refusal else {
            return wire.patient().map_err(|error| error.to_string());
        };
        eprintln!("moejob: a machine came that does not fit: {why}");
        let _ = wire.say(&Line::Refused(why));
        strangers += 1;
        if strangers >= STRANGERS_MAX {
            return Err(format!("{STRANGERS_MAX} others came, and none that fits"));
        }
    }
}

/// Comes to the machine that waits at `address`.
///
/// # Errors
/// In words: it is not there, or does not take this one.
pub fn come(address: &str, terms: Terms, mut measure: impl Measure) -> Result<Both, String> {
    let named = |error: io::Error| format!("{address}: {error}");
    let at = address.to_socket_addrs().map_err(named)?.next();
    let at = at.ok_or_else(|| format!("{address} is no address"))?;
    let stream = TcpStream::connect_timeout(&at, COMES_LIMIT).map_err(named)?;
    let mut wire = Wire::new(stream, ANSWER_LIMIT).map_err(named)?;
    let Terms { secret, devices, rdma } = terms;
    let secret = secret.to_string();
    wire.say(&Line::Comes { version: VERSION, secret, devices, rdma }).map_err(gone)?;
    let meeting = match wire.hear().map_err(gone)? {
        Line::Meets(meeting) if meeting.is_valid() => meeting,
        Line::Refused(why) => return Err(format!("{address} does not take this machine: {why}")),
        _ => return Err(format!("{address} says what is no place to meet")),
    };
    let mut own = Vec::new();
    measure(&terms.order(1, Some(meeting)), &mut |said| {
        if let PairSaid::Measured(measured) = said {
            own = measured;
        }
    });
    wire.say(&Line::Found(own.clone())).map_err(gone)?;
    Ok(Both { own, other: wire.found()? })
}

fn gone(error: io::Error) -> String {
    format!("the other machine is gone: {error}")
}

/// Lines of JSON, each bounded in length and time.
struct Wire {
    from: BufReader<TcpStream>,
    to: TcpStream,
}

impl Wire {
    fn new(stream: TcpStream, limit: Duration) -> io::Result<Wire> {
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        Ok(Wire { to: stream.try_clone()?, from: BufReader::new(stream) })
    }

    /// It has said who it is, and may take its time.
    fn patient(self) -> io::Result<Wire> {
        self.to.set_read_timeout(Some(ANSWER_LIMIT))?;
        self.to.set_write_timeout(Some(ANSWER_LIMIT))?;
        Ok(self)
    }

    fn say(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        self.to.write_all(text.as_bytes())
    }

    fn hear(&mut self) -> io::Result<Line> {
        let mut text = String::new();
        self.from.by_ref().take(LINE_BYTES_MAX).read_line(&mut text)?;
        if text.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&text)?)
    }

    fn found(&mut self) -> Result<Vec<Measured>, String> {
        match self.hear().map_err(gone)? {
            Line::Found(mut measured) => {
                measured.truncate(MEASURED_MAX);
                Ok(measured)
            }
            Line::Refused(why) => Err(format!("the other machine: {why}")),
            Line::Comes { .. } | Line::Meets(_) => {
                Err("the other machine says what is no measurement".to_string())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::pair::PAIR_CHECK;

    const TERMS: Terms = Terms { secret: "s3", devices: 8, rdma: true };

    /// A link that gives so many GB/s; side 0 meets where it is asked to.
    fn link(rate: f64, meets: bool) -> impl Measure {
        move |order: &PairOrder, say: &mut dyn FnMut(PairSaid)| {
            assert_eq!(order.side == 1, order.meeting.is_some());
            if order.side == 0 && meets {
                say(PairSaid::Meets(Meeting { id: "0f".repeat(128), bytes: 1 << 33 }));
            }
            say(PairSaid::Measured(vec![Measured::number(PAIR_CHECK, rate)]));
        }
    }

    fn listening() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        (listener, address)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn both_machines_know_what_both_have_measured() {
        let (listener, address) = listening();
        let waits = std::thread::spawn(move || wait(&listener, TERMS, soon(), link(181.0, true)));
        let came = come(&address, TERMS, link(179.0, true)).expect("it is taken");
        let waited = waits.join().expect("no panic").expect("it came");
        let rate = |rate: f64| vec![Measured::number(PAIR_CHECK, rate)];
        assert_eq!(waited, Both { own: rate(181.0), other: rate(179.0) });
        assert_eq!(came, Both { own: rate(179.0), other: rate(181.0) });
    }

    #[test]
    fn who_does_not_fit_is_told_why_and_the_next_one_is_taken() {
        let (listener, address) = listening();
        let waits = std::thread::spawn(move || wait(&listener, TERMS, soon(), link(1.0, true)));
        let refused = |terms: Terms| come(&address, terms, link(1.0, true)).expect_err("refused");
        let other = refused(Terms { secret: "other", ..TERMS });
        assert!(other.ends_with("does not take this machine: it has another secret"), "{other}");
        let fewer = refused(Terms { devices: 4, ..TERMS });
        assert!(fewer.ends_with("it has 4 GPUs, and the one that waits 8"), "{fewer}");
        let plain = refused(Terms { rdma: false, ..TERMS });
        assert!(plain.ends_with("it has a profile without rdma"), "{plain}");
        for nonsense in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\xff\n", b""] {
            let mut stream = TcpStream::connect(&address).expect("it listens");
            stream.write_all(nonsense).expect("it reads");
            stream.shutdown(std::net::Shutdown::Write).expect("said");
            let _ = stream.read_to_end(&mut Vec::new());
        }
        assert!(come(&address, TERMS, link(1.0, true)).is_ok());
        assert!(waits.join().expect("no panic").is_ok());
    }

    #[test]
    fn a_machine_without_gpus_says_so_to_both() {
        let (listener, address) = listening();
        let waits = std::thread::spawn(move || wait(&listener, TERMS, soon(), link(0.0, false)));
        let refused = come(&address, TERMS, link(1.0, true)).expect_err("nowhere to meet");
        assert!(refused.contains("have no place to meet"), "{refused}");
        let waited = waits.join().expect("no panic").expect("its own measurements");
        assert!(waited.other.is_empty() && waited.own.len() == 1);
    }

    #[test]
    fn nobody_is_waited_for_for_ever_and_nobody_comes_to_nothing() {
        let (listener, address) = listening();
        let nobody = wait(&listener, TERMS, Instant::now(), link(1.0, true));
        assert_eq!(nobody, Err("no other machine has come".to_string()));
        drop(listener);
        assert!(come(&address, TERMS, link(1.0, true)).is_err());
        let wrong = come("no address", TERMS, link(1.0, true)).expect_err("no address");
        assert!(wrong.starts_with("no address"), "{wrong}");
    }
}
