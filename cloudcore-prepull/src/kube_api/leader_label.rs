//! The label by which the Service finds the leader: on the leader's pod and on no other (decision 16).
//!
//! ```text
//!  start ──▶ off ──shows──▶ on: its own pod, then off from every other one; looked at again ──hides──▶ off
//! ```
//!
//! One task makes all requests, one after the other, so that none of this process overtakes another one. What takes the
//! label away from this pod is harmless at any time; what gives it goes through the leader's fenced client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, Patch};
use kube::{Client, Error, ResourceExt};
use prepull_engine::shared::pacing::Backoff;
use serde_json::{Value, json};
use tokio::sync::watch;
use tracing::info;

use crate::kube_api::field_manager::patch_params;
use crate::kube_api::refusal::{FailureLog, explain_error};

/// The label; the Service of the manifests selects it.
const LABEL: &str = "prepull.kubeedge.io/leader";
/// When a Deployment has one pod too many, it deletes the one that costs least: not the leader, so that an update moves the
/// leadership once.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// How often the leader checks the label: a user may have changed it by hand, or copied a pod with it.
const PERIOD: Duration = Duration::from_secs(5);
/// The limit for one check and its patches, which take milliseconds. After that we start over.
const LIMIT: Duration = Duration::from_secs(5);
/// How long the end of a leader waits for the label to go. Its successor takes it away in any case.
const HIDE_LIMIT: Duration = Duration::from_secs(1);
/// The waits between two attempts; edges wait for them.
const RETRY: Backoff = Backoff::new(Duration::from_millis(250), PERIOD);

/// The label of this pod. All clones are of the same pod.
#[derive(Clone)]
pub(crate) struct LeaderLabel(Option<Arc<Channels>>);

struct Channels {
    wish: watch::Sender<LabelWish>,
    outcome: watch::Receiver<LabelOutcome>,
}

#[derive(Clone)]
struct LabelWish {
    /// Counts the wishes, to tell for which one an outcome is.
    number: u64,
    /// The leader's client. None: the pod is not to have the label.
    leader: Option<Client>,
}

#[derive(Clone, Debug)]
struct LabelOutcome {
    number: u64,
    /// Why it is not as wished.
    problem: Option<String>,
}

impl LeaderLabel {
    /// Takes the label from our pod: its container may have led before it was restarted. Outside of a pod this does
    /// nothing.
    pub(crate) fn start(client: Client, namespace: &str, pod: Option<String>) -> Self {
        let Some(pod) = pod else { return Self(None) };
        let (wish, wishes) = watch::channel(LabelWish { number: 1, leader: None });
        let (outcomes, outcome) = watch::channel(LabelOutcome { number: 0, problem: None });
        let marker = Marker { client, namespace: namespace.to_owned(), pod, log: FailureLog::default() };
        tokio::spawn(marker.run(wishes, outcomes));
        Self(Some(Arc::new(Channels { wish, outcome })))
    }

    /// Gives the label to this pod, and takes it from all others, from now on. `leader` is the leader's client.
    pub(crate) fn show(&self, leader: Client) {
        self.send_wish(Some(leader));
    }

    /// Takes the label from this pod, and waits until it is gone, for a moment at most.
    pub(crate) async fn hide(&self) {
        let Some(number) = self.send_wish(None) else { return };
        let Some(Channels { outcome, .. }) = self.0.as_deref() else { return };
        let mut outcome = outcome.clone();
        let gone = outcome.wait_for(|outcome| outcome.number == number && outcome.problem.is_none());
        let _ = tokio::time::timeout(HIDE_LIMIT, gone).await;
    }

    /// Why the label is not as it has to be; `None` if it is.
    pub(crate) fn problem(&self) -> Option<String> {
        let channels = self.0.as_ref()?;
        let (wished, outcome) = (channels.wish.borrow().number, channels.outcome.borrow());
        if outcome.number == wished {
            outcome.problem.clone()
        } else {
            Some("the API server has not been told yet".to_owned())
        }
    }

    fn send_wish(&self, leader: Option<Client>) -> Option<u64> {
        let channels = self.0.as_ref()?;
        channels.wish.send_modify(|wish| *wish = LabelWish { number: wish.number + 1, leader });
        Some(channels.wish.borrow().number)
    }
}

impl fmt::Debug for LeaderLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LeaderLabel").field(&self.problem()).finish()
    }
}

pub(crate) fn own_pod() -> Option<String> {
    std::env::var("POD_NAME").ok().filter(|name| !name.is_empty())
}

struct Marker {
    client: Client,
    namespace: String,
    pod: String,
    log: FailureLog,
}

impl Marker {
    /// Keeps the label as wished until all senders of wishes are dropped.
    async fn run(self, mut wishes: watch::Receiver<LabelWish>, outcomes: watch::Sender<LabelOutcome>) {
        let mut retry = RETRY;
        loop {
            let wish = wishes.borrow_and_update().clone();
            let problem = match tokio::time::timeout(LIMIT, self.apply_wish(wish.leader.as_ref())).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => {
                    // The manifests of the Lease are those of this right, too.
                    let problem = explain_error::<Lease>(&error);
                    self.log.record("mark the leader's pod", &self.pod, problem.as_deref(), &error);
                    Some(problem.unwrap_or_else(|| error.to_string()))
                }
                Err(_) => Some(format!("the API server has not answered within {LIMIT:?}")),
            };
            let wait = match &problem {
                Some(_) => Some(retry.next_wait()),
                None => wish.leader.is_some().then_some(PERIOD),
            };
            if problem.is_none() {
                retry = RETRY;
            }
            outcomes.send_replace(LabelOutcome { number: wish.number, problem });
            let wait = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = wishes.changed() => if changed.is_err() { return },
                () = wait => {}
            }
        }
    }

    async fn apply_wish(&self, leader: Option<&Client>) -> Result<(), Error> {
        let Some(leader) = leader else { return self.patch(&self.client, &self.pod, false).await };
        let pods = Api::<Pod>::namespaced(leader.clone(), &self.namespace);
        let labelled = pods.list_metadata(&ListParams::default().labels(&format!("{LABEL}=true"))).await?;
        let labelled: Vec<String> = labelled.iter().map(ResourceExt::name_any).collect();
        for (pod, leads) in label_changes(&labelled, &self.pod) {
            self.patch(leader, pod, leads).await?;
            if leads {
                info!(pod, "the Service sends edges to this pod");
            } else {
                info!(pod, "the Service sends edges no longer to this pod, which does not lead");
            }
        }
        Ok(())
    }

    async fn patch(&self, client: &Client, pod: &str, leads: bool) -> Result<(), Error> {
        let pods = Api::<Pod>::namespaced(client.clone(), &self.namespace);
        match pods.patch_metadata(pod, &patch_params(), &Patch::Merge(label_patch(leads))).await {
            // The pod was deleted, and its label with it. If it is our own, this process is about to end.
            Err(Error::Api(answer)) if answer.code == 404 => Ok(()),
            patched => patched.map(drop),
        }
    }
}

/// Pods with a wrong label, and the right one: our own first, since edges wait for it.
fn label_changes<'a>(labelled: &'a [String], own: &'a str) -> Vec<(&'a str, bool)> {
    let others = labelled.iter().map(String::as_str).filter(|pod| *pod != own).map(|pod| (pod, false));
    let own = (!labelled.iter().any(|pod| pod == own)).then_some((own, true));
    own.into_iter().chain(others).collect()
}

fn label_patch(leads: bool) -> Value {
    let (label, cost) = if leads { (json!("true"), json!("1")) } else { (Value::Null, Value::Null) };
    json!({"metadata": {"labels": {LABEL: label}, "annotations": {DELETION_COST: cost}}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leader_labels_only_its_own_pod() {
        let labelled = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        for (found, expected) in [
            (&[][..], &[("a", true)][..]),
            (&["a"], &[]),
            (&["b", "c"], &[("a", true), ("b", false), ("c", false)]),
            (&["b", "a"], &[("b", false)]),
        ] {
            assert_eq!(label_changes(&labelled(found), "a"), expected, "{found:?}");
        }
    }

    #[test]
    fn without_a_pod_nothing_is_labelled() {
        let label = LeaderLabel(None);
        assert_eq!((label.send_wish(None), label.problem()), (None, None));
    }
}
