//! `make bench`: the overhead of the agent in a pull, the memory of both programs, and the duration of a small job.
//!
//! Times are compared as ratios within one run, in alternating pairs, since the machines are noisy. A bar that is missed
//! is reported and does not fail the program; only a failed measurement does.

#![allow(clippy::print_stdout)]

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edgecore_prepull::config::Limits;
use edgecore_prepull::images::fetch::{FetchMode, FetchSettings, Fetching};
use edgecore_prepull::images::puller::Puller;
use edgecore_prepull::images::puller::cri::CriPuller;
use edgecore_prepull::tasks::agent::{Execution, TaskTerms};
use edgecore_prepull::tasks::executor::{Executor, TaskControl};
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::{AuthConfig, ImageSpec, PullImageRequest};
use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_api::task::{CheckItem, ImageTask, JobUid, PullPolicy, Task, TaskId, TaskOutcome};
use prepull_api::wire::Key;
use tokio::sync::{mpsc, watch};

use prepull_e2e::prelude::*;
use prepull_e2e::usage::Usage;

type Cri = ImageServiceClient<tonic::transport::Channel>;

/// Number of rounds of pulls. The median of their ratios ignores rounds that the machine disturbed.
const ROUNDS: usize = 10;
/// The ways to pull an image in each round.
const WAYS: usize = 4;
const DIRECTLY: usize = 0;
const AND_FLUSHED: usize = 1;
const AGENT: usize = 2;
const FETCHED: usize = 3;
/// Sizes of the layers of each image, which are those of a small application.
const LAYERS: [u64; 3] = [16 * MIB; 3];

#[tokio::main]
async fn main() -> Result<()> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    overhead().await?;
    real_nodes().await
}

/// Compares pulls through the agent's executor with direct CRI calls. `PullImage` leaves what it has pulled in memory,
/// and the agent does not say that an image is there before it is on the disk: so the bar is for the same call and the
/// same flush, and what the flush costs is told apart.
async fn overhead() -> Result<()> {
    println!(
        "\nOne image of {} MiB, {ROUNDS} times: PullImage, PullImage and a flush, and through the agent",
        LAYERS.iter().sum::<u64>() / MIB
    );
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let containerd = Containerd::start("bench").await?;
    let puller = Arc::new(CriPuller::new(containerd.endpoint().parse()?));
    let executor = Executor::new(puller.clone(), NonZeroUsize::MIN, Limits::default());
    let settings = FetchSettings { mode: FetchMode::Agent, ..FetchSettings::whatever_the_disk() };
    let fetching = Fetching::over_cri(CriPuller::new(containerd.endpoint().parse()?), settings);
    let fetching = Executor::new(Arc::new(fetching), NonZeroUsize::MIN, Limits::default());
    let (_, user, secret) = registry.login("alice")?;
    let key = Arc::new(Key::Credentials {
        credentials: vec![RegistryCredential {
            username: Sensitive::new(user),
            password: Sensitive::new(secret),
            ..RegistryCredential::default()
        }],
    });
    // Every pull needs new content, which is generated before the first pull. Both sides connect before the measurement.
    let mut references = Vec::new();
    for number in 0..WAYS * ROUNDS + 3 {
        let image = Image::of_layers(&format!("bench-{number}"), &LAYERS)?;
        references.push(registry.seed(&image, &format!("bench/image:{number}"))?);
    }
    let mut references = references.into_iter();
    let mut cri = containerd.cri().await?;
    pull_directly(&mut cri, &references.next().context("no image")?, user, secret).await?;
    pull_through_agent(&executor, &references.next().context("no image")?, &key).await?;
    pull_through_agent(&fetching, &references.next().context("no image")?, &key).await?;
    puller.flush().await;
    let mut times = [(); WAYS].map(|()| Vec::new());
    for round in 0..ROUNDS {
        // The first pull of a round has the quieter disk, so that each way is the first one in turn. No way pays for
        // what another one has left in memory.
        for way in (0..WAYS).map(|way| (round + way) % WAYS) {
            let reference = references.next().context("no image")?;
            let took = match way {
                DIRECTLY => pull_directly(&mut cri, &reference, user, secret).await?,
                AND_FLUSHED => {
                    let begun = Instant::now();
                    pull_directly(&mut cri, &reference, user, secret).await?;
                    puller.flush().await;
                    begun.elapsed()
                }
                AGENT => pull_through_agent(&executor, &reference, &key).await?,
                _ => pull_through_agent(&fetching, &reference, &key).await?,
            };
            times[way].push(took.as_secs_f64());
            puller.flush().await;
        }
    }
    let ratios = |of: usize, to: usize| {
        let mut ratios: Vec<_> = times[of].iter().zip(&times[to]).map(|(of, to)| of / to).collect();
        (median(&mut ratios), ratios[0], ratios[ROUNDS - 1])
    };
    let (ratio, least, most) = ratios(AGENT, AND_FLUSHED);
    println!("  agent / PullImage and a flush   median {ratio:.3}, from {least:.3} to {most:.3}");
    let (durable, least, most) = ratios(AND_FLUSHED, DIRECTLY);
    println!("  PullImage and a flush / without median {durable:.3}, from {least:.3} to {most:.3}");
    let (fetched, least, most) = ratios(FETCHED, AND_FLUSHED);
    println!("  agent's fetch / PullImage and a flush median {fetched:.3}, from {least:.3} to {most:.3}");
    let names = ["PullImage", "PullImage and a flush", "through the agent", "fetched by the agent"];
    for (name, times) in names.iter().zip(&mut times) {
        println!("  {name:<31} median {:.3} s", median(times));
    }
    bar("through the agent against PullImage and a flush", ratio, 1.05, "");
    bar("fetched by the agent against PullImage and a flush", fetched, 1.05, "");
    Ok(())
}

async fn pull_directly(cri: &mut Cri, reference: &str, user: &str, secret: &str) -> Result<Duration> {
    let auth = AuthConfig { username: user.to_owned(), password: secret.to_owned(), ..AuthConfig::default() };
    let image = Some(ImageSpec { image: reference.to_owned(), ..ImageSpec::default() });
    let begun = Instant::now();
    cri.pull_image(PullImageRequest { image, auth: Some(auth), sandbox_config: None }).await?;
    Ok(begun.elapsed())
}

async fn pull_through_agent(
    executor: &Executor<impl Puller>,
    reference: &str,
    key: &Arc<Key>,
) -> Result<Duration> {
    let image = ImageTask {
        image: reference.to_owned(),
        reference: reference.to_owned(),
        policy: PullPolicy::IfNotPresent,
        retries: 0,
        key: 0,
        timeout: None,
        sandbox: None,
    };
    let task = Task {
        id: TaskId { job: JobUid("bench".to_owned()), attempt: 1 },
        title: "bench".to_owned(),
        checks: vec![CheckItem::Disk],
        images: vec![image],
    };
    let terms = TaskTerms {
        deadline: Instant::now() + Duration::from_secs(300),
        keys: vec![key.clone()],
        download: Arc::default(),
        windows: None,
    };
    let work = Execution { task, check: None, done: vec![None], terms: terms.clone() };
    let (_control, receiver) = watch::channel(TaskControl { terms, stop: None });
    let (sender, mut reports) = mpsc::channel(64);
    let begun = Instant::now();
    let listen = async { while reports.recv().await.is_some() {} };
    let (end, ()) = tokio::join!(executor.run(work, receiver, sender), listen);
    let took = begun.elapsed();
    ensure!(end.outcome == TaskOutcome::Succeeded, "{}", end.reason);
    Ok(took)
}

/// Measures the memory of both programs with real nodes, idle and busy, and the duration of a job.
async fn real_nodes() -> Result<()> {
    println!("\nThree real nodes, one job of four images");
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let cluster = Cluster::own().await?;
    cluster.registry_secret("default", "alice", &[registry.login("alice")?]).await?;
    let names = ["edge-1", "edge-2", "edge-3"];
    cluster.edge_nodes(&names).await?;
    let cloud = Cloud::start(&cluster).await?;
    let mut nodes = Vec::new();
    for name in names {
        nodes.push(EdgeNode::start(&cluster, &cloud, name).await?);
    }
    for node in &nodes {
        node.is_connected().await?;
    }
    let idle = nodes.iter().map(|node| resident(node.agent()?.pid())).collect::<Result<Vec<_>>>()?;
    bar("agent, idle", largest(&idle), 12.0, " MiB");
    println!("  cloudcore, idle: {:.1} MiB", resident(cloud.process()?.pid())?);

    let images = (0..4)
        .map(|number| {
            registry
                .seed(&Image::of_layers(&format!("bench-{number}"), &LAYERS)?, &format!("job/image:{number}"))
        })
        .collect::<Result<Vec<_>>>()?;
    let begun = Instant::now();
    let job =
        cluster.job("bench").images(&images).on(names).secret("default/alice").concurrency(3).apply().await?;
    let done = job.completes();
    tokio::pin!(done);
    let mut busy = idle;
    let status = loop {
        tokio::select! {
            status = &mut done => break status?,
            () = tokio::time::sleep(Duration::from_millis(20)) => {
                for node in &nodes {
                    busy.push(resident(node.agent()?.pid())?);
                }
            }
        }
    };
    ensure!(status.summary.successful == 3, "{:?}", status.summary);
    bar("agent, pulling", largest(&busy), 20.0, " MiB");
    println!("  cloudcore, after the job: {:.1} MiB", resident(cloud.process()?.pid())?);
    println!(
        "  from kubectl apply to Completed: {:.2} s (3 nodes x 4 images x 48 MiB, one machine)",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Resident memory of a process in MiB.
fn resident(pid: u32) -> Result<f64> {
    // Far below the integers that a float represents exactly.
    #[allow(clippy::cast_precision_loss)]
    let bytes = Usage::of(pid)?.rss as f64;
    Ok(bytes / 1024.0 / 1024.0)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], values[middle])
    } else {
        values[middle]
    }
}

/// Prints a value with its bar, and whether the bar is met.
fn bar(what: &str, value: f64, limit: f64, unit: &str) {
    let verdict = if value <= limit { "ok" } else { "MISSED" };
    println!("  {what}: {value:.2}{unit} (bar {limit}{unit}) {verdict}");
}
