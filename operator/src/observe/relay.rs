//! One kind of the cluster's objects: its watches, one after the other, as changes.

use super::{Change, Key, Kind};
use crate::metrics::Metrics;
use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

/// When a kind is listed anew though its watch goes on, and who is told whether it is heard of.
pub struct Lists {
    pub first: Duration,
    pub every: Duration,
    pub metrics: Metrics,
}

/// Whoever gave the operator its rights before there were profiles has not given this one: then
/// there are none but those shipped, and the watch goes on asking.
pub fn allowed(
    maps: impl Stream<Item = watcher::Result<watcher::Event<ConfigMap>>>,
) -> impl Stream<Item = watcher::Result<watcher::Event<ConfigMap>>> {
    let mut told = false;
    maps.flat_map(move |event| {
        let refused = match &event {
            Err(watcher::Error::InitialListFailed(kube::Error::Api(status))) => {
                matches!(status.code, 403 | 404)
            }
            _ => false,
        };
        let first = refused && !told;
        told |= refused;
        let empty = [watcher::Event::Init, watcher::Event::InitDone].map(Ok);
        let none = if first { Vec::from(empty) } else { Vec::new() };
        futures::stream::iter(none.into_iter().chain([event]))
    })
}

/// The watches of one kind, one after the other: what a new list no longer has is told as gone.
pub async fn relay<K, Seen, Watch>(
    kind: Kind,
    watch: impl Fn() -> Watch + Send,
    lists: Lists,
    to: mpsc::Sender<Change>,
    mut reduce: impl FnMut(K) -> Seen + Send,
    told: impl Fn(Seen) -> (Key, Change) + Send,
) where
    K: Send + 'static,
    Watch: Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
{
    let mut due = Instant::now() + lists.first;
    let mut stream = Box::pin(watch().default_backoff());
    let (mut known, mut listed) = (HashSet::new(), None::<HashSet<Key>>);
    loop {
        let event = match timeout_at(due, stream.try_next()).await {
            Ok(event) => event,
            Err(_) => {
                due = Instant::now() + lists.every;
                // A list that is under way ends.
                if listed.is_none() {
                    stream = Box::pin(watch().default_backoff());
                }
                continue;
            }
        };
        let event = match event {
            Ok(Some(event)) => event,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(?kind, %error, "watching goes on after a pause");
                // Without the right to read them there are no profiles but those shipped.
                if kind != Kind::Profiles {
                    let now = std::time::Instant::now();
                    lists.metrics.unheard(kind.words(), &error.to_string(), now);
                }
                continue;
            }
        };
        lists.metrics.heard(kind.words());
        let mut changes = Vec::new();
        match event {
            watcher::Event::Init => listed = Some(HashSet::new()),
            watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
                let (key, change) = told(reduce(object));
                if let Some(listed) = &mut listed {
                    listed.insert(Arc::clone(&key));
                }
                known.insert(key);
                changes.push(change);
            }
            watcher::Event::Delete(object) => {
                let (key, _) = told(reduce(object));
                known.remove(&key);
                changes.push(gone(kind, key));
            }
            watcher::Event::InitDone => {
                let listed = listed.take().unwrap_or_default();
                let lost: Vec<Key> = known.difference(&listed).cloned().collect();
                changes.extend(lost.into_iter().map(|key| gone(kind, key)));
                known = listed;
                changes.push(Change::Complete(kind));
            }
        }
        for change in changes {
            if to.send(change).await.is_err() {
                return;
            }
        }
    }
}

fn gone(kind: Kind, key: Key) -> Change {
    match kind {
        Kind::Jobs => Change::JobGone(key),
        Kind::Pods => Change::PodGone(key),
        Kind::Nodes => Change::NodeGone(key),
        Kind::Classes => Change::ClassGone(key),
        Kind::Profiles => Change::Profiles(BTreeMap::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use watcher::Event::{self, Init, InitApply, InitDone};

    type Said = watcher::Result<Event<&'static str>>;

    /// Changes of nodes as words, until the watch ends or there are `count`.
    async fn heard<Watch: Stream<Item = Said> + Send>(
        watch: impl Fn() -> Watch + Send,
        first: Duration,
        count: usize,
    ) -> Vec<String> {
        let (to, mut changes) = mpsc::channel(16);
        let metrics = Metrics::default();
        let lists = Lists { first, every: Duration::from_secs(3600), metrics };
        let told = |name: &str| (Arc::from(name), Change::JobGone(Arc::from(name)));
        let following = relay(Kind::Nodes, watch, lists, to, |name: &'static str| name, told);
        let reading = async {
            let mut heard = Vec::new();
            while heard.len() < count && let Some(change) = changes.recv().await {
                heard.push(match change {
                    Change::JobGone(name) => format!("node {name}"),
                    Change::NodeGone(name) => format!("no node {name}"),
                    other => format!("{other:?}"),
                });
            }
            heard
        };
        let mut following = std::pin::pin!(following);
        let mut reading = std::pin::pin!(reading);
        tokio::select! {
            heard = &mut reading => heard,
            () = &mut following => reading.await,
        }
    }

    /// The process is then to end: `cli/operator.rs` waits for just that.
    #[tokio::test]
    async fn a_watch_that_ends_for_good_ends_its_task() {
        let watch = || stream::iter([Init, InitApply("a"), InitDone, Init, InitDone].map(Ok));
        let heard = heard(watch, Duration::from_secs(3600), usize::MAX).await;
        // What the second list does not have is gone, though nothing told its end.
        assert_eq!(heard, ["node a", "Complete(Nodes)", "no node a", "Complete(Nodes)"]);
    }

    /// Two watches that tell of nothing but their lists.
    #[tokio::test]
    async fn what_no_event_has_told_the_next_list_does() {
        let count = AtomicUsize::new(0);
        let watch = || {
            let other = if count.fetch_add(1, Ordering::Relaxed) == 0 { "goes" } else { "comes" };
            let listed = [Init, InitApply("stays"), InitApply(other), InitDone].map(Ok);
            stream::iter(listed).chain(stream::pending())
        };
        let heard = heard(watch, Duration::from_millis(20), 7).await;
        let first = ["node stays", "node goes", "Complete(Nodes)"];
        let second = ["node stays", "node comes", "no node goes", "Complete(Nodes)"];
        assert_eq!(heard, [&first[..], &second[..]].concat());
    }
}
