//! What a job has told, as text.

use super::World;
use moejob_plan::lead::{Figures, Write};
use moejob_protocol::message::Down;
use moejob_protocol::pair::PairOrder;
use serde_json::Value;

impl World {
    /// What was told since this was asked before. Then what people and the next leader know by
    /// the status as it was written last, without the lines that are as they were.
    pub(super) fn show(&mut self) -> Vec<String> {
        let told = std::mem::take(&mut self.told);
        let mut lines = Vec::new();
        let mut status = self.seen.status.clone();
        for condition in status["conditions"].as_array_mut().into_iter().flatten() {
            let text = |field: &str| condition[field].as_str().unwrap_or_default().to_string();
            let [kind, is, reason, message] = ["type", "status", "reason", "message"].map(text);
            let message = message.replace('\n', " / ");
            lines.push(format!("{kind} is {is}, {reason}: {message}"));
        }
        let mut shown = |title: &str, text: &str, left_out: &[&str]| {
            let mut value: Value = serde_json::from_str(text).unwrap_or_default();
            if let Some(fields) = value.as_object_mut() {
                fields.retain(|name, _| !left_out.contains(&name.as_str()));
            }
            lines.push(format!("{title} {value}"));
        };
        for (title, field) in [("record", "record"), ("more", "recordMore")] {
            let text = status[field].take();
            shown(title, text.as_str().unwrap_or_default(), &["accepted", "gang", "pods"]);
        }
        shown("status", &status.to_string(), &["conditions", "record", "recordMore"]);
        let job = self.job.as_ref().expect("there is a job");
        let fence = job.fence().map(|fence| format!("{fence:?}"));
        lines.push(format!("leader {}, fence {}", job.term(), fence.unwrap_or_default()));
        let before = std::mem::replace(&mut self.shown, lines.clone());
        told.into_iter().chain(lines.into_iter().filter(|line| !before.contains(line))).collect()
    }
}

pub(super) fn figures(figures: &Figures) -> String {
    let Figures { phase, step, nodes_ready, nodes_desired, .. } = figures;
    let numbers = [
        ("loss", figures.loss),
        ("tokens/s", figures.tokens_per_second),
        ("imbalance", figures.expert_imbalance),
        ("dropped", figures.dropped_tokens),
    ];
    let known = numbers.iter().filter_map(|(name, of)| Some(format!(", {name} {}", (*of)?)));
    let late = [("checkpoints", figures.checkpoint_degraded), ("data", figures.data_degraded)];
    let late = late.iter().filter(|(_, is)| *is).map(|(what, _)| format!(", {what} are late"));
    let known: String = known.chain(late).collect();
    let places = figures.ranks.iter().map(|place| format!("; {place:?}")).collect::<String>();
    let lost = figures.engines_lost.len();
    format!(
        "figures: {phase} at step {step}, {nodes_ready} of {nodes_desired} nodes, {lost} engines \
         lost{known}{places}"
    )
}

pub(super) fn order(body: &Down) -> String {
    match body {
        Down::Leave { reason } => format!("leave ({reason})"),
        Down::Request(request) => format!("{request:?}"),
        Down::Shutdown => "end".to_string(),
        Down::Preflight(order) => {
            let passed = order.passed_at_boot.iter().map(|boot| format!(", passed at {boot}"));
            format!("measure {}{}", order.number, passed.collect::<String>())
        }
        Down::Pair(order) => {
            let PairOrder { number, side, devices, rdma, meeting } = &**order;
            let way = if *rdma { " by RDMA" } else { "" };
            let place = meeting.as_ref().map(|of| format!(" at ..{}", &of.id[252..]));
            let place = place.unwrap_or_default();
            format!("measure pair {number} as side {side} with {devices} GPUs{way}{place}")
        }
        other => format!("{other:?}"),
    }
}

pub(super) fn words(write: &Write) -> String {
    match write {
        Write::CreatePod { birth, template } => {
            let image = match template.around.image.as_str() {
                "own:1" | "" => String::new(),
                other => format!(" with {other}"),
            };
            match birth.node.as_str() {
                "" => format!("pod {}{image}", birth.name),
                node => format!("pod {} on {node}{image}", birth.name),
            }
        }
        Write::DeletePod { name, grace_s, .. } => format!("no pod {name} within {grace_s} s"),
        Write::Status { status, resource_version, .. } => {
            let recorded = serde_json::from_str::<Value>(&status.record).unwrap_or_default();
            let lost = status.engines_lost.iter().map(|lost| {
                let (node, device) = (&lost.node, lost.device);
                format!(", engine {} lost on device {device} of {node} {}", lost.rank, lost.uuid)
            });
            format!(
                "status {} of generation {} on version {resource_version}, record of attempt {}{}",
                status.phase,
                status.observed_generation.unwrap_or_default(),
                recorded["attempt"],
                lost.collect::<String>()
            )
        }
        Write::Ensure { object, fresh, .. } => {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
            let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
            // Any other one is made without a look.
            let looks = if *fresh { "" } else { ", looked at first" };
            format!("{kind} {name}{looks}")
        }
        Write::DeleteJob(job) => format!("no job {}", job.name),
        Write::Event { namespace, reason, note, .. } => {
            let note: String = note.chars().take(100).collect();
            format!("in {namespace}: {reason}: {note}")
        }
    }
}
