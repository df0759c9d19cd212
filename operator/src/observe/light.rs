//! A pod as the sieve lets it through, and what was left out of it because it was too much.

use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use kube::Resource;
use serde::Deserialize;
use std::borrow::Cow;

#[derive(Clone, Debug, Deserialize)]
pub struct LightPod {
    metadata: ObjectMeta,
    spec: Option<PodSpec>,
    status: Option<PodStatus>,
    unread: Option<String>,
}

impl LightPod {
    /// The pod, and what of it is not there.
    pub fn pod(self) -> (Pod, Option<String>) {
        let LightPod { metadata, spec, status, unread } = self;
        (Pod { metadata, spec, status }, unread)
    }
}

impl Resource for LightPod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        Pod::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        Pod::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        Pod::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        Pod::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
