//! The watches that fill [`PageState`], and the clock that makes rows of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise::ImagePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::known::PageState;
use crate::cluster::Cluster;
use crate::edges::DOOR;
use crate::hearing::SERVER;
use crate::jobs::REPORTS_OF_A_PAGE;
use crate::leader::LeaseWatch;
use crate::problem::{self, ClusterPlace};

/// How often rows are made of what has changed: as fast as a person sees bars move.
const FRAME: Duration = Duration::from_millis(300);
/// How often the API server is asked whether it's there: a person learns within --request-timeout and this that it isn't.
const LISTEN: Duration = Duration::from_secs(5);

/// What can't be watched, where the page can do without it. Without the labels of nodes these are not grouped.
const NODES: &str = "the nodes cannot be watched";
/// Few clusters have OpenKruise's API, and not everybody may see its jobs.
const PULL_JOBS: &str = "OpenKruise's jobs cannot be watched";
const OPTIONAL: [&str; 2] = [NODES, PULL_JOBS];
/// For how long one of them that was heard is refused before the page does without it: longer than an API server that has just
/// begun needs to know its rights and definitions.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// A watch tries again within a minute. Between refusals that are further apart it went on, and had nothing to report.
const APART: Duration = Duration::from_secs(90);

/// The first and the last one of several refusals of a watch, one after another.
#[derive(Debug, Default)]
struct Refusals(Option<(Instant, Instant)>);

impl Refusals {
    /// Takes one more. Returns whether they last.
    fn note(&mut self, now: Instant) -> bool {
        let before = self.0.filter(|(_, last)| now.duration_since(*last) < APART);
        let first = before.map_or(now, |(first, _)| first);
        self.0 = Some((first, now));
        now.duration_since(first) >= REFUSED_FOR
    }
}

/// What is known, and who waits for changes of it.
#[derive(Debug)]
pub(crate) struct Watching {
    known: Mutex<PageState>,
    changes: watch::Sender<u64>,
}

impl Watching {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { known: Mutex::default(), changes: watch::Sender::new(0) })
    }

    /// What is known now.
    pub(crate) fn known(&self) -> MutexGuard<'_, PageState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that grows with each change.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Watches, until something is refused.
    ///
    /// # Errors
    ///
    /// A missing right, missing definitions, or credentials that are not accepted.
    pub(crate) async fn run(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let place = cluster.place();
        let of_jobs =
            watcher(Api::<ImagePrePullJob>::all(cluster.watch_client()), watcher::Config::default())
                .default_backoff();
        let few = watcher::Config::default().page_size(REPORTS_OF_A_PAGE);
        let of_reports =
            watcher(Api::<ImagePrePullReport>::all(cluster.watch_client()), few).default_backoff();
        let nodes: Api<PartialObjectMeta<Node>> = Api::all(cluster.watch_client());
        let of_nodes = watcher(nodes, watcher::Config::default()).default_backoff();
        let of_pull_jobs =
            watcher(Api::<ImagePullJob>::all(cluster.watch_client()), watcher::Config::default())
                .default_backoff();
        tokio::try_join!(
            self.take_events(of_jobs, place, "the jobs cannot be watched", PageState::take_job),
            self.take_events(
                of_reports,
                place,
                "the reports of jobs cannot be watched",
                PageState::take_report
            ),
            async {
                let taken = self.take_events(of_nodes, place, NODES, PageState::take_node).await;
                if let Err(error) = taken {
                    let text = problem::error_text(&problem::explain(error, place));
                    self.known().update_hearing(|hearing| hearing.lack_sites(text));
                }
                std::future::pending::<anyhow::Result<()>>().await
            },
            async {
                let _ = self.take_events(of_pull_jobs, place, PULL_JOBS, PageState::take_pull_job).await;
                std::future::pending::<anyhow::Result<()>>().await
            },
            self.poll_leader(cluster),
            self.make_rows(),
        )?;
        Ok(())
    }

    async fn take_events<K>(
        &self,
        events: impl Stream<Item = watcher::Result<Event<K>>>,
        place: &ClusterPlace,
        what: &'static str,
        take: impl Fn(&mut PageState, Event<K>),
    ) -> anyhow::Result<()> {
        let mut events = std::pin::pin!(events);
        let mut is_heard = false;
        let mut refusals = Refusals::default();
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    // A list that is about to be requested shows nothing about the connection yet.
                    if !matches!(event, Event::Init) {
                        (is_heard, refusals) = (true, Refusals::default());
                    }
                    let mut known = self.known();
                    known.update_hearing(|hearing| hearing.note_event(what, &event));
                    take(&mut known, event);
                }
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    let is_refused = OPTIONAL.contains(&what) && is_refusal(&error);
                    let has_lasted = is_refused && refusals.note(Instant::now());
                    if !is_refused {
                        refusals = Refusals::default();
                    }
                    if has_lasted || problem::is_lasting(&error, is_heard) {
                        let mut known = self.known();
                        known.update_hearing(|hearing| hearing.forget(what));
                        if has_lasted {
                            // What was known of it would otherwise be shown for ever.
                            take(&mut known, Event::Init);
                            take(&mut known, Event::InitDone);
                        }
                        return Err(error.context(what));
                    }
                    // It is taken up again by itself.
                    let text = format!("{what}: {}", problem::error_text(&problem::explain(error, place)));
                    self.known().update_hearing(|hearing| hearing.note_loss(what, text, Timestamp::now()));
                }
            }
        }
        Ok(())
    }

    /// Asks the API server for the leader's Lease, again and again. A watch alone wouldn't notice that it is silent.
    async fn poll_leader(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let leases = Api::<Lease>::namespaced(cluster.client(), cluster.system_namespace());
        let mut watched = LeaseWatch::default();
        loop {
            let lease = leases.get_opt(DOOR).await;
            let now = Timestamp::now();
            match lease {
                Ok(lease) => {
                    let gone = lease.and_then(|lease| watched.take(&lease, now, Instant::now()));
                    let text = gone.map(|gone| gone.text());
                    self.known().update_hearing(|hearing| hearing.hear_server(text, now));
                }
                // It answers a person who may not read the Lease.
                Err(kube::Error::Api(answer)) if answer.code == 403 && !problem::is_page(&answer) => {
                    self.known().update_hearing(|hearing| hearing.hear_server(None, now));
                }
                Err(error) => {
                    let text = problem::error_text(&problem::explain(error.into(), cluster.place()));
                    self.known().update_hearing(|hearing| hearing.note_loss(SERVER, text, now));
                }
            }
            tokio::time::sleep(LISTEN).await;
        }
    }

    async fn make_rows(&self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut frames = tokio::time::interval(FRAME);
        frames.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            frames.tick().await;
            let now = self.known().refresh_rows(Timestamp::now(), begun.elapsed());
            self.changes.send_if_modified(|seen| std::mem::replace(seen, now) != now);
        }
    }
}

/// Whether the API server itself says that there is no right to it, or no such API.
fn is_refusal(error: &anyhow::Error) -> bool {
    problem::server_answer(error)
        .is_some_and(|answer| matches!(answer.code, 403 | 404) && !problem::is_page(answer))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::stream;
    use serde_json::json;

    use super::*;

    type NodeEvent = watcher::Result<Event<PartialObjectMeta<Node>>>;

    /// Whether a watch ends that has read a node and is refused then, again after each of these seconds, and what is still known of
    /// the node. Then whether a loss is shown.
    async fn after_refusals(what: &'static str, pauses: [u64; 4]) -> (bool, usize, bool) {
        let node = json!({ "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "edge-1", "labels": { "zone": "lyon" } } });
        let node = serde_json::from_value(node).unwrap();
        let list: [NodeEvent; 3] = [Ok(Event::Init), Ok(Event::InitApply(node)), Ok(Event::InitDone)];
        let refused = stream::iter(pauses).then(|seconds| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            let status: kube::core::Status = serde_json::from_value(json!({ "code": 403 })).unwrap();
            NodeEvent::Err(watcher::Error::WatchStartFailed(kube::Error::Api(status.boxed())))
        });
        let patience = Duration::from_secs(10);
        let place = ClusterPlace { server: "https://api:6443/".to_owned(), context: None, patience };
        let watching = Watching::new();
        let events = stream::iter(list).chain(refused);
        let taken = watching.take_events(events, &place, what, PageState::take_node).await;
        let known = watching.known();
        let is_lost = *known.hearing() != crate::hearing::Hearing::default();
        (taken.is_err(), known.label_values("zone").len(), is_lost)
    }

    #[tokio::test(start_paused = true)]
    async fn what_stays_refused_is_left_out() {
        assert_eq!(after_refusals(NODES, [0, 20, 20, 20]).await, (true, 0, false));
        assert_eq!(after_refusals(NODES, [0, 10, 20, 20]).await, (false, 1, true), "not for a minute yet");
        assert_eq!(after_refusals(NODES, [0, 100, 100, 100]).await, (false, 1, true), "it went on meanwhile");
        let needed = after_refusals("the jobs cannot be watched", [0, 20, 20, 20]).await;
        assert_eq!(needed, (false, 1, true), "the page can't do without it");
    }
}
