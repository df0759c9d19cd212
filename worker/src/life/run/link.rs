//! The adopted control stream: one task that reads, one that writes.

use super::Happened;
use crate::life::control::{FrameError, read_frame, write_frame};
use crate::failure::chain;
use crate::life::session::Event;
use moejob_protocol::message::Frame;
use moejob_protocol::{PROTOCOL_VERSION, Up};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::server::TlsStream;

/// Reports that wait for the leader to read; a leader that lets so many wait is lost.
const REPORTS_MAX: usize = 256;
/// A leader heartbeats every 500 ms; silence for as long as its lease lasts means that it is cut
/// off or replaced.
const LEADER_SILENCE_MS: u64 = 10_000;

pub struct Link {
    pub number: u64,
    reports: mpsc::Sender<Frame<Up>>,
    reader: JoinHandle<()>,
    /// Taken by `finish`.
    writer: Option<JoinHandle<()>>,
}

impl Link {
    pub fn start(
        number: u64,
        stream: TlsStream<TcpStream>,
        happened: mpsc::Sender<Happened>,
    ) -> Link {
        let (from, to) = tokio::io::split(stream);
        let (reports, queue) = mpsc::channel(REPORTS_MAX);
        let reader = tokio::spawn(read(number, from, happened.clone()));
        let writer = Some(tokio::spawn(write(number, to, queue, happened)));
        Link { number, reports, reader, writer }
    }

    /// # Errors
    /// Why the leader does not hear any more.
    pub fn send(&self, term: u64, attempt: u32, body: Up) -> Result<(), String> {
        let frame = Frame { v: PROTOCOL_VERSION, term, attempt, body };
        self.reports.try_send(frame).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => format!("{REPORTS_MAX} reports wait"),
            mpsc::error::TrySendError::Closed(_) => "its stream broke".to_string(),
        })
    }

    /// Writes what waits, and closes.
    pub async fn finish(mut self) {
        let (none, _) = mpsc::channel(1);
        self.reports = none;
        if let Some(writer) = self.writer.take() {
            let _ = writer.await;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.reader.abort();
        if let Some(writer) = &self.writer {
            writer.abort();
        }
    }
}

async fn read(number: u64, mut from: impl AsyncRead + Unpin, happened: mpsc::Sender<Happened>) {
    loop {
        let event = match read_frame(&mut from, Duration::from_millis(LEADER_SILENCE_MS)).await {
            Ok(frame) => Event::Frame(frame),
            // Nothing of a frame was read yet, so the stream can go on.
            Err(FrameError::Silent { .. }) => Event::LeaderSilent,
            Err(error) => Event::LeaderLost { why: chain(&error) },
        };
        let lost = matches!(event, Event::LeaderLost { .. });
        let sent = happened.send(Happened::Link { number, event }).await;
        if lost || sent.is_err() {
            return;
        }
    }
}

async fn write(
    number: u64,
    mut to: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Frame<Up>>,
    happened: mpsc::Sender<Happened>,
) {
    while let Some(frame) = queue.recv().await {
        if let Err(error) = write_frame(&mut to, &frame).await {
            let event = Event::LeaderLost { why: chain(&error) };
            let _ = happened.send(Happened::Link { number, event }).await;
            return;
        }
    }
    let _ = to.shutdown().await;
}
