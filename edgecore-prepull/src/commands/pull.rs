//! `edgecore-prepull pull`: pulls on this machine with the executor of the agent, without a cloud.

mod display;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use prepull_api::credentials::RegistryConfig;
use prepull_api::image::Reference;
use prepull_api::task::{ImageTask, JobUid, PullPolicy, Task, TaskId};
use prepull_api::wire::Key;
use prepull_program::signals::wait_for_termination;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::commands::args::PullArgs;
use crate::config::Limits;
use crate::images::providers::{ProviderSettings, Providers, Stderr};
use crate::images::puller::cri::CriPuller;
use crate::images::runtime::RuntimeEndpoint;
use crate::tasks::agent::{Execution, TaskEnd, TaskTerms};
use crate::tasks::executor::{Executor, TaskControl, TaskUpdate};
use display::Display;

/// Capacity for updates that have not been displayed yet.
const UPDATES: usize = 16;

/// Pulls the images. The exit status says whether all of them are on this machine now.
pub(crate) async fn run(args: PullArgs) -> anyhow::Result<ExitCode> {
    let PullArgs {
        images,
        runtime_endpoint: endpoint,
        docker_config,
        image_credential_provider_config,
        image_credential_provider_bin_dir,
        image_credential_provider_timeout,
        retries,
        parallel_pulls,
        timeout,
    } = args;
    let providers = ProviderSettings {
        config: image_credential_provider_config,
        bin_dir: image_credential_provider_bin_dir,
        timeout: image_credential_provider_timeout,
    };
    let providers = Providers::load(&providers, Stderr::Shown, None)?;
    let config = match &docker_config {
        None => None,
        Some(path) => {
            let text = std::fs::read(path)
                .with_context(|| format!("cannot read --docker-config {}", path.display()))?;
            let config = RegistryConfig::from_docker_config(&text)
                .with_context(|| format!("--docker-config {} cannot be used", path.display()))?;
            Some(config)
        }
    };
    let mut tasks = Vec::new();
    let mut keys = Vec::new();
    for image in images {
        let reference = Reference::parse(&image)?.normalized();
        keys.push(Arc::new(select_key(config.as_ref().map(|config| config.lookup(&reference)))));
        tasks.push(ImageTask {
            image,
            reference: reference.to_string(),
            // Whoever runs `pull` wants the image that the registry has now.
            policy: PullPolicy::Always,
            retries,
            key: 0,
            timeout: None,
            sandbox: None,
        });
    }
    let display = Display::new(&tasks, std::io::stderr().is_terminal());
    let execution = Execution {
        done: vec![None; tasks.len()],
        check: None,
        terms: TaskTerms { deadline: (Instant::now() + timeout).into_std(), keys },
        task: Task {
            id: TaskId { job: JobUid("pull".to_owned()), attempt: 1 },
            title: "pull".to_owned(),
            checks: Vec::new(),
            images: tasks,
        },
    };

    let endpoint = endpoint.unwrap_or_else(RuntimeEndpoint::in_the_usual_places);
    endpoint.find().await?;
    let puller = Arc::new(CriPuller::new(endpoint));
    let executor = Executor::new(puller, parallel_pulls, Limits::default())
        .with_credential_providers(Arc::new(providers));
    let (control, receiver) = watch::channel(TaskControl { terms: execution.terms.clone(), stop: None });
    let (sender, updates) = mpsc::channel(UPDATES);
    let interrupt = async {
        if let Ok(signal) = wait_for_termination().await {
            control.send_modify(|control| control.stop = Some(signal.to_owned()));
        }
        // The executor stops by itself; the end of `pulling` decides.
        std::future::pending::<()>().await;
    };
    let pulling =
        async { tokio::join!(executor.run(execution, receiver, sender), show(&display, updates)).0 };
    let end = tokio::select! {
        end = pulling => end,
        () = interrupt => unreachable!("it waits forever"),
    };
    let TaskEnd { outcome: _, reason: _, check: _, images } = end;
    display.show_missing_results(&images);
    let all = images.iter().all(|image| image.outcome.is_on_node());
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The credentials for an image. Like docker, pulls an image without an entry anonymously; an entry that is malformed
/// fails the image.
fn select_key(lookup: Option<prepull_api::credentials::Lookup>) -> Key {
    match lookup {
        Some(lookup) if !lookup.credentials.is_empty() => {
            Key::Credentials { credentials: lookup.credentials }
        }
        Some(lookup) => match lookup.broken.first() {
            Some(problem) => Key::Unavailable { reason: format!("--docker-config: {problem}") },
            None => Key::anonymous(),
        },
        None => Key::anonymous(),
    }
}

/// Displays updates until the executor has ended.
async fn show(display: &Display, mut updates: mpsc::Receiver<TaskUpdate>) {
    while let Some(update) = updates.recv().await {
        match update {
            TaskUpdate::Checked(_) => {}
            TaskUpdate::Progress(images) => images.iter().for_each(|image| display.show_progress(image)),
            TaskUpdate::ImageEnded { index, result } => display.show_result(index, &result),
        }
    }
}
