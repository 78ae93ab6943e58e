//! Pulls by the runtime alone, and through the agent's executor.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edgecore_prepull::config::CheckLimits;
use edgecore_prepull::images::fetch::{FetchMode, FetchSettings, Fetching};
use edgecore_prepull::images::puller::Puller;
use edgecore_prepull::images::puller::cri::CriPuller;
use edgecore_prepull::tasks::agent::{Execution, TaskTerms};
use edgecore_prepull::tasks::executor::{Executor, TaskControl};
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::{AuthConfig, ImageSpec, PullImageRequest};
use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_api::task::{CheckItem, ImageTask, JobUid, Task, TaskId, TaskOutcome};
use prepull_api::wire::PullKey;
use prepull_e2e::prelude::*;
use tokio::sync::{mpsc, watch};

pub(super) type Cri = ImageServiceClient<tonic::transport::Channel>;

/// The agent's executor, with downloads by the agent itself.
pub(super) fn fetching_executor(
    containerd: &Containerd,
    parallel_pulls: NonZeroUsize,
) -> Result<Executor<Fetching<CriPuller>>> {
    let settings = FetchSettings { mode: FetchMode::Agent, ..FetchSettings::without_room_check() };
    let puller = Fetching::over_cri(CriPuller::new(containerd.endpoint().parse()?), settings);
    Ok(Executor::new(Arc::new(puller), parallel_pulls, CheckLimits::default()))
}

/// A user and a password, for all images.
pub(super) fn key(user: &str, secret: &str) -> Arc<PullKey> {
    let credential = RegistryCredential {
        username: Sensitive::new(user),
        password: Sensitive::new(secret),
        ..RegistryCredential::default()
    };
    Arc::new(PullKey::Credentials { credentials: vec![credential] })
}

pub(super) async fn pull_directly(
    cri: &mut Cri,
    reference: &str,
    login: Option<(&str, &str)>,
) -> Result<Duration> {
    let auth = login.map(|(user, secret)| AuthConfig {
        username: user.to_owned(),
        password: secret.to_owned(),
        ..AuthConfig::default()
    });
    let image = Some(ImageSpec { image: reference.to_owned(), ..ImageSpec::default() });
    let begun = Instant::now();
    cri.pull_image(PullImageRequest { image, auth, sandbox_config: None }).await?;
    Ok(begun.elapsed())
}

pub(super) async fn through_agent(
    executor: &Executor<impl Puller>,
    references: &[String],
    key: &Arc<PullKey>,
) -> Result<Duration> {
    // A key serves one image.
    let image = |(reference, key): (&String, u32)| ImageTask { key, ..ImageTask::new(reference) };
    let task = Task {
        title: "bench".to_owned(),
        checks: vec![CheckItem::Disk],
        ..Task::new(
            TaskId { job: JobUid("bench".to_owned()), attempt: 1 },
            references.iter().zip(0..).map(image).collect(),
        )
    };
    let terms = TaskTerms {
        deadline: Instant::now() + Duration::from_secs(300),
        keys: vec![key.clone(); references.len()],
        download: Arc::default(),
        windows: None,
    };
    let work = Execution {
        task,
        check: None,
        removal: None,
        done: vec![None; references.len()],
        terms: terms.clone(),
    };
    let (_control, receiver) = watch::channel(TaskControl { terms, may_remove: false, stop: None });
    let (sender, mut reports) = mpsc::channel(64);
    let begun = Instant::now();
    let listen = async { while reports.recv().await.is_some() {} };
    let (end, ()) = tokio::join!(executor.run(work, receiver, sender), listen);
    let took = begun.elapsed();
    ensure!(end.outcome == TaskOutcome::Succeeded, "{}", end.reason);
    Ok(took)
}
