//! As much of HTTP as a tracking server needs: JSON there and back, one request a connection.
//!
//! It blocks, and belongs on a thread of its own. Nothing is redirected, nothing is kept open, and
//! no answer is longer than a bound.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// For a connection, and for each read and write on it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Answers are a few hundred bytes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Characters of an answer that a person is shown.
const WORDS_MAX: usize = 200;

/// A server, as `http://[USER:PASSWORD@]HOST[:PORT][/PREFIX]` or the same by https.
#[derive(Clone, PartialEq, Eq)]
pub struct Server {
    tls: bool,
    host: String,
    port: u16,
    prefix: String,
    /// The value of `Authorization`.
    authorization: Option<String>,
}

/// Why nothing came back that could be used.
#[derive(Debug, thiserror::Error)]
pub enum PostError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it answers {status}: {words}")]
    Refused { status: u16, words: String },
    #[error("its answer is no HTTP or no JSON: {0}")]
    Answer(String),
}

impl PostError {
    /// The same request would be refused again.
    pub fn is_final(&self) -> bool {
        matches!(self, PostError::Refused { status: 400..=428 | 430..=499, .. })
    }

    pub fn is_absent(&self) -> bool {
        matches!(self, PostError::Refused { status: 404, .. })
    }
}

/// Neither user nor password.
impl std::fmt::Display for Server {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(to, "{scheme}://{}:{}{}", self.host, self.port, self.prefix)
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{self}")
    }
}

impl Server {
    /// # Errors
    /// Says what is wrong, without user and password.
    pub fn read(uri: &str) -> Result<Server, String> {
        let (scheme, rest) = uri.split_once("://").ok_or("it is no http://... or https://...")?;
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err(format!("{scheme}:// is not spoken here: http:// or https://")),
        };
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, place) = match authority.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, authority),
        };
        // An IPv6 address stands in brackets.
        let bracketed = place.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let (host, port) = match bracketed {
            Some((host, rest)) => (host, rest.strip_prefix(':')),
            None => place.split_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
        };
        let default = if tls { 443 } else { 80 };
        let port = port.map_or(Ok(default), |port| {
            port.parse().map_err(|_| format!("{port:?} is no port"))
        })?;
        let plain = |text: &str| !text.chars().any(|c| c.is_whitespace() || c.is_control());
        if host.is_empty() || !plain(host) || !plain(path) {
            return Err("its host or path is empty or no name".to_string());
        }
        let host = if bracketed.is_some() { format!("[{host}]") } else { host.to_string() };
        let prefix = path.trim_end_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("/{prefix}") };
        let authorization = user.map(|user| format!("Basic {}", STANDARD.encode(user)));
        Ok(Server { tls, host, port, prefix, authorization })
    }

    /// The same with these credentials, unless the address has its own.
    #[must_use]
    pub fn with(mut self, token: Option<&str>, user: Option<(&str, &str)>) -> Server {
        // What could end a line of the head is no credential.
        let given = match (token, user) {
            (Some(token), _) if !token.chars().any(char::is_control) => {
                Some(format!("Bearer {token}"))
            }
            (None, Some((name, password))) => {
                Some(format!("Basic {}", STANDARD.encode(format!("{name}:{password}"))))
            }
            _ => None,
        };
        self.authorization = self.authorization.or(given);
        self
    }

    /// Sends `body` to `path`, or asks for `path` where there is none.
    ///
    /// # Errors
    /// See `PostError`.
    pub fn call(&self, path: &str, body: Option<&Value>) -> Result<Value, PostError> {
        let text = body.map(Value::to_string).unwrap_or_default();
        let method = if body.is_some() { "POST" } else { "GET" };
        let mut request = format!(
            "{method} {}{path} HTTP/1.1\r\nHost: {}:{}\r\nUser-Agent: moejob\r\n\
             Accept: application/json\r\nConnection: close\r\n",
            self.prefix, self.host, self.port
        );
        if let Some(authorization) = &self.authorization {
            request += &format!("Authorization: {authorization}\r\n");
        }
        if body.is_some() {
            let length = text.len();
            request += &format!("Content-Type: application/json\r\nContent-Length: {length}\r\n");
        }
        request += "\r\n";
        request += &text;
        let answer = self.exchange(request.as_bytes())?;
        let (status, body) = parse(&answer)?;
        if !(200..300).contains(&status) {
            let words: String = String::from_utf8_lossy(&body).chars().take(WORDS_MAX).collect();
            let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
            return Err(PostError::Refused { status, words });
        }
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).map_err(|error| PostError::Answer(error.to_string()))
    }

    fn exchange(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        let bare = self.host.trim_matches(['[', ']']);
        let mut refused = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
        for address in (bare, self.port).to_socket_addrs()? {
            let stream = match TcpStream::connect_timeout(&address, PATIENCE) {
                Ok(stream) => stream,
                Err(error) => {
                    refused = error;
                    continue;
                }
            };
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            if !self.tls {
                return converse(stream, request);
            }
            let name = ServerName::try_from(bare.to_string()).map_err(io::Error::other)?;
            let client = ClientConnection::new(trust()?, name).map_err(io::Error::other)?;
            return converse(StreamOwned::new(client, stream), request);
        }
        Err(refused)
    }
}

fn converse(mut stream: impl Read + Write, request: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(request)?;
    stream.flush()?;
    let mut answer = Vec::new();
    match (&mut stream).take(ANSWER_BYTES_MAX).read_to_end(&mut answer) {
        // Servers often close without the farewell of TLS; the length of the answer tells.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && !answer.is_empty() => {}
        read => {
            read?;
        }
    }
    Ok(answer)
}

/// The authorities that this machine trusts, or those of `SSL_CERT_FILE`.
fn trust() -> io::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(io::Error::other("this machine has no certificates of authorities"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().map_err(io::Error::other)?;
    Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

/// Status and body of a whole answer.
fn parse(answer: &[u8]) -> Result<(u16, Vec<u8>), PostError> {
    let bad = |what: &str| PostError::Answer(what.to_string());
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.ok_or_else(|| bad("its head has no end"))?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let mut lines = head.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let version = words.next().unwrap_or_default();
    let status = words.next().and_then(|word| word.parse().ok());
    let status = status.filter(|_| version.starts_with("HTTP/1."));
    let status = status.ok_or_else(|| bad("its first line names no status"))?;
    let field = |name: &str| {
        head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.trim().eq_ignore_ascii_case(name).then(|| value.trim().to_string())
        })
    };
    let body = &answer[end + 4..];
    if field("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
        return Ok((status, unchunked(body).ok_or_else(|| bad("its chunks are cut off"))?));
    }
    match field("content-length").map(|value| value.parse::<usize>()) {
        None => Ok((status, body.to_vec())),
        Some(Ok(length)) if length <= body.len() => Ok((status, body[..length].to_vec())),
        Some(_) => Err(bad("it is cut off")),
    }
}

/// The bytes of all chunks; None where one is cut off.
fn unchunked(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let line = body.windows(2).position(|two| two == b"\r\n")?;
        let size = std::str::from_utf8(&body[..line]).ok()?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        body = &body[line + 2..];
        if size == 0 {
            return Some(whole);
        }
        whole.extend(body.get(..size)?);
        body = body.get(size.checked_add(2)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_secrets_not_shown() {
        for (uri, shown) in [
            ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
            ("HTTPS://tracking.example/a/b/", "https://tracking.example:443/a/b"),
            ("http://[::1]:81/?x#y", "http://[::1]:81"),
            ("http://me:secret@host", "http://host:80"),
        ] {
            let server = Server::read(uri).unwrap_or_else(|why| panic!("{uri}: {why}"));
            assert_eq!((server.to_string(), format!("{server:?}")), (shown.into(), shown.into()));
        }
        for wrong in ["", "mlruns", "sqlite:///x", "http://", "http://host:port", "http://a b/"] {
            assert!(Server::read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_address_s_own_credentials_count_first() {
        let of = |uri: &str, token, user| {
            Server::read(uri).expect("an address").with(token, user).authorization
        };
        // RFC 7617, section 2.
        let basic = Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==".to_string());
        let user = Some(("Aladdin", "open sesame"));
        assert_eq!(of("http://Aladdin:open sesame@h", Some("x"), None), basic);
        assert_eq!(of("http://h", None, user), basic);
        assert_eq!(of("http://h", Some("t"), user), Some("Bearer t".to_string()));
        assert_eq!(of("http://h", Some("t\r\nX: y"), None), None);
        assert_eq!(of("http://h", None, None), None);
    }

    #[test]
    fn answers_are_taken_whole_or_not_at_all() {
        let good = |text: &str| {
            let text_of = |body| String::from_utf8(body).expect("text");
            parse(text.as_bytes()).map(|(status, body)| (status, text_of(body)))
        };
        let whole = |status, body: &str| (status, body.to_string());
        let sized = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}more";
        assert_eq!(good(sized).expect("an answer"), whole(200, "{}"));
        let open = "HTTP/1.0 404 no\r\n\r\nnot there";
        assert_eq!(good(open).expect("an answer"), whole(404, "not there"));
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n\
                       3\r\n{\"a\r\n4;x=y\r\n\":1}\r\n0\r\n\r\n";
        assert_eq!(good(chunked).expect("an answer"), whole(200, "{\"a\":1}"));
        for cut in (0..chunked.len() - 4).chain([usize::MAX]) {
            let text = if cut == usize::MAX { "SSH-2.0-x\r\n\r\n" } else { &chunked[..cut] };
            assert!(good(text).is_err(), "{text:?}");
        }
        assert!(good("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}").is_err());
    }
}
