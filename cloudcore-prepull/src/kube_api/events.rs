//! Kubernetes events on jobs and NodeImages, for the person who watches.
//!
//! Events of the group "" in the form that kubectl and client-go have always written: API servers of every version
//! take them for a cluster-scoped object in the namespace `default`, and `kubectl describe` finds them there. Those
//! with an `eventTime`, as kube's own `Recorder` writes them, are refused there by older servers (1.20, for one).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as CoreEvent, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::{Api, PostParams};
use prepull_api::crd::kruise;
use prepull_engine::kruise::ObjectId;
use prepull_engine::kruise::jobs::Event as KruiseEvent;
use prepull_engine::prepull::controller::JobEvent;
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

/// Events that wait for the API server. They are advice, not state: what does not fit is dropped and logged.
const QUEUE: usize = 256;
/// Where events about cluster-scoped objects live.
const NAMESPACE: &str = "default";
/// Bytes of the job's name in an event's name. With a dot and 16 hexadecimal digits it stays below the 253 bytes
/// that a name may have.
const NAME_PART: usize = 200;

/// Events of NodeImages: so many at once, and then so many a second. A fleet that succeeds must not drown etcd.
const SUCCESSES: (f64, f64) = (50.0, 1.0);
/// The same for what failed, which somebody may be looking for.
const FAILURES: (f64, f64) = (100.0, 5.0);

/// An event on any object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    api_version: String,
    kind: &'static str,
    namespace: Option<String>,
    name: String,
    uid: String,
    warning: bool,
    reason: &'static str,
    note: String,
}

impl From<JobEvent> for Event {
    fn from(event: JobEvent) -> Self {
        let JobEvent { job, name, warning, reason, note } = event;
        let api_version = format!("{}/v1alpha2", prepull_api::crd::GROUP);
        Self {
            api_version,
            kind: "ImagePrePullJob",
            namespace: None,
            name,
            uid: job.0,
            warning,
            reason,
            note,
        }
    }
}

impl From<KruiseEvent> for Event {
    fn from(event: KruiseEvent) -> Self {
        let KruiseEvent { kind, object: ObjectId { namespace, name, uid }, warning, reason, note } = event;
        let api_version = format!("{}/{}", kruise::GROUP, kruise::VERSION);
        let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
        Self { api_version, kind, namespace, name, uid: uid.0, warning, reason, note }
    }
}

/// The sending end.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Event>,
    successes: Arc<Mutex<Bucket>>,
    failures: Arc<Mutex<Bucket>>,
}

impl Events {
    /// Starts the task that publishes.
    pub fn start(client: Client) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(publish(client, receiver));
        let bucket = |(burst, rate)| Arc::new(Mutex::new(Bucket::new(burst, rate, Instant::now())));
        Self { queue, successes: bucket(SUCCESSES), failures: bucket(FAILURES) }
    }

    /// Hands over one event.
    pub fn send(&self, event: JobEvent) {
        info!(job = event.name, reason = event.reason, note = event.note, "event");
        self.offer(event.into());
    }

    /// Hands over one event of Kruise's objects. There is one for each node of a job: beyond a rate they are dropped, and
    /// what they would have said stands in the status.
    pub fn send_kruise(&self, event: KruiseEvent) {
        let of_node = event.reason.starts_with("PullImage");
        debug!(kind = event.kind, object = %event.object, reason = event.reason, note = event.note, "event");
        let bucket = if event.warning { &self.failures } else { &self.successes };
        // Nothing that holds the lock can leave the bucket half changed.
        let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        if !of_node || bucket.take(Instant::now()) {
            self.offer(event.into());
        }
    }

    fn offer(&self, event: Event) {
        if let Err(error) = self.queue.try_send(event) {
            warn!(%error, "event dropped");
        }
    }
}

/// Lets a burst through, and then a rate.
#[derive(Debug)]
struct Bucket {
    burst: f64,
    rate: f64,
    left: f64,
    counted: Instant,
}

impl Bucket {
    fn new(burst: f64, rate: f64, now: Instant) -> Self {
        Self { burst, rate, left: burst, counted: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        self.left = (self.left + (now - self.counted).as_secs_f64() * self.rate).min(self.burst);
        self.counted = now;
        let has = self.left >= 1.0;
        if has {
            self.left -= 1.0;
        }
        has
    }
}

async fn publish(client: Client, mut events: mpsc::Receiver<Event>) {
    let instance = std::env::var("POD_NAME").ok();
    while let Some(event) = events.recv().await {
        let (name, reason) = (event.name.clone(), event.reason);
        let api: Api<CoreEvent> =
            Api::namespaced(client.clone(), event.namespace.as_deref().unwrap_or(NAMESPACE));
        if let Err(error) =
            api.create(&PostParams::default(), &object(event, instance.clone(), Timestamp::now())).await
        {
            warn!(object = name, reason, %error, "event not published");
        }
    }
}

fn object(event: Event, instance: Option<String>, now: Timestamp) -> CoreEvent {
    const PROGRAM: &str = "cloudcore-prepull";
    let Event { api_version, kind, namespace, name, uid, warning, reason, note } = event;
    // Names of objects are ASCII; where this one is cut, a dash or dot may be last, which a dot must not follow.
    let part = name.get(..NAME_PART).map_or(name.as_str(), |cut| cut.trim_end_matches(['-', '.'])).to_owned();
    CoreEvent {
        metadata: ObjectMeta {
            name: Some(format!("{part}.{:x}", now.as_nanosecond())),
            namespace: Some(namespace.clone().unwrap_or_else(|| NAMESPACE.to_owned())),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(api_version),
            kind: Some(kind.to_owned()),
            namespace,
            name: Some(name),
            uid: Some(uid),
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
        let event = JobEvent {
            job: JobUid("u".to_owned()),
            name,
            warning: true,
            reason: "Failed",
            note: "why".to_owned(),
        };
        object(event.into(), None, Timestamp::from_second(1_000_000_000).unwrap())
    }

    #[test]
    fn an_event_is_in_the_form_that_every_server_takes() {
        let event = event("nginx".to_owned());
        assert_eq!(event.metadata.name.as_deref(), Some("nginx.de0b6b3a7640000"));
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!((event.involved_object.namespace, event.event_time), (None, None));
        assert_eq!((event.type_.as_deref(), event.count), (Some("Warning"), Some(1)));
    }

    #[test]
    fn an_event_of_a_job_with_the_longest_name_has_a_valid_name() {
        let name = event(format!("{}.{}", "a".repeat(199), "b".repeat(53))).metadata.name.unwrap();
        assert!(name.len() <= 253 && name.starts_with("aaa") && !name.contains(".."), "{name}");
    }

    #[test]
    fn a_burst_of_events_passes_and_then_a_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(50.0, 1.0, start);
        let passed = |bucket: &mut Bucket, at| (0..1000).filter(|_| bucket.take(at)).count();
        assert_eq!(passed(&mut bucket, start), 50);
        assert_eq!(passed(&mut bucket, start + Duration::from_secs(3)), 3);
        assert_eq!(passed(&mut bucket, start + Duration::from_secs(1000)), 50, "no more than at first");
    }
}
