//! Frames of the control stream, for both of its ends.
//!
//! A frame is a 4-byte little-endian length, at most 4 MiB of a leader and 128 KiB of a worker, and
//! that many bytes of JSON. What a header claims costs no memory: the buffer grows with the bytes
//! that arrive.

use moejob_protocol::PROTOCOL_VERSION;
use moejob_protocol::message::{Frame, FrameBody};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// From the first byte of a frame to its last. A body of 4 MiB takes milliseconds on any network
/// that can train.
pub const FRAME_MS_MAX: u64 = 5_000;

/// The last part of a silence. When a process that was stopped (Ctrl-Z) goes on, its timers have
/// expired before anybody looked at its sockets; what came meanwhile is found by looking again.
const SECOND_LOOK_MS: u64 = 100;

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("the stream ended")]
    Ended,
    #[error("nothing came for {ms} ms")]
    Silent { ms: u128 },
    #[error("a frame was not complete after {FRAME_MS_MAX} ms")]
    Slow,
    #[error("a frame of {length} bytes; allowed are 1 to {most}")]
    Length { length: usize, most: usize },
    #[error("protocol version {found}, this side speaks {PROTOCOL_VERSION}")]
    Version { found: u32 },
    #[error("not a frame of this stream")]
    Json(#[from] serde_json::Error),
    #[error("the stream broke")]
    Io(#[source] io::Error),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> FrameError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => FrameError::Ended,
            _ => FrameError::Io(error),
        }
    }
}

/// Reads the next frame; the first byte must come within `silence`. Not cancel-safe.
///
/// # Errors
/// After any the stream is unusable.
pub async fn read_frame<Body: FrameBody>(
    stream: &mut (impl AsyncRead + Unpin),
    silence: Duration,
) -> Result<Frame<Body>, FrameError> {
    decode(&read_bytes::<Body>(stream, silence).await?)
}

/// Reads the bytes of the next frame, for [`decode`]; the first must come within `silence`. Not
/// cancel-safe.
///
/// # Errors
/// After any but `Silent` the stream is unusable.
pub async fn read_bytes<Body: FrameBody>(
    stream: &mut (impl AsyncRead + Unpin),
    silence: Duration,
) -> Result<Vec<u8>, FrameError> {
    let most = Body::BYTES_MAX;
    let mut length = [0; 4];
    let look = Duration::from_millis(SECOND_LOOK_MS).min(silence / 2);
    let first = match timeout(silence - look, stream.read(&mut length[..1])).await {
        Ok(first) => Ok(first),
        Err(_) => timeout(look, stream.read(&mut length[..1])).await,
    };
    match first.map_err(|_| FrameError::Silent { ms: silence.as_millis() })?? {
        0 => return Err(FrameError::Ended),
        count => assert_eq!(count, 1),
    }
    let rest = async {
        stream.read_exact(&mut length[1..]).await?;
        let length = u32::from_le_bytes(length) as usize;
        if length == 0 || length > most {
            return Err(FrameError::Length { length, most });
        }
        let mut bytes = Vec::new();
        stream.take(length as u64).read_to_end(&mut bytes).await?;
        if bytes.len() < length { Err(FrameError::Ended) } else { Ok(bytes) }
    };
    let bytes = timeout(Duration::from_millis(FRAME_MS_MAX), rest).await;
    bytes.map_err(|_| FrameError::Slow)?
}

/// # Errors
/// `Version` before `Json`: another version's body may look different.
pub fn decode<Body: DeserializeOwned>(bytes: &[u8]) -> Result<Frame<Body>, FrameError> {
    #[derive(Deserialize)]
    struct Version {
        v: u32,
    }
    let Version { v: found } = serde_json::from_slice(bytes)?;
    if found != PROTOCOL_VERSION {
        return Err(FrameError::Version { found });
    }
    Ok(serde_json::from_slice(bytes)?)
}

/// # Errors
/// `Length` when the body is too large to be read by anybody.
pub fn encode<Body: FrameBody>(frame: &Frame<Body>) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, frame)?;
    let length = bytes.len() - 4;
    if length > Body::BYTES_MAX {
        return Err(FrameError::Length { length, most: Body::BYTES_MAX });
    }
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes)
}

/// Writes and flushes one frame.
///
/// # Errors
/// See [`encode`]; `Io`.
pub async fn write_frame<Body: FrameBody>(
    stream: &mut (impl AsyncWrite + Unpin),
    frame: &Frame<Body>,
) -> Result<(), FrameError> {
    stream.write_all(&encode(frame)?).await?;
    Ok(stream.flush().await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::message::FRAME_BYTES_MAX;
    use moejob_protocol::{Down, Up};

    /// What the worker's reader says to `bytes`, after which the stream ends.
    async fn read(bytes: &[u8]) -> String {
        let mut stream = bytes;
        match read_frame::<Down>(&mut stream, Duration::from_millis(50)).await {
            Ok(frame) => format!("{:?} of attempt {}", frame.body, frame.attempt),
            Err(error) => error.to_string(),
        }
    }

    fn framed(json: &str) -> Vec<u8> {
        [&(json.len() as u32).to_le_bytes()[..], json.as_bytes()].concat()
    }

    #[tokio::test(start_paused = true)]
    async fn frames_and_what_is_not_one() {
        let good = r#"{"v":1,"term":1,"attempt":2,"body":"heartbeat"}"#;
        let not = "not a frame of this stream";
        let mut truncated = framed(good);
        truncated.pop();
        for (bytes, expected) in [
            (framed(good), "Heartbeat of attempt 2"),
            (vec![], "the stream ended"),
            (vec![3], "the stream ended"),
            (vec![3, 0, 0, 0, b'{'], "the stream ended"),
            (truncated, "the stream ended"),
            (vec![0; 4], "a frame of 0 bytes; allowed are 1 to 4194304"),
            (vec![0xff; 4], "a frame of 4294967295 bytes; allowed are 1 to 4194304"),
            (vec![1, 0, 64, 0], "a frame of 4194305 bytes; allowed are 1 to 4194304"),
            (b"GET / HTTP".to_vec(), "a frame of 542393671 bytes; allowed are 1 to 4194304"),
            (framed(r#"{"v":2,"new":[]}"#), "protocol version 2, this side speaks 1"),
            (framed(r#"{"v":0,"term":1}"#), "protocol version 0, this side speaks 1"),
            (framed("{}"), not),
            (framed("\0\0\0"), not),
            (framed("\u{feff}{}"), not),
            (framed(r#"{"v":1,"term":1,"attempt":2,"body":"heartbeat"} "x""#), not),
            (framed(r#"{"v":1,"term":1,"attempt":2,"body":"selfDestruct"}"#), not),
            (framed(r#"{"v":1,"term":1,"attempt":2,"body":"heartbeat","x":1}"#), not),
            (framed(r#"{"v":1,"v":1,"term":1,"attempt":2,"body":"heartbeat"}"#), not),
            (framed(r#"{"v":1,"term":-1,"attempt":2,"body":"heartbeat"}"#), not),
            (framed(r#"{"v":1,"term":1,"attempt":4294967296,"body":"heartbeat"}"#), not),
            (framed(r#"{"v":1,"term":1,"attempt":2,"body":{"leave":{}}}"#), not),
            (framed(&"[".repeat(100_000)), not),
        ] {
            assert_eq!(read(&bytes).await, expected, "{:?}", String::from_utf8_lossy(&bytes));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_or_silent_sender_is_left() {
        let silence = Duration::from_millis(700);
        let (mut near, _far) = tokio::io::duplex(64);
        let error = read_frame::<Down>(&mut near, silence).await.expect_err("silence");
        assert_eq!(error.to_string(), "nothing came for 700 ms");
        let (mut near, mut far) = tokio::io::duplex(64);
        tokio::spawn(async move {
            // One byte a second is a live sender, but never a frame in time.
            for byte in [200, 0, 0, 0].into_iter().chain([b' '; 200]) {
                let _ = far.write_all(&[byte]).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        let error = read_frame::<Down>(&mut near, silence).await.expect_err("slow");
        assert_eq!(error.to_string(), "a frame was not complete after 5000 ms");
    }

    /// A leader reads little from a worker, whatever its image.
    #[tokio::test(start_paused = true)]
    async fn a_worker_says_less_than_a_leader() {
        let frame = |body| Frame { v: PROTOCOL_VERSION, term: 1, attempt: 1, body };
        let long = frame(Up::Failed { exit_code: 1, message: "x".repeat(128 << 10), step: None });
        let error = encode(&long).expect_err("too long");
        assert!(matches!(error, FrameError::Length { most: 131_072, .. }), "{error}");
        let header = (140_000u32).to_le_bytes();
        let error = read_frame::<Up>(&mut &header[..], Duration::from_millis(50)).await;
        let error = error.expect_err("too long").to_string();
        assert_eq!(error, "a frame of 140000 bytes; allowed are 1 to 131072");
    }

    #[tokio::test]
    async fn what_is_written_is_read_and_the_largest_fits() {
        let leave = |length| Frame {
            v: PROTOCOL_VERSION,
            term: u64::MAX,
            attempt: u32::MAX,
            body: Down::Leave { reason: "x".repeat(length) },
        };
        let around = encode(&leave(0)).expect("small").len() - 4;
        let largest = leave(FRAME_BYTES_MAX - around);
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &largest).await.expect("it fits");
        let read = read_frame(&mut bytes.as_slice(), Duration::from_secs(1)).await;
        assert_eq!(read.expect("the frame"), largest);
        let error = encode(&leave(FRAME_BYTES_MAX - around + 1)).expect_err("a byte too many");
        assert!(matches!(error, FrameError::Length { .. }), "{error}");
    }
}
