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
    /// It was fast with another node; else what it is by itself.
    pub paired: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    passed: BTreeMap<Key, Millis>,
    /// What was found and not told to others yet, in order.
    news: Vec<News>,
    revision: u64,
}

/// That a node passed, and when; or that it passed no more.
pub type News = (Key, Option<Millis>);

/// When nodes passed.
pub type Passes = BTreeMap<Key, Millis>;

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
        let same = |key: &Key| {
            (&key.profile, &key.image, key.paired) == (&of.profile, &of.image, of.paired)
        };
        let all = self.passed.range(first..).take_while(|(key, _)| here(key));
        let fresh = all.filter(|(key, _)| same(key) && self.is_fresh(key, now));
        fresh.max_by_key(|(_, at)| **at).map(|(key, _)| key.boot_id.clone())
    }

    pub fn passed(&mut self, key: Key, now: Millis) {
        self.prune(now);
        self.news.push((key.clone(), Some(now)));
        self.note(key, Some(now));
    }

    /// A node that failed is measured whenever it is asked for, whatever it was before.
    pub fn failed(&mut self, key: &Key) {
        if self.passed.contains_key(key) {
            self.news.push((key.clone(), None));
            self.note(key.clone(), None);
        }
    }

    /// What was found since the last call, for other caches.
    pub fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// What another cache has found.
    pub fn note(&mut self, key: Key, passed: Option<Millis>) {
        self.revision += 1;
        match passed {
            Some(at) => drop(self.passed.insert(key, at)),
            None => drop(self.passed.remove(&key)),
        }
        while self.passed.len() > KEPT_MAX {
            let oldest = self.passed.iter().min_by_key(|(_, at)| **at).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { return };
            self.passed.remove(&oldest);
        }
    }

    /// Another number than before: something was noted since.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// All passes of a namespace, for a job of it.
    pub fn of(&self, namespace: &str) -> Passes {
        let first = Key { namespace: namespace.to_string(), ..Key::default() };
        let all = self.passed.range(first..).take_while(|(key, _)| key.namespace == namespace);
        all.map(|(key, at)| (key.clone(), *at)).collect()
    }

    /// What all jobs of the namespace have found, in place of what was known. What was not told to
    /// them yet stays.
    pub fn take_over(&mut self, namespace: &str, passes: Passes) {
        self.passed.retain(|key, _| key.namespace != namespace);
        self.passed.extend(passes);
        for (key, at) in self.news.clone() {
            self.note(key, at);
        }
    }

    fn prune(&mut self, now: Millis) {
        self.passed.retain(|_, at| *at <= now && now - *at < CACHED_MS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, node: &str) -> Key {
        Key { namespace: namespace.into(), node: node.into(), ..Key::default() }
    }

    #[test]
    fn what_one_job_finds_the_others_of_its_namespace_know() {
        let [mut shared, mut one, mut other] = [(); 3].map(|()| Cache::default());
        one.passed(key("a", "n0"), 5);
        one.passed(key("a", "n1"), 6);
        let before = shared.revision();
        one.take_news().into_iter().for_each(|(key, at)| shared.note(key, at));
        assert_ne!(shared.revision(), before);
        assert!(one.take_news().is_empty());
        // What it has found itself and not told yet is not forgotten.
        other.passed(key("a", "n2"), 7);
        other.take_over("a", shared.of("a"));
        for node in ["n0", "n1", "n2"] {
            assert!(other.is_fresh(&key("a", node), 8), "{node}");
        }
        assert!(shared.of("b").is_empty(), "another tenant's trust is its own");
        one.failed(&key("a", "n1"));
        one.failed(&key("a", "n9"));
        let news = one.take_news();
        assert_eq!(news, [(key("a", "n1"), None)], "of others nothing was said");
        other.take_news().into_iter().chain(news).for_each(|(key, at)| shared.note(key, at));
        other.take_over("a", shared.of("a"));
        assert!(!other.is_fresh(&key("a", "n1"), 8) && other.is_fresh(&key("a", "n2"), 8));
    }
}
