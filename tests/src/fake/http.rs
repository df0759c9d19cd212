//! HTTP/1.1 as an API server speaks it: requests, and answers of JSON.

use serde_json::{Value, json};
use std::collections::HashMap;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// More than any request of an operator.
const REQUEST_BYTES_MAX: usize = 4 << 20;

/// One that has come whole.
pub struct Request {
    pub method: String,
    pub path: String,
    pub query: HashMap<String, String>,
    /// Its bearer's token, or nothing.
    pub who: String,
    /// Null where it is no JSON.
    pub body: Value,
}

/// Status code and body.
pub type Answer = (u16, Value);

/// As an API server tells that it did not do what was asked.
pub fn failure(code: u16, reason: &str, message: &str) -> Answer {
    (code, json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code }))
}

/// The next request of a connection. None where it has ended, or where this is no request.
pub async fn read(stream: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut first = String::new();
    if stream.read_line(&mut first).await.ok()? == 0 {
        return None;
    }
    let (mut length, mut who) = (0, String::new());
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.ok()?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        match name.to_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok()?,
            "authorization" => who = value.trim().trim_start_matches("Bearer ").to_string(),
            _ => {}
        }
    }
    let mut body = vec![0; Some(length).filter(|of| *of <= REQUEST_BYTES_MAX)?];
    stream.read_exact(&mut body).await.ok()?;
    let mut words = first.split_whitespace();
    let (method, target) = (words.next()?.to_string(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    Some(Request {
        method,
        path: path.to_string(),
        query: pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect(),
        who,
        body: serde_json::from_slice(&body).unwrap_or_default(),
    })
}

/// None where the connection has ended.
pub async fn write(stream: &mut BufReader<TcpStream>, (status, value): &Answer) -> Option<()> {
    let text = value.to_string();
    let head = format!(
        "HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(text.as_bytes()).await.ok()
}
