//! What many pods have in common, kept once.

use moejob_manifest::resources::Resources;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Names of nodes, images and sets of requests that many pods have in common are kept once.
#[derive(Default)]
pub(super) struct Shared {
    /// Names of nodes, owners, images.
    texts: HashSet<Arc<str>>,
    requests: BTreeMap<BTreeMap<String, i64>, Arc<Resources>>,
}

/// More different ones than that come from pods that are long gone.
const SHARED_MAX: usize = 16 << 10;

impl Shared {
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
