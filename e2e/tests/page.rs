//! The page of `kubectl prepull ui`, in a browser with a person's clicks.

use std::path::{Path, PathBuf};
use std::process::Command;

use futures::{StreamExt, TryStreamExt};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Api, PostParams};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL};
use prepull_e2e::browser::Browser;
use prepull_e2e::parts;
use prepull_e2e::plugin::PageServer;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

use crate::page_states::{fits, has_room};

/// The page server.
pub(crate) struct Page(PageServer);

impl Page {
    pub(crate) async fn serve(kubeconfig: &Path) -> Result<Self> {
        Ok(Self(Person::new(kubeconfig).serves_page().await?))
    }

    /// The address of the page.
    pub(crate) fn url(&self) -> &str {
        self.0.url()
    }

    /// The page in a browser.
    pub(crate) async fn opened(&self) -> Result<Browser> {
        self.opened_at(1280, 900).await
    }

    /// The page in a window of this size.
    pub(crate) async fn opened_at(&self, width: u32, height: u32) -> Result<Browser> {
        let browser = Browser::start(width, height).await?;
        browser.prefer("light").await?;
        browser.open(self.0.url()).await?;
        Ok(browser)
    }
}

/// Pictures that the docs show.
const SHOWN: [&str; 4] = ["job-failed", "job-500", "job-10000", "jobs-phone"];

/// Stores a picture with the logs; one that the docs show in `PREPULL_PICTURES`, if that is set.
pub(crate) async fn picture(browser: &Browser, name: &str) -> Result<()> {
    let dir = std::env::var_os("PREPULL_PICTURES").filter(|_| SHOWN.contains(&name)).map(PathBuf::from);
    let dir = dir.map_or_else(|| Place::here().map(|place| place.logs().to_owned()), Ok)?;
    std::fs::create_dir_all(&dir)?;
    browser.picture(&dir.join(format!("{name}.png"))).await
}

async fn phase_is(job: &Job, phase: JobPhase) -> Result<()> {
    job.reaches(phase).await.map(drop)
}

/// Hides the tab and shows it again: its stream is closed, and another one opened.
async fn hidden_tabs_hear_nothing(browser: &Browser) -> Result<()> {
    let prepare = "(() => { const Native = window.EventSource; window.opened = []; \
        window.EventSource = class extends Native { constructor(url) { super(url); opened.push(this); } }; \
        Object.defineProperty(document, 'hidden', { get: () => window.away, configurable: true }); return null; })()";
    browser.run::<Value>(prepare).await?;
    let turn =
        "document.dispatchEvent(new Event('visibilitychange')), opened.map((stream) => stream.readyState)";
    for opened in [0, 1] {
        let states: Vec<u8> = browser.run(&format!("window.away = true, {turn}")).await?;
        ensure!(states.len() == opened && states.iter().all(|state| *state == 2), "hidden: {states:?}");
        let states: Vec<u8> = browser.run(&format!("window.away = false, {turn}")).await?;
        ensure!(states.len() == opened + 1 && states[opened..].iter().all(|state| *state < 2), "{states:?}");
    }
    browser.run::<Value>("delete document.hidden").await.map(drop)
}

/// Suspends a job, resumes it, pauses its downloads, and resumes it again.
async fn stands_and_goes_on(browser: &Browser, job: &Job) -> Result<()> {
    for (button, state, name) in
        [("Suspend", "Suspended", "job-suspended"), ("Pause downloads", "Paused", "job-paused")]
    {
        browser.click(button).await?;
        browser.says(state).await?;
        picture(browser, name).await?;
        let spec = job.get().await?.spec;
        ensure!(spec.suspend || spec.pause, "it goes on after {button}");
        browser.click("Resume").await?;
        eventually("the job goes on", SOON, async || {
            let spec = job.get().await?.spec;
            ensure!(!spec.suspend && !spec.pause, "it still stands after {button}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// A click that waits for a connection while the streams of other windows have all six is never carried out.
async fn late_clicks_are_dropped(browser: &Browser, job: &Job) -> Result<()> {
    let take = "(() => { window.within = AbortSignal.timeout.bind(AbortSignal); \
        window.taken = Array.from({ length: 6 }, () => new EventSource('live')); \
        AbortSignal.timeout = () => within(1000); return null; })()";
    browser.run::<Value>(take).await?;
    browser.click("Suspend").await?;
    browser.says("There was no answer within").await?;
    browser.click("Close").await?;
    let free = "taken.forEach((stream) => stream.close()), AbortSignal.timeout = within, null";
    browser.run::<Value>(free).await?;
    browser.click("Pause downloads").await?;
    browser.says("Paused").await?;
    ensure!(!job.get().await?.spec.suspend, "the late click suspended it");
    browser.click("Resume").await?;
    browser.says("1 in progress").await
}

#[tokio::test]
async fn the_page_shows_and_controls_a_job() -> Result<()> {
    let site = Site::start().await?;
    let (one, two) = (site.add_node("edge-1").await?, site.add_node("edge-2").await?);
    let (_one, _two) = tokio::try_join!(one.into_future(), two.into_future())?;
    for (node, zone) in [("edge-1", "north"), ("edge-2", "south")] {
        site.cluster.label_node(node, "topology.kubernetes.io/zone", Some(zone)).await?;
    }
    let (_, there) = site.seed_image("there", &[MIB])?;
    let missing = site.registry.image("team/late:v1");
    let nodes = ["edge-1", "edge-2"];
    let job =
        site.job("morning").images([&there, &missing]).on(nodes).concurrency(2).retries(0).apply().await?;
    phase_is(&job, JobPhase::Failure).await?;
    let wrong = site.job("wrong").images(["r.example/App:v1"]).on(nodes).apply().await?;
    phase_is(&wrong, JobPhase::Failure).await?;
    // A job of OpenKruise is a row among the others.
    site.cluster.install_kruise().await?;
    site.cluster.pull_job("evening", &there).apply().await?;

    let page = Page::serve(site.cluster.kubeconfig()).await?;
    let browser = page.opened().await?;
    browser.says("2 failed of 2 nodes").await?;
    browser.says("imagepulljob/evening -n default").await?;
    // A refused job shows its reason and the remedy, and no empty cards.
    browser.click("wrong").await?;
    browser.says("No node has begun. Correct the field").await?;
    let shown = browser.text().await?;
    ensure!(shown.contains("Refused") && shown.contains("lowercase"), "{shown}");
    ensure!(!shown.contains("Nodes that have ended") && !shown.contains("Group nodes"), "{shown}");
    browser.click("Jobs").await?;
    browser.click("morning").await?;
    browser.says("Failures by reason").await?;
    browser.says("2 × NotFound").await?;
    // The reasons filter, and the squares are grouped by site.
    browser.click("2 × NotFound").await?;
    browser.says("Nodes 1 to 2 of 2").await?;
    let groups: String = browser.run("document.querySelector('canvas').getAttribute('aria-label')").await?;
    ensure!(groups.starts_with("2 nodes as squares"), "{groups}");
    // A click on the first square shows its node, and the keyboard continues from there.
    let at: [f64; 2] = browser
        .run("(() => { const at = document.querySelector('canvas').getBoundingClientRect(); return [at.x + 10, at.y + 34]; })()")
        .await?;
    browser.click_at(at).await?;
    browser.says("Tries").await?;
    // The hint of the square disappears with the pointer.
    browser.move_to([1.0, 1.0]).await?;
    let shown: String = browser.run("document.querySelector('section[aria-label=Node]').innerText").await?;
    ensure!(shown.contains("edge-1") && shown.contains(&missing) && shown.contains("failed"), "{shown}");
    picture(&browser, "job-failed").await?;
    browser.run::<Value>("document.querySelector('canvas').focus()").await?;
    browser.press("ArrowRight").await?;
    browser.press("Enter").await?;
    eventually("the other node is shown", SOON, async || {
        let shown: String =
            browser.run("document.querySelector('section[aria-label=Node]').innerText").await?;
        ensure!(shown.contains("edge-2"), "{shown}");
        Ok(())
    })
    .await?;

    // The image has arrived in the registry by now.
    let (_, late) = site.seed_image("late", &[MIB])?;
    assert_eq!(late, missing);
    browser.click("Retry").await?;
    browser.says("2 successful of 2 nodes").await?;
    browser.says("Completed").await?;
    phase_is(&job, JobPhase::Completed).await?;

    // A longer job is suspended, resumed, and ended.
    site.link.throttle(Some(MIB / 4));
    let (_, large) = site.seed_image("large", &[16 * MIB])?;
    let long = site.job("long").images([&large]).on(nodes).concurrency(1).apply().await?;
    browser.click("Jobs").await?;
    browser.says("long").await?;
    browser.click("long").await?;
    browser.says("1 in progress").await?;
    stands_and_goes_on(&browser, &long).await?;
    late_clicks_are_dropped(&browser, &long).await?;
    hidden_tabs_hear_nothing(&browser).await?;
    browser.click("Cancel").await?;
    eventually("the page asks", SOON, async || {
        // The question may come after the answer to the click.
        browser.run::<u32>("1").await?;
        let questions = browser.questions().await;
        ensure!(
            questions.len() == 1 && questions[0].contains("End this job now, and for good?"),
            "{questions:?}"
        );
        Ok(())
    })
    .await?;
    phase_is(&long, JobPhase::Failure).await?;
    browser.says("Failure").await?;
    browser.prefer("dark").await?;
    browser.click("Jobs").await?;
    browser.says("morning").await?;
    picture(&browser, "jobs-dark").await?;
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "{complaints:#?}");
    Ok(())
}

#[tokio::test]
async fn a_viewer_sees_no_buttons() -> Result<()> {
    let cluster = Cluster::own().await?;
    let job = cluster.job("seen").images(["registry.invalid/a:1"]).on(["edge-1"]).apply().await?;
    cluster
        .apply(
            "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: looks}
rules:
- {apiGroups: [operations.kubeedge.io], resources: [imageprepulljobs, imageprepullreports], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: looks}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: looks}
subjects: [{kind: User, name: jane, apiGroup: rbac.authorization.k8s.io}]
",
        )
        .await?;
    let page = Page::serve(&cluster.kubeconfig_as("jane")?).await?;
    let browser = page.opened().await?;
    browser.click("seen").await?;
    browser.says("registry.invalid/a:1").await?;
    let buttons: Vec<String> = browser
        .run("[...document.querySelectorAll('.buttons button')].filter((button) => button.offsetParent).map((button) => button.textContent)")
        .await?;
    ensure!(buttons.is_empty(), "{buttons:?}");
    browser.says("You can look at this job and not change it").await?;
    fits(&browser, "job-read-only").await?;
    browser.click("Sites").await?;
    browser.says("The sites can't be shown: user jane lacks a right").await?;
    browser.click("Edges").await?;
    browser.says("The edges can't be shown: user jane lacks a right").await?;
    fits(&browser, "edges-forbidden").await?;
    browser.click("Jobs").await?;

    // A user without even the right to view gets no page, and learns which right is missing.
    let ann = Person::new(&cluster.kubeconfig_as("ann")?);
    let said = tokio::time::timeout(SOON, ann.runs("ui --no-open")).await.context("the page is served")??;
    said.is(1, &["user ann lacks a right: to list imagepr"])?;

    // While the cluster doesn't answer, the page shows since when, also if it's opened then.
    cluster.stop_api()?;
    for browser in [&browser, &page.opened().await?] {
        for text in ["not live since", "Changes may be missing since", "the API server https://"] {
            browser.says(text).await?;
        }
    }
    fits(&browser, "disconnected").await?;
    cluster.start_api().await?;

    let curl = async |arguments: &[&str]| {
        let mut command = Command::new("curl");
        command.args(["--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "5"]);
        command.args(arguments);
        anyhow::Ok(parts::run_command(command).await?.trim().to_owned())
    };
    let url = page.0.url();
    let (act, bare) = (format!("{url}act/seen/suspend"), url.rsplitn(3, '/').last().unwrap_or_default());
    for (arguments, status) in [
        (vec![url], "200"),
        (vec![bare], "404"),
        (vec!["--header", "Host: rebound.example", url], "421"),
        (vec!["--header", "Origin: https://elsewhere.example", url], "403"),
        (vec!["--header", "Sec-Fetch-Site: cross-site", url], "403"),
        (vec!["--request", "POST", &act], "403"),
        (vec!["--request", "POST", "--header", "x-prepull: 1", &act], "502"),
    ] {
        assert_eq!(curl(&arguments).await?, status, "{arguments:?}");
    }
    ensure!(!job.get().await?.spec.suspend, "the job was changed");
    // Another user of this machine, who has read the address in the list of processes. This takes root.
    if rustix::process::geteuid().is_root() {
        let mut stranger = Command::new("setpriv");
        stranger.args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "curl",
            "--silent",
            "--max-time",
            "5",
            url,
        ]);
        // Curl's codes for a connection that is closed without an answer.
        let refused = parts::run_command(stranger).await.err().context("another user got an answer")?;
        let refused = refused.to_string();
        ensure!(
            ["52", "56"].iter().any(|code| refused.contains(&format!("exit status: {code}"))),
            "{refused}"
        );
    }

    // A foreign page that knows the address gets no data.
    let outside = Browser::start(400, 300).await?;
    let read = format!("fetch({url:?}).then((answer) => answer.text(), (error) => 'refused')");
    outside.open("data:text/html,elsewhere").await?;
    assert_eq!(outside.run::<String>(&read).await?, "refused");
    Ok(())
}

/// Seconds of a made-up job until now, and time that one of its nodes takes.
const RAN: i64 = 20 * 60;
const TAKES: i64 = 40;

/// The phase of a node of a made-up job that has gone through most of its nodes in their order.
fn phase_of(node: usize, nodes: usize) -> NodePhase {
    let chance = chance_of(node);
    match 100 * node / nodes {
        0..=79 if chance < 4 => NodePhase::Failure,
        80..=85 if chance < 50 => NodePhase::InProgress,
        0..=85 => NodePhase::Successful,
        86..=89 => NodePhase::InProgress,
        _ => NodePhase::Pending,
    }
}

/// A pseudo-random number below 100.
fn chance_of(node: usize) -> usize {
    let mixed = node.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33) % 100
}

/// A job of this many nodes in the form that cloudcore would write, with a few failures. Returns the number of
/// successful nodes.
pub(crate) async fn made_up_job(cluster: &Cluster, name: &str, nodes: usize) -> Result<usize> {
    let job = cluster.job(name).images(["registry.invalid/a:1"]).on(["edge-0"]).apply().await?;
    let began = Timestamp::from_second(Timestamp::now().as_second() - RAN)?;
    let names: Vec<String> = (0..nodes).map(|node| format!("edge-{node:05}")).collect();
    let record = |node: usize| {
        let phase = phase_of(node, nodes);
        let total = 40_000_000;
        let done = match phase {
            NodePhase::Pending => 0,
            NodePhase::InProgress | NodePhase::Failure => total / 100 * chance_of(node + nodes),
            NodePhase::Successful | NodePhase::Unknown => total,
        };
        let status = if phase == NodePhase::Successful { "True" } else { "Unknown" };
        let mut record = json!({ "nodeName": names[node], "phase": phase, "attempt": 1, "imageStatus": [
            { "image": "registry.invalid/a:1", "status": status, "bytes": { "done": done, "total": total } }
        ]});
        if matches!(phase, NodePhase::Successful | NodePhase::Failure) {
            let (node, nodes) = (i64::try_from(node).unwrap_or(0), i64::try_from(nodes).unwrap_or(1));
            let ended = began + SignedDuration::from_secs((RAN - TAKES) * node * 100 / nodes / 87 + TAKES);
            record["actionFlow"] = json!([{ "action": "Pull", "status": status, "time": ended }]);
        }
        if phase == NodePhase::Failure {
            let (code, reason) = [
                ("NotFound", "registry.invalid/a:1: not found at registry.invalid"),
                ("Unauthorized", "registry.invalid/a:1: registry.invalid answers 401 Unauthorized"),
                ("NoSpace", "registry.invalid/a:1: no space left on device"),
            ][[0, 1, 1, 2, 2, 2][node % 6]];
            record["code"] = code.into();
            record["reason"] = reason.into();
        }
        record
    };
    let uid = job.uid().await?;
    let api: Api<ImagePrePullReport> = Api::all(cluster.client());
    for (index, first) in (0..nodes).step_by(250).enumerate() {
        let report: ImagePrePullReport = serde_json::from_value(json!({
            "apiVersion": "operations.kubeedge.io/v1alpha1", "kind": "ImagePrePullReport",
            "metadata": { "name": format!("{name}-{index}"), "labels": { JOB_UID_LABEL: uid } },
            "jobName": name, "index": index,
            "nodeStatus": (first..nodes.min(first + 250)).map(record).collect::<Vec<_>>(),
        }))?;
        let report = ImagePrePullReport { types: Some(ImagePrePullReport::type_meta()), ..report };
        api.create(&PostParams::default(), &report).await?;
    }
    let count = |phase: NodePhase| (0..nodes).filter(|node| phase_of(*node, nodes) == phase).count();
    let successful = count(NodePhase::Successful);
    job.set_status(&json!({
        "phase": "InProgress", "startTime": began, "observedGeneration": 1,
        "summary": {
            "desired": nodes, "failure": count(NodePhase::Failure), "inProgress": count(NodePhase::InProgress),
            "pending": count(NodePhase::Pending), "successful": successful,
        },
    }))
    .await?;
    Ok(successful)
}

#[tokio::test]
async fn five_hundred_nodes_are_grouped_by_site() -> Result<()> {
    const NODES: usize = 500;
    const SITES: [&str; 7] = ["berlin", "hangzhou", "lyon", "nagoya", "porto", "pune", "quito"];
    let cluster = Cluster::start().await?;
    let label = "topology.kubernetes.io/zone";
    futures::stream::iter(0..NODES)
        .map(|node| (format!("edge-{node:05}"), SITES[chance_of(node) % SITES.len()]))
        .map(async |(name, site)| cluster.node(&name).edge().label(label, site).create().await)
        .buffer_unordered(16)
        .try_collect::<()>()
        .await?;
    let successful = made_up_job(&cluster, "medium", NODES).await?;
    let page = Page::serve(cluster.kubeconfig()).await?;
    let browser = page.opened().await?;
    browser.says(&format!("{successful} successful")).await?;
    browser.click("medium").await?;
    browser.says("Nodes 1 to 25 of 500").await?;
    let height: u32 = browser.run("document.querySelector('canvas').clientHeight").await?;
    picture(&browser, "job-500").await?;
    fits(&browser, "job-500").await?;
    // Failed nodes come first in the table.
    let states: Vec<String> = browser
        .run("[...document.querySelectorAll('tbody td[data-column=State]')].map((cell) => cell.textContent)")
        .await?;
    let failed = states.iter().take_while(|state| *state == "failed").count();
    assert_eq!((states.len(), failed), (25, 9), "{states:?}");
    // Without their headings, and with a line for each group, the squares take less room.
    browser
        .run::<Value>(
            "(() => { const select = document.querySelector('#group'); select.value = ''; \
             select.dispatchEvent(new Event('change')); })()",
        )
        .await?;
    eventually("the squares are in one group", SOON, async || {
        let now: u32 = browser.run("document.querySelector('canvas').clientHeight").await?;
        ensure!(now + 100 < height, "{now}, and before {height}");
        Ok(())
    })
    .await?;
    // Nothing required is missing; OpenKruise isn't required.
    let message: String = browser.run("document.querySelector('#message').textContent").await?;
    assert_eq!(message, "");
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "{complaints:#?}");
    Ok(())
}

/// Counts what a view begins and ceases to listen to beyond its own elements: sizes, and the colours that a person prefers.
async fn count_listeners(browser: &Browser) -> Result<()> {
    let count = "(() => { window.added = 0; window.removed = 0; \
        const [add, remove] = [EventTarget.prototype.addEventListener, EventTarget.prototype.removeEventListener]; \
        MediaQueryList.prototype.addEventListener = function (...of) { added += 1; add.apply(this, of); }; \
        MediaQueryList.prototype.removeEventListener = function (...of) { removed += 1; remove.apply(this, of); }; \
        window.ResizeObserver = class extends ResizeObserver { \
            observe(at) { added += 1; super.observe(at); } disconnect() { removed += 1; super.disconnect(); } }; \
        return null; })()";
    browser.run::<Value>(count).await.map(drop)
}

#[tokio::test]
async fn ten_thousand_nodes_draw_without_stutter() -> Result<()> {
    const NODES: usize = 10_000;
    let cluster = Cluster::start().await?;
    made_up_job(&cluster, "large", NODES).await?;
    let page = Page::serve(cluster.kubeconfig()).await?;
    let browser = page.opened().await?;
    browser.says("of 10,000 nodes").await?;
    count_listeners(&browser).await?;
    browser.click("large").await?;
    browser.says("Nodes 1 to 25 of 10,000").await?;
    browser.says("× NoSpace").await?;
    picture(&browser, "job-10000").await?;
    // The markup is that of `job-500`.
    has_room(&browser, "job-10000").await?;
    // Changes arrive, and each redraws only its squares.
    let api: Api<ImagePrePullReport> = Api::all(cluster.client());
    for index in 0..40 {
        let mut report = api.get(&format!("large-{index}")).await?;
        for node in &mut report.body.node_status {
            node.phase = NodePhase::Successful;
        }
        api.replace(&format!("large-{index}"), &PostParams::default(), &report).await?;
    }
    eventually("the changes are drawn", SOON, async || {
        let states: String = browser.run("document.querySelector('table').innerText").await?;
        ensure!(!states.contains("failed"), "{states}");
        Ok(())
    })
    .await?;
    let frames: Vec<f64> = browser.run("window.frames_of_grid").await?;
    let worst = frames.iter().copied().fold(0.0, f64::max);
    eprintln!("{} frames of {NODES} squares, the longest took {worst:.1} ms to draw", frames.len());
    // A person would see a stutter. A frame on a busy machine may take a few times as long as on a quiet one.
    ensure!(!frames.is_empty() && worst < 1000.0, "{frames:?}");
    // What listens is kept, with its ten thousand nodes: none is left once the job isn't shown.
    browser.click("Jobs").await?;
    browser.says("Jobs 1 to 1 of 1").await?;
    let [added, removed]: [u32; 2] = browser.run("[window.added, window.removed]").await?;
    ensure!(added > 0 && added == removed, "{added} listeners were added, {removed} removed");
    let _: ImagePrePullJob = cluster.existing_job("large").get().await?;
    Ok(())
}
