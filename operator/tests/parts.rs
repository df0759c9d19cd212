//! What the operator is made of, by its public face: figures and what asks for them.

use moejob::http::{Request, read};
use moejob::metrics::{JobFigures, Metrics};
use moejob_plan::engines::{EngineLoss, RankPlace};
use moejob_plan::track::Recovery;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A kubelet is answered at once, however many have connected and ask nothing, or half of it.
#[tokio::test]
async fn who_asks_is_answered_whoever_waits() {
    let at = std::net::TcpListener::bind("127.0.0.1:0").and_then(|of| of.local_addr());
    let at = at.expect("a port");
    let server = tokio::spawn(Metrics::default().serve(at));
    let mut waiting = Vec::new();
    for number in 0..200 {
        let mut stream = loop {
            match TcpStream::connect(at).await {
                Ok(stream) => break stream,
                // It does not listen yet.
                Err(_) => tokio::task::yield_now().await,
            }
        };
        if number % 2 == 0 {
            stream.write_all(b"GET /healthz HTTP/1.1\r\n").await.expect("half of a request");
        }
        waiting.push(stream);
    }
    let mut asks = TcpStream::connect(at).await.expect("a place");
    asks.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").await.expect("a request");
    let mut answer = String::new();
    let read = asks.read_to_string(&mut answer);
    // Those who wait have seconds; a kubelet gives three.
    let answered = tokio::time::timeout(Duration::from_secs(3), read).await;
    answered.expect("in time").expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    // The oldest were shut out, the newest wait on.
    assert_eq!(waiting[0].read(&mut [0]).await.unwrap_or_default(), 0);
    let newest = waiting.last_mut().expect("many");
    newest.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").await.expect("the other half");
    let mut answer = String::new();
    newest.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    server.abort();
}

#[test]
fn figures_are_written_as_prometheus_reads_them() {
    let metrics = Metrics::default();
    metrics.reconciled(Duration::from_millis(2));
    metrics.result("ok");
    metrics.recovered(&Recovery {
        cause: "rank 1 (a-a1-0) went silent".into(),
        attempt: 1,
        detected_at: 1_000,
        replanned_at: Some(1_060),
        rejoined_at: None,
        first_step_at: Some(1_300),
        steps_lost: 0,
    });
    let lost = EngineLoss { rank: 3, node: "n0".into(), device: 3, ..EngineLoss::default() };
    let figures = JobFigures {
        namespace: "n".into(),
        name: "j".into(),
        phase: "Running".into(),
        step: 7,
        loss: Some(2.5),
        ranks: Arc::new(vec![RankPlace {
            rank: 9,
            worker: "j-a1-1".into(),
            node: "n1".into(),
            device: 1,
            uuid: "GPU-a".into(),
        }]),
        engines_lost: [1_500, 2_500].map(|at| EngineLoss { at, ..lost.clone() }).into(),
        ..JobFigures::default()
    };
    metrics.job("u", figures);
    let text = metrics.text();
    for line in [
        "moejob_reconcile_duration_seconds_bucket{le=\"0.001\"} 0",
        "moejob_reconcile_duration_seconds_bucket{le=\"0.005\"} 1",
        "moejob_reconcile_duration_seconds_count 1",
        "moejob_reconcile_total{result=\"ok\"} 1",
        "moejob_recoveries_total{cause=\"silent\"} 1",
        "moejob_recovery_seconds_bucket{phase=\"replanned\",le=\"0.1\"} 1",
        "moejob_recovery_seconds_bucket{phase=\"first_step\",le=\"0.25\"} 0",
        "moejob_recovery_seconds_count{phase=\"first_step\"} 1",
        "moejob_step{namespace=\"n\",job=\"j\"} 7",
        "moejob_loss{namespace=\"n\",job=\"j\"} 2.5",
        "moejob_job_phase{namespace=\"n\",job=\"j\",phase=\"Running\"} 1",
        "moejob_job_phase{namespace=\"n\",job=\"j\",phase=\"Failed\"} 0",
        "moejob_rank_info{namespace=\"n\",job=\"j\",rank=\"9\",node=\"n1\",device=\"1\",\
         uuid=\"GPU-a\",pod=\"j-a1-1\"} 1",
        "moejob_engine_lost_timestamp_seconds{namespace=\"n\",job=\"j\",rank=\"3\",\
         node=\"n0\",device=\"3\",uuid=\"\",by_device=\"false\"} 2.5",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    let losses = text.matches("moejob_engine_lost_timestamp_seconds{").count();
    assert_eq!(losses, 1, "of one device the newest\n{text}");
    assert!(!text.contains("moejob_tokens_per_second{"), "unknown figures are left out");
    metrics.forget_job("u");
    assert!(!metrics.text().contains("moejob_step{"));
}

#[tokio::test]
async fn a_head_is_a_method_a_path_and_a_token() {
    let read = async |text: &[u8]| {
        let mut stream = text;
        read(&mut stream).await.expect("no error")
    };
    let request = |path: &str, token: Option<&str>| {
        let (path, token) = (path.to_string(), token.map(str::to_string));
        Some(Request { method: "GET".to_string(), path, token })
    };
    assert_eq!(read(b"GET /a?b HTTP/1.1\r\n\r\n").await, request("/a", None));
    let with = b"GET /a HTTP/1.1\r\nHost: x\r\nauthorization:  bearer abc \r\n\r\n";
    assert_eq!(read(with).await, request("/a", Some("abc")));
    let basic = b"GET / HTTP/1.1\r\nAuthorization: Basic abc\r\n\r\n";
    assert_eq!(read(basic).await, request("/", None));
    let empty = b"GET / HTTP/1.1\r\nAuthorization: Bearer \r\n\r\n";
    assert_eq!(read(empty).await, request("/", None));
    assert_eq!(read(b"GET / HTTP/1.1\r\n").await, None, "it ends before its end");
    // A head of all that may be is read; one byte more is not waited for.
    let padded = |bytes: usize| {
        let (first, last) = ("GET / HTTP/1.1\r\nX: ", "\r\n\r\n");
        format!("{first}{}{last}", "x".repeat(bytes - first.len() - last.len()))
    };
    let most = 16 << 10;
    assert_eq!(read(padded(most).as_bytes()).await, request("/", None));
    assert_eq!(read(padded(most + 1).as_bytes()).await, None);
}
