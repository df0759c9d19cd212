//! Nodes that passed are not measured again for an hour.

use crate::observed::Millis;
use std::collections::BTreeMap;

/// How long a pass counts.
pub const CACHED_MS: Millis = 60 * 60 * 1000;
/// Passes that are kept; beyond them the oldest go.
const KEPT_MAX: usize = 16_384;

/// What a pass is of. Whatever here changes, the node is measured again: another tenant's trust,
/// another machine, a reboot, another set of limits, another driver or NCCL in the image.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub namespace: String,
    pub node: String,
    /// The kernel's, a new one each time that it starts.
    pub boot_id: String,
    /// The profile's digest.
    pub profile: String,
    pub image: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    passed: BTreeMap<Key, Millis>,
}

impl Cache {
    /// Whether the node passed within the hour before `now`. A pass of the future, as clocks may
    /// have it, does not count.
    pub fn is_fresh(&self, key: &Key, now: Millis) -> bool {
        self.passed.get(key).is_some_and(|at| *at <= now && now - at < CACHED_MS)
    }

    /// The newest boot of the node of `of` at which it passed within the hour, whatever boot `of`
    /// says.
    pub fn boot_of(&self, of: &Key, now: Millis) -> Option<String> {
        let first = Key {
            namespace: of.namespace.clone(),
            node: of.node.clone(),
            ..Key::default()
        };
        let here = |key: &Key| (&key.namespace, &key.node) == (&of.namespace, &of.node);
        let same = |key: &Key| (&key.profile, &key.image) == (&of.profile, &of.image);
        let all = self.passed.range(first..).take_while(|(key, _)| here(key));
        let fresh = all.filter(|(key, _)| same(key) && self.is_fresh(key, now));
        fresh.max_by_key(|(_, at)| **at).map(|(key, _)| key.boot_id.clone())
    }

    pub fn passed(&mut self, key: Key, now: Millis) {
        self.prune(now);
        self.passed.insert(key, now);
        while self.passed.len() > KEPT_MAX {
            let oldest = self.passed.iter().min_by_key(|(_, at)| **at).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { return };
            self.passed.remove(&oldest);
        }
    }

    /// A node that failed is measured whenever it is asked for, whatever it was before.
    pub fn failed(&mut self, key: &Key) {
        self.passed.remove(key);
    }

    fn prune(&mut self, now: Millis) {
        self.passed.retain(|_, at| *at <= now && now - *at < CACHED_MS);
    }
}
