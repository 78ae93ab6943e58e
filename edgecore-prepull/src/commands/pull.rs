//! `edgecore-prepull pull`: pulls on this machine with the executor of the agent, without a cloud.

mod bars;
mod display;
mod layers;
#[cfg(test)]
mod tests;
mod wording;

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use prepull_api::credentials::RegistryConfig;
use prepull_api::download::DownloadTerms;
use prepull_api::image::Reference;
use prepull_api::task::{ImageResult, ImageTask, JobUid, PullPolicy, Task, TaskId};
use prepull_api::wire::PullKey;
use prepull_program::signals::wait_for_termination;
use prepull_registry::Proxies;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, interval, sleep, timeout_at};

use crate::commands::args::{PullArgs, PullOptions};
use crate::config::{Amount, CheckLimits, ParallelPulls, Rate};
use crate::images::fetch::{FetchSettings, Fetching, ImageDownload, RoomRules};
use crate::images::providers::{ProviderSettings, Providers, Stderr};
use crate::images::puller::cri::CriPuller;
use crate::images::puller::{ErrorClass, Present, PullError, Puller};
use crate::images::runtime::RuntimeEndpoint;
use crate::node_clock::node_clock;
use crate::tasks::agent::{Execution, TaskEnd, TaskTerms};
use crate::tasks::executor::{Executor, TaskControl, TaskUpdate};
use display::Display;

/// Capacity for updates that have not been displayed yet.
const UPDATES: usize = 16;
/// Time for which we wait for a runtime that doesn't answer before the first pull. A restart of containerd takes less.
/// The agent would wait longer, but a person may have mistyped the socket.
const RUNTIME_PATIENCE: Duration = Duration::from_secs(10);
/// Interval of asking a runtime that doesn't answer.
const RUNTIME_RETRY: Duration = Duration::from_millis(500);
/// Interval of redrawing the layers, short enough to look steady.
const LOOK: Duration = Duration::from_millis(100);
/// Exit status of a program that SIGINT ended, by the shell's convention.
const INTERRUPTED: u8 = 130;
/// Exit status of a program that SIGTERM ended, by the shell's convention.
const TERMINATED: u8 = 143;

/// Pulls the images. The exit status is 0 if all of them are on this machine now.
pub(crate) async fn run(args: PullArgs) -> anyhow::Result<ExitCode> {
    Ok(pull(args.images, args.how, DownloadTerms::default(), Proxies::from_env()).await?.code)
}

/// A pull by hand that has ended.
pub(super) struct Attempted {
    pub(super) code: ExitCode,
    /// One for each image, in the given order.
    pub(super) images: Vec<ImageResult>,
    /// What has pulled them.
    pub(super) puller: Arc<Fetching<CriPuller>>,
}

/// Pulls images under these terms, through these proxies where the agent downloads.
pub(super) async fn pull(
    images: Vec<String>,
    how: PullOptions,
    terms: DownloadTerms,
    proxies: Proxies,
) -> anyhow::Result<Attempted> {
    let fetch = fetch_settings(&how);
    let PullOptions {
        runtime_endpoint: endpoint,
        docker_config,
        image_credential_provider_config,
        image_credential_provider_bin_dir,
        image_credential_provider_timeout,
        retries,
        parallel_pulls: ParallelPulls(parallel_pulls),
        timeout,
        download_window,
        ..
    } = how;
    let clock = node_clock(download_window)?;
    let providers = ProviderSettings {
        config: image_credential_provider_config,
        bin_dir: image_credential_provider_bin_dir,
        timeout: image_credential_provider_timeout,
    };
    let providers = Providers::load(&providers, Stderr::Shown, None)?;
    let config = docker_config.as_deref().map(read_docker_config).transpose()?;
    let mut tasks = Vec::new();
    let mut keys = Vec::new();
    for image in images {
        let reference = Reference::parse(&image)?.normalized();
        keys.push(Arc::new(select_key(config.as_ref().map(|config| config.lookup(&reference)))));
        tasks.push(ImageTask {
            image,
            reference: reference.to_string(),
            // A person who runs `pull` wants the image that the registry has now.
            policy: PullPolicy::Always,
            retries,
            key: 0,
            timeout: None,
            sandbox: None,
        });
    }
    let (id, title) = (TaskId { job: JobUid("pull".to_owned()), attempt: 1 }, "pull".to_owned());
    let execution = Execution {
        done: vec![None; tasks.len()],
        check: None,
        removal: None,
        terms: TaskTerms {
            download: Arc::new(terms),
            ..TaskTerms::by_hand(keys, timeout, &clock, Instant::now().into_std())
        },
        task: Task { upgrade: None, removal: None, id, title, checks: Vec::new(), images: tasks },
    };

    let endpoint = endpoint.unwrap_or_else(RuntimeEndpoint::in_the_usual_places);
    endpoint.find_socket().await?;
    let puller = CriPuller::by_hand(endpoint);
    let puller = Arc::new(Fetching::over_cri(puller, fetch).through(proxies));
    wait_for_runtime(&*puller).await?;
    let present = look_up_all(&*puller, &execution.task.images).await;
    let display = Display::new(&execution.task.images, present, std::io::stderr().is_terminal());
    let executor = Executor::new(Arc::clone(&puller), parallel_pulls, CheckLimits::default())
        .with_credential_providers(Arc::new(providers));
    let terms = execution.terms.clone();
    let (control, receiver) = watch::channel(TaskControl { terms, may_remove: false, stop: None });
    let (sender, updates) = mpsc::channel(UPDATES);
    let signalled = OnceLock::new();
    let interrupt = async {
        if let Ok(signal) = wait_for_termination().await {
            let _ = signalled.set(signal);
            control.send_modify(|control| control.stop = Some(signal.to_owned()));
        }
        // The executor stops by itself; the end of `pulling` decides.
        std::future::pending::<()>().await;
    };
    let pulling = async {
        tokio::join!(
            executor.run(execution, receiver, sender),
            show_updates(&display, updates, || puller.downloads())
        )
        .0
    };
    let end = tokio::select! {
        end = pulling => end,
        () = interrupt => unreachable!("it waits forever"),
    };
    let TaskEnd { outcome: _, reason: _, check: _, images, removal: _ } = end;
    display.show_missing_results(&images);
    display.show_summary(&images);
    let all = images.iter().all(|image| image.outcome.is_on_node());
    let code = match signalled.get() {
        _ if all => ExitCode::SUCCESS,
        Some(&"SIGINT") => ExitCode::from(INTERRUPTED),
        Some(_) => ExitCode::from(TERMINATED),
        None => ExitCode::FAILURE,
    };
    Ok(Attempted { code, images, puller })
}

fn read_docker_config(path: &Path) -> anyhow::Result<RegistryConfig> {
    let text =
        std::fs::read(path).with_context(|| format!("cannot read --docker-config {}", path.display()))?;
    RegistryConfig::from_docker_config(&text)
        .with_context(|| format!("--docker-config {} cannot be used", path.display()))
}

fn fetch_settings(args: &PullOptions) -> FetchSettings {
    FetchSettings {
        mode: args.fetch,
        max_rate: args.max_download_rate.map(|Rate(rate)| rate),
        hosts_dir: args.registry_config_path.clone(),
        room: RoomRules {
            gc_high_threshold: args.image_gc_high_threshold.0,
            disk_min_free: args.disk_min_free.unwrap_or(Amount::Bytes(0)),
            make_room: false,
        },
        deltas: !args.whole,
        whole: args.whole,
    }
}

/// Waits until the runtime answers, for [`RUNTIME_PATIENCE`].
async fn wait_for_runtime(puller: &impl Puller) -> Result<(), PullError> {
    let deadline = Instant::now() + RUNTIME_PATIENCE;
    let mut last = None;
    let answer = async {
        loop {
            match puller.read_version().await {
                Err(error) if matches!(error.class, ErrorClass::RuntimeDown | ErrorClass::RuntimeLost) => {
                    last = Some(error);
                }
                // The pull reports any other problem.
                _ => return,
            }
            sleep(RUNTIME_RETRY).await;
        }
    };
    timeout_at(deadline, answer).await.map_err(|_| {
        let why =
            last.map_or_else(|| "it accepts connections and is silent".to_owned(), |error| error.message);
        let message =
            format!("the container runtime did not answer for {} s: {why}", RUNTIME_PATIENCE.as_secs());
        PullError::new(ErrorClass::RuntimeDown, message)
    })
}

/// The images that the runtime has before we pull, to report those as already there. Without an answer, none.
async fn look_up_all(puller: &impl Puller, images: &[ImageTask]) -> Vec<Option<Present>> {
    let mut present = Vec::new();
    for image in images {
        present.push(puller.look_up(&image.reference).await.ok().flatten());
    }
    present
}

/// The credentials for an image. Like docker, pulls an image without an entry anonymously. A malformed entry fails the
/// image.
fn select_key(lookup: Option<prepull_api::credentials::Lookup>) -> PullKey {
    match lookup {
        Some(lookup) if !lookup.credentials.is_empty() => {
            PullKey::Credentials { credentials: lookup.credentials }
        }
        Some(lookup) => match lookup.broken.first() {
            Some(problem) => PullKey::Unavailable { reason: format!("--docker-config: {problem}") },
            None => PullKey::anonymous(),
        },
        None => PullKey::anonymous(),
    }
}

/// Displays updates, and what is being downloaded, until the executor has ended.
async fn show_updates(
    display: &Display,
    mut updates: mpsc::Receiver<TaskUpdate>,
    downloads: impl Fn() -> Vec<ImageDownload>,
) {
    let mut look = interval(LOOK);
    loop {
        let update = tokio::select! {
            update = updates.recv() => update,
            _ = look.tick(), if display.has_bars() => {
                display.show_downloads(&downloads());
                continue;
            }
        };
        match update {
            None => return,
            Some(TaskUpdate::Checked(_) | TaskUpdate::Removal(_)) => {}
            Some(TaskUpdate::Progress { images, waits }) => {
                display.show_waits(&waits);
                for image in &images {
                    display.show_progress(image);
                }
            }
            Some(TaskUpdate::ImageEnded { index, result }) => display.show_result(index, &result),
        }
    }
}
