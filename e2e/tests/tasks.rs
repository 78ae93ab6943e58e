//! The fifteen tasks of docs/tasks.md, as the page has them: each command is run, and its output compared.

use std::path::{Path, PathBuf};

use prepull_api::credentials::ALLOW;
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;
use prepull_e2e::services;

/// Commands of one task, at most.
const MOST: usize = 3;
/// Commands that change nothing, and may be repeated.
const LOOKS: [&str; 5] = [
    "kubectl prepull nodes",
    "kubectl prepull rates",
    "kubectl prepull why",
    "kubectl prepull check",
    "kubectl auth can-i",
];
/// What the page calls the registry.
const REGISTRY: &str = "harbor.example";

struct PageTask {
    number: usize,
    commands: Vec<PageCommand>,
}

struct PageCommand {
    line: String,
    status: i32,
    expected: Vec<String>,
}

fn tasks() -> Result<Vec<PageTask>> {
    let page = std::fs::read_to_string(workspace().join("docs/tasks.md"))?;
    let parts = page.split("\n## ").skip(1);
    parts
        .map(|part| {
            let number = part.split_once(". ").context("a task without a number")?.0.parse()?;
            let blocks = part.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
            let mut commands: Vec<PageCommand> = Vec::new();
            for line in blocks.flat_map(str::lines) {
                if let Some(line) = line.strip_prefix("$ ") {
                    let (line, status) = line.split_once("    # exit ").unwrap_or((line, "0"));
                    let (line, status) = (line.to_owned(), status.parse()?);
                    commands.push(PageCommand { line, status, expected: Vec::new() });
                } else {
                    let command = commands.last_mut().context("output without a command")?;
                    command.expected.push(line.to_owned());
                }
            }
            Ok(PageTask { number, commands })
        })
        .collect()
}

#[test]
fn each_task_takes_three_commands() -> Result<()> {
    let tasks = tasks()?;
    let numbers: Vec<_> = tasks.iter().map(|task| task.number).collect();
    assert_eq!(numbers, (1..=15).collect::<Vec<_>>());
    for PageTask { number, commands } in tasks {
        ensure!(commands.len() <= MOST, "task {number} has {} commands", commands.len());
        ensure!(!commands.is_empty(), "task {number} has no command");
        let has_jq = commands.iter().any(|command| command.line.contains("jq"));
        ensure!(!has_jq, "task {number} needs jq");
    }
    Ok(())
}

/// A cluster with two boxes, a third one that never joined, and a registry behind a link.
struct PageWorld {
    cluster: Cluster,
    cloud: Option<Cloud>,
    _network: Network,
    registry: Registry,
    link: Proxy,
    boxes: Vec<EdgeNode>,
    dir: PathBuf,
    /// What the last command printed.
    said: String,
}

impl PageWorld {
    async fn start() -> Result<Self> {
        let cluster = Cluster::for_changes().await?;
        let (cloud, network) =
            services::with_edges_listed(&cluster, Cloud::start(&cluster).replica()).await?;
        let registry =
            Registry::start().user("alice", &password("alice")).user("bob", &password("bob")).await?;
        let link = Proxy::for_http(registry.addr())?;
        registry.route_through(&link)?;
        cluster.registry_secret("default", "harbor", &[registry.login("alice")?]).await?;
        cluster.annotate_secret("default", "harbor", ALLOW, None).await?;
        let address = registry.login("alice")?.0.to_owned();
        cluster.registry_secret("default", "wrong", &[(&address, "alice", "wrong")]).await?;
        cluster.edge_nodes(&["edge-1", "edge-2"]).await?;
        let boxes = vec![
            EdgeNode::start(&cluster, &cloud, "edge-1").await?,
            EdgeNode::start(&cluster, &cloud, "edge-2").await?,
        ];
        let dir = cluster.place().new_dir("tasks")?;
        Ok(Self {
            cluster,
            cloud: Some(cloud),
            _network: network,
            registry,
            link,
            boxes,
            dir,
            said: String::new(),
        })
    }

    fn image(&self, name: &str, size: u64) -> Result<String> {
        let image = Image::of_layers(name, &[size])?;
        self.registry.seed(&image, &format!("team/{name}:v1"))
    }

    /// What has happened before a command.
    async fn prepare(&mut self, line: &str, images: &PageImages) -> Result<()> {
        let job = |name: &str, image: &str| self.cluster.job(name).on(["edge-1", "edge-2"]).images([image]);
        match line {
            "kubectl prepull failures spring" => {
                let job = job("spring", &images.late).secret("default/harbor").retries(0).concurrency(2);
                job.apply().await?.until("has failed", has_failed).await?;
            }
            "kubectl prepull retry spring" => _ = self.image("late", MIB)?,
            "kubectl prepull status nightly" => {
                self.cluster.annotate_secret("default", "wrong", ALLOW, Some("*")).await?;
                let job = job("nightly", &images.web).secret("default/wrong").policy("Always").concurrency(2);
                job.retries(0).apply().await?.until("has failed", has_failed).await?;
            }
            "kubectl prepull why edge-3 nightly" => self.cluster.edge_nodes(&["edge-3"]).await?,
            "kubectl prepull rates" => {
                self.link.throttle(Some(2 * MIB));
                let job = job("bulk", &images.bulk).secret("default/harbor").concurrency(2);
                let job = job.timeout_seconds(600).apply().await?;
                job.until("it downloads", |status| {
                    let bytes = status.image("edge-1", &images.bulk).and_then(|image| image.bytes);
                    bytes.is_some_and(|bytes| bytes.done > 8 * MIB)
                })
                .await?;
            }
            "kubectl prepull resume bulk" => self.link.throttle(None),
            _ if line.contains("--name web-edge-4") => {
                // The printed line installs a unit; here the agent joins with its token.
                let (_, token) = self.said.split_once("PREPULL_TOKEN=").context("no token was printed")?;
                let token = token.split_whitespace().next().context("no token was printed")?;
                self.cluster.edge_nodes(&["edge-4"]).await?;
                let cloud = self.cloud.as_ref().context("the leader is gone")?;
                let fresh = EdgeNode::start(&self.cluster, cloud, "edge-4").with_token(token).await?;
                self.boxes.push(fresh);
            }
            _ if line.starts_with("kubectl prepull from -f app.yaml") => {
                std::fs::write(self.dir.join("app.yaml"), APP.replace(REGISTRY, images.registry()))?;
            }
            "kubectl prepull check" => {
                if let Some(mut cloud) = self.cloud.take() {
                    cloud.terminate().await?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn has_failed(status: &prepull_api::crd::status::ImagePrePullJobStatus) -> bool {
    status.phase == JobPhase::Failure
}

struct PageImages {
    web: String,
    late: String,
    bulk: String,
}

impl PageImages {
    /// The registry's host and port.
    fn registry(&self) -> &str {
        self.web.split_once('/').map_or("", |(registry, _)| registry)
    }
}

const APP: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      imagePullSecrets: [{name: harbor}]
      containers: [{name: web, image: 'harbor.example/team/web:v1'}]
";

/// The line with one space between its words, as the page may have other columns.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether the output has a line with these parts in this order.
fn has_line(output: &str, expected: &str) -> bool {
    let parts: Vec<_> = expected.split('…').map(words).collect();
    output.lines().any(|line| {
        let line = words(line);
        let mut rest = line.as_str();
        let starts = line.starts_with(&parts[0]);
        starts
            && parts
                .iter()
                .all(|part| rest.split_once(part.as_str()).map(|(_, after)| rest = after).is_some())
    })
}

#[tokio::test]
#[allow(clippy::print_stderr, reason = "the table of the closing note")]
async fn the_tasks_run_as_written() -> Result<()> {
    let mut world = PageWorld::start().await?;
    let images = PageImages {
        web: world.image("web", 2 * MIB)?,
        bulk: world.image("bulk", 96 * MIB)?,
        late: world.image("web", 2 * MIB)?.replace("web", "late"),
    };
    let mut wrong = Vec::new();
    // The leader dies last.
    let (mut tasks, leader): (Vec<_>, Vec<_>) = tasks()?.into_iter().partition(|task| task.number != 11);
    tasks.extend(leader);
    for PageTask { number, commands } in tasks {
        let began = std::time::Instant::now();
        let count = commands.len();
        let mut took = std::time::Duration::ZERO;
        for PageCommand { line, status, expected } in commands {
            world.prepare(&line, &images).await?;
            let real = line.replace(REGISTRY, images.registry());
            let real = real.replace("manifests/", &format!("{}/manifests/", workspace().display()));
            let started = std::time::Instant::now();
            let (ended, output) = loop {
                let (ended, output) = world.cluster.shell_status(&world.dir, &real).await?;
                let output = output.replace(images.registry(), REGISTRY);
                let fits = ended == status && expected.iter().all(|expected| has_line(&output, expected));
                // What has just changed may take a moment until it is seen.
                if fits || !LOOKS.iter().any(|look| line.starts_with(look)) || started.elapsed() > SOON {
                    break (ended, output);
                }
            };
            took += started.elapsed();
            world.said.clone_from(&output);
            if ended != status {
                wrong.push(format!("{number}: `{line}` ended with {ended}, not {status}: {output}"));
            }
            for missing in expected.iter().filter(|expected| !has_line(&output, expected)) {
                wrong.push(format!("{number}: `{line}` does not print {missing:?}: {output}"));
            }
        }
        eprintln!(
            "task {number}: {count} commands, {:.1} s ({:.1} s with its setting)",
            took.as_secs_f32(),
            began.elapsed().as_secs_f32()
        );
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(is_json(&world.dir.join("report.json"))?, "report.json is no JSON");
    Ok(())
}

fn is_json(file: &Path) -> Result<bool> {
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    Ok(report["nodeStatus"].is_array())
}
