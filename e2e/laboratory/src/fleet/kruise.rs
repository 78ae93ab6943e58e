//! `--kruise`: the number of writes for OpenKruise's API. An ImagePullJob over all nodes, or an ImageListPullJob for
//! several images, from its creation until all NodeImages are empty again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kube::api::{Api, ListParams};
use prepull_api::crd::kruise::{ImagePullJob, NodeImage};
use prepull_e2e::cleanup::eventually;
use prepull_e2e::kruise::{KruiseListJob, KruiseObject, PullJobKind};
use prepull_e2e::teller::Teller;
use serde::Serialize;

use super::FleetOptions;
use super::figures::Connect;
use super::requests::WriteCounts;
use super::scene::{FleetScene, usage};

/// Writes of the harness itself, which are not counted.
const OWN: [&str; 3] = ["imagepulljobs POST", "imagelistpulljobs POST", "others POST"];
/// Limit for all NodeImages to be created, and to be empty again.
const LIMIT: Duration = Duration::from_secs(300);
/// NodeImages in one page of a list.
const PAGE: u32 = 500;

/// The figures of one run with `--kruise`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KruiseFigures {
    /// Options of the run.
    pub options: FleetOptions,
    /// Version of the API server.
    pub cluster: String,
    /// Cores and memory of this machine.
    pub machine: String,
    /// How the fleet connected.
    pub connect: Connect,
    /// Writes until every node had its NodeImage.
    pub writes_before: BTreeMap<String, u64>,
    /// Seconds from the job's creation to its end.
    pub ended_seconds: f64,
    /// Seconds from the job's end until its time to live was over and all NodeImages were empty.
    pub removed_seconds: f64,
    /// Writes from the job's creation to its end, without the creation.
    pub writes_to_end: BTreeMap<String, u64>,
    /// Writes from the job's end until all NodeImages were empty.
    pub writes_to_removal: BTreeMap<String, u64>,
    /// Writes of NodeImages and jobs for each node and image, from the creation until all NodeImages were empty.
    pub per_node_and_image: f64,
    /// Events for each node and image; their rate is limited.
    pub events_per_node_and_image: f64,
    /// Nodes of the job, or images of the list, and how many of them succeeded.
    pub desired_and_succeeded: (i32, i32),
    /// Pulls that were begun.
    pub pulls: u64,
    /// Complete images that were pulled again.
    pub pulled_twice: u64,
    /// CPU time of cloudcore for the job.
    pub cloud_cpu_seconds: f64,
    /// Largest resident memory of cloudcore since its start.
    pub cloud_peak: u64,
}

impl KruiseFigures {
    /// Starts a fleet with these options, measures it, and stops it.
    pub(crate) async fn measure(options: &FleetOptions, teller: &Teller) -> Result<Self> {
        let (scene, connect) = FleetScene::start(options, teller).await?;
        let client = scene.cluster.client();
        let node_images: Api<NodeImage> = Api::all(client.clone());
        let count = async |so: fn(&NodeImage) -> bool| {
            let mut page = ListParams::default().limit(PAGE);
            let (mut all, mut fitting) = (0, 0);
            loop {
                let list = node_images.list(&page).await?;
                all += list.items.len();
                fitting += list.items.iter().filter(|object| so(object)).count();
                match list.metadata.continue_.filter(|token| !token.is_empty()) {
                    Some(token) => page = page.continue_token(&token),
                    None => return anyhow::Ok((all, fitting)),
                }
            }
        };
        eventually("every node has a NodeImage", LIMIT, async || {
            let (all, _) = count(|_| true).await?;
            ensure!(all == options.nodes, "{all} have one");
            Ok(())
        })
        .await?;
        let before = WriteCounts::read_current(&client).await?;
        let cpu_before = usage(&scene.cloud)?.cpu;

        teller.step(&format!("job over {} nodes", options.nodes));
        let begun = Instant::now();
        let desired_and_succeeded = scene.kruise_job(options).await?;
        let ended = Instant::now();
        let at_end = WriteCounts::read_current(&client).await?;
        teller.step("the job has ended; its time to live");
        if options.images > 1 {
            scene.delete_children().await?;
        }
        eventually("each NodeImage is empty", LIMIT, async || {
            let (all, empty) = count(|object| {
                let status = object.status.as_ref();
                object.spec.images.is_empty() && status.is_none_or(|status| status.image_statuses.is_empty())
            })
            .await?;
            ensure!(all == empty, "{empty} of {all} are");
            Ok(())
        })
        .await?;
        let removed_seconds = ended.elapsed().as_secs_f64();
        let after = WriteCounts::read_current(&client).await?;
        let (tally, now) = (scene.fleet.tally(), usage(&scene.cloud)?);

        let mut writes_to_end = at_end.added_since(&before);
        let ours = 1;
        for own in OWN {
            // cloudcore itself creates the ImagePullJobs of a list.
            if let Some(count) = writes_to_end.get_mut(own) {
                *count = count.saturating_sub(if options.images > 1 && own == OWN[0] { 0 } else { ours });
            }
        }
        let writes_to_removal = after.added_since(&at_end);
        writes_to_end.retain(|_, count| *count > 0);
        let sum = |so: fn(&str) -> bool| {
            let all = [&writes_to_end, &writes_to_removal].into_iter().flatten();
            all.filter(|(what, _)| so(what)).map(|(_, count)| count).sum()
        };
        let events = sum(|what| what.starts_with("events"));
        let written = sum(|what| what.starts_with("image") || what.starts_with("nodeimages"));
        let pairs = options.nodes as u64 * u64::from(options.images);
        let (cluster, machine) = (scene.cluster.version().await?, prepull_e2e::usage::describe_machine());
        Ok(Self {
            options: options.clone(),
            cluster,
            machine,
            connect,
            writes_before: before.added_since(&WriteCounts::default()),
            ended_seconds: ended.duration_since(begun).as_secs_f64(),
            removed_seconds,
            writes_to_end,
            writes_to_removal,
            per_node_and_image: ratio(written, pairs),
            events_per_node_and_image: ratio(events, pairs),
            desired_and_succeeded,
            pulls: tally.pulls,
            pulled_twice: tally.pulled_twice,
            cloud_cpu_seconds: now.cpu.saturating_sub(cpu_before).as_secs_f64(),
            cloud_peak: now.peak,
        })
    }

    /// Every node came to an end, and nothing was pulled twice.
    pub(crate) fn is_whole(&self) -> bool {
        let (desired, succeeded) = self.desired_and_succeeded;
        desired > 0 && (desired == succeeded || self.options.fail_rate > 0.0) && self.pulled_twice == 0
    }
}

impl FleetScene {
    /// Creates the job, and waits for its end.
    async fn kruise_job(&self, options: &FleetOptions) -> Result<(i32, i32)> {
        let image = |number| format!("registry.example/fleet/image-{number}:v1");
        let nodes = options.concurrency.unwrap_or_else(|| i64::try_from(options.nodes).unwrap_or(i64::MAX));
        let (parallelism, seconds) = (i32::try_from(nodes)?, i32::try_from(options.timeout_seconds)?);
        if options.images == 1 {
            let job = self.cluster.pull_job("fleet", &image(0)).parallelism(parallelism);
            let job = job.limits(seconds, 3).ttl(1).apply().await?;
            let status = wait_for_end(&job, options.limit).await?;
            Ok((status.desired, status.succeeded))
        } else {
            let job = self.cluster.list_job("fleet", (0..options.images).map(image)).parallelism(parallelism);
            let job = job.limits(seconds, 3).apply().await?;
            let status = wait_for_end(&job, options.limit).await?;
            Ok((status.desired, status.succeeded))
        }
    }

    /// Deletes the list with its children, as the garbage collector of a real cluster would.
    async fn delete_children(&self) -> Result<()> {
        let list: KruiseListJob = self.cluster.applied_job("default", "fleet");
        let children = list.children().await?;
        list.delete().await?;
        for child in children {
            let name = child.metadata.name.unwrap_or_default();
            self.cluster.applied_job::<ImagePullJob>("default", &name).delete().await?;
        }
        Ok(())
    }
}

async fn wait_for_end<K: PullJobKind>(job: &KruiseObject<K>, limit: Duration) -> Result<K::Status> {
    job.clone().with_limit(limit).completes().await
}

/// Divides with two decimals.
fn ratio(part: u64, whole: u64) -> f64 {
    let hundredths = part * 100 / whole.max(1);
    f64::from(u32::try_from(hundredths).unwrap_or(u32::MAX)) / 100.0
}
