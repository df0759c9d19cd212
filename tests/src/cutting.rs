//! A proxy between an operator and the API server that counts the operator's writes, and at one of
//! them ends the operator: before the API server has heard of it, or before the operator hears
//! that it was done. It may also spoil what the operator sees (`View`).
//!
//! ```text
//! operator --plain HTTP--> proxy --TLS--> API server
//!                            | write n: SIGKILL to the operator, nothing of it goes on
//! ```
//!
//! Renewals of the lease and token reviews change nothing that is compared; they do not count.

mod told;

pub use told::View;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use told::{Events, find};
use tokio::time::{Instant, sleep_until};

/// More than any request of an operator.
const REQUEST_BYTES_MAX: usize = 4 << 20;

/// At which write the operator ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The API server never hears of this write.
    Before(usize),
    /// It is done, and the operator never hears of that.
    After(usize),
    /// After each one of them.
    AfterEach,
}

/// One write of the operator, and the status code of its answer.
#[derive(Clone, Debug)]
pub struct Write {
    /// `POST pods`, `PATCH moejobs/status`.
    pub what: String,
    /// The object's.
    pub name: String,
    pub answer: Option<u16>,
}

#[derive(Default)]
struct Book {
    writes: Vec<Write>,
    cut: Option<Cut>,
    cuts: usize,
    operator: Option<i32>,
    /// Connections of an operator that was ended are of no use to anybody.
    era: u32,
    view: View,
    /// How many events its watches have told, by resource.
    events: BTreeMap<String, usize>,
    /// The event that was never seen.
    unseen: Option<String>,
}

/// An answer that is awaited or under way on a connection.
enum Answer {
    /// Of the write with this index, if it counts.
    Write(Option<usize>),
    /// Of a list of this resource, or of a watch.
    List(String),
    Watch(String, Events),
}

#[derive(Clone)]
pub struct Proxy {
    book: Arc<Mutex<Book>>,
    connector: TlsConnector,
    server: (String, u16),
    pub port: u16,
}

impl Proxy {
    /// Listens at a port of its own of the loopback, for as long as the runtime lives.
    ///
    /// # Errors
    /// When the root is no certificate, or there is no port.
    pub async fn start(server: (String, u16), root: &str) -> io::Result<Proxy> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let mut roots = RootCertStore::empty();
        let certificates = CertificateDer::pem_slice_iter(root.as_bytes());
        roots.add_parsable_certificates(certificates.filter_map(Result::ok));
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let proxy = Proxy {
            book: Arc::default(),
            connector: TlsConnector::from(Arc::new(config)),
            server,
            port: listener.local_addr()?.port(),
        };
        let serving = proxy.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let proxy = serving.clone();
                let era = proxy.book().era;
                tokio::spawn(async move { proxy.relay(tcp, era).await });
            }
        });
        Ok(proxy)
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().expect("no panic holds it")
    }

    /// Begins anew: no writes so far, and a view as it should be.
    pub fn begin(&self, cut: Option<Cut>) {
        let mut book = self.book();
        (book.writes, book.cut, book.cuts) = (Vec::new(), cut, 0);
        (book.view, book.events, book.unseen) = (View::default(), BTreeMap::new(), None);
    }

    /// The operator's view is spoilt from now on.
    pub fn spoil(&self, view: View) {
        self.book().view = view;
    }

    /// How many events the watches have told since the beginning, by resource.
    pub fn events(&self) -> BTreeMap<String, usize> {
        self.book().events.clone()
    }

    /// The event that was never seen, where there was one.
    pub fn unseen(&self) -> Option<String> {
        self.book().unseen.clone()
    }

    /// Who is ended.
    pub fn watch(&self, operator: i32) {
        self.book().operator = Some(operator);
    }

    /// Ends the operator now.
    pub fn strike(&self) {
        end(&mut self.book());
    }

    pub fn writes(&self) -> Vec<Write> {
        self.book().writes.clone()
    }

    /// How often the operator was ended.
    pub fn cuts(&self) -> usize {
        self.book().cuts
    }

    async fn relay(&self, mut operator: TcpStream, era: u32) -> io::Result<()> {
        let server = TcpStream::connect(self.server.clone()).await?;
        let name = ServerName::try_from(self.server.0.clone()).map_err(io::Error::other)?;
        let mut server = self.connector.connect(name, server).await?;
        let (mut asked, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
        // The request whose answer comes next: a connection asks one thing at a time.
        let mut waiting = Answer::Write(None);
        // What comes late, in order.
        let mut late: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
        loop {
            let due = late.front().map(|(due, _)| *due);
            tokio::select! {
                read = operator.read_buf(&mut asked) => {
                    if read? == 0 || asked.len() > REQUEST_BYTES_MAX {
                        return Ok(());
                    }
                    while let Some((request, length)) = request(&asked)? {
                        match self.ask(era, request, &asked[..length]) {
                            Some(answer) => waiting = answer,
                            None => return Ok(()),
                        }
                        server.write_all(&asked[..length]).await?;
                        server.flush().await?;
                        asked.drain(..length);
                    }
                }
                read = server.read(&mut chunk) => {
                    let read = read?;
                    if read == 0 {
                        for (due, bytes) in late {
                            sleep_until(due).await;
                            operator.write_all(&bytes).await?;
                        }
                        return Ok(());
                    }
                    match self.answer(era, &mut waiting, &chunk[..read]) {
                        Some((bytes, delay)) => late.push_back((Instant::now() + delay, bytes)),
                        None => return Ok(()),
                    }
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    if let Some((_, bytes)) = late.pop_front() {
                        operator.write_all(&bytes).await?;
                    }
                }
            }
        }
    }

    /// What is to be answered. None: it does not go on.
    fn ask(&self, era: u32, request: (String, String), text: &[u8]) -> Option<Answer> {
        let (verb, path) = request;
        let mut book = self.book();
        if era != book.era {
            return None;
        }
        let reads = matches!(verb.as_str(), "GET" | "HEAD" | "OPTIONS");
        if let Some(resource) = of_all(&path).filter(|_| verb == "GET").map(str::to_string) {
            return Some(match path.contains("watch=") {
                true => Answer::Watch(resource, Events::default()),
                false => Answer::List(resource),
            });
        }
        if reads || path.contains("/leases") || path.contains("/tokenreviews") {
            return Some(Answer::Write(None));
        }
        let what = format!("{verb} {}", resource(&path));
        book.writes.push(Write { what, name: named(text), answer: None });
        let number = book.writes.len();
        if book.cut == Some(Cut::Before(number)) {
            end(&mut book);
            return None;
        }
        Some(Answer::Write(Some(number - 1)))
    }

    /// What the operator is to hear of it, and how late. None: nothing any more.
    fn answer(&self, era: u32, to: &mut Answer, text: &[u8]) -> Option<(Vec<u8>, Duration)> {
        let mut book = self.book();
        let at_once = Duration::ZERO;
        let index = match to {
            Answer::Write(index) => index.take(),
            _ if era != book.era => return None,
            Answer::List(resource) => return Some((text.to_vec(), book.delay(resource))),
            Answer::Watch(resource, events) => {
                let on = events.pass(text, |line| book.sees(resource, line));
                return Some((on, book.delay(resource)));
            }
        };
        let Some(index) = index else {
            return (era == book.era).then(|| (text.to_vec(), at_once));
        };
        let code = text.get(9..12).and_then(|code| std::str::from_utf8(code).ok()?.parse().ok());
        if let Some(write) = book.writes.get_mut(index) {
            write.answer = code;
        }
        if era != book.era {
            return None;
        }
        let done = code.is_some_and(|code| code < 300);
        let cut = match book.cut {
            Some(Cut::After(number)) => number == index + 1,
            Some(Cut::AfterEach) => done,
            Some(Cut::Before(_)) | None => false,
        };
        if cut {
            end(&mut book);
            return None;
        }
        Some((text.to_vec(), at_once))
    }
}

impl Book {
    fn delay(&self, resource: &str) -> Duration {
        let counts = !self.view.after_a_cut || self.cuts > 0;
        let late = self.view.late.iter().filter(|(of, _)| counts && of == resource);
        Duration::from_millis(late.map(|(_, millis)| *millis).sum())
    }

    /// Whether this event of a watch goes on; counts it.
    fn sees(&mut self, resource: &str, line: &[u8]) -> bool {
        let event: serde_json::Value = serde_json::from_slice(line).unwrap_or_default();
        let kind = event["type"].as_str().unwrap_or_default();
        if !matches!(kind, "ADDED" | "MODIFIED" | "DELETED") {
            return true;
        }
        let count = self.events.entry(resource.to_string()).or_default();
        let number = std::mem::replace(count, *count + 1);
        let of = self.view.unseen.as_ref();
        let sees = !of.is_some_and(|(of, unseen)| of == resource && *unseen == number);
        if !sees {
            let name = event["object"]["metadata"]["name"].as_str().unwrap_or_default();
            self.unseen = Some(format!("{resource} {number}: {kind} {name}"));
        }
        sees
    }
}

fn end(book: &mut Book) {
    book.cuts += 1;
    book.era += 1;
    if let Some(operator) = book.operator.take() {
        crate::send(operator, rustix::process::Signal::KILL);
    }
}

/// Verb and path of the first whole request, and its length in bytes.
fn request(bytes: &[u8]) -> io::Result<Option<((String, String), usize)>> {
    let Some(head) = find(bytes, b"\r\n\r\n") else { return Ok(None) };
    let text = String::from_utf8_lossy(&bytes[..head]);
    let mut lines = text.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ').map(str::to_string);
    let (Some(verb), Some(path)) = (words.next(), words.next()) else {
        return Err(io::Error::other("not HTTP"));
    };
    let headers: HashMap<String, &str> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim()))
        .collect();
    if headers.contains_key("transfer-encoding") {
        return Err(io::Error::other("a request without a length"));
    }
    let body = headers.get("content-length").map_or(Ok(0), |length| length.parse::<usize>());
    let length = head + 4 + body.map_err(io::Error::other)?;
    Ok((bytes.len() >= length).then_some(((verb, path), length)))
}

/// The resource of a list or of a watch of all namespaces: what an operator sees the cluster by.
fn of_all(path: &str) -> Option<&str> {
    let path = path.split('?').next()?;
    let resource = path.rsplit('/').next()?;
    let seen = ["pods", "moejobs", "nodes", "priorityclasses"].contains(&resource);
    (seen && !path.contains("/namespaces/")).then_some(resource)
}

/// `pods` of `/api/v1/namespaces/default/pods/x`, `moejobs/status` with its subresource.
fn resource(path: &str) -> String {
    let path = path.split('?').next().unwrap_or_default();
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let at = parts.iter().position(|part| *part == "namespaces").map_or(0, |at| at + 2);
    let of = parts.get(at).copied().unwrap_or(path);
    match parts.get(at + 2) {
        Some(subresource) => format!("{of}/{subresource}"),
        None => of.to_string(),
    }
}

/// The name in the object that a request carries.
fn named(request: &[u8]) -> String {
    let head = find(request, b"\r\n\r\n").unwrap_or(0);
    let body = request.get(head + 4..).unwrap_or_default();
    let object: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    object["metadata"]["name"].as_str().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        let one = b"PATCH /apis/a/v1/namespaces/n/moejobs/j/status?x=1 HTTP/1.1\r\n\
                    Content-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\n\r\n";
        let ((verb, path), length) = request(one).expect("HTTP").expect("whole");
        assert_eq!((verb.as_str(), &one[length..length + 3]), ("PATCH", &b"GET"[..]));
        assert_eq!(resource(&path), "moejobs/status");
        assert!(request(&one[..length - 1]).expect("HTTP").is_none());
        assert_eq!(resource("/api/v1/namespaces/n/pods"), "pods");
        assert_eq!(resource("/api/v1/namespaces/n/secrets/s"), "secrets");
        assert!(request(b"x\r\n\r\n").is_err());
        assert_eq!(of_all("/apis/moejob.dev/v1alpha1/moejobs?watch=true"), Some("moejobs"));
        assert_eq!(of_all("/api/v1/namespaces/n/pods"), None);
    }
}
