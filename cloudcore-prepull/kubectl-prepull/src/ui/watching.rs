//! The watches that fill [`PageState`], and the clock that makes rows of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
use tokio::time::MissedTickBehavior;

use super::known::PageState;
use crate::cluster::Cluster;
use crate::edges::DOOR;
use crate::hearing::SERVER;
use crate::jobs::REPORTS_OF_A_PAGE;
use crate::leader::current_leader;
use crate::problem::{self, ClusterPlace};

/// How often rows are made of what has changed: as fast as a person sees bars move.
const FRAME: Duration = Duration::from_millis(300);
/// How often the API server is asked whether it's there: a person learns within --request-timeout and this that it isn't.
const LISTEN: Duration = Duration::from_secs(5);

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
                // Without this right nodes are not grouped by their labels, and everything else works.
                let taken = self
                    .take_events(of_nodes, place, "the nodes cannot be watched", PageState::take_node)
                    .await;
                if let Err(error) = taken {
                    let text = problem::error_text(&problem::explain(error, place));
                    self.known().update_hearing(|hearing| hearing.lack_sites(text));
                }
                std::future::pending::<anyhow::Result<()>>().await
            },
            async {
                // Few clusters have OpenKruise's API, and not everybody may see its jobs.
                let _ = self
                    .take_events(
                        of_pull_jobs,
                        place,
                        "OpenKruise's jobs cannot be watched",
                        PageState::take_pull_job,
                    )
                    .await;
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
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    // A list that is about to be requested shows nothing about the connection yet.
                    is_heard |= !matches!(event, Event::Init);
                    let mut known = self.known();
                    known.update_hearing(|hearing| hearing.note_event(what, &event));
                    take(&mut known, event);
                }
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    if problem::is_lasting(&error, is_heard) {
                        self.known().update_hearing(|hearing| hearing.forget(what));
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
        loop {
            let lease = leases.get_opt(DOOR).await;
            let now = Timestamp::now();
            match lease {
                Ok(lease) => {
                    let gone = lease.and_then(|lease| current_leader(&lease, now).err());
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
