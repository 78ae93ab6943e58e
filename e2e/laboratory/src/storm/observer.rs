//! Watches every job during the storm, and records each promise that one of its statuses breaks.

use std::collections::{BTreeSet, HashMap};

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Resource, ResourceExt};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::kruise::{ImagePullJob, ImagePullJobStatus};
use prepull_api::crd::report::MAX_NODES_IN_REPORT;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};
use prepull_e2e::cluster::Cluster;
use tokio::task::JoinSet;

use super::diary::Diary;

/// The watches of a storm.
pub(super) struct StormObserver(JoinSet<()>);

impl StormObserver {
    pub(super) fn start(cluster: &Cluster, diary: &Diary) -> Self {
        let mut watches = JoinSet::new();
        let (client, notes) = (cluster.client(), diary.clone());
        watches.spawn(async move {
            let mut seen = HashMap::<String, JobObservations>::new();
            for_each_version(Api::<ImagePrePullJob>::all(client), |job| {
                seen.entry(job.uid().unwrap_or_default()).or_default().observe_job(&job, &notes);
            })
            .await;
        });
        let (client, notes) = (cluster.client(), diary.clone());
        watches.spawn(async move {
            let mut seen = PullJobs::default();
            for_each_version(Api::<ImagePullJob>::all(client), |job| seen.observe_job(&job, &notes)).await;
        });
        Self(watches)
    }

    /// Ends the watches. Reports a watch that ended by itself, because it may have missed changes.
    pub(super) async fn end_watches(mut self, diary: &Diary) {
        while let Some(ended) = self.0.try_join_next() {
            diary.note_broken(&format!("a watch of the storm ended by itself: {ended:?}"));
        }
        self.0.shutdown().await;
    }
}

/// Passes on every version of every object, as far as the API server reports it.
async fn for_each_version<K>(api: Api<K>, mut look: impl FnMut(K))
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let mut events =
        std::pin::pin!(watcher(api, watcher::Config::default()).default_backoff().applied_objects());
    while let Some(event) = events.next().await {
        // After an error the watch tries again: the API server is stopped at times.
        if let Ok(object) = event {
            look(object);
        }
    }
}

/// Observations of an ImagePrePullJob.
#[derive(Default)]
struct JobObservations {
    last: ImagePrePullJobStatus,
    generation: i64,
    /// The largest concurrency that its spec has ever allowed. Running nodes continue when it's lowered.
    most: i64,
}

impl JobObservations {
    fn observe_job(&mut self, job: &ImagePrePullJob, diary: &Diary) {
        let name = job.name_any();
        let generation = job.metadata.generation.unwrap_or_default();
        self.most = self.most.max(job.spec.image_pre_pull_template.concurrency);
        let status = job.status.clone().unwrap_or_default();
        for broken in self.broken_promises(&status, generation) {
            diary.note_broken(&format!("{name}: {broken}"));
        }
        (self.last, self.generation) = (status, generation);
    }

    /// The promises that the change to this status breaks.
    fn broken_promises(&self, now: &ImagePrePullJobStatus, generation: i64) -> Vec<String> {
        let (before, mut broken) = (&self.last, Vec::new());
        let sum = &now.summary;
        let parts = sum.pending + sum.in_progress + sum.successful + sum.failure + sum.unknown;
        if parts != sum.desired {
            broken.push(format!("the summary does not add up: {sum:?}"));
        }
        // A job with several reports may have written the start of a node and not yet the end of the previous one: the
        // next leader counts both until the edge reports again. The model checks the edges' reports.
        let has_one_report = usize::try_from(sum.desired).is_ok_and(|nodes| nodes <= MAX_NODES_IN_REPORT);
        // A recheck takes no concurrency.
        let looks = now.recheck.as_ref().is_some_and(|recheck| recheck.completion_time.is_none());
        if has_one_report && !looks && i64::from(sum.in_progress) > self.most {
            broken.push(format!("{} nodes at a time, and {} are allowed", sum.in_progress, self.most));
        }
        // A new run has its own start and rounds.
        if now.first_attempt > before.first_attempt {
            return broken;
        }
        if before.start_time.is_some() && now.start_time != before.start_time {
            broken.push(format!("its start moved from {:?} to {:?}", before.start_time, now.start_time));
        }
        if rounds(now) < rounds(before) {
            broken.push(format!("its rounds fell from {:?} to {:?}", rounds(before), rounds(now)));
        }
        let has_ended = before.completion_time.is_some();
        // An edit may start a job again; without an edit and a further round, its end is final.
        if has_ended && generation == self.generation && rounds(now) == rounds(before) {
            if now.completion_time != before.completion_time {
                broken.push(format!(
                    "its end moved from {:?} to {:?}",
                    before.completion_time, now.completion_time
                ));
            }
            if now.phase != before.phase {
                broken.push(format!("it was {:?} and over, and is {:?}", before.phase, now.phase));
            }
        }
        if now.phase == JobPhase::InProgress && now.completion_time.is_some() {
            broken.push("it is InProgress and has an end".to_owned());
        }
        broken
    }
}

/// The further rounds of a job, and its re-checks.
fn rounds(status: &ImagePrePullJobStatus) -> (u32, u32) {
    (status.retry, status.recheck.as_ref().map_or(0, |recheck| recheck.rounds))
}

/// Observations of the ImagePullJobs.
#[derive(Default)]
struct PullJobs {
    /// The largest parallelism that the spec of each has ever allowed.
    most: HashMap<String, i32>,
    /// The jobs of each image, by their UIDs.
    of_image: HashMap<String, BTreeSet<String>>,
}

impl PullJobs {
    fn observe_job(&mut self, job: &ImagePullJob, diary: &Diary) {
        let uid = job.uid().unwrap_or_default();
        let most = self.most.entry(uid.clone()).or_default();
        if let Some(IntOrString::Int(parallelism)) = job.spec.template.parallelism {
            *most = (*most).max(parallelism);
        }
        let jobs = self.of_image.entry(job.spec.image.clone()).or_default();
        jobs.insert(uid);
        let Some(status) = &job.status else { return };
        let (name, active) = (job.name_any(), status.active);
        // Jobs of one image share its entry in each NodeImage: a node that pulls for one of them counts for all.
        if jobs.len() == 1 && active > *most {
            diary.note_broken(&format!("{name}: {active} nodes at a time, and {most} are allowed"));
        }
        look_at_end(job, status, diary);
    }
}

fn look_at_end(job: &ImagePullJob, status: &ImagePullJobStatus, diary: &Diary) {
    if status.completion_time.is_some() && status.succeeded + status.failed != status.desired {
        diary.note_broken(&format!("{}: it is over and does not add up: {status:?}", job.name_any()));
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use prepull_api::crd::status::Summary;

    use super::*;

    fn at(second: i64) -> Option<Time> {
        Timestamp::from_second(second).ok().map(Time)
    }

    fn ended() -> ImagePrePullJobStatus {
        ImagePrePullJobStatus {
            phase: JobPhase::Completed,
            start_time: at(10),
            completion_time: at(20),
            summary: Summary { desired: 2, successful: 2, ..Summary::default() },
            ..ImagePrePullJobStatus::default()
        }
    }

    #[test]
    fn a_finished_job_stays_finished() {
        let seen = JobObservations { last: ended(), generation: 1, most: 1 };
        assert_eq!(seen.broken_promises(&ended(), 1), Vec::<String>::new());
        let again = ImagePrePullJobStatus { phase: JobPhase::InProgress, completion_time: None, ..ended() };
        assert_eq!(seen.broken_promises(&again, 1).len(), 2);
        assert_eq!(seen.broken_promises(&again, 2), Vec::<String>::new());
        let later = ImagePrePullJobStatus { completion_time: at(21), ..ended() };
        assert_eq!(seen.broken_promises(&later, 1).len(), 1);
    }

    #[test]
    fn sums_starts_and_concurrency_are_checked() {
        let seen = JobObservations { last: ended(), generation: 1, most: 1 };
        let moved = ImagePrePullJobStatus { start_time: at(11), ..ended() };
        assert_eq!(seen.broken_promises(&moved, 1).len(), 1);
        let lost = Summary { desired: 2, successful: 1, ..Summary::default() };
        assert_eq!(seen.broken_promises(&ImagePrePullJobStatus { summary: lost, ..ended() }, 1).len(), 1);
        let crowd = Summary { desired: 2, in_progress: 2, ..Summary::default() };
        assert_eq!(seen.broken_promises(&ImagePrePullJobStatus { summary: crowd, ..ended() }, 1).len(), 1);
    }
}
