//! The watches of jobs and nodes, which feed the engine, and the loop of every watch.
//!
//! After a watch has broken (410, a restart of the API server) all objects are listed again; the engine compares
//! them to find deleted ones. Errors are logged and retried with backoff; they never end the stream.

use std::collections::HashSet;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, PartialObjectMeta};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher::watcher};
use kube::{Client, ResourceExt};
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::crd::settings::ImagePrePullSettings;
use prepull_api::task::JobUid;
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::node_view::NodeView;
use prepull_engine::prepull::controller::{Input, JobObject, rest_of};
use prepull_engine::shared::events::{ObjectEvent, ObjectKind};
use prepull_engine::shared::objects::ObjectId;
use prepull_engine::{engine, settings};
use tokio::sync::mpsc;

use crate::kube_api::events::Events;
use crate::kube_api::refusal::{FailureLog, explain_error};
use crate::kube_api::report_object::report_id;
use crate::kube_api::stored_job::StoredJob;

/// The reason of the event on a job that is left to KubeEdge.
const LEFT_TO_KUBEEDGE: &str = "LeftToKubeEdge";

/// Seconds that a watch lasts before it is begun again, where the last one ended. One that is silent for 5 s longer has
/// lost its connection: without changes the API server sends nothing for minutes.
const WATCH_SECONDS: u32 = 30;

/// Jobs in one answer: an old one may have 250 KiB until it is read, when little of it is kept.
const JOBS_IN_PAGE: u32 = 50;

/// What every watch of this program begins with.
pub(crate) fn watcher_config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

/// Watches all nodes for ever. Of each it keeps only what planning needs.
pub(crate) async fn nodes(client: Client, inputs: mpsc::Sender<engine::Input>) {
    follow_objects(
        Api::<Node>::all(client),
        watcher_config(),
        inputs,
        |node| NodeView::from_node(&node),
        WatchInputs {
            all: FleetEvent::Nodes,
            one: FleetEvent::Node,
            gone: |node: &NodeView| FleetEvent::NodeGone(node.name.clone()),
            begins: None,
        },
    )
    .await;
}

/// Watches all jobs for ever. A job that cannot be parsed does not stop the others. One that KubeEdge has begun is left
/// out, with an event on it.
pub(crate) async fn jobs(client: Client, events: Events, inputs: mpsc::Sender<engine::Input>) {
    let mut left = LeftJobs { events, noticed: HashSet::new() };
    let stored =
        watcher(Api::<StoredJob>::all(client), watcher_config().page_size(JOBS_IN_PAGE)).default_backoff();
    follow_events::<StoredJob, _, _, _>(
        stored.filter_map(move |event| std::future::ready(left.leave_out(event))),
        inputs,
        |stored| stored.job,
        WatchInputs {
            all: Input::Jobs,
            one: Input::Job,
            gone: |job: &JobObject| Input::JobGone(uid_of(job)),
            begins: None,
        },
    )
    .await;
}

struct LeftJobs {
    events: Events,
    /// The UIDs of jobs that already have the event.
    noticed: HashSet<String>,
}

impl LeftJobs {
    fn leave_out(
        &mut self,
        event: watcher::Result<Event<StoredJob>>,
    ) -> Option<watcher::Result<Event<StoredJob>>> {
        match event {
            Ok(Event::InitApply(job)) if job.is_kubeedges => {
                self.send_event_once(&job);
                None
            }
            // It may have been ours to begin a moment ago.
            Ok(Event::Apply(job)) if job.is_kubeedges => {
                self.send_event_once(&job);
                Some(Ok(Event::Delete(job)))
            }
            Ok(Event::Delete(job)) => {
                self.noticed.remove(&uid_of(&job.job).0);
                Some(Ok(Event::Delete(job)))
            }
            event => Some(event),
        }
    }

    fn send_event_once(&mut self, job: &StoredJob) {
        let uid = uid_of(&job.job);
        if self.noticed.insert(uid.0.clone()) {
            let object = ObjectId { namespace: String::new(), name: job.name_any(), uid };
            let note = "KubeEdge has begun with this job, or carried it out, and it is left alone. To have it carried out \
                        here, delete it and apply it again (docs/kubeedge.md)";
            self.events.send(ObjectEvent {
                kind: ObjectKind::ImagePrePullJob,
                object,
                warning: true,
                reason: LEFT_TO_KUBEEDGE,
                note: note.to_owned(),
            });
        }
    }
}

fn uid_of(job: &JobObject) -> JobUid {
    JobUid(rest_of(job).metadata.uid.clone().unwrap_or_default())
}

/// Watches the metadata of all reports for ever, to notice deletions by users.
pub(crate) async fn reports(client: Client, inputs: mpsc::Sender<engine::Input>) {
    // A list from the API server's cache: what it may lack is written once more in vain, and the store is spared the
    // reading of every report.
    let events =
        watcher(Api::<PartialObjectMeta<ImagePrePullReport>>::all(client), watcher_config().any_semantic())
            .default_backoff();
    // What is written is this program's own, and known.
    let events = events.filter(|event| std::future::ready(!matches!(event, Ok(Event::Apply(_)))));
    follow_events::<ImagePrePullReport, _, _, _>(
        events,
        inputs,
        |report| report_id(&report.metadata),
        WatchInputs {
            all: Input::ReportsListed,
            one: |(job, index)| Input::ReportGone { job, index },
            gone: |(job, index)| Input::ReportGone { job: job.clone(), index: *index },
            begins: None,
        },
    )
    .await;
}

/// Watches the settings of nodes for ever.
pub(crate) async fn settings(client: Client, inputs: mpsc::Sender<engine::Input>) {
    follow_objects(
        Api::<ImagePrePullSettings>::all(client),
        watcher_config(),
        inputs,
        std::convert::identity,
        WatchInputs {
            all: settings::Input::All,
            one: |object| settings::Input::One(Box::new(object)),
            gone: |object: &ImagePrePullSettings| settings::Input::Gone(object.name_any()),
            begins: None,
        },
    )
    .await;
}

pub(crate) struct WatchInputs<T, I> {
    /// For a list of all objects.
    pub(crate) all: fn(Vec<T>) -> I,
    /// For an object that was created or changed.
    pub(crate) one: fn(T) -> I,
    pub(crate) gone: fn(&T) -> I,
    /// For the start of a list. A list may take a while, and some receivers must know what was written during it.
    pub(crate) begins: Option<fn() -> I>,
}

/// Watches for ever, or until the receiver is dropped. The configuration may select some of the objects.
pub(crate) async fn follow_objects<K, T, I>(
    api: Api<K>,
    config: watcher::Config,
    inputs: mpsc::Sender<engine::Input>,
    read: impl Fn(K) -> T,
    watched: WatchInputs<T, I>,
) where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
    I: Into<engine::Input>,
{
    follow_events::<K, _, _, _>(watcher(api, config).default_backoff(), inputs, read, watched).await;
}

/// Follows the events of a watch for objects of the kind `K`, each parsed as `O`.
async fn follow_events<K, O, T, I>(
    events: impl Stream<Item = watcher::Result<Event<O>>>,
    inputs: mpsc::Sender<engine::Input>,
    read: impl Fn(O) -> T,
    watched: WatchInputs<T, I>,
) where
    K: kube::Resource<DynamicType = ()>,
    I: Into<engine::Input>,
{
    let kind = K::kind(&());
    let (mut listed, log) = (Vec::new(), FailureLog::default());
    let mut stream = std::pin::pin!(events);
    loop {
        let input = match stream.next().await {
            Some(Ok(Event::Init)) => {
                listed.clear();
                let Some(begins) = watched.begins else { continue };
                begins()
            }
            Some(Ok(Event::InitApply(object))) => {
                listed.push(read(object));
                continue;
            }
            Some(Ok(Event::InitDone)) => (watched.all)(std::mem::take(&mut listed)),
            Some(Ok(Event::Apply(object))) => (watched.one)(read(object)),
            Some(Ok(Event::Delete(object))) => (watched.gone)(&read(object)),
            Some(Err(error)) => {
                log.record("watch", &kind, lasting_problem::<K>(&error).as_deref(), &error);
                continue;
            }
            None => return,
        };
        if inputs.send(input.into()).await.is_err() {
            return;
        }
    }
}

/// The problem that keeps a watch from starting until an operator acts.
pub(crate) fn lasting_problem<K: kube::Resource<DynamicType = ()>>(error: &watcher::Error) -> Option<String> {
    match error {
        watcher::Error::InitialListFailed(error) | watcher::Error::WatchStartFailed(error) => {
            explain_error::<K>(error)
        }
        _ => None,
    }
}
