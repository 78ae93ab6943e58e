//! Kruise's objects: whether they are ours to serve, their watches, and the actions that the engine asks for.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use prepull_engine::kruise::jobs;
use prepull_engine::kruise::node_images::{self, WrittenNodeImage};
use prepull_engine::kruise::{Action, Input};
use prepull_engine::shared::outcomes::{DispatchOutcome, WriteOutcome};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info, info_span};

use super::core::{Core, catch_panic};
use crate::commands::args::RunArgs;
use crate::edges::dispatch::dispatch_node_image_task;
use crate::kube_api::{kruise_owner, kruise_watch};
use crate::run::http::Readiness;

/// The time between two checks whether Kruise's kinds are ours by now. The user who applies them waits for it.
const RECHECK: Duration = Duration::from_secs(5);

/// Whether Kruise's API is served. Where it is asked for, and its kinds are not ours to serve, ImagePrePullJobs are served
/// all the same: a flag that comes before its definitions stops nothing that worked.
pub(super) struct KruiseGate {
    is_open: bool,
    has_opened: CancellationToken,
}

impl KruiseGate {
    /// Checks whether the kinds are ours. If not, we log it, show it in /readyz, and check again. Once they are, we
    /// cancel `shutdown`, for a start with Kruise's API.
    pub(super) async fn open(
        args: &RunArgs,
        client: &Client,
        readiness: &Arc<Readiness>,
        shutdown: &CancellationToken,
    ) -> Self {
        let has_opened = CancellationToken::new();
        let refusal = if args.enable_kruise_api {
            shutdown.run_until_cancelled(Box::pin(find_refusal(client, readiness))).await
        } else {
            return Self { is_open: false, has_opened };
        };
        let is_open = refusal == Some(None);
        if let Some(Some(refusal)) = refusal {
            let (client, readiness) = (client.clone(), readiness.clone());
            let (opened, stop) = (has_opened.clone(), shutdown.clone());
            log_refusal(&refusal);
            let recheck = async move {
                let mut last = refusal;
                loop {
                    tokio::time::sleep(RECHECK).await;
                    match self::find_refusal(&client, &readiness).await {
                        Some(refusal) if refusal == last => {}
                        Some(refusal) => {
                            log_refusal(&refusal);
                            last = refusal;
                        }
                        None => break,
                    }
                }
                info!("OpenKruise's API can be served now: the work starts over with it");
                opened.cancel();
                stop.cancel();
            };
            tokio::spawn(shutdown.clone().run_until_cancelled_owned(recheck));
        }
        Self { is_open, has_opened }
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether the API can be served by now, and is not.
    pub(super) fn has_opened(&self) -> bool {
        self.has_opened.is_cancelled()
    }
}

/// Why Kruise's API cannot be served, if so.
async fn find_refusal(client: &Client, readiness: &Readiness) -> Option<String> {
    let refusal = kruise_owner::check_ownership(client, Timestamp::now())
        .await
        .err()
        .map(|refusal| refusal.to_string());
    readiness.set_lack(refusal.as_ref().map(|refusal| format!("OpenKruise's API is not served: {refusal}")));
    refusal
}

fn log_refusal(refusal: &str) {
    error!(
        problem = refusal,
        "OpenKruise's API is not served, ImagePrePullJobs are; checking again until it can be"
    );
}

impl Core {
    pub(super) fn watch_kruise(&self, client: &Client, shutdown: &CancellationToken) {
        let inputs = || self.inputs.clone();
        let jobs = kruise_watch::pull_jobs(client.clone(), inputs());
        let lists = kruise_watch::list_jobs(client.clone(), inputs());
        let pods = kruise_watch::pods(client.clone(), self.needs_pods.subscribe(), inputs());
        let node_images = kruise_watch::node_images(client.clone(), inputs());
        self.watch("the watch of ImagePullJobs", "ImagePullJob", jobs, shutdown);
        self.watch("the watch of ImageListPullJobs", "ImageListPullJob", lists, shutdown);
        self.watch("the watch of pods", "Pod", pods, shutdown);
        self.watch("the watch of NodeImages", "NodeImage", node_images, shutdown);
    }

    pub(super) fn act_for_kruise(&mut self, action: Action) {
        let inputs = self.inputs.clone();
        match action {
            Action::Send(node, message) => _ = self.sessions.send(&node, message),
            Action::Event(event) => self.events.send(event),
            Action::Dispatch(dispatch) => {
                let (secrets, sessions, share) =
                    (self.secrets.clone(), self.sessions.clone(), self.sites.share_by_default);
                let span = info_span!("dispatch", task = dispatch.task.title, node = %dispatch.node);
                let work = async move {
                    let (node, task) = (dispatch.node.clone(), dispatch.task.id.clone());
                    let dispatched =
                        catch_panic(dispatch_node_image_task(*dispatch, &secrets, &sessions, share)).await;
                    let (outcome, keys) = dispatched.unwrap_or((DispatchOutcome::Offline, None));
                    if sessions.may_log(&node) {
                        info!(?outcome, "dispatched");
                    }
                    let dispatched = node_images::Input::Dispatched { node, task, outcome, keys };
                    let _ = inputs.send(Input::Node(dispatched).into()).await;
                };
                self.work.spawn(work.instrument(span));
            }
            Action::NodeImage(node, write) => {
                let writer = self.kruise_writer.clone();
                self.work.spawn(async move {
                    let written = catch_panic(writer.write_node_image(&node, write))
                        .await
                        .unwrap_or(WrittenNodeImage::Failed);
                    let _ = inputs.send(Input::Node(node_images::Input::Written(node, written)).into()).await;
                });
            }
            Action::Job(write) => {
                let writer = self.kruise_writer.clone();
                self.work.spawn(async move {
                    let target = write.target();
                    let outcome = catch_panic(writer.write_job(write)).await.unwrap_or(WriteOutcome::Failed);
                    let _ = inputs.send(Input::Job(jobs::Input::Written { target, outcome }).into()).await;
                });
            }
        }
    }
}
