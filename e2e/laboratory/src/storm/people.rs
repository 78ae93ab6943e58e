//! Actions of people during the storm: on jobs of both APIs, secrets, nodes and reports.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use kube::api::{Api, DeleteParams, ListParams};
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::task::JobUid;
use prepull_e2e::chance::Chance;
use prepull_e2e::cluster::Cluster;
use prepull_e2e::sim::Fleet;
use serde_json::json;

use super::diary::Diary;
use super::scene::{Images, NAMESPACE, NODES, ZONE, edge_label, remake_node};
use super::schedule::StormSchedule;

/// Mean time between two actions.
const DEED_EVERY: Duration = Duration::from_millis(1500);
/// Limit for an action: the API server may hang.
const DEED_LIMIT: Duration = Duration::from_secs(8);
/// Most jobs of a kind that people keep; then they delete the oldest.
const MOST_JOBS: usize = 12;
/// Shortest and longest timeout of a node in seconds.
const TIMEOUT: (u64, u64) = (15, 60);

/// A planned action.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PlannedDeed {
    Deed,
    /// Restore a Node that was deleted or made NotReady.
    Repair(String),
    /// Restore a secret.
    Secret(usize),
}

/// The people of one storm.
pub(super) struct People {
    chance: Chance,
    schedule: StormSchedule<PlannedDeed>,
    /// Names of their jobs, oldest first.
    jobs: Vec<String>,
    pull_jobs: Vec<String>,
    list_jobs: Vec<String>,
    /// UIDs of the jobs with deleted reports.
    without_reports: BTreeSet<String>,
    /// Nodes to repair.
    broken: BTreeSet<String>,
    made: usize,
}

/// The targets of the actions.
struct Around<'a> {
    cluster: &'a Cluster,
    fleet: &'a Fleet,
    images: &'a Images,
}

impl People {
    pub(super) fn new(seed: u64, duration: Duration) -> Self {
        Self {
            chance: Chance::new(seed, 1),
            schedule: StormSchedule::new(duration),
            jobs: Vec::new(),
            pull_jobs: Vec::new(),
            list_jobs: Vec::new(),
            without_reports: BTreeSet::new(),
            broken: BTreeSet::new(),
            made: 0,
        }
    }

    /// Number of jobs that they tried to create.
    pub(super) fn made(&self) -> usize {
        self.made
    }

    /// Acts until the storm is over, and repairs the rest.
    pub(super) async fn act_until_end(
        &mut self,
        cluster: &Cluster,
        fleet: &Fleet,
        images: &Images,
        diary: &Diary,
    ) {
        let around = Around { cluster, fleet, images };
        self.schedule.begin();
        self.schedule.plan(Duration::ZERO, PlannedDeed::Deed);
        while let Some(planned) = self.schedule.next().await {
            if planned == PlannedDeed::Deed {
                let wait = self.chance.wait(DEED_EVERY);
                self.schedule.plan(wait, PlannedDeed::Deed);
                self.do_something(&around, diary).await;
            } else {
                self.repair(planned, &around, diary).await;
            }
        }
    }

    /// Makes all planned repairs now.
    pub(super) async fn repair_all(
        &mut self,
        cluster: &Cluster,
        fleet: &Fleet,
        images: &Images,
        diary: &Diary,
    ) {
        let around = Around { cluster, fleet, images };
        for planned in self.schedule.take_rest() {
            if planned != PlannedDeed::Deed {
                self.repair(planned, &around, diary).await;
            }
        }
    }

    async fn repair(&mut self, planned: PlannedDeed, around: &Around<'_>, diary: &Diary) {
        match planned {
            PlannedDeed::Deed => {}
            PlannedDeed::Repair(node) => {
                self.broken.remove(&node);
                carry_out_deed(&format!("{node} is an edge again, and Ready"), diary, async {
                    if around.cluster.mark_ready(&node, true).await.is_err() {
                        remake_node(around.cluster, &node).await?;
                    }
                    Ok(())
                })
                .await;
            }
            PlannedDeed::Secret(registry) => {
                let what = format!("the secret of registry {registry} is right again");
                carry_out_deed(&what, diary, around.images.make_secret(around.cluster, registry, true)).await;
            }
        }
    }

    async fn do_something(&mut self, around: &Around<'_>, diary: &Diary) {
        match self.draw_below(100) {
            0..=27 => self.make_job(around, diary).await,
            28..=37 => self.make_pull_job(around, diary).await,
            38..=42 => self.make_list_job(around, diary).await,
            43..=67 => self.edit_job(around, diary).await,
            68..=72 => self.edit_pull_job(around, diary).await,
            73..=79 => self.delete_job(around, diary).await,
            80..=83 => self.delete_reports(around, diary).await,
            84..=87 => self.spoil_secret(around, diary).await,
            _ => self.touch_node(around, diary).await,
        }
    }

    async fn make_job(&mut self, around: &Around<'_>, diary: &Diary) {
        self.made += 1;
        let name = format!("job-{}", self.made);
        let mut job = around.cluster.job(&name).images(self.some_images(around));
        job = match self.draw_below(4) {
            0 => job.on_label(ZONE.0, ZONE.1),
            1 => job.on_label(edge_label().0, edge_label().1),
            _ => job.on(self.some_nodes(around)),
        };
        for (registry, (host, ..)) in around.images.logins.iter().enumerate() {
            job = job.registry_secret(host, &format!("{NAMESPACE}/{}", Images::secret_of(registry)));
        }
        let tolerance = format!("0.{}", 1 + self.draw_below(8));
        job = job
            .concurrency(1 + self.draw_long(40))
            .timeout_seconds(self.draw_timeout())
            .retries(self.draw_long(3));
        job = job.tolerate(&tolerance);
        if self.draw_below(3) == 0 {
            job = job.policy("Always");
        }
        if self.draw_below(3) == 0 {
            job = job.waves(&["10%", "50%", "100%"], self.draw_long(8));
        }
        let (suspend, retry, follow) = (self.draw_below(8) == 0, self.draw_below(3), self.draw_below(3) == 0);
        let deadline = (self.draw_below(5) == 0).then(|| 20 + self.draw_long(90));
        job = job.spec(|spec| {
            spec.suspend = suspend;
            spec.retry = u32::try_from(retry).unwrap_or_default().into();
            spec.active_deadline_seconds = deadline;
            spec.follow_nodes = follow && spec.image_pre_pull_template.label_selector.is_some();
        });
        self.jobs.push(name.clone());
        carry_out_deed(&format!("{name} is made"), diary, async { job.apply().await.map(drop) }).await;
        if self.jobs.len() > MOST_JOBS {
            let oldest = self.jobs.remove(0);
            let what = format!("{oldest} is deleted, the oldest of many");
            carry_out_deed(&what, diary, around.cluster.existing_job(&oldest).delete()).await;
        }
    }

    async fn make_pull_job(&mut self, around: &Around<'_>, diary: &Diary) {
        self.made += 1;
        let name = format!("pull-{}", self.made);
        let image = self.one_of(&around.images.references);
        let mut job = around.cluster.pull_job(&name, &image).on_nodes(self.some_nodes(around));
        job = job.parallelism(self.draw_int(1, 30)).limits(self.draw_int(15, 60), self.draw_int(0, 3));
        let secrets: Vec<_> = (0..around.images.logins.len()).map(Images::secret_of).collect();
        job = job.secrets(&secrets.iter().map(String::as_str).collect::<Vec<_>>());
        if self.draw_below(3) == 0 {
            job = job.policy("Always");
        }
        self.pull_jobs.push(name.clone());
        carry_out_deed(&format!("{name} is made"), diary, async { job.apply().await.map(drop) }).await;
        if self.pull_jobs.len() > MOST_JOBS {
            let oldest = self.pull_jobs.remove(0);
            let job =
                around.cluster.applied_job::<prepull_api::crd::kruise::ImagePullJob>(NAMESPACE, &oldest);
            carry_out_deed(&format!("{oldest} is deleted, the oldest of many"), diary, job.delete()).await;
        }
    }

    async fn make_list_job(&mut self, around: &Around<'_>, diary: &Diary) {
        self.made += 1;
        let name = format!("list-{}", self.made);
        let mut job =
            around.cluster.list_job(&name, self.some_images(around)).on_nodes(self.some_nodes(around));
        job = job.parallelism(self.draw_int(1, 20)).limits(self.draw_int(15, 60), self.draw_int(0, 2));
        let secrets: Vec<_> = (0..around.images.logins.len()).map(Images::secret_of).collect();
        job = job.secrets(&secrets.iter().map(String::as_str).collect::<Vec<_>>());
        self.list_jobs.push(name.clone());
        carry_out_deed(&format!("{name} is made"), diary, async { job.apply().await.map(drop) }).await;
    }

    /// Sets one field of a job to a valid or an invalid value.
    async fn edit_job(&mut self, around: &Around<'_>, diary: &Diary) {
        if self.jobs.is_empty() {
            return self.make_job(around, diary).await;
        }
        let name = self.one_of(&self.jobs.clone());
        let template =
            |field: &str, value: serde_json::Value| json!({"imagePrePullTemplate": {field: value}});
        let edit = match self.draw_below(19) {
            0 | 1 => template("concurrency", (1 + self.draw_long(40)).into()),
            2 => template("timeoutSeconds", self.draw_timeout().into()),
            3 => template("concurrency", 0.into()),
            4 => template("failureTolerate", "most".into()),
            5 => template("timeoutSeconds", (-1).into()),
            6 => json!({"activeDeadlineSeconds": 0}),
            7 => json!({"suspend": true}),
            8 => json!({"suspend": false}),
            9 | 10 => json!({"retry": 1 + self.draw_below(4)}),
            11 => json!({"rollout": {"steps": ["20%", "100%"], "pauseSeconds": self.draw_below(5)}}),
            12 => template("images", json!(["elsewhere.example/other:v1"])),
            // Releases a job: a finished job begins a new run, and a running one does so when it has ended.
            13 | 14 => template("images", self.some_images(around).into()),
            15 => json!({"download": {"maxRate": "64Ki"}}),
            16 => json!({"download": null}),
            17 => json!({"recheck": 1 + self.draw_below(3)}),
            18 => json!({"cancel": true}),
            _ => json!({"rollout": {"steps": ["80%", "20%"]}}),
        };
        let what = format!("{name} is edited: {edit}");
        carry_out_deed(&what, diary, around.cluster.existing_job(&name).patch_spec(edit)).await;
    }

    async fn edit_pull_job(&mut self, around: &Around<'_>, diary: &Diary) {
        if self.pull_jobs.is_empty() {
            return self.make_pull_job(around, diary).await;
        }
        let name = self.one_of(&self.pull_jobs.clone());
        let edit = json!({"parallelism": self.draw_int(1, 30)});
        let job = around.cluster.applied_job::<prepull_api::crd::kruise::ImagePullJob>(NAMESPACE, &name);
        let what = format!("{name} is edited: {edit}");
        carry_out_deed(&what, diary, async { job.patch_spec(edit).await.map(drop) }).await;
    }

    async fn delete_job(&mut self, around: &Around<'_>, diary: &Diary) {
        use prepull_api::crd::kruise::{ImageListPullJob, ImagePullJob};
        match self.draw_below(5) {
            0 if !self.pull_jobs.is_empty() => {
                let at = self.draw_below(self.pull_jobs.len());
                let name = self.pull_jobs.remove(at);
                let job = around.cluster.applied_job::<ImagePullJob>(NAMESPACE, &name);
                carry_out_deed(&format!("{name} is deleted"), diary, job.delete()).await;
            }
            1 if !self.list_jobs.is_empty() => {
                let at = self.draw_below(self.list_jobs.len());
                let name = self.list_jobs.remove(at);
                let job = around.cluster.applied_job::<ImageListPullJob>(NAMESPACE, &name);
                carry_out_deed(&format!("{name} is deleted"), diary, job.delete()).await;
            }
            _ if !self.jobs.is_empty() => {
                let at = self.draw_below(self.jobs.len());
                let name = self.jobs.remove(at);
                carry_out_deed(
                    &format!("{name} is deleted"),
                    diary,
                    around.cluster.existing_job(&name).delete(),
                )
                .await;
            }
            _ => {}
        }
    }

    /// Whether a job's reports were deleted. If no cloudcore led at that moment, the record of completed nodes is lost,
    /// and they get their tasks again.
    pub(super) fn have_deleted_reports_of(&self, job: &JobUid) -> bool {
        self.without_reports.contains(&job.0)
    }

    async fn delete_reports(&mut self, around: &Around<'_>, diary: &Diary) {
        if self.jobs.is_empty() {
            return;
        }
        let name = self.one_of(&self.jobs.clone());
        let without_reports = &mut self.without_reports;
        carry_out_deed(&format!("the reports of {name} are deleted"), diary, async {
            let api: Api<ImagePrePullReport> = Api::all(around.cluster.client());
            let job = around.cluster.existing_job(&name);
            without_reports.insert(job.uid().await?);
            let reports = job.reports().await?;
            for report in reports {
                api.delete(&report.metadata.name.unwrap_or_default(), &DeleteParams::default()).await?;
            }
            Ok(())
        })
        .await;
    }

    async fn spoil_secret(&mut self, around: &Around<'_>, diary: &Diary) {
        let registry = self.draw_below(around.images.logins.len());
        let (lasts, deleted) =
            (self.chance.between(Duration::from_secs(2), Duration::from_secs(15)), self.draw_below(2) == 0);
        self.schedule.plan(lasts, PlannedDeed::Secret(registry));
        let what = if deleted { "deleted" } else { "wrong" };
        carry_out_deed(&format!("the secret of registry {registry} is {what}"), diary, async {
            if deleted {
                return around.cluster.delete_secret(NAMESPACE, &Images::secret_of(registry)).await;
            }
            around.images.make_secret(around.cluster, registry, false).await
        })
        .await;
    }

    async fn touch_node(&mut self, around: &Around<'_>, diary: &Diary) {
        let node = if self.draw_below(4) == 0 {
            NODES[self.draw_below(NODES.len())].to_owned()
        } else {
            self.one_of(around.fleet.names())
        };
        let lasts = self.chance.between(Duration::from_secs(2), Duration::from_secs(20));
        let (what, labelled) = (self.draw_below(4), self.draw_below(2) == 0);
        if !self.broken.insert(node.clone()) {
            return;
        }
        self.schedule.plan(lasts, PlannedDeed::Repair(node.clone()));
        let cluster = around.cluster;
        match what {
            0 => carry_out_deed(&format!("{node} is deleted"), diary, cluster.delete_node(&node)).await,
            1 => {
                carry_out_deed(&format!("{node} is NotReady"), diary, cluster.mark_ready(&node, false)).await;
            }
            _ => {
                let value = labelled.then_some(ZONE.1);
                carry_out_deed(
                    &format!("{node} has the zone {value:?}"),
                    diary,
                    cluster.label_node(&node, ZONE.0, value),
                )
                .await;
            }
        }
    }

    /// Images of both registries.
    fn some_images(&mut self, around: &Around<'_>) -> Vec<String> {
        let mut images = BTreeSet::new();
        for _ in 0..=self.draw_below(4) {
            images.insert(self.one_of(&around.images.references));
        }
        images.into_iter().collect()
    }

    /// Some simulated nodes, at times with real ones.
    fn some_nodes(&mut self, around: &Around<'_>) -> Vec<String> {
        let mut nodes = BTreeSet::new();
        for _ in 0..=self.draw_below(60) {
            nodes.insert(self.one_of(around.fleet.names()));
        }
        if self.draw_below(2) == 0 {
            nodes.extend(NODES.map(str::to_owned));
        }
        nodes.into_iter().collect()
    }

    fn draw_timeout(&mut self) -> i64 {
        let (least, most) = TIMEOUT;
        i64::try_from(least).unwrap_or_default() + self.draw_long(most - least)
    }

    /// Draws a number below `count`; 0 for 0.
    fn draw_below(&mut self, count: usize) -> usize {
        self.chance.below(count)
    }

    fn draw_long(&mut self, count: u64) -> i64 {
        i64::try_from(self.draw_below(usize::try_from(count).unwrap_or(usize::MAX))).unwrap_or_default()
    }

    fn draw_int(&mut self, least: i32, most: i32) -> i32 {
        let count = usize::try_from(most - least + 1).unwrap_or(1);
        least + i32::try_from(self.draw_below(count)).unwrap_or_default()
    }

    /// Draws one of these names; an empty one if there are none.
    fn one_of(&mut self, names: &[String]) -> String {
        let at = self.draw_below(names.len());
        names.get(at).cloned().unwrap_or_default()
    }
}

/// Carries out an action that may hang or be refused, and records it.
async fn carry_out_deed(what: &str, diary: &Diary, work: impl Future<Output = Result<()>>) {
    match tokio::time::timeout(DEED_LIMIT, work).await {
        Ok(Ok(())) => diary.note_event(&format!("people: {what}")),
        Ok(Err(error)) => diary.note_event(&format!("people: {what}: refused: {}", error.root_cause())),
        Err(_) => diary.note_event(&format!("people: {what}: no answer")),
    }
}

/// The names of all existing jobs.
pub(super) async fn existing_objects<K>(api: &Api<K>) -> Result<Vec<K>>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    Ok(api.list(&ListParams::default()).await?.items)
}
