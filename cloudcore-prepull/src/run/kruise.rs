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
use tracing::{Instrument, error, info, info_span, warn};

use super::core::{Core, catch_panic};
use crate::commands::args::RunArgs;
use crate::edges::dispatch::dispatch_node_image_task;
use crate::kube_api::kruise_owner::{self, KruiseRefusal};
use crate::kube_api::kruise_watch;
use crate::run::http::Readiness;

/// The time between two checks whether Kruise's kinds are ours by now. The user who applies them waits for it.
const RECHECK: Duration = Duration::from_secs(5);
/// The time between two checks whether they still are. Until then two controllers may write the same objects; each check costs
/// the API server four reads.
const RECHECK_SERVED: Duration = Duration::from_secs(60);

/// Whether Kruise's API is served. Where it is asked for, and its kinds are not ours to serve, ImagePrePullJobs are served
/// all the same: a flag that comes before its definitions stops nothing that worked.
pub(super) struct KruiseGate {
    is_open: bool,
    has_changed: CancellationToken,
}

impl KruiseGate {
    /// Checks whether the kinds are ours. If not, we log it, and show it in /readyz. We go on checking, and once the answer is
    /// another one, we cancel `shutdown`, for a start with Kruise's API, or without it.
    pub(super) async fn open(
        args: &RunArgs,
        client: &Client,
        readiness: &Arc<Readiness>,
        shutdown: &CancellationToken,
    ) -> Self {
        let has_changed = CancellationToken::new();
        let refusal = if args.enable_kruise_api {
            shutdown.run_until_cancelled(Box::pin(find_refusal(client, readiness))).await
        } else {
            return Self { is_open: false, has_changed };
        };
        let is_open = refusal == Some(None);
        if let Some(refusal) = refusal {
            let (client, readiness) = (client.clone(), readiness.clone());
            let (changed, stop) = (has_changed.clone(), shutdown.clone());
            if let Some(refusal) = &refusal {
                log_refusal(refusal);
            }
            let recheck = async move {
                match refusal {
                    Some(refusal) => wait_until_ours(&client, &readiness, refusal).await,
                    None => wait_until_lost(&client).await,
                }
                changed.cancel();
                stop.cancel();
            };
            tokio::spawn(shutdown.clone().run_until_cancelled_owned(recheck));
        }
        Self { is_open, has_changed }
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether the API can be served by now, and is not, or the other way round.
    pub(super) fn has_changed(&self) -> bool {
        self.has_changed.is_cancelled()
    }
}

/// Waits until the kinds are ours. `last` is why they aren't yet.
async fn wait_until_ours(client: &Client, readiness: &Readiness, mut last: String) {
    loop {
        tokio::time::sleep(RECHECK).await;
        match find_refusal(client, readiness).await {
            Some(refusal) if refusal == last => {}
            Some(refusal) => {
                log_refusal(&refusal);
                last = refusal;
            }
            None => break,
        }
    }
    info!("OpenKruise's API can be served now: the work starts over with it");
}

/// Waits until the kinds aren't ours any more.
async fn wait_until_lost(client: &Client) {
    loop {
        tokio::time::sleep(RECHECK_SERVED).await;
        match kruise_owner::check_ownership(client, Timestamp::now()).await {
            // An API server that has just started may refuse for a moment what it allows: that's no other controller.
            Ok(()) | Err(KruiseRefusal::Forbidden { .. }) => {}
            Err(_) => break,
        }
    }
    warn!("OpenKruise's API can't be served any more: the work starts over without it");
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU16, Ordering};

    use kube::ResourceExt;
    use prepull_api::crd::kruise::crds;
    use serde_json::json;

    use super::*;
    use crate::kube_api::fake_api::{client_answering, refusal_status};

    #[tokio::test(start_paused = true)]
    async fn kruises_controller_is_noticed() {
        // How the Lease is answered: with a Lease that's alive, or with a refusal.
        let code = Arc::new(AtomicU16::new(404));
        let answered = Arc::clone(&code);
        let (client, _) = client_answering(move |target| {
            let crd = crds().into_iter().find(|crd| target.contains(&format!("/{}", crd.name_any())));
            match (crd, answered.load(Ordering::Relaxed)) {
                (Some(crd), _) => serde_json::to_value(crd).unwrap(),
                (None, 200) => json!({
                    "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": "kruise-manager" },
                    "spec": { "holderIdentity": "kruise", "renewTime": format!("{:.6}", Timestamp::now()) },
                }),
                (None, 404) => {
                    json!({ "kind": "Status", "code": 404, "reason": "NotFound", "message": "no Lease" })
                }
                (None, code) => refusal_status(code),
            }
        });
        let mut lost = std::pin::pin!(wait_until_lost(&client));
        for refused in [404, 403] {
            code.store(refused, Ordering::Relaxed);
            let ended = tokio::time::timeout(5 * RECHECK_SERVED, lost.as_mut()).await;
            assert!(ended.is_err(), "{refused}");
        }
        code.store(200, Ordering::Relaxed);
        assert!(tokio::time::timeout(2 * RECHECK_SERVED, lost).await.is_ok());
    }
}
