//! As much of HTTP/1 as a kubelet and a scraper speak: one GET a connection.
//!
//! Any pod may connect. Who has not asked yet holds a place that goes to the next one when there
//! are too many, oldest first: a kubelet asks at once, and is answered whoever else waits.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{sleep, timeout};

/// A request's head; more is not read. Tokens of service accounts take a tenth of it.
const REQUEST_BYTES_MAX: u64 = 16 << 10;
/// From the first byte of a connection to its last.
const REQUEST_MAX: Duration = Duration::from_secs(5);
/// Connections at once that have not asked yet; one more takes the place of the oldest.
const UNASKED_MAX: usize = 32;
/// Questions that are answered at once; one more waits.
const ANSWERS_MAX: usize = 32;
/// After an accept that failed, for want of file descriptors say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// Without the query.
    pub path: String,
    /// Of `Authorization: Bearer`.
    pub token: Option<String>,
}

/// Status line and text.
pub type Page = (&'static str, String);

/// Connections that have not asked yet, by their order. Whose sender is dropped is shut out.
type Unasked = Arc<Mutex<BTreeMap<u64, oneshot::Sender<()>>>>;

/// The place of a connection.
#[derive(Debug)]
pub struct Place {
    number: u64,
    unasked: Unasked,
    answers: Arc<Semaphore>,
    /// A connection that has asked holds these until it is answered: nobody takes its place.
    asked: Option<(oneshot::Sender<()>, OwnedSemaphorePermit)>,
}

impl Place {
    /// The question of its connection, when its turn has come to be answered. None when the stream
    /// ends before the head does.
    ///
    /// # Errors
    /// When the stream breaks.
    pub async fn read(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
    ) -> io::Result<Option<Request>> {
        let Some(request) = read(stream).await? else { return Ok(None) };
        let keeps = self.leave();
        let turn = Arc::clone(&self.answers).acquire_owned().await.ok();
        self.asked = keeps.zip(turn);
        Ok(self.asked.is_some().then_some(request))
    }

    fn leave(&self) -> Option<oneshot::Sender<()>> {
        let mut unasked = self.unasked.lock().unwrap_or_else(PoisonError::into_inner);
        unasked.remove(&self.number)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Hands each connection to `answer`, until the process ends.
///
/// # Errors
/// When nothing can listen there.
pub async fn serve<Answer>(
    at: SocketAddr,
    answer: impl Fn(TcpStream, Place) -> Answer,
) -> io::Result<()>
where
    Answer: Future<Output = io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind(at).await?;
    let (unasked, answers) = (Unasked::default(), Arc::new(Semaphore::new(ANSWERS_MAX)));
    for number in 0.. {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (keeps, shut_out) = oneshot::channel();
                let mut waiting = unasked.lock().unwrap_or_else(PoisonError::into_inner);
                waiting.insert(number, keeps);
                if waiting.len() > UNASKED_MAX {
                    waiting.pop_first();
                }
                drop(waiting);
                let (unasked, answers) = (Arc::clone(&unasked), Arc::clone(&answers));
                let answered = answer(stream, Place { number, unasked, answers, asked: None });
                tokio::spawn(async move {
                    // Who goes away early, or takes too long, gets nothing.
                    tokio::select! {
                        _ = timeout(REQUEST_MAX, answered) => {}
                        _ = shut_out => {}
                    }
                });
            }
            Err(error) => {
                tracing::debug!(%error, "accept failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    Ok(())
}

/// None when the stream ends before the head does.
///
/// # Errors
/// When the stream breaks.
pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Request>> {
    let mut head = Vec::new();
    let mut limited = stream.take(REQUEST_BYTES_MAX);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if limited.read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
    }
    Ok(Some(Request::of(&String::from_utf8_lossy(&head))))
}

/// # Errors
/// When the stream breaks.
pub async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    (status, body): Page,
) -> io::Result<()> {
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

impl Request {
    fn of(head: &str) -> Request {
        let mut lines = head.lines();
        let mut words = lines.next().unwrap_or_default().split_whitespace().map(str::to_string);
        let (method, target) = (words.next(), words.next().unwrap_or_default());
        let token = lines.find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let (kind, token) = value.trim().split_once(' ')?;
            let bearer = name.eq_ignore_ascii_case("authorization")
                && kind.eq_ignore_ascii_case("bearer");
            bearer.then(|| token.trim().to_string())
        });
        Request {
            method: method.unwrap_or_default(),
            path: target.split('?').next().unwrap_or_default().to_string(),
            token: token.filter(|token| !token.is_empty()),
        }
    }
}
