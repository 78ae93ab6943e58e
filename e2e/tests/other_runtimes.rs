//! Runtimes other than containerd: the answers of CRI-O and cri-dockerd, from a stand-in that imitates them. They
//! report no bytes, have no leases, and describe errors differently.

mod answers;
mod stand_in;

use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edgecore_prepull::config::CheckLimits;
use edgecore_prepull::images::fetch::{FetchSettings, Fetching};
use edgecore_prepull::images::puller::Puller;
use edgecore_prepull::images::puller::cri::CriPuller;
use edgecore_prepull::tasks::agent::{Execution, TaskEnd, TaskTerms};
use edgecore_prepull::tasks::executor::{Executor, TaskControl};
use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_api::failure::FailureCode;
use prepull_api::task::{
    ImageOutcome, ImageResult, ImageTask, JobUid, KeepCode, Removal, RemovalOutcome, Task, TaskId,
};
use prepull_api::wire::PullKey;
use prepull_e2e::cleanup::Child;
use prepull_e2e::parts;
use prepull_e2e::prelude::*;
use tokio::sync::{mpsc, watch};
use tonic::Code;

use answers::{FAILURES, Failure, SUCCESSES, Then};
use stand_in::{Act, Runtime, StandIn, digest, id};

const BOTH: [Runtime; 2] = [Runtime::CriO, Runtime::Docker];
const REFERENCE: &str = "r.example/team/app:v1";

fn image(reference: &str) -> ImageTask {
    ImageTask { retries: 1, ..ImageTask::new(reference) }
}

/// A key with these passwords, in this order.
fn key(passwords: &[&str]) -> PullKey {
    let credential = |password: &&str| RegistryCredential {
        username: Sensitive::new("user"),
        password: Sensitive::new(*password),
        ..RegistryCredential::default()
    };
    PullKey::Credentials { credentials: passwords.iter().map(credential).collect() }
}

/// Runs a task with these images, all concurrently, until it ends or `stop` does.
async fn run_until(
    runtime: &StandIn,
    images: Vec<ImageTask>,
    key: PullKey,
    stop: impl Future<Output = Result<()>>,
) -> Result<TaskEnd> {
    let parallel = NonZeroUsize::new(images.len()).context("no image")?;
    let executor = Executor::new(Arc::new(puller(runtime)?), parallel, CheckLimits::default());
    let key = Arc::new(key);
    let terms = TaskTerms {
        deadline: Instant::now() + Duration::from_secs(120),
        keys: images.iter().map(|_| Arc::clone(&key)).collect(),
        download: Arc::default(),
        windows: None,
    };
    let task = Task {
        title: "other-runtimes".to_owned(),
        ..Task::new(TaskId { job: JobUid("other-runtimes".to_owned()), attempt: 1 }, images)
    };
    execute(&executor, task, terms, stop).await
}

/// Runs a task until it ends or `stop` does.
pub(crate) async fn execute<P: Puller>(
    executor: &Executor<P>,
    task: Task,
    terms: TaskTerms,
    stop: impl Future<Output = Result<()>>,
) -> Result<TaskEnd> {
    let (control, receiver) =
        watch::channel(TaskControl { may_remove: true, terms: terms.clone(), stop: None });
    let (sender, mut reports) = mpsc::channel(64);
    let done = vec![None; task.images.len()];
    let work = Execution { removal: None, task, check: None, done, terms };
    let listen = async { while reports.recv().await.is_some() {} };
    let stop = async {
        stop.await?;
        control.send_modify(|control| control.stop = Some("the job was deleted".to_owned()));
        std::future::pending::<Result<()>>().await
    };
    tokio::select! {
        error = stop => Err(error.err().context("it goes on for ever")?),
        (end, ()) = async { tokio::join!(executor.run(work, receiver, sender), listen) } => Ok(end),
    }
}

fn puller(runtime: &StandIn) -> Result<CriPuller> {
    Ok(CriPuller::new(format!("unix://{}", runtime.socket().display()).parse()?))
}

/// Runs a task with these images to its end.
async fn run(runtime: &StandIn, images: Vec<ImageTask>, key: PullKey) -> Result<TaskEnd> {
    run_until(runtime, images, key, std::future::pending()).await
}

impl Failure {
    fn reference(&self) -> String {
        format!("r.example/{}:v1", self.case)
    }

    /// The answer to a pull of [`Self::reference`].
    fn text(&self) -> String {
        let reference = self.reference();
        let repository = reference.trim_end_matches(":v1");
        self.text.replace("IMAGE", &reference).replace("REPOSITORY", repository)
    }
}

fn failures_of(runtime: Runtime) -> impl Iterator<Item = &'static Failure> {
    FAILURES.iter().filter(move |failure| failure.of == runtime)
}

/// Pulls an image for each of the failures. `acts` scripts the pulls that meet it.
async fn pull_each(
    runtime: &StandIn,
    failures: &[&'static Failure],
    key: PullKey,
    acts: impl Fn(&Failure) -> Vec<Act>,
) -> Result<Vec<(&'static Failure, ImageResult)>> {
    for failure in failures {
        runtime.script(&failure.reference(), acts(failure));
    }
    let images = failures.iter().map(|failure| image(&failure.reference())).collect();
    let end = run(runtime, images, key).await?;
    Ok(failures.iter().copied().zip(end.images).collect())
}

#[tokio::test]
async fn every_failure_is_retried_by_its_cause() -> Result<()> {
    for kind in BOTH {
        let runtime = StandIn::start(kind)?;
        let failures: Vec<_> = failures_of(kind).collect();
        // Each image fails once. Only a retry gets it.
        let once = |failure: &Failure| vec![Act::Fail(failure.code, failure.text())];
        for (failure, result) in pull_each(&runtime, &failures, key(&["only"]), once).await? {
            let Failure { case, then, is, .. } = failure;
            let (outcome, code, attempts) = match then {
                Then::Again => (ImageOutcome::Pulled, None, 2),
                Then::NextCredential | Then::Fails => (ImageOutcome::Failed, Some(*is), 1),
            };
            let found = (result.outcome, result.code, result.attempts);
            assert_eq!(found, (outcome, code, attempts), "{kind:?}, {case}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_lasting_failure_names_its_cause() -> Result<()> {
    for kind in BOTH {
        let runtime = StandIn::start(kind)?;
        let failures: Vec<_> = failures_of(kind).collect();
        let twice = |failure: &Failure| vec![Act::Fail(failure.code, failure.text()); 2];
        for (failure, result) in pull_each(&runtime, &failures, PullKey::anonymous(), twice).await? {
            let found = (result.outcome, result.code);
            assert_eq!(found, (ImageOutcome::Failed, Some(failure.is)), "{kind:?}, {}", failure.case);
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_refusal_leads_to_the_next_credential() -> Result<()> {
    for kind in BOTH {
        let runtime = StandIn::start(kind)?;
        let refused: Vec<_> =
            failures_of(kind).filter(|failure| failure.then == Then::NextCredential).collect();
        let passwords = key(&["wrong", "right", "never needed"]);
        let password = |failure: &Failure| vec![Act::Password("right", failure.code, failure.text())];
        let results = pull_each(&runtime, &refused, passwords, password).await?;
        let pulls = runtime.pulls();
        for (failure, result) in results {
            let case = failure.case;
            assert_eq!((result.outcome, result.attempts), (ImageOutcome::Pulled, 1), "{kind:?}, {case}");
            let of_image = pulls.iter().filter(|pull| pull.reference == failure.reference());
            let passwords: Vec<_> = of_image.map(|pull| pull.password.as_str()).collect();
            assert_eq!(passwords, ["wrong", "right"], "{kind:?}, {case}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn an_image_has_its_certain_facts_only() -> Result<()> {
    for kind in BOTH {
        let runtime = StandIn::start(kind)?;
        let of_kind = || SUCCESSES.iter().filter(|success| success.of == kind);
        for success in of_kind() {
            runtime.lists(success.reference, success.lists);
        }
        let images = || of_kind().map(|success| image(success.reference)).collect::<Vec<_>>();
        for outcome in [ImageOutcome::Pulled, ImageOutcome::Present] {
            let end = run(&runtime, images(), PullKey::anonymous()).await?;
            for (success, result) in of_kind().zip(&end.images) {
                let reference = success.reference;
                assert_eq!((result.outcome, result.bytes), (outcome, None), "{kind:?}, {reference}");
                assert_eq!(result.digest, success.digest.map(digest), "{kind:?}, {reference}");
                assert_eq!(result.id, Some(id()), "{kind:?}, {reference}");
            }
        }
        // A reference by digest gets that digest, whatever the runtime lists.
        let by_digest = format!("r.example/multi@{}", digest('c'));
        let end = run(&runtime, vec![image(&by_digest)], PullKey::anonymous()).await?;
        assert_eq!(end.images[0].digest, Some(digest('c')));
        ensure!(runtime.pulls().iter().all(|pull| !pull.has_lease), "only containerd has leases");
    }
    Ok(())
}

#[tokio::test]
async fn an_absent_dockerd_costs_no_try() -> Result<()> {
    let runtime = StandIn::start(Runtime::Docker)?;
    let away =
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?";
    let away = Act::Fail(Code::Unknown, away.to_owned());
    runtime.script(REFERENCE, [away.clone(), away]);
    let only_try = ImageTask { retries: 0, ..image(REFERENCE) };
    let result = run(&runtime, vec![only_try], PullKey::anonymous()).await?.images.remove(0);
    assert_eq!((result.outcome, result.attempts), (ImageOutcome::Pulled, 1), "{result:?}");
    assert_eq!(runtime.pulls().len(), 3);
    Ok(())
}

#[tokio::test]
async fn a_stopped_pull_continues_only_in_docker() -> Result<()> {
    for kind in BOTH {
        let runtime = StandIn::start(kind)?;
        runtime.script(REFERENCE, [Act::Download]);
        let is_pulling = async || {
            eventually("the runtime pulls", SOON, async || {
                ensure!(!runtime.pulls().is_empty(), "it does not");
                Ok(())
            })
            .await
        };
        let end = run_until(&runtime, vec![image(REFERENCE)], PullKey::anonymous(), is_pulling()).await?;
        assert_eq!(end.images[0].outcome, ImageOutcome::Stopped, "{kind:?}");
        eventually("the runtime knows", SOON, async || {
            ensure!(runtime.pulls()[0].abandoned, "it does not: {:?}", runtime.pulls());
            Ok(())
        })
        .await?;

        runtime.finish_downloads();
        let (outcome, pulls) = match kind {
            Runtime::CriO => (ImageOutcome::Pulled, 2),
            Runtime::Docker => {
                eventually("dockerd goes on to the end", SOON, async || {
                    ensure!(runtime.has_image(REFERENCE), "it has not got the image");
                    Ok(())
                })
                .await?;
                (ImageOutcome::Present, 1)
            }
        };
        let end = run(&runtime, vec![image(REFERENCE)], PullKey::anonymous()).await?;
        assert_eq!((end.images[0].outcome, runtime.pulls().len()), (outcome, pulls), "{kind:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_silent_registry_ends_with_the_timeout() -> Result<()> {
    for kind in BOTH {
        let runtime = StandIn::start(kind)?;
        runtime.script(REFERENCE, [Act::Download]);
        // Without bytes we can't distinguish a silent connection from a slow one; only the timeout ends it.
        let limited = ImageTask { timeout: Some(Duration::from_secs(1)), ..image(REFERENCE) };
        let only_try = ImageTask { retries: 0, ..limited.clone() };
        let result = run(&runtime, vec![only_try], PullKey::anonymous()).await?.images.remove(0);
        assert_eq!(
            (result.outcome, result.code),
            (ImageOutcome::Failed, Some(FailureCode::Timeout)),
            "{kind:?}"
        );
        assert_eq!(result.reason, "not pulled within timeoutSeconds (1s)", "{kind:?}");
        let result = run(&runtime, vec![limited], PullKey::anonymous()).await?.images.remove(0);
        assert_eq!((result.outcome, result.attempts), (ImageOutcome::Pulled, 1), "{kind:?}");
        assert_eq!(runtime.pulls().len(), 2, "{kind:?}");
    }
    Ok(())
}

/// Starts a real containerd without CRI, in the configuration of Docker's package, and returns it with its socket.
async fn containerd_without_cri(place: &Place) -> Result<(Child, std::path::PathBuf)> {
    let dir = place.new_dir("without-cri")?;
    let (shown, socket) = (dir.display(), dir.join("containerd.sock"));
    let config = format!(
        r#"version = 2
root = "{shown}/root"
state = "{shown}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]
[grpc]
address = "{shown}/containerd.sock"
"#
    );
    std::fs::write(dir.join("config.toml"), config)?;
    let mut command = Command::new(parts::containerd());
    command.arg("--config").arg(dir.join("config.toml")).current_dir(&dir);
    let process = Child::spawn(place, "containerd-without-cri", command)?;
    eventually("containerd listens", SOON, async || {
        containerd_client::connect(&socket).await.map(drop).context("it does not")
    })
    .await?;
    Ok((process, socket))
}

#[tokio::test]
async fn a_containerd_without_cri_is_skipped() -> Result<()> {
    let place = Place::here()?;
    let (_containerd, without_cri) = containerd_without_cri(&place).await?;
    // A separate /run, with the sockets in their usual places.
    let pull = async |sockets: &[(&str, &Path)]| -> Result<(bool, String)> {
        let mut script = vec!["mount -t tmpfs prepull-e2e /run".to_owned()];
        script.extend(sockets.iter().map(|(usual, socket)| {
            format!("mkdir -p $(dirname {usual}) && ln -s {} {usual}", socket.display())
        }));
        let program = parts::program_path("edgecore-prepull")?;
        script.push(format!("exec {} pull --retries 0 {REFERENCE}", program.display()));
        let mut command = tokio::process::Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "sh", "-euc", &script.join("\n")])
            .kill_on_drop(true);
        let output = tokio::time::timeout(SOON, command.output()).await.context("it hangs")??;
        Ok((output.status.success(), String::from_utf8([output.stdout, output.stderr].concat())?))
    };
    let containerd = ("/run/containerd/containerd.sock", without_cri.as_path());
    for (kind, usual) in [(Runtime::CriO, "/run/crio/crio.sock"), (Runtime::Docker, "/run/cri-dockerd.sock")]
    {
        let runtime = StandIn::start(kind)?;
        let (succeeded, said) = pull(&[containerd, (usual, &runtime.socket())]).await?;
        ensure!(succeeded && said.contains("1 pulled"), "{kind:?}: {said}");
        ensure!(runtime.has_image(REFERENCE), "{kind:?}");
    }
    let (succeeded, said) = pull(&[containerd]).await?;
    ensure!(!succeeded && said.contains("/run/containerd/containerd.sock (does not serve CRI v1)"), "{said}");
    ensure!(
        said.contains("/run/cri-dockerd.sock (no socket)") && said.contains("--runtime-endpoint"),
        "{said}"
    );
    Ok(())
}

/// What a removal does with each image that it names.
async fn removes(
    runtime: &StandIn,
    removal: Removal,
) -> Result<Vec<(RemovalOutcome, Option<KeepCode>, u64)>> {
    let puller = Fetching::over_cri(puller(runtime)?, FetchSettings::without_room_check());
    let executor = Executor::new(Arc::new(puller), NonZeroUsize::MIN, CheckLimits::default());
    let terms = TaskTerms {
        deadline: Instant::now() + Duration::from_secs(60),
        keys: Vec::new(),
        download: Arc::default(),
        windows: None,
    };
    let task = Task {
        removal: Some(Box::new(removal)),
        title: "removal".to_owned(),
        ..Task::new(TaskId { job: JobUid("removal".to_owned()), attempt: 1 }, Vec::new())
    };
    let end = execute(&executor, task, terms, std::future::pending()).await?;
    let images = end.removal.context("no result")?.images;
    let mut found: Vec<_> = images.iter().map(|image| (image.image.clone(), image)).collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(found.into_iter().map(|(_, image)| (image.outcome, image.code, image.bytes)).collect())
}

#[tokio::test]
async fn images_of_other_runtimes_are_removed() -> Result<()> {
    for kind in BOTH {
        let runtime = StandIn::start(kind)?;
        runtime.keeps('a', &["r.example/app:v1"], false);
        runtime.keeps('b', &["r.example/app:v2"], true);
        runtime.keeps('c', &["r.example/app:v3", "r.example/other:v3"], false);
        let images = ["v1", "v2", "v3", "v4"].map(|tag| format!("r.example/app:{tag}")).to_vec();
        let removal = Removal { images, ..Removal::default() };
        let dry = removes(&runtime, Removal { dry_run: true, ..removal.clone() }).await?;
        assert_eq!(dry[0], (RemovalOutcome::Removable, None, 7), "{kind:?}");
        let kept = |code| (RemovalOutcome::Kept, Some(code), 0);
        let rest = [KeepCode::PinnedByRuntime, KeepCode::OtherName, KeepCode::NotPresent].map(kept);
        assert_eq!(dry[1..], rest, "{kind:?}");
        let done = removes(&runtime, removal).await?;
        assert_eq!(done[0], (RemovalOutcome::Removed, None, 7), "{kind:?}");
        assert_eq!(done[1..], rest, "{kind:?}");
        ensure!(!runtime.has_image("r.example/app:v1"), "{kind:?}: it's there");

        // These runtimes don't say when an image came.
        let repositories = vec!["r.example/app".to_owned()];
        let old = Removal { repositories, keep_last: 1, ..Removal::default() };
        let codes: Vec<_> = removes(&runtime, old).await?.into_iter().filter_map(|image| image.1).collect();
        assert_eq!(codes, [KeepCode::PinnedByRuntime, KeepCode::AgeUnknown], "{kind:?}");
    }
    Ok(())
}
