//! An API server whose answers are those of one function.

#[path = "../../../tests/src/fake/http.rs"]
#[allow(dead_code, reason = "what other servers read of a request")]
mod http;

pub use http::{Answer, Request, failure};

use kube::{Client, Config};
use std::sync::Arc;
use tokio::io::BufReader;
use tokio::net::TcpListener;

/// A client of one that serves for as long as the runtime lives.
pub async fn client(answer: impl Fn(Request) -> Answer + Send + Sync + 'static) -> Client {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let answer = Arc::new(answer);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (mut stream, answer) = (BufReader::new(stream), Arc::clone(&answer));
            tokio::spawn(async move {
                while let Some(request) = http::read(&mut stream).await {
                    http::write(&mut stream, &answer(request)).await?;
                }
                Some(())
            });
        }
    });
    Client::try_from(Config::new(url.parse().expect("a URL"))).expect("a client")
}
