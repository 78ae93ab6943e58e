//! The watches that fill [`Known`], and the clock that makes rows of it.

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

use super::hearing::SERVER;
use super::known::Known;
use crate::cluster::Cluster;
use crate::edges::DOOR;
use crate::jobs::REPORTS_OF_A_PAGE;
use crate::leader::judge;
use crate::problem::{self, Place};

/// How often rows are made of what has changed: as fast as a person sees bars move.
const FRAME: Duration = Duration::from_millis(300);
/// How often the API server is asked whether it's there: a person learns within --request-timeout and this that it isn't.
const LISTEN: Duration = Duration::from_secs(5);

/// What is known, and who waits for changes of it.
#[derive(Debug)]
pub(crate) struct Watching {
    known: Mutex<Known>,
    changes: watch::Sender<u64>,
}

impl Watching {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { known: Mutex::default(), changes: watch::Sender::new(0) })
    }

    /// What is known now.
    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
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
        let of_jobs = watcher(Api::<ImagePrePullJob>::all(cluster.watching()), watcher::Config::default())
            .default_backoff();
        let few = watcher::Config::default().page_size(REPORTS_OF_A_PAGE);
        let of_reports = watcher(Api::<ImagePrePullReport>::all(cluster.watching()), few).default_backoff();
        let nodes: Api<PartialObjectMeta<Node>> = Api::all(cluster.watching());
        let of_nodes = watcher(nodes, watcher::Config::default()).default_backoff();
        let of_pull_jobs = watcher(Api::<ImagePullJob>::all(cluster.watching()), watcher::Config::default())
            .default_backoff();
        tokio::try_join!(
            self.take(of_jobs, place, "the jobs cannot be watched", Known::take_job),
            self.take(of_reports, place, "the reports of jobs cannot be watched", Known::take_report),
            async {
                // Without this right nodes are not grouped by their labels, and everything else works.
                let taken = self.take(of_nodes, place, "the nodes cannot be watched", Known::take_node).await;
                if let Err(error) = taken {
                    let text = problem::text(&problem::explain(error, place));
                    self.known().hear(|hearing| hearing.lack_sites(text));
                }
                std::future::pending::<anyhow::Result<()>>().await
            },
            async {
                // Few clusters have OpenKruise's API, and not everybody may see its jobs.
                let _ = self
                    .take(of_pull_jobs, place, "OpenKruise's jobs cannot be watched", Known::take_pull_job)
                    .await;
                std::future::pending::<anyhow::Result<()>>().await
            },
            self.listen(cluster),
            self.make_rows(),
        )?;
        Ok(())
    }

    async fn take<K>(
        &self,
        events: impl Stream<Item = watcher::Result<Event<K>>>,
        place: &Place,
        what: &'static str,
        take: impl Fn(&mut Known, Event<K>),
    ) -> anyhow::Result<()> {
        let mut events = std::pin::pin!(events);
        let mut is_heard = false;
        while let Some(event) = events.next().await {
            match event {
                // The list is about to be requested: that shows nothing about the connection yet.
                Ok(Event::Init) => take(&mut self.known(), Event::Init),
                Ok(event) => {
                    is_heard = true;
                    let mut known = self.known();
                    known.hear(|hearing| hearing.hear(what));
                    take(&mut known, event);
                }
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    // An API server that has just begun refuses for a moment what it has granted before.
                    if problem::is_lasting(&error) && !is_heard {
                        return Err(error.context(what));
                    }
                    // It is taken up again by itself.
                    let text = format!("{what}: {}", problem::text(&problem::explain(error, place)));
                    self.known().hear(|hearing| hearing.lose(what, text, Timestamp::now()));
                }
            }
        }
        Ok(())
    }

    /// Asks the API server for the leader's Lease, again and again. A watch alone wouldn't notice that it is silent.
    async fn listen(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let leases = Api::<Lease>::namespaced(cluster.client(), cluster.system());
        loop {
            let lease = leases.get_opt(DOOR).await;
            let now = Timestamp::now();
            match lease {
                Ok(lease) => {
                    let gone = lease.and_then(|lease| judge(&lease, now).err());
                    let text = gone.map(|gone| gone.text());
                    self.known().hear(|hearing| hearing.hear_server(text, now));
                }
                // It answers a person who may not read the Lease.
                Err(kube::Error::Api(answer)) if answer.code == 403 && !problem::is_page(&answer) => {
                    self.known().hear(|hearing| hearing.hear_server(None, now));
                }
                Err(error) => {
                    let text = problem::text(&problem::explain(error.into(), cluster.place()));
                    self.known().hear(|hearing| hearing.lose(SERVER, text, now));
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
            let now = self.known().refresh(Timestamp::now(), begun.elapsed());
            self.changes.send_if_modified(|seen| std::mem::replace(seen, now) != now);
        }
    }
}
