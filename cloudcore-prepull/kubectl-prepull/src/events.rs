//! Events of the API server, as rows.

use anyhow::Context;
use futures::TryStreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams};
use serde::Serialize;

use crate::cluster::Cluster;
use crate::pages::pages;
use crate::screen::sanitize_line;

/// Where events about objects without a namespace are.
const NAMESPACE: &str = "default";
const PAGE: u32 = 500;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EventRow {
    pub(crate) time: Option<Timestamp>,
    /// Name of the event, which ends in its time: times themselves are whole seconds.
    #[serde(skip)]
    name: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) reason: String,
    pub(crate) object: String,
    pub(crate) count: i32,
    pub(crate) message: String,
}

/// The events with these fields, in the namespace of the object; none: it has none.
pub(crate) async fn read_events(
    cluster: &Cluster,
    namespace: Option<&str>,
    fields: &str,
) -> anyhow::Result<Vec<Event>> {
    let api = Api::<Event>::namespaced(cluster.client(), namespace.unwrap_or(NAMESPACE));
    let asked = ListParams::default().fields(fields).limit(PAGE);
    pages(api, asked).try_concat().await.context("the events cannot be read")
}

impl EventRow {
    /// When it was seen last.
    pub(crate) fn time(&self) -> Option<Timestamp> {
        self.time
    }

    pub(crate) fn from_event(event: &Event) -> Self {
        let text = |text: &Option<String>| text.as_deref().map(sanitize_line).unwrap_or_default();
        let time = event.last_timestamp.as_ref().map(|time| time.0);
        let seen = event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1);
        let object = &event.involved_object;
        Self {
            time: time
                .or_else(|| event.event_time.as_ref().map(|time| time.0))
                .or_else(|| event.metadata.creation_timestamp.as_ref().map(|time| time.0)),
            name: text(&event.metadata.name),
            kind: text(&event.type_),
            reason: text(&event.reason),
            object: format!("{}/{}", text(&object.kind).to_lowercase(), text(&object.name)),
            count: seen,
            message: text(&event.message),
        }
    }
}
