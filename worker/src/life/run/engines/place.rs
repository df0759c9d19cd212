//! How people know an engine: by its rank, its node and its device there.

use crate::attempt::records::event;
use moejob_protocol::report::{Detail, Event, EventKind};

/// Where an engine works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub attempt: u32,
    pub rank: u32,
    pub node: String,
    /// Its number among the devices of the worker.
    pub device: usize,
}

impl Place {
    /// `rank 3 (device 1 of node-0, GPU-..., pid 77)`. `uuid` is empty on processors.
    pub fn in_words(&self, uuid: &str, pid: u32) -> String {
        let Place { rank, node, device, .. } = self;
        let comma = if uuid.is_empty() { "" } else { ", " };
        format!("rank {rank} (device {device} of {node}{comma}{uuid}, pid {pid})")
    }

    /// An event of the engine with this process id, on the GPU with this uuid.
    pub fn told(
        &self,
        (uuid, pid): (&str, u32),
        kind: EventKind,
        reason: &str,
        message: &str,
        more: impl IntoIterator<Item = (&'static str, Detail)>,
    ) -> Event {
        let details = [
            ("rank", Detail::Number(self.rank.into())),
            ("node", Detail::Text(self.node.clone())),
            ("device", Detail::Number(self.device as u64)),
            ("uuid", Detail::Text(uuid.to_string())),
            ("pid", Detail::Number(pid.into())),
        ];
        let details = details.into_iter().chain(more);
        event(self.attempt, kind, reason, message.to_string(), details)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_named_by_rank_node_and_device() {
        let place = Place { attempt: 2, rank: 3, node: "n".to_string(), device: 1 };
        assert_eq!(place.in_words("", 7), "rank 3 (device 1 of n, pid 7)");
        assert_eq!(place.in_words("GPU-a", 7), "rank 3 (device 1 of n, GPU-a, pid 7)");
        for uuid in ["", "GPU-a"] {
            let more = [("exit", Detail::Text("exit code 1".to_string()))];
            let told = place.told((uuid, 7), EventKind::EngineLost, "Lost", "", more);
            let value = serde_json::to_value(&told).expect("JSON");
            let found = ["attempt", "rank", "node", "device", "uuid", "pid", "exit"]
                .map(|name| value[name].clone());
            let expected = serde_json::json!([2, 3, "n", 1, uuid, 7, "exit code 1"]);
            assert_eq!(serde_json::Value::from(found.to_vec()), expected);
        }
    }
}
