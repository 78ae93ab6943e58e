//! One object of Kruise's API, from its application to its end.

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

use crate::cleanup::eventually;
use crate::cluster::Cluster;
use crate::place::Place;

/// How long a test waits for what it expects, unless it says otherwise: long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Events are published one after another, beside the status.
const EVENT_LIMIT: Duration = Duration::from_secs(10);
/// Whose logs are shown when an object does not get where it should.
const LOGS: [&str; 3] = ["cloudcore-prepull", "agent-", "kube-apiserver"];

/// What an [`Object`] may be.
pub trait Kind:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

impl<K> Kind for K where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
}

/// An object that is there, or will be.
#[derive(Clone)]
pub struct Object<K> {
    place: Arc<Place>,
    pub(super) api: Api<K>,
    pub(super) name: String,
    limit: Duration,
}

impl<K: Kind> Object<K> {
    pub(super) fn new(cluster: &Cluster, api: Api<K>, name: &str) -> Self {
        Self { place: Arc::clone(cluster.place()), api, name: name.to_owned(), limit: LIMIT }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits this long instead of a minute.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// The object as the API server has it.
    pub async fn get(&self) -> Result<K> {
        self.api.get(&self.name).await.with_context(|| format!("cannot get {}", self.title()))
    }

    /// What the API server knows it by.
    pub async fn uid(&self) -> Result<String> {
        Ok(self.get().await?.meta().uid.clone().unwrap_or_default())
    }

    /// Waits until it is so. Where that takes too long, the error says how it is and ends with the logs.
    pub async fn until(&self, what: &str, mut so: impl FnMut(&K) -> bool) -> Result<K> {
        self.until_some(what, |object| so(object).then(|| object.clone())).await
    }

    /// As [`Self::until`], and returns what `found` finds.
    pub async fn until_some<T>(&self, what: &str, mut found: impl FnMut(&K) -> Option<T>) -> Result<T> {
        let mut last = None;
        let search = async {
            // A restart of the API server is no end, and an error is followed by another try.
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

    /// Waits until it is there.
    pub async fn exists(&self) -> Result<K> {
        self.until("exists", |_| true).await
    }

    /// Waits until there is none of that name.
    pub async fn is_gone(&self) -> Result<()> {
        let mut changes = Box::pin(watch_object(self.api.clone(), &self.name).default_backoff());
        let gone = async { while !matches!(changes.next().await, Some(Ok(None)) | None) {} };
        tokio::time::timeout(self.limit, gone)
            .await
            .with_context(|| format!("{} is still there\n{}", self.title(), self.place.log_tails(&LOGS)))
    }

    /// Whether there is one now.
    pub async fn is_there(&self) -> Result<bool> {
        Ok(self.api.get_opt(&self.name).await?.is_some())
    }

    /// Changes it: a JSON merge patch, `{"spec": …}`.
    pub async fn patch(&self, patch: serde_json::Value) -> Result<K> {
        let patched = self.api.patch(&self.name, &PatchParams::default(), &Patch::Merge(patch)).await;
        patched.with_context(|| format!("cannot patch {}", self.title()))
    }

    /// Changes its spec, as `kubectl patch --type=merge` does.
    pub async fn patch_spec(&self, spec: serde_json::Value) -> Result<K> {
        self.patch(serde_json::json!({ "spec": spec })).await
    }

    /// Deletes it. There is no garbage collector in the cluster: what it owns stays.
    pub async fn delete(&self) -> Result<()> {
        self.api.delete(&self.name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// The events on it so far: type, reason, message.
    pub async fn events(&self) -> Result<Vec<(String, String, String)>> {
        let api: Api<Event> = Api::all(self.api.clone().into_client());
        let fields = format!("involvedObject.uid={}", self.uid().await?);
        let mut events = api.list(&ListParams::default().fields(&fields)).await?.items;
        events.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name)); // their names end in the time
        let text = Option::unwrap_or_default;
        Ok(events.into_iter().map(|e| (text(e.type_), text(e.reason), text(e.message))).collect())
    }

    /// Waits for an event with that reason, and returns its type and message. Events follow the status.
    pub async fn event(&self, reason: &str) -> Result<(String, String)> {
        eventually(&format!("event {reason} on {}", self.title()), EVENT_LIMIT, async || {
            let events = self.events().await?;
            let found = events.iter().find(|(_, found, _)| found == reason);
            let (kind, _, message) = found.with_context(|| format!("there are {events:?}"))?;
            Ok((kind.clone(), message.clone()))
        })
        .await
    }

    /// For messages: its kind and its name.
    pub(super) fn title(&self) -> String {
        format!("{} {}", K::kind(&()), self.name)
    }

    /// How it is, and the logs.
    pub(super) fn diagnosis(&self, object: Option<&K>) -> String {
        let yaml = object.map_or_else(
            || "there is none\n".to_owned(),
            |object| serde_saphyr::to_string(object).unwrap_or_else(|error| error.to_string()),
        );
        format!("--- the object:\n{yaml}\n{}", self.place.log_tails(&LOGS))
    }
}
