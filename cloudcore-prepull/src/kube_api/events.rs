//! The publisher of Kubernetes events on jobs, NodeImages and Nodes.
//!
//! It writes events of the core group in the form that kubectl and client-go have always used: API servers of every
//! version accept them for a cluster-scoped object in the namespace `default`, where `kubectl describe` finds them. With
//! an `eventTime`, as kube's own `Recorder` sets it, older servers refuse them there (1.20, for one).

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as CoreEvent, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::Api;
use parking_lot::Mutex;
use prepull_api::crd::kruise;
use prepull_engine::shared::events::{ObjectEvent, ObjectKind};
use prepull_engine::shared::objects::ObjectId;
use prepull_engine::shared::pacing::TokenBucket;
use prepull_engine::shared::reasons;
use prepull_program::errors::with_causes;
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use crate::kube_api::field_manager::post_params;

/// Events that wait for the API server. They are advice, not state: an event that does not fit is dropped and logged.
const QUEUE: usize = 256;
/// The namespace of events about cluster-scoped objects.
const NAMESPACE: &str = "default";
/// Bytes of the object's name in the event's name: with a dot and 16 hexadecimal digits it stays below the limit of 253.
const NAME_PART: usize = 200;

/// Burst and rate per second of events about successful pulls of single nodes: a fleet that succeeds must not flood etcd.
const SUCCESSES: (f64, f64) = (50.0, 1.0);
/// Burst and rate per second of events about failed pulls of single nodes: operators look for these.
const FAILURES: (f64, f64) = (100.0, 5.0);

type EventBucket = TokenBucket<Instant>;

/// The sender of events. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<ObjectEvent>,
    successes: Arc<Mutex<EventBucket>>,
    failures: Arc<Mutex<EventBucket>>,
}

impl Events {
    pub(crate) fn start(client: Client) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(publish_events(client, receiver));
        let bucket = |(burst, per_second)| Arc::new(Mutex::new(EventBucket::new(per_second, burst)));
        Self { queue, successes: bucket(SUCCESSES), failures: bucket(FAILURES) }
    }

    /// Queues an event. Those of single images on single nodes are dropped beyond a rate: the status has them too.
    pub(crate) fn send(&self, event: ObjectEvent) {
        let ObjectEvent { kind, object, warning, reason, note } = &event;
        match (kind, warning) {
            (ObjectKind::ImagePrePullJob, true) => warn!(job = object.name, reason, note, "event"),
            (ObjectKind::ImagePrePullJob, false) => info!(job = object.name, reason, note, "event"),
            _ => debug!(kind = kind.as_str(), %object, reason, note, "event"),
        }
        let bucket = if *warning { &self.failures } else { &self.successes };
        let mut bucket = bucket.lock();
        if !reasons::is_of_one_image(reason) || bucket.try_take(1.0, Instant::now()).is_ok() {
            let queued = self.queue.try_send(event);
            queued.unwrap_or_else(|error| warn!(%error, "an event was dropped"));
        }
    }
}

async fn publish_events(client: Client, mut events: mpsc::Receiver<ObjectEvent>) {
    let instance = std::env::var("POD_NAME").ok();
    while let Some(event) = events.recv().await {
        let (object, reason) = (event.object.clone(), event.reason);
        let api: Api<CoreEvent> = Api::namespaced(client.clone(), namespace_of(&event.object));
        let event = core_event(event, instance.clone(), Timestamp::now());
        if let Err(error) = api.create(&post_params(), &event).await {
            warn!(%object, reason, error = with_causes(&error), "an event was not published");
        }
    }
}

/// The namespace of events about an object.
fn namespace_of(object: &ObjectId) -> &str {
    if object.namespace.is_empty() { NAMESPACE } else { &object.namespace }
}

fn core_event(event: ObjectEvent, instance: Option<String>, now: Timestamp) -> CoreEvent {
    const PROGRAM: &str = "cloudcore-prepull";
    let ObjectEvent { kind, object, warning, reason, note } = event;
    let home = namespace_of(&object).to_owned();
    let ObjectId { namespace, name, uid } = object;
    let api_version = match kind {
        ObjectKind::Node => "v1".to_owned(),
        ObjectKind::ImagePrePullJob => format!("{}/v1alpha2", prepull_api::crd::GROUP),
        ObjectKind::ImagePullJob | ObjectKind::ImageListPullJob | ObjectKind::NodeImage => {
            format!("{}/{}", kruise::GROUP, kruise::VERSION)
        }
    };
    // Names of objects are ASCII. The cut may leave a dash or a dot at the end, which a dot must not follow.
    let part = name.get(..NAME_PART).map_or(name.as_str(), |cut| cut.trim_end_matches(['-', '.'])).to_owned();
    CoreEvent {
        metadata: ObjectMeta {
            name: Some(format!("{part}.{:x}", now.as_nanosecond())),
            namespace: Some(home),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(api_version),
            kind: Some(kind.as_str().to_owned()),
            namespace: Some(namespace).filter(|namespace| !namespace.is_empty()),
            name: Some(name),
            uid: Some(uid.0),
            ..ObjectReference::default()
        },
        type_: Some(if warning { "Warning" } else { "Normal" }.to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(note),
        source: Some(EventSource { component: Some(PROGRAM.to_owned()), host: None }),
        reporting_component: Some(PROGRAM.to_owned()),
        reporting_instance: instance,
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        count: Some(1),
        ..CoreEvent::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prepull_api::task::JobUid;

    use super::*;

    fn event(name: String) -> CoreEvent {
        let event = ObjectEvent {
            kind: ObjectKind::ImagePrePullJob,
            object: ObjectId { namespace: String::new(), name, uid: JobUid("u".to_owned()) },
            warning: true,
            reason: "Failed",
            note: "why".to_owned(),
        };
        core_event(event, None, Timestamp::from_second(1_000_000_000).unwrap())
    }

    #[test]
    fn events_are_valid_for_every_api_server() {
        let event = event("nginx".to_owned());
        assert_eq!(event.metadata.name.as_deref(), Some("nginx.de0b6b3a7640000"));
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!((event.involved_object.namespace, event.event_time), (None, None));
        assert_eq!((event.type_.as_deref(), event.count), (Some("Warning"), Some(1)));
    }

    #[test]
    fn events_of_long_job_names_are_valid() {
        let name = event(format!("{}.{}", "a".repeat(199), "b".repeat(53))).metadata.name.unwrap();
        assert!(name.len() <= 253 && name.starts_with("aaa") && !name.contains(".."), "{name}");
    }

    #[test]
    fn events_are_limited_by_burst_and_rate() {
        let start = Instant::now();
        let (burst, per_second) = SUCCESSES;
        let mut bucket = EventBucket::new(per_second, burst);
        let passed =
            |bucket: &mut EventBucket, at| (0..1000).filter(|_| bucket.try_take(1.0, at).is_ok()).count();
        assert_eq!(passed(&mut bucket, start), 50);
        assert_eq!(passed(&mut bucket, start + Duration::from_secs(3)), 3);
        assert_eq!(passed(&mut bucket, start + Duration::from_secs(1000)), 50, "no more than the burst");
    }
}
