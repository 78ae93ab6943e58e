//! The watches of Kruise's objects and of pods. Their events become inputs of the engine.

use std::fmt::Debug;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::Api;
use kube::{Client, Resource};
use parking_lot::Mutex;
use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob, NodeImage};
use prepull_api::task::NodeName;
use prepull_engine::engine;
use prepull_engine::kruise::Input;
use prepull_engine::kruise::jobs::{self, Pod};
use prepull_engine::kruise::node_images::{self, CompactNodeImage, SharedParts};
use prepull_engine::shared::objects::Unreadable;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use crate::kube_api::guarded::{Guarded, id_of, into_readable};
use crate::kube_api::watch::{WatchInputs, follow_objects, watcher_config};

type WatchedObject<K> = Result<Box<K>, Unreadable>;

/// NodeImages in one answer: one may have a megabyte, and those of twenty images have 50 KiB.
const NODE_IMAGES_IN_PAGE: u32 = 100;
/// Jobs in one answer, of either kind: any user of a namespace can make one of 1.4 MiB, and the client's own page of 500 would
/// be 700 MiB.
const JOBS_IN_PAGE: u32 = 50;
/// Pods in one answer: those of a user may be as large as jobs, and most have 10 KiB.
const PODS_IN_PAGE: u32 = 100;

/// Watches all NodeImages for ever. Of a list that arrives no more is kept than the engine keeps: whole NodeImages of ten
/// thousand nodes with twenty images would be half a gigabyte.
pub(crate) async fn node_images(client: Client, inputs: mpsc::Sender<engine::Input>) {
    use node_images::Input as To;
    let gone = |object: &WatchedObject<CompactNodeImage>| {
        let (name, uid) = match object {
            Ok(object) => (object.name(), object.uid().to_owned()),
            Err(unreadable) => (NodeName(unreadable.id.name.clone()), unreadable.id.uid.0.clone()),
        };
        Input::Node(To::NodeImageGone { name, uid })
    };
    let parts = Mutex::new(SharedParts::default());
    let compact = |object: Guarded<NodeImage>| {
        let mut parts = parts.lock();
        into_readable(object).map(|object| Box::new(CompactNodeImage::new(*object, &mut parts)))
    };
    let watched = WatchInputs {
        all: |objects| Input::Node(To::NodeImages(objects)),
        one: |object| Input::Node(To::NodeImage(object)),
        gone,
        begins: Some(|| Input::Node(To::NodeImagesListing)),
    };
    let config = watcher_config().page_size(NODE_IMAGES_IN_PAGE);
    follow_objects(Api::<Guarded<NodeImage>>::all(client), config, inputs, compact, watched).await;
}

pub(crate) async fn pull_jobs(client: Client, inputs: mpsc::Sender<engine::Input>) {
    use jobs::Input as To;
    let watched = WatchInputs {
        all: |objects| Input::Job(To::PullJobs(objects)),
        one: |object| Input::Job(To::PullJob(object)),
        gone: |object: &WatchedObject<ImagePullJob>| Input::Job(To::PullJobGone(id_of(object).uid)),
        begins: None,
    };
    follow_objects(
        Api::<Guarded<ImagePullJob>>::all(client),
        watcher_config().page_size(JOBS_IN_PAGE),
        inputs,
        into_readable,
        watched,
    )
    .await;
}

pub(crate) async fn list_jobs(client: Client, inputs: mpsc::Sender<engine::Input>) {
    use jobs::Input as To;
    let watched = WatchInputs {
        all: |objects| Input::Job(To::ListJobs(objects)),
        one: |object| Input::Job(To::ListJob(object)),
        gone: |object: &WatchedObject<ImageListPullJob>| Input::Job(To::ListJobGone(id_of(object).uid)),
        begins: None,
    };
    follow_objects(
        Api::<Guarded<ImageListPullJob>>::all(client),
        watcher_config().page_size(JOBS_IN_PAGE),
        inputs,
        into_readable,
        watched,
    )
    .await;
}

/// A field selector for the pods that a podSelector may select. The watch delivers a pod that leaves it as deleted.
const SCHEDULED: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

/// Watches all pods whenever a job selects its nodes by them. Of each only what a podSelector needs is read.
pub(crate) async fn pods(
    client: Client,
    mut are_needed: watch::Receiver<bool>,
    inputs: mpsc::Sender<engine::Input>,
) {
    use jobs::Input as To;
    // The sender lives as long as the engine.
    while are_needed.wait_for(|needed| *needed).await.is_ok() {
        let watched = WatchInputs {
            all: |pods| Input::Job(To::Pods(pods)),
            one: |pod| Input::Job(To::Pod(pod)),
            gone: |pod: &Pod| {
                Input::Job(To::PodGone { namespace: pod.namespace.clone(), name: pod.name.clone() })
            },
            begins: None,
        };
        let scheduled = watcher_config().fields(SCHEDULED).page_size(PODS_IN_PAGE);
        tokio::select! {
            () = follow_objects(Api::<PodView>::all(client.clone()), scheduled, inputs.clone(), pod_from_view, watched) => return,
            _ = are_needed.wait_for(|needed| !needed) => {}
        }
        if inputs.send(Input::Job(To::PodsUnwatched).into()).await.is_err() {
            return;
        }
    }
}

/// The part of a Pod that is read.
#[derive(Resource, Clone, Debug, Serialize, Deserialize)]
#[resource(inherit = core::Pod)]
struct PodView {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: PodPlace,
    #[serde(default)]
    status: PodState,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodPlace {
    node_name: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct PodState {
    phase: Option<String>,
}

fn pod_from_view(view: PodView) -> Pod {
    let PodView { metadata, spec, status } = view;
    let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let counts = !has_ended && metadata.deletion_timestamp.is_none();
    Pod {
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        labels: metadata.labels.unwrap_or_default(),
        node: spec.node_name.filter(|name| counts && !name.is_empty()).map(NodeName),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kube_api::fake_api::client_answering;

    #[tokio::test]
    async fn large_objects_come_in_pages() {
        let (client, requests) = client_answering(
            |_| json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}),
        );
        let (inputs, mut lists) = mpsc::channel(8);
        let (_needed, are_needed) = watch::channel(true);
        tokio::spawn(pull_jobs(client.clone(), inputs.clone()));
        tokio::spawn(list_jobs(client.clone(), inputs.clone()));
        tokio::spawn(pods(client, are_needed, inputs));
        for _ in 0..3 {
            lists.recv().await.unwrap();
        }
        let requests = requests.lock().unwrap();
        for (kind, limit) in
            [("/imagepulljobs?", "limit=50"), ("/imagelistpulljobs?", "limit=50"), ("/pods?", "limit=100")]
        {
            let is_limited = |list: &String| list.contains(kind) && list.split('&').any(|part| part == limit);
            assert!(requests.iter().any(is_limited), "{kind} {requests:?}");
        }
    }
}
