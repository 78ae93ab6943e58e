//! A job that is followed to its end, by watches of the job and of its reports.

use std::collections::{BTreeMap, BTreeSet};
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

use super::look::read_progress;
use super::pace::PaceMeter;
use super::show::Show;
use super::tally::Tally;
use super::view::JobView;
use crate::amounts::format_duration;
use crate::cluster::Cluster;
use crate::hearing::Hearing;
use crate::jobs::{self, REPORTS_OF_A_PAGE};
use crate::leader::{self, Leaderless};
use crate::listing::{ListChange, Listing};
use crate::problem;
use crate::session::{CommandOutcome, Session};

/// How often what has changed is shown on a terminal, where bars move.
const FRAME: Duration = Duration::from_millis(200);
/// How often what has changed is printed elsewhere: a job that ends a hundred nodes a second has no line for each.
const LINE: Duration = Duration::from_secs(1);

/// Follows a job until it has ended, or for at most `limit`.
pub(crate) async fn follow_job(
    session: &Session,
    cluster: &Cluster,
    name: &str,
    limit: Option<Duration>,
) -> anyhow::Result<CommandOutcome> {
    let job = jobs::get(cluster, name).await?;
    let mut show = Show::new(session);
    let mut followed = Followed { job, ..Followed::default() };
    let ended = run_bounded(Box::pin(until_over(cluster, &mut followed, &mut show)), limit).await;
    let ended = or_interrupted(ended)?;
    show.finish_bars(ended);
    if matches!(ended, CommandOutcome::Done | CommandOutcome::Failed) {
        // The watch of the reports may be a moment behind that of the job.
        let Some(read) = unless_interrupted(Box::pin(read_progress(cluster, name))).await? else {
            problem::print_note(&format!("job {name} has ended: kubectl prepull status {name} shows how"));
            return Ok(CommandOutcome::Interrupted);
        };
        if let Err(error) = &read {
            let why = problem::error_text(error);
            problem::print_note(&format!("job {name} has ended, and is shown as it was followed: {why}"));
        }
        problem::unless_unread(show.print_last(&followed.last_view(read)))?;
    }
    note_that_it_goes_on(ended, name, limit);
    Ok(ended)
}

/// The end of the work, of the time, or of the person's patience.
pub(crate) async fn run_bounded(
    work: impl Future<Output = anyhow::Result<CommandOutcome>>,
    limit: Option<Duration>,
) -> anyhow::Result<CommandOutcome> {
    let bounded = async {
        tokio::select! {
            ended = work => ended,
            () = wait_for_limit(limit) => Ok(CommandOutcome::TimedOut),
        }
    };
    unless_interrupted(bounded).await?.unwrap_or(Ok(CommandOutcome::Interrupted))
}

/// The end of the work, or none if Ctrl-C comes first. Once the program has waited for Ctrl-C, it doesn't end it any more by
/// itself: all that is awaited later needs this, too.
pub(crate) async fn unless_interrupted<T>(work: impl Future<Output = T>) -> anyhow::Result<Option<T>> {
    tokio::select! {
        biased;
        interrupted = tokio::signal::ctrl_c() => {
            interrupted.context("Ctrl-C cannot be waited for")?;
            Ok(None)
        }
        ended = work => Ok(Some(ended)),
    }
}

/// Turns a closed pipe into [`CommandOutcome::Interrupted`]: we stop following, and the job goes on.
pub(crate) fn or_interrupted(ended: anyhow::Result<CommandOutcome>) -> anyhow::Result<CommandOutcome> {
    match ended {
        Err(error) if problem::is_closed_pipe(&error) => Ok(CommandOutcome::Interrupted),
        ended => ended,
    }
}

pub(crate) fn note_that_it_goes_on(ended: CommandOutcome, name: &str, limit: Option<Duration>) {
    let goes_on = format!("job {name} goes on: kubectl prepull status {name} --watch follows it again");
    match ended {
        CommandOutcome::Done | CommandOutcome::Failed => {}
        CommandOutcome::TimedOut => {
            let limit = limit.unwrap_or_default().as_secs();
            problem::print_note(&format!("after {} {goes_on}", format_duration(limit)));
        }
        CommandOutcome::Interrupted => problem::print_note(&goes_on),
    }
}

async fn wait_for_limit(limit: Option<Duration>) {
    match limit {
        Some(limit) => tokio::time::sleep(limit).await,
        None => std::future::pending().await,
    }
}

async fn until_over(
    cluster: &Cluster,
    followed: &mut Followed,
    show: &mut Show,
) -> anyhow::Result<CommandOutcome> {
    let job = &followed.job;
    let name = job.name_any();
    let of_name = watcher::Config::default().fields(&format!("metadata.name={name}"));
    // Few at a time: see jobs::REPORTS_OF_A_PAGE.
    let of_job = watcher::Config::default().labels(&jobs::of_job(job)).page_size(REPORTS_OF_A_PAGE);
    let mut changes = std::pin::pin!(
        watcher(Api::<ImagePrePullJob>::all(cluster.watch_client()), of_name).default_backoff()
    );
    let mut reports = std::pin::pin!(
        watcher(Api::<ImagePrePullReport>::all(cluster.watch_client()), of_job).default_backoff()
    );
    let mut leader = std::pin::pin!(leader::watch_leader(cluster));
    let mut ticks = tokio::time::interval(if show.has_bars() { FRAME } else { LINE });
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut hearing, mut heard) = (Hearing::default(), BTreeSet::new());
    loop {
        let is_heard = tokio::select! {
            change = changes.next() => {
                let change = accept_change(change, "jobs", (&mut hearing, &mut heard), show)?;
                let is_heard = shows_connection(change.as_ref());
                if let Some(change) = change {
                    followed.take_job(change)?;
                }
                is_heard
            }
            change = reports.next() => {
                let change = accept_change(change, "reports", (&mut hearing, &mut heard), show)?;
                let is_heard = shows_connection(change.as_ref());
                if let Some(change) = change {
                    followed.take_report(change);
                }
                is_heard
            }
            Some(gone) = leader.next() => match gone {
                Ok(gone) => {
                    followed.gone = gone;
                    true
                }
                Err(error) => {
                    show.mark_disconnected(&error);
                    false
                }
            },
            _ = ticks.tick() => {
                show.draw_view(&followed.view())?;
                false
            }
        };
        if is_heard && !hearing.awaits_list() {
            show.mark_connected();
        }
        if jobs::is_over(&followed.job) {
            let phase = followed.job.status.as_ref().map(|status| status.phase);
            return Ok(if phase == Some(JobPhase::Completed) {
                CommandOutcome::Done
            } else {
                CommandOutcome::Failed
            });
        }
    }
}

/// A change, if it is one. A watch that breaks is taken up again by itself; one that is refused from the start is not.
fn accept_change<K>(
    change: Option<watcher::Result<Event<K>>>,
    what: &'static str,
    (hearing, heard): (&mut Hearing, &mut BTreeSet<&'static str>),
    show: &mut Show,
) -> anyhow::Result<Option<Event<K>>> {
    match change {
        Some(Ok(change)) => {
            hearing.note_event(what, &change);
            if shows_connection(Some(&change)) {
                heard.insert(what);
            }
            Ok(Some(change))
        }
        Some(Err(error)) => {
            let error = anyhow::Error::from(error).context("the job cannot be watched");
            if problem::is_lasting(&error, heard.contains(what)) {
                return Err(error);
            }
            hearing.note_loss(what, problem::error_text(&error), Timestamp::now());
            show.mark_disconnected(&error);
            Ok(None)
        }
        None => bail!("the watch of the job has ended"),
    }
}

/// Whether the API server was heard: a list that begins is only about to be requested.
fn shows_connection<K>(change: Option<&Event<K>>) -> bool {
    !matches!(change, None | Some(Event::Init))
}

#[derive(Default)]
struct Followed {
    job: ImagePrePullJob,
    /// By the name of their report, each with the first attempt of its run.
    tallies: BTreeMap<String, (Option<u32>, Tally)>,
    listed: Listing<String>,
    pace: PaceMeter,
    since: Option<Instant>,
    gone: Option<Leaderless>,
    /// Whether the list that is being read has the job.
    is_listed: bool,
}

impl Followed {
    fn take_job(&mut self, change: Event<ImagePrePullJob>) -> anyhow::Result<()> {
        match change {
            Event::Apply(job) | Event::InitApply(job) if job.metadata.uid == self.job.metadata.uid => {
                self.job = job;
                self.is_listed = true;
            }
            Event::Init => self.is_listed = false,
            // A job that is deleted while the watch is down is only missing in the next list.
            Event::InitDone if self.is_listed => {}
            Event::Apply(_) | Event::InitApply(_) | Event::Delete(_) | Event::InitDone => {
                bail!("job {} was deleted while it was followed", self.job.name_any())
            }
        }
        Ok(())
    }

    fn take_report(&mut self, change: Event<ImagePrePullReport>) {
        match self.listed.take_event(change, ResourceExt::name_any) {
            Some(ListChange::Put(report)) => {
                let counted = (report.body.first_attempt, Tally::of_report(&report));
                self.tallies.insert(report.name_any(), counted);
            }
            Some(ListChange::Remove(report)) => {
                self.tallies.remove(&report.name_any());
            }
            Some(ListChange::Retain(names)) => self.tallies.retain(|name, _| names.contains(name)),
            None => {}
        }
    }

    /// The view after the end, which a failed read doesn't take back: the job may even be deleted by then.
    fn last_view(&self, read: anyhow::Result<(ImagePrePullJob, Tally)>) -> JobView {
        let (job, tally) = read
            .ok()
            .filter(|(job, _)| job.metadata.uid == self.job.metadata.uid)
            .unwrap_or_else(|| (self.job.clone(), self.tally()));
        JobView::new(&job, &tally, None, Timestamp::now())
    }

    /// The sum of the current run: a new one replaces the reports of the last one by and by.
    fn tally(&self) -> Tally {
        let run = jobs::run_of(&self.job);
        let current = self.tallies.values().filter(|(first_attempt, _)| *first_attempt == run);
        Tally::sum(current.map(|(_, tally)| tally))
    }

    fn view(&mut self) -> JobView {
        let tally = self.tally();
        let view = JobView::new(&self.job, &tally, None, Timestamp::now());
        let at = self.since.get_or_insert_with(Instant::now).elapsed();
        let view = match self.pace.observe(at, view.bytes.done, view.done) {
            Some(pace) => JobView::new(&self.job, &tally, Some(pace), Timestamp::now()),
            None => view,
        };
        view.without_leader(self.gone.as_ref())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::crd::status::ImagePrePullJobStatus;
    use serde_json::json;

    use super::*;

    fn job(uid: &str) -> ImagePrePullJob {
        let mut job = ImagePrePullJob::new("web", prepull_api::crd::job::ImagePrePullJobSpec::default());
        job.metadata.uid = Some(uid.into());
        job
    }

    #[test]
    fn a_failed_read_undoes_no_end() {
        let mut ended = job("1");
        ended.status = Some(ImagePrePullJobStatus { phase: JobPhase::Completed, ..Default::default() });
        let mut followed = Followed { job: ended, ..Followed::default() };
        let tally = Tally { delta_saved: 7, ..Tally::default() };
        followed.tallies.insert("web-0".into(), (None, tally));
        let seen = |read| {
            let view = followed.last_view(read);
            (view.phase, view.delta_saved_bytes)
        };
        assert_eq!(seen(Err(anyhow::anyhow!("too many requests"))), (JobPhase::Completed, 7));
        let other = Ok((job("2"), Tally::default()));
        assert_eq!(seen(other), (JobPhase::Completed, 7), "it's another job of this name");
        let later = (followed.job.clone(), Tally { delta_saved: 8, ..Tally::default() });
        assert_eq!(seen(Ok(later)), (JobPhase::Completed, 8));
    }

    #[test]
    fn earlier_runs_do_not_count() {
        let report = |name: &str, first_attempt: Option<u32>| {
            let image = json!({ "image": "a:1", "status": "True", "bytes": { "done": 1, "total": 1 } });
            let node = json!({ "nodeName": name, "phase": "Successful", "imageStatus": [image] });
            let report =
                json!({ "metadata": { "name": name }, "nodeStatus": [node], "firstAttempt": first_attempt });
            Event::Apply(serde_json::from_value(report).unwrap())
        };
        let mut followed = Followed { job: job("1"), ..Followed::default() };
        followed.take_report(report("web-0", None));
        followed.take_report(report("web-1", None));
        assert_eq!(followed.view().bytes.done, 2);
        followed.job.status = Some(ImagePrePullJobStatus { first_attempt: Some(3), ..Default::default() });
        followed.take_report(report("web-0", Some(3)));
        assert_eq!(followed.view().bytes.done, 1);
        let failed = Err(anyhow::anyhow!("too many requests"));
        assert_eq!(followed.last_view(failed).bytes.done, 1);
    }

    #[test]
    fn a_job_that_a_new_list_lacks_was_deleted() {
        let job = job("1");
        let mut followed = Followed { job: job.clone(), ..Followed::default() };
        for event in [Event::Init, Event::InitApply(job), Event::InitDone, Event::Init] {
            followed.take_job(event).unwrap();
        }
        let gone = followed.take_job(Event::InitDone).unwrap_err();
        assert_eq!(gone.to_string(), "job web was deleted while it was followed");
    }

    #[tokio::test]
    async fn ctrl_c_ends_what_follows_the_job() {
        let own = std::process::id().to_string();
        for _ in 0..2 {
            let interrupted = async {
                std::process::Command::new("kill").args(["-INT", &own]).status().unwrap();
                std::future::pending::<()>().await;
            };
            assert_eq!(unless_interrupted(interrupted).await.unwrap(), None);
        }
        assert_eq!(unless_interrupted(async { 7 }).await.unwrap(), Some(7));
    }

    #[test]
    fn a_reader_that_has_gone_ends_no_job() {
        let closed = || anyhow::Error::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!(
            or_interrupted(Err(closed().context("write the output"))).unwrap(),
            CommandOutcome::Interrupted
        );
        assert_eq!(or_interrupted(Ok(CommandOutcome::Failed)).unwrap(), CommandOutcome::Failed);
        assert!(or_interrupted(Err(anyhow::anyhow!("refused"))).is_err());
    }
}
