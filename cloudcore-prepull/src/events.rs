//! Kubernetes events on jobs, for the person who watches.
//!
//! Events of the group "" in the form that kubectl and client-go have always written: API servers of every version
//! take them for a cluster-scoped object in the namespace `default`, and `kubectl describe` finds them there. Those
//! with an `eventTime`, as kube's own `Recorder` writes them, are refused there by older servers (1.20, for one).

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::controller::JobEvent;

/// Events that wait for the API server. They are advice, not state: what does not fit is dropped and logged.
const QUEUE: usize = 256;
/// Where events about cluster-scoped objects live.
const NAMESPACE: &str = "default";
/// Bytes of the job's name in an event's name. With a dot and 16 hexadecimal digits it stays below the 253 bytes
/// that a name may have.
const NAME_PART: usize = 200;

/// The sending end.
#[derive(Clone, Debug)]
pub struct Events(mpsc::Sender<JobEvent>);

impl Events {
    /// Starts the task that publishes.
    pub fn start(client: Client) -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(publish(client, receiver));
        Self(sender)
    }

    /// Hands over one event.
    pub fn send(&self, event: JobEvent) {
        info!(job = event.name, reason = event.reason, note = event.note, "event");
        if let Err(error) = self.0.try_send(event) {
            warn!(%error, "event dropped");
        }
    }
}

async fn publish(client: Client, mut events: mpsc::Receiver<JobEvent>) {
    let api: Api<Event> = Api::namespaced(client, NAMESPACE);
    let instance = std::env::var("POD_NAME").ok();
    while let Some(event) = events.recv().await {
        let (name, reason) = (event.name.clone(), event.reason);
        if let Err(error) =
            api.create(&PostParams::default(), &object(event, instance.clone(), Timestamp::now())).await
        {
            warn!(job = name, reason, %error, "event not published");
        }
    }
}

fn object(event: JobEvent, instance: Option<String>, now: Timestamp) -> Event {
    const PROGRAM: &str = "cloudcore-prepull";
    let JobEvent { job, name, warning, reason, note } = event;
    // Names of objects are ASCII; where this one is cut, a dash or dot may be last, which a dot must not follow.
    let part = name.get(..NAME_PART).map_or(name.as_str(), |cut| cut.trim_end_matches(['-', '.'])).to_owned();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{part}.{:x}", now.as_nanosecond())),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(format!("{}/v1alpha2", prepull_api::crd::GROUP)),
            kind: Some("ImagePrePullJob".to_owned()),
            name: Some(name),
            uid: Some(job.0),
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
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use prepull_api::task::JobUid;

    use super::*;

    fn event(name: String) -> Event {
        let event = JobEvent {
            job: JobUid("u".to_owned()),
            name,
            warning: true,
            reason: "Failed",
            note: "why".to_owned(),
        };
        object(event, None, Timestamp::from_second(1_000_000_000).unwrap())
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
}
