//! A job that is followed to its end, by watches of the job and of its reports.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures::StreamExt;
use jiff::Timestamp;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::crd::status::JobPhase;
use tokio::time::MissedTickBehavior;

use super::look::look;
use super::pace::PaceMeter;
use super::show::Show;
use super::tally::Tally;
use super::view::View;
use crate::amounts::duration;
use crate::cluster::Cluster;
use crate::jobs::{self, REPORTS_OF_A_PAGE};
use crate::leader::{self, Leaderless};
use crate::listing::{Change, Listing};
use crate::problem;
use crate::session::{Ended, Session};

/// How often what has changed is shown on a terminal, where bars move.
const FRAME: Duration = Duration::from_millis(200);
/// How often what has changed is printed elsewhere: a job that ends a hundred nodes a second has no line for each.
const LINE: Duration = Duration::from_secs(1);

/// Follows a job until it has ended, or for at most `limit`.
pub(crate) async fn follow(
    session: &Session,
    cluster: &Cluster,
    name: &str,
    limit: Option<Duration>,
) -> anyhow::Result<Ended> {
    let job = jobs::get(cluster, name).await?;
    let mut show = Show::new(session);
    let ended = bounded(Box::pin(until_over(cluster, job, &mut show)), limit).await?;
    show.end(ended);
    if matches!(ended, Ended::Done | Ended::Failed) {
        // The watch of the reports may be a moment behind that of the job.
        let (job, tally) = look(cluster, name).await?;
        show.last(&View::new(&job, &tally, None, Timestamp::now()))?;
    }
    note_that_it_goes_on(ended, name, limit);
    Ok(ended)
}

/// The end of the work, of the time, or of the person's patience.
pub(crate) async fn bounded(
    work: impl Future<Output = anyhow::Result<Ended>>,
    limit: Option<Duration>,
) -> anyhow::Result<Ended> {
    tokio::select! {
        ended = work => ended,
        () = passed(limit) => Ok(Ended::TimedOut),
        interrupted = tokio::signal::ctrl_c() => {
            interrupted.context("Ctrl-C cannot be waited for")?;
            Ok(Ended::Interrupted)
        }
    }
}

pub(crate) fn note_that_it_goes_on(ended: Ended, name: &str, limit: Option<Duration>) {
    let goes_on = format!("job {name} goes on: kubectl prepull status {name} --watch follows it again");
    match ended {
        Ended::Done | Ended::Failed => {}
        Ended::TimedOut => {
            let limit = limit.unwrap_or_default().as_secs();
            problem::note(&format!("after {} {goes_on}", duration(limit)));
        }
        Ended::Interrupted => problem::note(&goes_on),
    }
}

async fn passed(limit: Option<Duration>) {
    match limit {
        Some(limit) => tokio::time::sleep(limit).await,
        None => std::future::pending().await,
    }
}

async fn until_over(cluster: &Cluster, job: ImagePrePullJob, show: &mut Show) -> anyhow::Result<Ended> {
    let name = job.name_any();
    let of_name = watcher::Config::default().fields(&format!("metadata.name={name}"));
    // Few at a time: see jobs::REPORTS_OF_A_PAGE.
    let of_job = watcher::Config::default().labels(&jobs::of_job(&job)).page_size(REPORTS_OF_A_PAGE);
    let mut changes =
        std::pin::pin!(watcher(Api::<ImagePrePullJob>::all(cluster.watching()), of_name).default_backoff());
    let mut reports =
        std::pin::pin!(watcher(Api::<ImagePrePullReport>::all(cluster.watching()), of_job).default_backoff());
    let mut leader = std::pin::pin!(leader::looks(cluster));
    let mut ticks = tokio::time::interval(if show.has_bars() { FRAME } else { LINE });
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut followed = Followed { job, ..Followed::default() };
    loop {
        tokio::select! {
            change = changes.next() => {
                if let Some(change) = heard(change, show)? {
                    followed.take_job(change)?;
                }
            }
            change = reports.next() => {
                if let Some(change) = heard(change, show)? {
                    followed.take_report(change);
                }
            }
            Some(gone) = leader.next() => match gone {
                Ok(gone) => {
                    show.connected();
                    followed.gone = gone;
                }
                Err(error) => show.disconnected(&error),
            },
            _ = ticks.tick() => show.now(&followed.view())?,
        }
        if jobs::is_over(&followed.job) {
            let phase = followed.job.status.as_ref().map(|status| status.phase);
            return Ok(if phase == Some(JobPhase::Completed) { Ended::Done } else { Ended::Failed });
        }
    }
}

/// A change, if it is one. A watch that breaks is taken up again by itself; one that is refused is not.
fn heard<K>(change: Option<watcher::Result<Event<K>>>, show: &mut Show) -> anyhow::Result<Option<Event<K>>> {
    match change {
        Some(Ok(change)) => {
            show.connected();
            Ok(Some(change))
        }
        Some(Err(error)) => {
            let error = anyhow::Error::from(error).context("the job cannot be watched");
            if problem::is_lasting(&error) {
                return Err(error);
            }
            show.disconnected(&error);
            Ok(None)
        }
        None => bail!("the watch of the job has ended"),
    }
}

#[derive(Default)]
struct Followed {
    job: ImagePrePullJob,
    tallies: BTreeMap<String, Tally>,
    listed: Listing<String>,
    pace: PaceMeter,
    since: Option<Instant>,
    gone: Option<Leaderless>,
}

impl Followed {
    fn take_job(&mut self, change: Event<ImagePrePullJob>) -> anyhow::Result<()> {
        match change {
            Event::Apply(job) | Event::InitApply(job) if job.metadata.uid == self.job.metadata.uid => {
                self.job = job;
            }
            Event::Apply(_) | Event::InitApply(_) | Event::Delete(_) => {
                bail!("job {} was deleted while it was followed", self.job.name_any())
            }
            Event::Init | Event::InitDone => {}
        }
        Ok(())
    }

    fn take_report(&mut self, change: Event<ImagePrePullReport>) {
        match self.listed.take(change, ResourceExt::name_any) {
            Some(Change::Put(report)) => {
                self.tallies.insert(report.name_any(), Tally::of(&report));
            }
            Some(Change::Remove(report)) => {
                self.tallies.remove(&report.name_any());
            }
            Some(Change::Retain(names)) => self.tallies.retain(|name, _| names.contains(name)),
            None => {}
        }
    }

    fn view(&mut self) -> View {
        let tally = Tally::sum(self.tallies.values());
        let view = View::new(&self.job, &tally, None, Timestamp::now());
        let at = self.since.get_or_insert_with(Instant::now).elapsed();
        let view = match self.pace.observe(at, view.bytes.done, view.done) {
            Some(pace) => View::new(&self.job, &tally, Some(pace), Timestamp::now()),
            None => view,
        };
        view.without_leader(self.gone.as_ref())
    }
}
