//! Options of a pull on a real containerd: the timeout of an attempt and the metadata of a sandbox; and the image id in
//! its result.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edgecore_prepull::config::CheckLimits;
use edgecore_prepull::images::puller::cri::CriPuller;
use edgecore_prepull::tasks::agent::{TaskEnd, TaskTerms};
use edgecore_prepull::tasks::executor::Executor;
use k8s_cri::v1::{ImageSpec, ImageStatusRequest};
use prepull_api::task::{ImageOutcome, ImageTask, JobUid, PullPolicy, SandboxMetadata, Task, TaskId};
use prepull_api::wire::PullKey;
use prepull_e2e::prelude::*;

use crate::other_runtimes::execute;

fn image(reference: &str, policy: PullPolicy) -> ImageTask {
    ImageTask { policy, ..ImageTask::new(reference) }
}

/// Runs a task with one image.
async fn run(containerd: &Containerd, image: ImageTask) -> Result<TaskEnd> {
    let puller = Arc::new(CriPuller::new(containerd.endpoint().parse()?));
    let executor = Executor::new(puller, NonZeroUsize::MIN, CheckLimits::default());
    let terms = TaskTerms {
        deadline: Instant::now() + Duration::from_secs(120),
        keys: vec![Arc::new(PullKey::anonymous())],
        download: Arc::default(),
        windows: None,
    };
    let task = Task {
        title: "tries".to_owned(),
        ..Task::new(TaskId { job: JobUid("tries".to_owned()), attempt: 1 }, vec![image])
    };
    execute(&executor, task, terms, std::future::pending()).await
}

#[tokio::test]
async fn a_slow_try_is_dropped_and_resumed() -> Result<()> {
    let registry = Registry::start().await?;
    let proxy = Proxy::for_http(registry.addr())?;
    registry.route_through(&proxy)?;
    let containerd = Containerd::start("tries").await?;
    // The pull takes six seconds in total, and each attempt may take three.
    let layers = Image::of_layers("tries", &[12 * MIB])?;
    let reference = registry.seed(&layers, "team/app:v1")?;
    proxy.throttle(Some(2 * MIB));
    let limited = |retries| ImageTask {
        timeout: Some(Duration::from_secs(3)),
        retries,
        ..image(&reference, PullPolicy::Always)
    };

    let end = run(&containerd, limited(0)).await?;
    let result = &end.images[0];
    assert_eq!((result.outcome, result.attempts), (ImageOutcome::Failed, 1));
    assert_eq!(result.reason, "not pulled within timeoutSeconds (3s)");
    ensure!(!containerd.has_image(&reference).await?);

    let end = run(&containerd, limited(9)).await?;
    let result = &end.images[0];
    assert_eq!(result.outcome, ImageOutcome::Pulled, "{result:?}");
    ensure!(containerd.has_image(&reference).await?);
    for blob in layers.blobs() {
        let size = std::fs::metadata(layers.blob_file(blob))?.len();
        let fetched = proxy.bytes_of(blob);
        // The part in transit when an attempt was dropped is fetched again.
        ensure!(fetched <= size + size / 4, "{fetched} bytes of {blob}, which has {size}");
    }
    Ok(())
}

#[tokio::test]
async fn a_result_has_the_image_id() -> Result<()> {
    let registry = Registry::start().await?;
    let containerd = Containerd::start("id").await?;
    let reference = registry.seed(&Image::small("id")?, "team/app:v1")?;
    let sandbox = SandboxMetadata {
        labels: [("app".to_owned(), "a".to_owned())].into(),
        annotations: [("example/note".to_owned(), "b".to_owned())].into(),
    };
    let with_sandbox = ImageTask { sandbox: Some(sandbox), ..image(&reference, PullPolicy::IfNotPresent) };
    let pulled = run(&containerd, with_sandbox.clone()).await?.images.remove(0);
    let present = run(&containerd, with_sandbox).await?.images.remove(0);
    assert_eq!((pulled.outcome, present.outcome), (ImageOutcome::Pulled, ImageOutcome::Present));

    let spec = ImageSpec { image: reference, ..ImageSpec::default() };
    let request = ImageStatusRequest { image: Some(spec), verbose: false };
    let status = containerd.cri().await?.image_status(request).await?.into_inner();
    let id = Some(status.image.context("no image")?.id);
    ensure!(id.as_ref().is_some_and(|id| id.starts_with("sha256:")), "{id:?}");
    assert_eq!((&pulled.id, &present.id), (&id, &id));
    ensure!(pulled.id != pulled.digest, "the id is not the digest: {pulled:?}");
    Ok(())
}
