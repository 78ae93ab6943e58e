//! Kubernetes events on jobs, for the person who watches.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tracing::{info, warn};

use crate::controller::JobEvent;

/// Events that wait for the API server. They are advice, not state: what does not fit is dropped and logged.
const QUEUE: usize = 256;

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
    let reporter =
        Reporter { controller: "cloudcore-prepull".to_owned(), instance: std::env::var("POD_NAME").ok() };
    let recorder = Recorder::new(client, reporter);
    while let Some(JobEvent { job, name, warning, reason, note }) = events.recv().await {
        let regarding = ObjectReference {
            api_version: Some(format!("{}/v1alpha2", prepull_api::crd::GROUP)),
            kind: Some("ImagePrePullJob".to_owned()),
            name: Some(name.clone()),
            uid: Some(job.0),
            ..ObjectReference::default()
        };
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note),
            action: reason.to_owned(),
            secondary: None,
        };
        if let Err(error) = recorder.publish(&event, &regarding).await {
            warn!(job = name, reason, %error, "event not published");
        }
    }
}
