//! The watches that fill [`Known`], and the clock that makes rows of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::{Stream, StreamExt};
use jiff::Timestamp;
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

use super::known::Known;
use crate::cluster::Cluster;
use crate::jobs::REPORTS_OF_A_PAGE;
use crate::problem;

/// How often rows are made of what has changed: as fast as a person sees bars move.
const FRAME: Duration = Duration::from_millis(300);

/// What is known, and who waits for changes of it.
#[derive(Debug)]
pub(crate) struct Watching {
    known: Mutex<Known>,
    changes: watch::Sender<u64>,
    /// What keeps a watch from being heard, while it does.
    problem: watch::Sender<Option<String>>,
}

impl Watching {
    pub(crate) fn new() -> Arc<Self> {
        let known = Mutex::default();
        Arc::new(Self { known, changes: watch::Sender::new(0), problem: watch::Sender::new(None) })
    }

    /// What is known now.
    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that grows with each change.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// What keeps the cluster from being heard.
    pub(crate) fn problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.subscribe()
    }

    /// Watches, until something is refused.
    ///
    /// # Errors
    ///
    /// A missing right, missing definitions, or credentials that are not accepted.
    pub(crate) async fn run(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let of_jobs = watcher(Api::<ImagePrePullJob>::all(cluster.watching()), watcher::Config::default())
            .default_backoff();
        let few = watcher::Config::default().page_size(REPORTS_OF_A_PAGE);
        let of_reports = watcher(Api::<ImagePrePullReport>::all(cluster.watching()), few).default_backoff();
        let nodes: Api<PartialObjectMeta<Node>> = Api::all(cluster.watching());
        let of_nodes = watcher(nodes, watcher::Config::default()).default_backoff();
        let of_pull_jobs = watcher(Api::<ImagePullJob>::all(cluster.watching()), watcher::Config::default())
            .default_backoff();
        tokio::try_join!(
            self.take(of_jobs, "the jobs cannot be watched", Known::take_job),
            self.take(of_reports, "the reports of jobs cannot be watched", Known::take_report),
            async {
                // Without this right nodes are not grouped by their labels, and everything else works.
                let _ = self.take(of_nodes, "the nodes cannot be watched", Known::take_node).await;
                std::future::pending::<anyhow::Result<()>>().await
            },
            async {
                // Few clusters have OpenKruise's API, and not everybody may see its jobs.
                let _ = self
                    .take(of_pull_jobs, "OpenKruise's jobs cannot be watched", Known::take_pull_job)
                    .await;
                std::future::pending::<anyhow::Result<()>>().await
            },
            self.make_rows(),
        )?;
        Ok(())
    }

    async fn take<K>(
        &self,
        events: impl Stream<Item = watcher::Result<Event<K>>>,
        what: &'static str,
        take: impl Fn(&mut Known, Event<K>),
    ) -> anyhow::Result<()> {
        let mut events = std::pin::pin!(events);
        let mut is_heard = false;
        while let Some(event) = events.next().await {
            match event.context(what) {
                // The list is about to be requested: that shows nothing about the connection yet.
                Ok(Event::Init) => take(&mut self.known(), Event::Init),
                Ok(event) => {
                    is_heard = true;
                    self.problem.send_if_modified(|problem| problem.take().is_some());
                    take(&mut self.known(), event);
                }
                // An API server that has just begun refuses for a moment what it has granted before.
                Err(error) if problem::is_lasting(&error) && !is_heard => return Err(error),
                // It is taken up again by itself.
                Err(error) => {
                    self.problem.send_replace(Some(problem::text(&error)));
                    self.known().note();
                }
            }
        }
        Ok(())
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
