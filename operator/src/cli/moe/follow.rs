//! A watch as batches of objects: all of them at first, then each that has changed.

use futures::{Stream, StreamExt};
use kube::api::DynamicObject;
use kube::runtime::watcher;
use serde_json::Value;
use std::pin::Pin;

type Events = dyn Stream<Item = watcher::Result<watcher::Event<DynamicObject>>> + Send;

pub struct Followed {
    events: Pin<Box<Events>>,
    listed: Option<Vec<Value>>,
    /// It has failed since it last told anything.
    troubled: bool,
}

impl Followed {
    pub fn new(
        events: impl Stream<Item = watcher::Result<watcher::Event<DynamicObject>>> + Send + 'static,
    ) -> Followed {
        Followed { events: events.boxed(), listed: None, troubled: false }
    }

    /// What is otherwise than before. An object that was deleted comes with its deletion time.
    pub async fn next(&mut self) -> Option<Vec<Value>> {
        loop {
            match self.events.next().await? {
                Ok(event) => {
                    self.troubled = false;
                    if let Some(objects) = self.take(event) {
                        return Some(objects);
                    }
                }
                // It begins again after a pause; once is enough to know.
                Err(error) if !std::mem::replace(&mut self.troubled, true) => {
                    let error = super::output::plain(&error);
                    eprintln!("the watch is interrupted, and goes on: {error}");
                }
                Err(_) => {}
            }
        }
    }

    fn take(&mut self, event: watcher::Event<DynamicObject>) -> Option<Vec<Value>> {
        match event {
            watcher::Event::Init => self.listed = Some(Vec::new()),
            watcher::Event::InitApply(object) => {
                self.listed.get_or_insert_default().push(plain(object));
            }
            watcher::Event::InitDone => return Some(self.listed.take().unwrap_or_default()),
            watcher::Event::Apply(object) => return Some(vec![plain(object)]),
            watcher::Event::Delete(object) => {
                let mut object = plain(object);
                let gone = &mut object["metadata"]["deletionTimestamp"];
                if gone.is_null() {
                    *gone = super::table::stamp(super::now()).into();
                }
                object["gone"] = true.into();
                return Some(vec![object]);
            }
        }
        None
    }
}

fn plain(object: DynamicObject) -> Value {
    serde_json::to_value(object).unwrap_or_default()
}
