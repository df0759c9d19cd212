//! Amounts of what nodes have and pods ask for, in thousandths, so that 500m of a core is whole.

use serde_json::Value;
use std::collections::BTreeMap;

/// Name of a resource -> thousandths of its unit (cores, bytes, devices, pods).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources(pub BTreeMap<String, i64>);

impl Resources {
    /// From `{ "cpu": "500m", "memory": "2Gi", .. }`; what is no quantity counts as none.
    pub fn read(quantities: &Value) -> Resources {
        let mut all = Resources::default();
        for (name, quantity) in quantities.as_object().into_iter().flatten() {
            let text = match quantity {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            all.put(name, &text);
        }
        all
    }

    /// Adds an entry as Kubernetes writes it.
    pub fn put(&mut self, name: &str, quantity: &str) {
        if let Some(amount) = thousandths(quantity) {
            self.0.insert(name.to_string(), amount);
        }
    }

    pub fn add(&mut self, other: &Resources) {
        for (name, amount) in &other.0 {
            let sum = self.0.entry(name.clone()).or_insert(0);
            *sum = sum.saturating_add(*amount);
        }
    }

    /// Takes back what was added.
    pub fn subtract(&mut self, other: &Resources) {
        for (name, amount) in &other.0 {
            if let Some(sum) = self.0.get_mut(name) {
                *sum = sum.saturating_sub(*amount);
            }
        }
        self.0.retain(|_, amount| *amount != 0);
    }

    /// The first resource of which less is left than `self` asks for.
    pub fn lacking(&self, allocatable: &Resources, requested: &Resources) -> Option<&str> {
        let of = |all: &Resources, name: &str| all.0.get(name).copied().unwrap_or(0);
        let mut asked = self.0.iter().filter(|(_, amount)| **amount > 0);
        let lacks = asked.find(|(name, amount)| {
            of(allocatable, name).saturating_sub(of(requested, name)) < **amount
        });
        lacks.map(|(name, _)| name.as_str())
    }

    /// What the pod of this manifest asks for, one pod among it. A limit without a request is one.
    pub fn of_pod(pod: &Value) -> Resources {
        let spec = &pod["spec"];
        let asked = |resources: &Value| {
            let mut one = Resources::read(&resources["limits"]);
            one.0.extend(Resources::read(&resources["requests"]).0);
            one
        };
        let list = |field: &str| spec[field].as_array().into_iter().flatten();
        let init = list("initContainers");
        Resources::together(
            list("containers").map(|of| asked(&of["resources"])),
            init.map(|of| (asked(&of["resources"]), of["restartPolicy"] == "Always")),
            &asked(&spec["resources"]),
            &Resources::read(&spec["overhead"]),
        )
    }

    /// What a pod asks for, as a scheduler counts it: its containers, and of those that begin it
    /// (each with whether it goes on beside the others) the most that there is at once. What is
    /// said of the whole pod counts in place of that.
    pub fn together(
        containers: impl Iterator<Item = Resources>,
        init: impl Iterator<Item = (Resources, bool)>,
        whole: &Resources,
        overhead: &Resources,
    ) -> Resources {
        let (mut beside, mut most) = (Resources::default(), Resources::default());
        for (one, goes_on) in init {
            let mut now = beside.clone();
            now.add(&one);
            most.raise(&now);
            if goes_on {
                beside = now;
            }
        }
        let mut all = beside;
        containers.for_each(|one| all.add(&one));
        all.raise(&most);
        all.0.extend(whole.0.clone());
        all.add(overhead);
        all.0.insert("pods".to_string(), 1_000);
        all
    }

    /// Of each resource the larger amount.
    fn raise(&mut self, other: &Resources) {
        for (name, amount) in &other.0 {
            let entry = self.0.entry(name.clone()).or_default();
            *entry = (*entry).max(*amount);
        }
    }
}

/// `500m` is 500, `2` is 2000, `1Gi` is 1024^3 * 1000; parts of a thousandth count as a whole one.
pub fn thousandths(text: &str) -> Option<i64> {
    let (digits, suffix) = split(text);
    let factor = factor(suffix)?;
    let amount = digits.parse::<f64>().ok()? * factor * 1e3;
    (amount < i64::MAX as f64).then(|| amount.ceil() as i64)
}

/// The digits of a quantity, a point among them, and its suffix.
pub fn split(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()))
}

/// What a suffix of a quantity stands for: those of `unit`, `n`, `u`, `e3`, `E3`.
fn factor(suffix: &str) -> Option<f64> {
    match suffix {
        "n" => Some(1e-9),
        "u" => Some(1e-6),
        _ => unit(suffix).or_else(|| {
            let power = suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
            (-9..=18).contains(&power).then(|| 10f64.powi(power))
        }),
    }
}

/// What a suffix that people write stands for: `m k M G T P E`, `Ki Mi Gi Ti Pi Ei`, or none.
pub fn unit(suffix: &str) -> Option<f64> {
    let factor = match suffix {
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 2f64.powi(10),
        "Mi" => 2f64.powi(20),
        "Gi" => 2f64.powi(30),
        "Ti" => 2f64.powi(40),
        "Pi" => 2f64.powi(50),
        "Ei" => 2f64.powi(60),
        _ => return None,
    };
    Some(factor)
}
