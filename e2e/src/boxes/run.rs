//! One job over boxes of a site, and its cost.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase};
use serde_json::json;

use super::figures::{OfProcess, Row};
use super::scene::{Boxes, SiteBox};
use crate::jobs::Job;
use crate::teller::Teller;
use crate::usage::Usage;

/// Interval of the lines that show how far a job is.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Time limit for each box in seconds: longer than any run.
const NODE_SECONDS: i64 = 24 * 3600;
/// Tries of an image on each box: a site in trouble needs some.
const RETRIES: i64 = 10;
/// Bytes that an agent has downloaded, by source.
const DOWNLOADED: &str = "edgecore_prepull_downloaded_bytes_total";
/// Bytes that an agent has served to other boxes.
const SERVED: &str = "edgecore_prepull_peer_served_bytes_total";
/// Interval of a look at the uplink's counter.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The plan of a job.
#[derive(Clone, Debug)]
pub struct Order {
    /// Name of the job.
    pub name: String,
    /// The image, if it isn't that of the site.
    pub image: Option<String>,
    /// The boxes, which all begin at the same time.
    pub on: Vec<String>,
    /// Whether the boxes share what they have.
    pub share: bool,
    /// Tries of the image on each box after the first.
    pub retries: i64,
    /// Boxes that may fail.
    pub may_fail: usize,
    /// Limit for the job.
    pub limit: Duration,
}

impl Order {
    /// An order for these boxes, each by itself. No box may fail.
    pub fn new(name: &str, on: Vec<String>, limit: Duration) -> Self {
        Self { name: name.to_owned(), image: None, on, share: false, retries: RETRIES, may_fail: 0, limit }
    }
}

/// A job that has begun.
pub struct Run {
    job: Job,
    may_fail: usize,
    begun: Instant,
    down: u64,
    up: u64,
    cloud: Process,
    /// Each box of the job, with the initial usage of its processes: agent and containerd.
    boxes: Vec<(String, [Process; 2], Came)>,
}

/// Byte counters of a box's agent: downloaded and served.
#[derive(Clone, Copy, Debug, Default)]
struct Came {
    registry: u64,
    peers: u64,
    served: u64,
}

impl Came {
    async fn of(found: &SiteBox) -> Result<Self> {
        let metrics = found.node.metrics().await?;
        let of = |name: &str, labels: &[(&str, &str)]| whole(metrics.sum(name, labels));
        Ok(Self {
            registry: of(DOWNLOADED, &[("source", "registry")]),
            peers: of(DOWNLOADED, &[("source", "peer")]),
            served: of(SERVED, &[]),
        })
    }

    /// The bytes added since then. An agent that was restarted has counted from zero.
    fn since(self, before: Self) -> Self {
        let added = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        Self {
            registry: added(self.registry, before.registry),
            peers: added(self.peers, before.peers),
            served: added(self.served, before.served),
        }
    }
}

/// A counter of bytes, which Prometheus writes as a float.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // whole, and never below 0
fn whole(counter: f64) -> u64 {
    counter as u64
}

/// A process and its initial usage.
struct Process {
    pid: u32,
    used: Usage,
}

impl Process {
    fn now(pid: u32) -> Result<Self> {
        // Reset the peak, so that it's that of this job.
        std::fs::write(format!("/proc/{pid}/clear_refs"), "5").context("cannot reset the peak of memory")?;
        Ok(Self { pid, used: Usage::of_process(pid)? })
    }

    /// The usage since then. For a restarted process, its whole usage.
    fn since(&self, pid: u32) -> Result<OfProcess> {
        let now = Usage::of_process(pid)?;
        let before = if pid == self.pid { self.used.cpu } else { Duration::ZERO };
        Ok(OfProcess { cpu_seconds: now.cpu.saturating_sub(before).as_secs_f64(), peak: now.peak })
    }
}

fn pids(found: &SiteBox) -> Result<[u32; 2]> {
    Ok([found.node.agent()?.pid(), found.node.containerd().process()?.pid()])
}

fn has_ended(status: &ImagePrePullJobStatus) -> bool {
    matches!(status.phase, JobPhase::Completed | JobPhase::Failure)
}

impl Run {
    /// Creates a job over these boxes. No box may fail. It uses the default for sharing.
    pub async fn begin(boxes: &Boxes, name: &str, on: &[String], limit: Duration) -> Result<Self> {
        Self::of(boxes, &Order::new(name, on.to_owned(), limit)).await
    }

    /// Creates a job.
    pub async fn of(boxes: &Boxes, order: &Order) -> Result<Self> {
        let mut begun = Vec::new();
        for name in &order.on {
            let found = boxes.get(name)?;
            let [agent, containerd] = pids(found)?;
            let came = Came::of(found).await?;
            begun.push((name.clone(), [Process::now(agent)?, Process::now(containerd)?], came));
        }
        let (down, up) = (boxes.lan.carried_down().await?, boxes.lan.carried_up().await?);
        let cloud = Process::now(boxes.cloud.process()?.pid())?;
        let image = order.image.as_ref().unwrap_or(&boxes.reference);
        let job = boxes.cluster.job(&order.name).images([image]).on(&order.on).retries(order.retries);
        let job = job.timeout_seconds(NODE_SECONDS).concurrency(i64::try_from(order.on.len())?);
        // No box is given up because of others.
        let mut job = serde_json::to_value(job.tolerate("1").build())?;
        if order.share {
            job["spec"]["download"] = json!({"shareWithinSite": true});
        }
        let begin = Instant::now();
        let job = boxes.cluster.apply_job(&job.to_string()).await?.within(order.limit);
        Ok(Self { job, may_fail: order.may_fail, begun: begin, down, up, cloud, boxes: begun })
    }

    /// Bytes that the uplink has carried to the site since the beginning.
    pub async fn carried(&self, boxes: &Boxes) -> Result<u64> {
        Ok(boxes.lan.carried_down().await? - self.down)
    }

    /// Waits until the uplink has carried this percentage of the image, or the job has ended.
    pub async fn reaches(&self, boxes: &Boxes, percent: u64) -> Result<()> {
        let enough = boxes.image_bytes()? * percent / 100;
        let carries = async {
            while self.carried(boxes).await? < enough {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            anyhow::Ok(())
        };
        tokio::select! {
            carried = carries => carried,
            ended = self.job.until("has ended", has_ended) => ended.map(drop),
        }
    }

    /// The box with the agent that downloads most from the registry right now: the carrier.
    pub async fn carrier(&self, boxes: &Boxes) -> Result<usize> {
        let all = async || {
            let mut all = Vec::new();
            for found in &boxes.all {
                // An agent that is just starting does not answer yet.
                all.push(Came::of(found).await.unwrap_or_default());
            }
            all
        };
        let before = all().await;
        tokio::time::sleep(5 * LOOK_EVERY).await;
        let now = all().await;
        let added = now.iter().zip(&before).map(|(now, before)| now.since(*before).registry);
        let most = added.enumerate().max_by_key(|(_, added)| *added);
        most.map(|(index, _)| index).context("the site has no boxes")
    }

    /// Waits until the job has ended, and returns its cost and its last status.
    pub async fn finish(
        self,
        boxes: &Boxes,
        what: &str,
        teller: Option<&Teller>,
    ) -> Result<(Row, ImagePrePullJobStatus)> {
        let mut lines = tokio::time::interval(LINE_EVERY);
        lines.tick().await; // the first comes at once
        let mut ends = Box::pin(self.job.until("has ended", has_ended));
        let status = loop {
            tokio::select! {
                ended = &mut ends => break ended?,
                _ = lines.tick() => if let Some(teller) = teller {
                    teller.step(&self.line(boxes).await?);
                },
            }
        };
        drop(ends);
        let have = usize::try_from(status.summary.successful)?;
        ensure!(have + self.may_fail >= self.boxes.len(), "{what}: only {have} boxes have it: {status:#?}");
        let seconds = self.begun.elapsed().as_secs_f64();
        let (down, up) = (boxes.lan.carried_down().await?, boxes.lan.carried_up().await?);
        let mut row = Row {
            what: what.to_owned(),
            boxes: self.boxes.len(),
            seconds,
            down: down - self.down,
            up: up - self.up,
            have,
            from_registry: 0,
            from_peers: 0,
            most_served: 0,
            cloud: self.cloud.since(boxes.cloud.process()?.pid())?,
            agents: Vec::new(),
            containerds: Vec::new(),
        };
        for (name, [agent, containerd], before) in &self.boxes {
            let found = boxes.get(name)?;
            let came = Came::of(found).await?.since(*before);
            row.from_registry += came.registry;
            row.from_peers += came.peers;
            row.most_served = row.most_served.max(came.served);
            let [agent_now, containerd_now] = pids(found)?;
            row.agents.push(agent.since(agent_now)?);
            row.containerds.push(containerd.since(containerd_now)?);
        }
        Ok((row, status))
    }

    async fn line(&self, boxes: &Boxes) -> Result<String> {
        let summary = self.job.status().await?.summary;
        let percent = 100 * self.carried(boxes).await? / boxes.image_bytes()?;
        Ok(format!(
            "  {} of {} boxes have the image; the uplink has carried {percent} % of it",
            summary.successful,
            self.boxes.len()
        ))
    }
}
