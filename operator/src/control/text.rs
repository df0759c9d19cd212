//! The configuration of an attempt, as JSON that all its members' streams share.

use super::StreamError;
use moejob_protocol::config::{Resume, ShardSource};
use moejob_protocol::{PROTOCOL_VERSION, WorkerConfig};
use serde_json::json;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncWrite, AsyncWriteExt};

/// Written at once: what is encrypted and not yet read stays in memory.
const CHUNK_BYTES: usize = 16 << 10;

/// Without the brace and the rank at its beginning.
pub(super) fn text_after_rank(config: &WorkerConfig) -> Arc<[u8]> {
    let text = serde_json::to_vec(config).unwrap_or_default();
    let rank = text.iter().position(|byte| *byte == b',').map_or(0, |comma| comma + 1);
    Arc::from(&text[rank..])
}

/// What [`text_after_rank`] is to a worker that speaks a version before [`CONTROL_RUNS`].
pub(super) fn text_by_rank(config: &WorkerConfig) -> Arc<[u8]> {
    let mut value = serde_json::to_value(config.by_rank()).unwrap_or_default();
    if let Resume::Memory { sources, .. } = &config.resume {
        let of = |source: &ShardSource| json!({ "shard": source.shard, "from": source.from });
        value["resume"]["memory"]["sources"] = sources.iter().map(of).collect();
    }
    if let Some(fields) = value.as_object_mut() {
        fields.remove("rank");
    }
    Arc::from(&serde_json::to_vec(&value).unwrap_or_default()[1..])
}

/// The frame of `Down::Configure`, as `write_frame` would write it, around a text that many
/// streams share.
pub(super) async fn write_configure(
    to: &mut (impl AsyncWrite + Unpin),
    (term, attempt, rank): (u64, u32, u32),
    text: &[u8],
    most: usize,
) -> Result<(), StreamError> {
    let head = format!(
        "{{\"v\":{PROTOCOL_VERSION},\"term\":{term},\"attempt\":{attempt},\
         \"body\":{{\"configure\":{{\"rank\":{rank},"
    );
    let length = head.len() + text.len() + 2;
    if length > most {
        return Err(StreamError::LongOrder { length, most });
    }
    let write = async {
        to.write_all(&(length as u32).to_le_bytes()).await?;
        to.write_all(head.as_bytes()).await?;
        for chunk in text.chunks(CHUNK_BYTES) {
            to.write_all(chunk).await?;
            to.flush().await?;
        }
        to.write_all(b"}}").await?;
        to.flush().await
    };
    write.await.map_err(|error: io::Error| StreamError::Frame(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use moe_worker::life::control::encode;
    use moejob_plan::lead::Ending;
    use moejob_protocol::Down;
    use moejob_protocol::config::Member;
    use moejob_protocol::message::{FRAME_BYTES_MAX, Frame};
    use serde_json::Value;

    #[tokio::test]
    async fn a_configuration_is_the_frame_that_it_would_be_alone() {
        let text = include_str!("../../tests/worker-config.json");
        let config: WorkerConfig = serde_json::from_str(text).expect("a configuration");
        let mut written = Vec::new();
        let text = text_after_rank(&config);
        let most = FRAME_BYTES_MAX;
        write_configure(&mut written, (7, 3, 41), &text, most).await.expect("a short frame");
        let config = WorkerConfig { rank: Some(41), ..config };
        let body = Down::Configure(Box::new(config));
        let frame = Frame { v: PROTOCOL_VERSION, term: 7, attempt: 3, body };
        assert_eq!(written, encode(&frame).expect("a frame"));
        let long = vec![b' '; FRAME_BYTES_MAX];
        let error = write_configure(&mut written, (7, 3, 41), &long, most).await;
        let error = error.expect_err("too long");
        assert_eq!(error.ending(), Ending::Refused, "{error}");
    }

    /// A worker of a release before reads an entry a rank, and a source a shard.
    #[test]
    fn a_worker_of_before_is_told_of_each_rank_and_shard() {
        let text = include_str!("../../tests/worker-config.json");
        let mut config: WorkerConfig = serde_json::from_str(text).expect("a configuration");
        let member = |rank: u32| Member {
            rank,
            worker: format!("w{rank}"),
            node: format!("n{rank}"),
            address: "10.0.0.1:7777".to_string(),
        };
        (config.ranks, config.members) = (2, vec![member(0), member(2)]);
        let source = |(shard, from)| ShardSource { shard, from };
        let sources = [(0, 0), (1, 1), (2, 3)].map(source).to_vec();
        let layout = config.layout.clone();
        config.resume = Resume::Memory { step: 1, attempt: 1, layout, sources };
        let read = |text: &[u8]| -> (Value, WorkerConfig) {
            let text = [b"{\"rank\":0,", text].concat();
            let whole = serde_json::from_slice(&text).expect("a configuration");
            (serde_json::from_slice(&text).expect("JSON"), whole)
        };
        let (told, whole) = read(&text_after_rank(&config));
        assert_eq!(told["members"].as_array().map(Vec::len), Some(2));
        let runs = json!([{"shard": 0, "from": 0, "count": 2}, {"shard": 2, "from": 3}]);
        assert_eq!(told["resume"]["memory"]["sources"], runs);
        assert_eq!(whole, WorkerConfig { rank: Some(0), ..config.clone() });
        let (told, _) = read(&text_by_rank(&config));
        let workers: Vec<(u64, &str)> = (told["members"].as_array().into_iter().flatten())
            .filter_map(|of| Some((of["rank"].as_u64()?, of["worker"].as_str()?)))
            .collect();
        assert_eq!(workers, [(0, "w0"), (1, "w0"), (2, "w2"), (3, "w2")]);
        let one = |shard: u32, from: u32| json!({ "shard": shard, "from": from });
        let each = json!([one(0, 0), one(1, 1), one(2, 3)]);
        assert_eq!(told["resume"]["memory"]["sources"], each);
    }
}
