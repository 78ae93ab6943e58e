//! The publisher of Kubernetes events on jobs, NodeImages and Nodes.
//!
//! It writes events of the core group in the form that kubectl and client-go have always used: API servers of every
//! version accept them for a cluster-scoped object in the namespace `default`, where `kubectl describe` finds them. With
//! an `eventTime`, as kube's own `Recorder` sets it, older servers refuse them there (1.20, for one).

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as CoreEvent, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::Api;
use parking_lot::Mutex;
use prepull_api::crd::kruise;
use prepull_engine::shared::events::{ObjectEvent, ObjectKind};
use prepull_engine::shared::objects::ObjectId;
use prepull_engine::shared::pacing::{BucketPerKey, TokenBucket};
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
/// Burst and rate per second of all other events about the objects of one kind in one namespace: a user may edit a job hundreds
/// of times a second, and each edit may have an event. Both kinds and the bursts above fit into [`QUEUE`] together.
const OF_NAMESPACE: (f64, f64) = (50.0, 1.0);
/// Most namespaces and kinds that are remembered because they were busy within the last minute.
const MAX_NAMESPACES: usize = 1024;
/// How long the API server may take for an event: those behind it wait, for example while a webhook on events hangs.
const PUBLISH_WITHIN: Duration = Duration::from_secs(5);

type EventBucket = TokenBucket<Instant>;

/// The sender of events. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<ObjectEvent>,
    successes: Arc<Mutex<EventBucket>>,
    failures: Arc<Mutex<EventBucket>>,
    namespaces: Arc<Mutex<BucketPerKey<(String, ObjectKind), Instant>>>,
}

impl Events {
    pub(crate) fn start(client: Client) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(publish_events(client, receiver));
        Self::with_queue(queue)
    }

    fn with_queue(queue: mpsc::Sender<ObjectEvent>) -> Self {
        let bucket = |(burst, per_second)| Arc::new(Mutex::new(EventBucket::new(per_second, burst)));
        let namespaces = BucketPerKey::new(OF_NAMESPACE.1, OF_NAMESPACE.0, MAX_NAMESPACES);
        let (successes, failures) = (bucket(SUCCESSES), bucket(FAILURES));
        Self { queue, successes, failures, namespaces: Arc::new(Mutex::new(namespaces)) }
    }

    /// Queues an event. Those of single images on single nodes are dropped beyond a rate, and so are those of one namespace:
    /// the status has them too.
    pub(crate) fn send(&self, event: ObjectEvent) {
        let ObjectEvent { kind, object, warning, reason, note } = &event;
        match (kind, warning) {
            (ObjectKind::ImagePrePullJob, true) => warn!(job = object.name, reason, note, "event"),
            (ObjectKind::ImagePrePullJob, false) => info!(job = object.name, reason, note, "event"),
            _ => debug!(kind = kind.as_str(), %object, reason, note, "event"),
        }
        if self.is_due(&event, Instant::now()) {
            let queued = self.queue.try_send(event);
            queued.unwrap_or_else(|error| warn!(%error, "an event was dropped"));
        }
    }

    fn is_due(&self, event: &ObjectEvent, now: Instant) -> bool {
        let ObjectEvent { kind, object, warning, reason, note: _ } = event;
        if reasons::is_of_one_image(reason) {
            let bucket = if *warning { &self.failures } else { &self.successes };
            return bucket.lock().try_take(1.0, now).is_ok();
        }
        let key = (object.namespace.clone(), *kind);
        object.namespace.is_empty() || self.namespaces.lock().try_take(&key, now).is_ok()
    }
}

async fn publish_events(client: Client, mut events: mpsc::Receiver<ObjectEvent>) {
    let instance = std::env::var("POD_NAME").ok();
    while let Some(event) = events.recv().await {
        let (object, reason) = (event.object.clone(), event.reason);
        let api: Api<CoreEvent> = Api::namespaced(client.clone(), namespace_of(&event.object));
        let event = core_event(event, instance.clone(), Timestamp::now());
        match tokio::time::timeout(PUBLISH_WITHIN, api.create(&post_params(), &event)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                warn!(%object, reason, error = with_causes(&error), "an event was not published");
            }
            Err(_) => warn!(%object, reason, "an event was not published in {PUBLISH_WITHIN:?}"),
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
    use std::convert::Infallible;

    use hyper::{Request, Response};
    use kube::client::Body;
    use prepull_api::task::JobUid;

    use super::*;

    fn object_event(kind: ObjectKind, namespace: &str, name: String, reason: &'static str) -> ObjectEvent {
        let object = ObjectId { namespace: namespace.to_owned(), name, uid: JobUid("u".to_owned()) };
        ObjectEvent { kind, object, warning: true, reason, note: "why".to_owned() }
    }

    fn event(name: String) -> CoreEvent {
        let event = object_event(ObjectKind::ImagePrePullJob, "", name, "Failed");
        core_event(event, None, Timestamp::from_second(1_000_000_000).unwrap())
    }

    #[test]
    fn no_namespace_takes_all_room() {
        let (queue, mut queued) = mpsc::channel(QUEUE);
        let events = Events::with_queue(queue);
        for _ in 0..1000 {
            for kind in [ObjectKind::ImagePullJob, ObjectKind::ImageListPullJob] {
                events.send(object_event(kind, "team", "job".to_owned(), reasons::INVALID));
                events.send(object_event(kind, "team", "job".to_owned(), reasons::PULL_IMAGE_FAILED));
            }
        }
        events.send(object_event(ObjectKind::ImagePullJob, "other", "job".to_owned(), reasons::FAILED));
        events.send(object_event(ObjectKind::Node, "", "edge-1".to_owned(), reasons::SUPERSEDED_KEY));
        let mut seen = Vec::new();
        while let Ok(event) = queued.try_recv() {
            seen.push(event.reason);
        }
        let of_team = seen.iter().filter(|reason| **reason == reasons::INVALID).count();
        assert!((100..120).contains(&of_team), "{of_team}");
        assert_eq!(seen[seen.len() - 2..], [reasons::FAILED, reasons::SUPERSEDED_KEY]);
    }

    #[tokio::test(start_paused = true)]
    async fn events_wait_briefly_for_others() {
        let hang = |_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>();
        let client = Client::new(tower::service_fn(hang), "default");
        let (queue, receiver) = mpsc::channel(QUEUE);
        for name in ["one", "two"] {
            let event = object_event(ObjectKind::Node, "", name.to_owned(), reasons::SUPERSEDED_KEY);
            queue.try_send(event).unwrap();
        }
        drop(queue);
        let begun = tokio::time::Instant::now();
        publish_events(client, receiver).await;
        assert_eq!(begun.elapsed().as_secs(), 2 * PUBLISH_WITHIN.as_secs());
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
