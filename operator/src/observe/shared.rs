//! What many pods have in common, kept once.

use super::Key;
use moejob_manifest::resources::Resources;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Names of nodes, images and sets of requests that many pods have in common are kept once.
#[derive(Default)]
pub(super) struct Shared {
    /// Names of nodes, owners, images.
    texts: HashSet<Arc<str>>,
    requests: BTreeMap<BTreeMap<String, i64>, Arc<Resources>>,
    /// Pods of which it was told that they have too much to be read.
    unread: HashSet<Key>,
}

/// More different ones than that come from pods that are long gone.
const SHARED_MAX: usize = 16 << 10;

/// Pods with too much that are told; others come of an image made to fill the log.
const UNREAD_MAX: usize = 256;

impl Shared {
    /// Tells once of each pod what was not read of it.
    pub fn unread(&mut self, key: &Key, what: &str) {
        if self.unread.len() < UNREAD_MAX && self.unread.insert(Arc::clone(key)) {
            tracing::warn!("pod {key} is known in part: {what}; what it asks for may be more");
        }
    }

    pub fn text(&mut self, text: &str) -> Arc<str> {
        if self.texts.len() > SHARED_MAX {
            self.texts.clear();
        }
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        let new: Arc<str> = Arc::from(text);
        self.texts.insert(Arc::clone(&new));
        new
    }

    pub fn requests(&mut self, amounts: Resources) -> Arc<Resources> {
        if self.requests.len() > SHARED_MAX {
            self.requests.clear();
        }
        if let Some(known) = self.requests.get(&amounts.0) {
            return Arc::clone(known);
        }
        let new = Arc::new(amounts);
        self.requests.insert(new.0.clone(), Arc::clone(&new));
        new
    }
}
