//! One object of Kruise's API: reading, changing and waiting for its states.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Event;
use kube::Resource;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cleanup::{SOON, eventually};
use crate::cluster::Cluster;
use crate::place::Place;

/// Default limit for a state that a test expects, long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// Programs with logs that are shown if an object doesn't reach the expected state.
const LOGS: [&str; 3] = ["cloudcore-prepull", "agent-", "kube-apiserver"];

/// A kind that a [`KruiseObject`] can have.
pub trait KruiseResource:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> KruiseResource for K where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

/// An object that exists, or will.
#[derive(Clone)]
pub struct KruiseObject<K> {
    place: Arc<Place>,
    pub(super) api: Api<K>,
    pub(super) name: String,
    limit: Duration,
}

impl<K: KruiseResource> KruiseObject<K> {
    pub(super) fn new(cluster: &Cluster, api: Api<K>, name: &str) -> Self {
        Self { place: Arc::clone(cluster.place()), api, name: name.to_owned(), limit: LIMIT }
    }

    /// Name of the object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the limit of later waits, instead of two minutes.
    #[must_use]
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Reads the object from the API server.
    pub async fn get(&self) -> Result<K> {
        self.api.get(&self.name).await.with_context(|| format!("cannot get {}", self.title()))
    }

    /// Reads the UID of the object.
    pub async fn uid(&self) -> Result<String> {
        Ok(self.get().await?.meta().uid.clone().unwrap_or_default())
    }

    /// Waits until the object satisfies a condition; `what` names it in errors. After the limit, the error shows the
    /// object and the logs.
    pub async fn until_met(&self, what: &str, mut is_met: impl FnMut(&K) -> bool) -> Result<K> {
        self.until_some(what, |object| is_met(object).then(|| object.clone())).await
    }

    /// Like [`Self::until_met`], but waits until `found` returns something, and returns that.
    pub async fn until_some<T>(&self, what: &str, mut found: impl FnMut(&K) -> Option<T>) -> Result<T> {
        let mut last = None;
        let search = async {
            // After an error, such as a restart of the API server, the watch tries again.
            let mut changes = Box::pin(watch_object(self.api.clone(), &self.name).default_backoff());
            while let Some(change) = changes.next().await {
                if let Ok(Some(object)) = change {
                    let found = found(&object);
                    last = Some(object);
                    if let Some(found) = found {
                        return Ok(found);
                    }
                }
            }
            bail!("the watch of {} ended", self.title())
        };
        match tokio::time::timeout(self.limit, search).await {
            Ok(found) => found,
            Err(_) => bail!(
                "{}: not «{what}» within {:?}\n{}",
                self.title(),
                self.limit,
                self.diagnosis(last.as_ref())
            ),
        }
    }

    /// Waits until the object exists.
    pub async fn exists(&self) -> Result<K> {
        self.until_met("exists", |_| true).await
    }

    /// Waits until the object no longer exists.
    pub async fn is_gone(&self) -> Result<()> {
        let mut changes = Box::pin(watch_object(self.api.clone(), &self.name).default_backoff());
        let gone = async { while !matches!(changes.next().await, Some(Ok(None)) | None) {} };
        tokio::time::timeout(self.limit, gone)
            .await
            .with_context(|| format!("{} still exists\n{}", self.title(), self.place.log_tails(&LOGS)))
    }

    /// Whether the object exists now.
    pub async fn exists_now(&self) -> Result<bool> {
        Ok(self.api.get_opt(&self.name).await?.is_some())
    }

    /// Changes the object by a JSON merge patch, `{"spec": …}`.
    pub async fn patch(&self, patch: serde_json::Value) -> Result<K> {
        let patched = self.api.patch(&self.name, &PatchParams::default(), &Patch::Merge(patch)).await;
        patched.with_context(|| format!("cannot patch {}", self.title()))
    }

    /// Changes the spec, as `kubectl patch --type=merge` does.
    pub async fn patch_spec(&self, spec: serde_json::Value) -> Result<K> {
        self.patch(serde_json::json!({ "spec": spec })).await
    }

    /// Deletes the object. What it owns remains, since the cluster has no garbage collector.
    pub async fn delete(&self) -> Result<()> {
        self.api.delete(&self.name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Reads the events about the object: type, reason and message of each.
    pub async fn events(&self) -> Result<Vec<(String, String, String)>> {
        let api: Api<Event> = Api::all(self.api.clone().into_client());
        let fields = format!("involvedObject.uid={}", self.uid().await?);
        let mut events = api.list(&ListParams::default().fields(&fields)).await?.items;
        events.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name)); // their names end in the time
        let text = Option::unwrap_or_default;
        Ok(events.into_iter().map(|e| (text(e.type_), text(e.reason), text(e.message))).collect())
    }

    /// Waits for an event with this reason, and returns its type and message. Events may come after the status.
    pub async fn wait_for_event(&self, reason: &str) -> Result<(String, String)> {
        eventually(&format!("event {reason} on {}", self.title()), SOON, async || {
            let events = self.events().await?;
            let found = events.iter().find(|(_, found, _)| found == reason);
            let (kind, _, message) = found.with_context(|| format!("there are {events:?}"))?;
            Ok((kind.clone(), message.clone()))
        })
        .await
    }

    /// Kind and name, for messages.
    pub(super) fn title(&self) -> String {
        format!("{} {}", K::kind(&()), self.name)
    }

    /// The object as YAML, and the logs.
    pub(super) fn diagnosis(&self, object: Option<&K>) -> String {
        let yaml = object.map_or_else(
            || "it does not exist\n".to_owned(),
            |object| serde_saphyr::to_string(object).unwrap_or_else(|error| error.to_string()),
        );
        format!("--- the object:\n{yaml}\n{}", self.place.log_tails(&LOGS))
    }
}
