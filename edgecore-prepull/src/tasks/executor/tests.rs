#![allow(clippy::unwrap_used, clippy::expect_used)]

mod flushing;
mod providers;
mod removal;
mod room;
mod upgrades;
mod windows;

use std::time::Duration;

use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_api::download::{DownloadTerms, Verification, VerificationMode};
use prepull_api::failure::FailureCode as Is;
use prepull_api::image::listed_name;
use prepull_api::task::{
    ByteProgress, ImagePhase, ImageTask, JobUid, PullPolicy, PulledBy, SandboxMetadata, Task, TaskId,
};
use prepull_api::wire::PullKey;
use tokio::time::Instant;

use super::*;
use crate::images::puller::fake::{Act, Fake};
use crate::tasks::agent::TaskTerms;

fn image(name: &str, policy: PullPolicy, retries: u32) -> ImageTask {
    ImageTask { policy, retries, ..ImageTask::new(name) }
}

fn always(name: &str) -> ImageTask {
    image(name, PullPolicy::Always, 0)
}

fn execution(images: Vec<ImageTask>) -> Execution {
    let id = TaskId { job: JobUid("job".to_owned()), attempt: 1 };
    Execution {
        removal: None,
        check: None,
        done: vec![None; images.len()],
        terms: TaskTerms {
            deadline: (Instant::now() + Duration::from_secs(300)).into_std(),
            keys: images.iter().map(|_| Arc::new(PullKey::anonymous())).collect(),
            download: Arc::default(),
            windows: None,
        },
        task: Task { title: "job".to_owned(), checks: vec![CheckItem::Disk], ..Task::new(id, images) },
    }
}

fn credentials(passwords: &[&str]) -> Arc<PullKey> {
    let credential = |password: &&str| RegistryCredential {
        server: "r.example".to_owned(),
        username: Sensitive::new("u"),
        password: Sensitive::new(*password),
        ..RegistryCredential::default()
    };
    Arc::new(PullKey::Credentials { credentials: passwords.iter().map(credential).collect() })
}

/// A running execution.
struct Run {
    control: watch::Sender<TaskControl>,
    updates: mpsc::Receiver<TaskUpdate>,
    end: tokio::task::JoinHandle<TaskEnd>,
}

fn executor(fake: &Arc<Fake>) -> Arc<Executor<Fake>> {
    let mut executor = Executor::new(fake.clone(), NonZeroUsize::new(2).unwrap(), CheckLimits::default());
    executor.images.random = || 1.0;
    Arc::new(executor)
}

fn start(executor: &Arc<Executor<Fake>>, execution: Execution) -> Run {
    let (control, receiver) =
        watch::channel(TaskControl { may_remove: false, terms: execution.terms.clone(), stop: None });
    let (sender, updates) = mpsc::channel(1000);
    let executor = executor.clone();
    Run {
        control,
        updates,
        end: tokio::spawn(async move { executor.run(execution, receiver, sender).await }),
    }
}

async fn run(fake: &Arc<Fake>, execution: Execution) -> TaskEnd {
    run_on(&executor(fake), execution).await
}

async fn run_on(executor: &Arc<Executor<Fake>>, execution: Execution) -> TaskEnd {
    start(executor, execution).end.await.unwrap()
}

fn outcomes(end: &TaskEnd) -> Vec<ImageOutcome> {
    end.images.iter().map(|image| image.outcome).collect()
}

use ImageOutcome::{Failed, Present as Already, Pulled as New, Stopped};
use ImagePhase::{Done, Pulling};

/// An image in an update: index, phase, bytes done.
type Seen = (u32, ImagePhase, Option<u64>);

#[tokio::test(start_paused = true)]
async fn the_parallel_limit_spans_tasks() {
    let fake = Fake::new();
    let executor = executor(&fake);
    let begun = Instant::now();
    let first = start(&executor, execution((0..6).map(|n| always(&format!("a{n}"))).collect()));
    tokio::task::yield_now().await;
    let second = start(&executor, execution(vec![always("b0"), always("b1")]));
    let second = second.end.await.unwrap();
    assert_eq!(second.outcome, TaskOutcome::Succeeded);
    // The short task waited for the pulls that were running, and not for the whole long task.
    assert_eq!(begun.elapsed().as_secs(), 2);
    let first = first.end.await.unwrap();
    assert_eq!(outcomes(&first), [New; 6]);
    assert_eq!(begun.elapsed().as_secs(), 4);
    assert_eq!(fake.state.lock().unwrap().most, 2);
}

#[tokio::test(start_paused = true)]
async fn only_transient_errors_are_retried() {
    let fake = Fake::new();
    let refused = || Act::Fail(ErrorClass::Transient, "connection refused");
    fake.script("flaky", [refused(), refused(), Act::Take(1)]);
    fake.script("broken", [refused(), refused(), refused(), Act::Take(1)]);
    fake.script("gone", [Act::Fail(ErrorClass::NotFound, "not found")]);
    fake.script("locked", [Act::Password("secret")]);
    let images = ["flaky", "broken", "gone", "locked"].map(|name| image(name, PullPolicy::Always, 2));
    let end = run(&fake, execution(images.to_vec())).await;
    assert_eq!(outcomes(&end), [New, Failed, Failed, Failed]);
    let attempts: Vec<_> = end.images.iter().map(|image| image.attempts).collect();
    assert_eq!(attempts, [3, 3, 1, 1]);
    assert_eq!(end.images[1].reason, "connection refused");
    let codes: Vec<_> = end.images.iter().map(|image| image.code).collect();
    assert_eq!(codes, [None, Some(Is::Other), Some(Is::NotFound), Some(Is::Unauthorized)]);
    assert_eq!(
        end.images[3].reason,
        "401 Unauthorized (pulled anonymously: no secret is named for this image)"
    );
    assert_eq!(end.reason, "3 of 4 images failed, the first: broken: connection refused");
    let mut given_up = fake.state.lock().unwrap().given_up.clone();
    given_up.sort();
    assert_eq!(given_up, ["gone", "locked"], "another task may resume a pull that failed transiently");
}

#[tokio::test(start_paused = true)]
async fn backoff_is_exponential_and_holds_no_permit() {
    let fake = Fake::new();
    let refused = Act::Fail(ErrorClass::Transient, "EOF");
    fake.script("a", vec![refused.clone(); 8]);
    fake.script("b", vec![refused; 8]);
    let begun = Instant::now();
    let images = vec![image("a", PullPolicy::Always, 7), image("b", PullPolicy::Always, 7), always("c")];
    let mut run = start(&executor(&fake), execution(images));
    let third = loop {
        if let TaskUpdate::ImageEnded { index: 2, .. } = run.updates.recv().await.unwrap() {
            break begun.elapsed();
        }
    };
    assert_eq!(third.as_secs(), 1);
    run.end.await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 1 + 2 + 4 + 8 + 16 + 30 + 30);
}

#[tokio::test(start_paused = true)]
async fn a_registrys_wait_is_obeyed_within_reason() {
    let fake = Fake::new();
    fake.script("a", [Act::Busy(40), Act::Busy(0), Act::Fail(ErrorClass::Transient, "EOF")]);
    let begun = Instant::now();
    let end = run(&fake, execution(vec![image("a", PullPolicy::Always, 3)])).await;
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 4));
    assert_eq!(begun.elapsed().as_secs(), (40 + 1) + 2 + 4 + 1);

    // A day is more than any task has.
    fake.script("b", [Act::Busy(86_400)]);
    let mut patient = execution(vec![image("b", PullPolicy::Always, 1)]);
    patient.terms.deadline = (Instant::now() + Duration::from_secs(3600)).into_std();
    let begun = Instant::now();
    assert_eq!(outcomes(&run(&fake, patient).await), [New]);
    assert_eq!(begun.elapsed().as_secs(), (600 + 1) + 1);
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_the_runtime_costs_no_attempt() {
    let fake = Fake::new();
    fake.state.lock().unwrap().filesystem_errors = vec![ErrorClass::RuntimeDown; 3];
    let down = Act::Fail(ErrorClass::RuntimeDown, "connection refused");
    fake.script("a", [down.clone(), down, Act::Take(1)]);
    let end = run(&fake, execution(vec![always("a")])).await;
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    assert!(end.check.unwrap().passed);
}

#[tokio::test(start_paused = true)]
async fn the_reason_names_a_long_outage() {
    let fake = Fake::new();
    fake.state.lock().unwrap().filesystem_errors = vec![ErrorClass::RuntimeDown; 1000];
    let begun = Instant::now();
    let end = run(&fake, execution(vec![always("a")])).await;
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::DeadlineExceeded, vec![Stopped]));
    assert_eq!(begun.elapsed().as_secs(), 300);
    assert_eq!(end.reason, "the deadline passed; 1 of 1 images are missing; connection refused");
    assert_eq!(end.images[0].reason, "the deadline passed before its pull began");
    assert_eq!(end.images[0].code, Some(Is::RuntimeDown), "the cause of the delay");
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_disk_is_retried() {
    let fake = Fake::new();
    fake.state.lock().unwrap().filesystem_errors = vec![ErrorClass::Transient; 3];
    let end = run(&fake, execution(vec![always("a")])).await;
    assert_eq!(outcomes(&end), [New]);

    fake.state.lock().unwrap().filesystem_errors = vec![ErrorClass::Transient; 1000];
    let begun = Instant::now();
    let end = run(&fake, execution(vec![always("b")])).await;
    assert_eq!((end.outcome, end.reason.as_str()), (TaskOutcome::Failed, "check failed: disk: no answer"));
    assert_eq!(begun.elapsed().as_secs(), 1 + 2 + 4);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_releases_partial_content() {
    let fake = Fake::new();
    let full = || Act::Fail(ErrorClass::NoSpace, "no space left on device");
    fake.script("huge", [full(), full()]);
    fake.script("unlucky", [full(), Act::Take(1)]);
    let images = ["huge", "unlucky"].map(|name| image(name, PullPolicy::Always, 1));
    let end = run(&fake, execution(images.to_vec())).await;
    assert_eq!(outcomes(&end), [Failed, New]);
    assert_eq!((end.images[0].attempts, end.images[1].attempts), (2, 2));
    let mut given_up = fake.state.lock().unwrap().given_up.clone();
    given_up.sort();
    assert_eq!(given_up, ["huge", "huge", "unlucky"], "at once, and not after the last try only");
}

#[tokio::test(start_paused = true)]
async fn an_image_that_crashes_the_runtime_fails() {
    let fake = Fake::new();
    let lost = || Act::Fail(ErrorClass::RuntimeLost, "broken pipe");
    fake.script("upgrade", [lost(), lost(), Act::Take(1)]);
    fake.script("bomb", vec![lost(); 100]);
    let end = run(&fake, execution(vec![always("upgrade"), image("bomb", PullPolicy::Always, 1)])).await;
    assert_eq!(outcomes(&end), [New, Failed]);
    assert_eq!(end.images[0].attempts, 1, "a restart of the runtime is not the fault of the image");
    assert_eq!(fake.pulls().iter().filter(|name| *name == "bomb").count(), 2 + 2);
    assert_eq!((end.images[1].attempts, end.images[1].reason.as_str()), (2, "broken pipe"));
}

#[tokio::test(start_paused = true)]
async fn failed_checks_prevent_pulls() {
    let fake = Fake::new();
    fake.state.lock().unwrap().free = 9;
    let mut run = start(&executor(&fake), execution(vec![always("a")]));
    let end = (&mut run.end).await.unwrap();
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::Failed, vec![Failed]));
    assert!(end.reason.starts_with("check failed: disk: /images has"), "{}", end.reason);
    assert_eq!(end.images[0].code, Some(Is::CheckFailed));
    assert_eq!(fake.pulls(), [""; 0]);
    assert!(matches!(run.updates.recv().await, Some(TaskUpdate::Checked(outcome)) if !outcome.passed));
}

#[tokio::test(start_paused = true)]
async fn policies_match_the_kubelets() {
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["old".to_owned()];
    let images = vec![
        image("old", PullPolicy::IfNotPresent, 0),
        image("new", PullPolicy::IfNotPresent, 0),
        image("absent", PullPolicy::Never, 3),
        image("old", PullPolicy::Never, 0),
    ];
    let end = run(&fake, execution(images)).await;
    assert_eq!(outcomes(&end), [Already, New, Failed, Already]);
    assert_eq!(end.images[2].reason, "the image is not present, and its pull policy is Never");
    assert_eq!(end.images[0].digest.as_deref(), Some("sha256:d"));
    assert_eq!(fake.pulls(), ["new"]);
    let end = run(&fake, execution(vec![always("old")])).await;
    assert_eq!(outcomes(&end), [New]);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_tries_credentials_in_order() {
    let fake = Fake::new();
    fake.script("a", vec![Act::Password("right"); 3]);
    fake.script("b", vec![Act::Password("right"); 2]);
    fake.script("hidden", [Act::Fail(ErrorClass::NotFound, "not found"), Act::Password("no")]);
    let mut execution =
        execution(["a", "b", "hidden"].map(|name| image(name, PullPolicy::Always, 5)).to_vec());
    execution.terms.keys = vec![
        credentials(&["old", "older", "right"]),
        credentials(&["old", "older"]),
        credentials(&["x", "y"]),
    ];
    let end = run(&fake, execution).await;
    assert_eq!(outcomes(&end), [New, Failed, Failed]);
    assert_eq!(end.images[0].attempts, 1);
    assert_eq!(end.images[1].reason, "401 Unauthorized (2 credentials were tried)");
    assert_eq!(end.images[2].reason, "not found (2 credentials were tried)");
}

#[tokio::test(start_paused = true)]
async fn undecided_refusals_are_tried_again() {
    let fake = Fake::new();
    let refusals = [ErrorClass::NotFound, ErrorClass::Auth].map(Act::Undecided);
    fake.script("a", refusals.clone().into_iter().chain(refusals).chain([Act::Password("right")]));
    fake.script("b", [Act::Undecided(ErrorClass::Auth), Act::Password("right")]);
    let mut execution = execution(["a", "b"].map(|name| image(name, PullPolicy::Always, 2)).to_vec());
    execution.terms.keys = vec![credentials(&["right", "old"]), credentials(&["old", "right"])];
    let end = run(&fake, execution).await;
    assert_eq!(outcomes(&end), [New, New]);
    assert_eq!([0, 1].map(|image| end.images[image].attempts), [3, 1], "the second credential comes first");
    assert_eq!(fake.state.lock().unwrap().given_up, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_unavailable_key_fails_its_image() {
    let fake = Fake::new();
    let mut execution = execution(vec![always("a"), always("b")]);
    let reason = "secret default/a is missing".to_owned();
    execution.terms.keys[0] = Arc::new(PullKey::Unavailable { reason: reason.clone() });
    let end = run(&fake, execution).await;
    assert_eq!((outcomes(&end), &end.images[0].reason), (vec![Failed, New], &reason));
    assert_eq!(fake.pulls(), ["b"]);
}

#[tokio::test(start_paused = true)]
async fn a_present_image_needs_no_key() {
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["there".to_owned()];
    let images = vec![
        image("there", PullPolicy::IfNotPresent, 0),
        image("there", PullPolicy::Never, 0),
        image("absent", PullPolicy::IfNotPresent, 0),
        image("absent", PullPolicy::Never, 0),
        always("there"),
    ];
    let mut execution = execution(images);
    let reason = "secret default/a is missing".to_owned();
    let unavailable = Arc::new(PullKey::Unavailable { reason: reason.clone() });
    execution.terms.keys = vec![unavailable; 5];
    let end = run(&fake, execution).await;
    assert_eq!(outcomes(&end), [Already, Already, Failed, Failed, Failed]);
    assert_eq!((&end.images[2].reason, &end.images[4].reason), (&reason, &reason));
    assert_eq!(end.images[3].reason, "the image is not present, and its pull policy is Never");
    assert_eq!(fake.pulls(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_reference_is_pulled_once() {
    for policy in [PullPolicy::Always, PullPolicy::IfNotPresent] {
        let fake = Fake::new();
        let executor = executor(&fake);
        let same = || execution(vec![image("a", policy, 0), image("a", policy, 0)]);
        let (first, second) = (start(&executor, same()), start(&executor, same()));
        let (first, second) = (first.end.await.unwrap(), second.end.await.unwrap());
        let mut all = outcomes(&first);
        all.extend(outcomes(&second));
        assert_eq!(all.iter().filter(|outcome| **outcome == New).count(), 1, "{all:?}");
        assert!(all.iter().all(|outcome| outcome.is_on_node()));
        assert_eq!(fake.pulls().len(), 1, "{policy}");
    }
}

#[tokio::test(start_paused = true)]
async fn another_key_asks_the_registry_again() {
    let fake = Fake::new();
    fake.script("a", [Act::Take(1), Act::Password("right")]);
    let executor = executor(&fake);
    let mut with_wrong_password = execution(vec![always("a")]);
    with_wrong_password.terms.keys = vec![credentials(&["wrong"])];
    let first = start(&executor, execution(vec![always("a")]));
    tokio::task::yield_now().await;
    let second = start(&executor, with_wrong_password).end.await.unwrap();
    assert_eq!(outcomes(&first.end.await.unwrap()), [New]);
    assert_eq!(outcomes(&second), [Failed]);
}

#[tokio::test(start_paused = true)]
async fn a_movable_deadline_stops_pulls() {
    let fake = Fake::new();
    fake.script("long", [Act::Take(1000)]);
    fake.script("flaky", vec![Act::Fail(ErrorClass::Transient, "EOF"); 100]);
    let begun = Instant::now();
    let execution = execution(vec![always("short"), always("long"), image("flaky", PullPolicy::Always, 100)]);
    let run = start(&executor(&fake), execution);
    sleep(Duration::from_secs(200)).await;
    run.control.send_modify(|control| {
        control.terms.deadline = (Instant::now() + Duration::from_secs(300)).into_std();
    });
    let end = run.end.await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 500);
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::DeadlineExceeded, vec![New, Stopped, Stopped]));
    assert_eq!(end.images[1].reason, "the deadline passed during its pull");
    assert!(
        end.images[2].reason.ends_with("between two attempts; the last attempt failed: EOF"),
        "{}",
        end.images[2].reason
    );
    assert_eq!(fake.state.lock().unwrap().dropped, ["long"]);
    assert_eq!(fake.state.lock().unwrap().given_up, [""; 0], "the next attempt resumes it");
}

#[tokio::test(start_paused = true)]
async fn a_stop_gives_up_running_pulls() {
    let fake = Fake::new();
    fake.script("long", [Act::Take(100)]);
    let begun = Instant::now();
    let run = start(
        &executor(&fake),
        execution(vec![always("short"), always("long"), always("next"), always("last")]),
    );
    sleep(Duration::from_millis(60_500)).await;
    run.control.send_modify(|control| control.stop = Some("job deleted".to_owned()));
    let end = run.end.await.unwrap();
    assert_eq!(begun.elapsed().as_millis(), 60_500);
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::Cancelled, vec![New, Stopped, New, New]));
    assert_eq!(end.images[1].bytes, Some(ByteProgress { done: 50, total: 100 }));
    assert_eq!(end.reason, "cancelled: job deleted; 1 of 4 images are missing");
    let state = fake.state.lock().unwrap();
    assert_eq!(
        (&state.dropped[..], &state.given_up[..]),
        (&["long".to_owned()][..], &["long".to_owned()][..])
    );
}

#[tokio::test(start_paused = true)]
async fn another_tasks_download_is_not_given_up() {
    let fake = Fake::new();
    fake.script("shared", [Act::Take(100), Act::Take(100)]);
    let executor = executor(&fake);
    let mut second = execution(vec![always("shared")]);
    second.task.id.job = JobUid("second".to_owned());
    executor.hold(&second.task);
    let cancel = async |run: Run| {
        sleep(Duration::from_secs(10)).await;
        run.control.send_modify(|control| control.stop = Some("job deleted".to_owned()));
        assert_eq!(run.end.await.unwrap().outcome, TaskOutcome::Cancelled);
    };
    cancel(start(&executor, execution(vec![always("shared")]))).await;
    assert_eq!(fake.state.lock().unwrap().given_up, [""; 0], "the second task goes on with it");
    cancel(start(&executor, second)).await;
    assert_eq!(fake.state.lock().unwrap().given_up, ["shared"]);
}

#[tokio::test]
async fn a_wanted_image_makes_no_room() {
    let executor = executor(&Fake::new());
    let [wanted, pulled] = ["wanted", "pulled"].map(|name| vec![listed_name(name).into_owned()]);
    let reserve = |names: &[String]| executor.images.reserve(names);
    assert!(reserve(&wanted).is_some());
    executor.hold(&execution(vec![always("wanted")]).task);
    assert!(reserve(&wanted).is_none(), "a task has come");
    let reserved = reserve(&pulled).unwrap();
    assert!(executor.images.try_lock_all(&pulled).is_none(), "a pull waits for the removal");
    drop(reserved);
    let _pulls = executor.images.try_lock_all(&pulled).unwrap();
    assert!(reserve(&pulled).is_none());
}

#[tokio::test(start_paused = true)]
async fn leftovers_go_when_the_disk_is_short() {
    const KEPT: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::ZERO;
    let fake = Fake::new();
    fake.state.lock().unwrap().leftovers = true;
    let executor = executor(&fake);
    let open = execution(vec![always("wanted")]);
    executor.hold(&open.task);
    let tidying = tokio::spawn({
        let executor = executor.clone();
        async move { executor.keep_tidy(|| KEPT).await }
    });
    let next = async |free| {
        fake.state.lock().unwrap().free = free;
        sleep(Duration::from_secs(15)).await;
        fake.state.lock().unwrap().released.drain(..).collect::<Vec<_>>()
    };
    sleep(Duration::from_secs(1)).await;
    let wanted = vec!["wanted".to_owned()];
    assert_eq!(next(15).await, [(wanted.clone(), KEPT)], "only what is old");
    assert_eq!(next(14).await, [(wanted.clone(), SHORT)]);
    fake.state.lock().unwrap().filesystem_errors = vec![ErrorClass::Transient];
    assert_eq!(next(14).await, [(wanted, KEPT)], "an unseen disk isn't short");
    executor.let_go(&open.task.id);
    fake.state.lock().unwrap().leftovers = false;
    assert_eq!(next(14).await, [(vec![], SHORT)]);
    assert_eq!(next(14).await, [], "nothing is left");
    run_on(&executor, execution(vec![always("new")])).await;
    assert_eq!(next(50).await, [(vec![], KEPT)], "a pull may have left something");
    tidying.abort();
}

#[tokio::test(start_paused = true)]
async fn ended_images_are_not_pulled_again() {
    let fake = Fake::new();
    fake.state.lock().unwrap().free = 0;
    let mut execution = execution(vec![always("done"), always("open")]);
    let done = ImageResult { reason: "not found".to_owned(), attempts: 4, ..ImageResult::new(Failed) };
    execution.done[0] = Some(done.clone());
    execution.check = Some(CheckOutcome { passed: true, reason: String::new() });
    let end = run(&fake, execution).await;
    assert_eq!((&end.images[0], end.images[1].outcome), (&done, New));
    assert_eq!(fake.pulls(), ["open"]);
}

#[tokio::test(start_paused = true)]
async fn progress_is_sent_once_a_second() {
    let fake = Fake::new();
    fake.script("a", [Act::Take(10)]);
    fake.script("b", [Act::Take(60)]);
    let executor = executor(&fake);
    let begun = Instant::now();
    let mut run = start(&executor, execution(vec![always("a"), always("b"), always("c")]));
    let mut seen: Vec<(u128, Vec<Seen>)> = Vec::new();
    while let Some(update) = run.updates.recv().await {
        if let TaskUpdate::Progress { images, .. } = update {
            let images =
                images.iter().map(|image| (image.index, image.phase, image.bytes.map(|bytes| bytes.done)));
            seen.push((begun.elapsed().as_millis(), images.collect()));
            if seen.len() == 2 {
                executor.pace().begin_session();
            }
        }
    }
    let expected = [
        (200, vec![(0, Pulling, None), (1, Pulling, None)]),
        (5_200, vec![(0, Pulling, Some(50))]),
        // A new session: all images that have begun.
        (6_200, vec![(0, Pulling, Some(50)), (1, Pulling, None)]),
        (10_200, vec![(0, Done, Some(100)), (2, Pulling, None)]),
        (11_200, vec![(2, Done, Some(100))]),
        (30_200, vec![(1, Pulling, Some(50))]),
    ];
    assert_eq!(seen, expected);
    run.end.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn later_images_use_new_keys() {
    let fake = Fake::new();
    fake.script("a", [Act::Take(10)]);
    fake.script("b", [Act::Take(10)]);
    fake.script("c", [Act::Password("new")]);
    let mut execution = execution(vec![always("a"), always("b"), always("c")]);
    execution.terms.keys = vec![credentials(&["old"]); 3];
    let run = start(&executor(&fake), execution);
    sleep(Duration::from_secs(5)).await;
    run.control.send_modify(|control| control.terms.keys = vec![credentials(&["new"]); 3]);
    assert_eq!(outcomes(&run.end.await.unwrap()), [New; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_task_without_images_succeeds() {
    let end = run(&Fake::new(), execution(Vec::new())).await;
    assert_eq!((end.outcome, end.images.len()), (TaskOutcome::Succeeded, 0));
}

#[tokio::test(start_paused = true)]
async fn each_attempt_has_a_timeout_of_its_own() {
    let fake = Fake::new();
    fake.script("slow", [Act::Take(200), Act::Take(200), Act::Take(99)]);
    fake.script("slower", vec![Act::Take(200); 3]);
    let limited = |name, retries| ImageTask {
        timeout: Some(Duration::from_secs(100)),
        ..image(name, PullPolicy::Always, retries)
    };
    let mut execution = execution(vec![limited("slow", 2), limited("slower", 1)]);
    execution.terms.deadline = (Instant::now() + Duration::from_secs(3000)).into_std();
    let begun = Instant::now();
    let end = run(&fake, execution).await;
    assert_eq!(begun.elapsed().as_secs(), (100 + 1) + (100 + 2) + 99);
    assert_eq!(outcomes(&end), [New, Failed]);
    assert_eq!((end.images[0].attempts, end.images[1].attempts), (3, 2));
    assert_eq!(end.images[1].reason, "not pulled within timeoutSeconds (100s)");
    let state = fake.state.lock().unwrap();
    assert_eq!(state.dropped.iter().filter(|name| *name == "slow").count(), 2, "stopped in the runtime");
    assert_eq!(state.given_up, [""; 0], "the next attempt resumes what was fetched");
}

#[tokio::test(start_paused = true)]
async fn the_tasks_deadline_beats_the_timeout() {
    let fake = Fake::new();
    fake.script("slow", vec![Act::Take(1000); 9]);
    let image =
        ImageTask { timeout: Some(Duration::from_secs(1000)), ..image("slow", PullPolicy::Always, 9) };
    let begun = Instant::now();
    let end = run(&fake, execution(vec![image])).await;
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::DeadlineExceeded, vec![Stopped]));
    assert_eq!(begun.elapsed().as_secs(), 300);
}

#[tokio::test(start_paused = true)]
async fn pulls_pass_the_sandbox_and_return_ids() {
    let fake = Fake::new();
    let sandbox = SandboxMetadata {
        labels: [("app".to_owned(), "a".to_owned())].into(),
        annotations: [("note".to_owned(), "b".to_owned())].into(),
    };
    let with_sandbox = ImageTask { sandbox: Some(sandbox.clone()), ..always("a") };
    let end =
        run(&fake, execution(vec![with_sandbox, image("a", PullPolicy::IfNotPresent, 0), always("a")])).await;
    assert_eq!(outcomes(&end), [New, Already, Already]);
    for image in &end.images {
        assert_eq!(image.id.as_deref(), Some("sha256:i"));
    }
    assert_eq!(fake.state.lock().unwrap().sandboxes, [Some(sandbox)]);
}

#[tokio::test(start_paused = true)]
async fn a_note_explains_only_a_refusal() {
    let fake = Fake::new();
    fake.script("locked", [Act::Password("secret")]);
    fake.script("gone", [Act::Fail(ErrorClass::NotFound, "not found")]);
    let mut execution = execution(vec![always("locked"), always("gone")]);
    let note = "secret default/a has no entry for r.example".to_owned();
    let key = Arc::new(PullKey::Anonymous { note });
    execution.terms.keys = vec![key.clone(), key];
    let end = run(&fake, execution).await;
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (pulled anonymously: secret default/a has no entry for r.example)"
    );
    assert_eq!(end.images[1].reason, "not found");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_image_has_its_last_code() {
    let fake = Fake::new();
    fake.script("slow", [Act::Take(1000)]);
    fake.script("flaky", vec![Act::Fail(ErrorClass::Transient, "EOF"); 100]);
    let images = || vec![always("slow"), image("flaky", PullPolicy::Always, 100)];
    let codes = |end: &TaskEnd| end.images.iter().map(|image| image.code.unwrap()).collect::<Vec<_>>();
    let end = run(&fake, execution(images())).await;
    assert_eq!((outcomes(&end), codes(&end)), (vec![Stopped, Stopped], vec![Is::Timeout, Is::Other]));
    fake.script("slow", [Act::Take(1000)]);
    let run = start(&executor(&fake), execution(images()));
    sleep(Duration::from_secs(20)).await;
    run.control.send_modify(|control| control.stop = Some("enough".to_owned()));
    assert_eq!(codes(&run.end.await.unwrap()), [Is::Cancelled; 2]);
}

#[tokio::test(start_paused = true)]
async fn local_failures_have_their_own_codes() {
    let fake = Fake::new();
    let mut execution = execution(vec![image("absent", PullPolicy::Never, 0), always("locked")]);
    execution.terms.keys[1] =
        Arc::new(PullKey::Unavailable { reason: "secret a/b does not exist".to_owned() });
    let end = run(&fake, execution).await;
    let codes: Vec<_> = end.images.iter().map(|image| image.code.unwrap()).collect();
    assert_eq!(codes, [Is::NotPresent, Is::SecretUnusable]);
}

fn pinned(images: Vec<ImageTask>) -> Execution {
    let mut execution = execution(images);
    execution.terms.download = Arc::new(DownloadTerms { pin: true, ..DownloadTerms::default() });
    execution
}

#[tokio::test(start_paused = true)]
async fn images_are_pinned_on_request() {
    let fake = Fake::new();
    fake.state.lock().unwrap().present.push("there".to_owned());
    fake.state.lock().unwrap().confirms_pins = true;
    fake.script("broken", [(); 2].map(|()| Act::Fail(ErrorClass::Permanent, "broken")));
    let images = || vec![always("new"), image("there", PullPolicy::IfNotPresent, 0), always("broken")];
    let pins = |end: &TaskEnd| end.images.iter().map(|image| image.pinned).collect::<Vec<_>>();

    assert_eq!(pins(&run(&fake, execution(images())).await), [None, None, None]);
    assert!(fake.state.lock().unwrap().pins.is_empty());
    assert_eq!(pins(&run(&fake, pinned(images())).await), [Some(true), Some(true), None]);
    let job = JobUid("job".to_owned());
    let mut pinned_images = fake.state.lock().unwrap().pins.clone();
    pinned_images.sort();
    assert_eq!(pinned_images, [("new".to_owned(), job.clone()), ("there".to_owned(), job)]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_pin_fails_no_image() {
    let fake = Fake::new();
    let down = || PullError::new(ErrorClass::RuntimeDown, "connection refused");
    fake.state.lock().unwrap().pin_errors = vec![PullError::new(ErrorClass::Permanent, "unknown service")];
    let end = run(&fake, pinned(vec![always("a")])).await;
    assert_eq!((outcomes(&end), end.images[0].pinned), (vec![New], Some(false)));

    // The runtime restarts in between.
    fake.state.lock().unwrap().pin_errors = vec![down(), down()];
    fake.state.lock().unwrap().confirms_pins = true;
    let end = run(&fake, pinned(vec![always("b")])).await;
    assert_eq!((outcomes(&end), end.images[0].pinned), (vec![New], Some(true)));

    // The pin is no longer wanted.
    fake.state.lock().unwrap().pin_errors = vec![down(), down(), down()];
    let run = start(&executor(&fake), pinned(vec![always("c")]));
    sleep(Duration::from_secs(4)).await;
    run.control.send_modify(|control| control.terms.download = Arc::default());
    let end = run.end.await.unwrap();
    assert_eq!((outcomes(&end), end.images[0].pinned), (vec![New], None));
}

#[tokio::test(start_paused = true)]
async fn a_shared_pull_is_verified_on_demand() {
    let verify = Verification { mode: VerificationMode::Warn, keys: Vec::new(), unavailable: None };
    for (verify, pulls) in [(None, 1), (Some(verify), 2)] {
        let fake = Fake::new();
        fake.state.lock().unwrap().warning = Some("no signature".to_owned());
        let executor = executor(&fake);
        let mut second = execution(vec![always("a")]);
        second.task.id.attempt = 2;
        second.terms.download = Arc::new(DownloadTerms { verify, ..DownloadTerms::default() });
        let first = start(&executor, execution(vec![always("a")]));
        sleep(Duration::from_millis(1)).await;
        let second = run_on(&executor, second).await;
        let first = first.end.await.unwrap();
        assert_eq!(fake.pulls().len(), pulls);
        // A warning isn't a failure.
        assert_eq!(
            (first.outcome, first.images[0].reason.as_str()),
            (TaskOutcome::Succeeded, "no signature")
        );
        let expected = if pulls == 2 { (New, "no signature") } else { (Already, "") };
        assert_eq!((second.images[0].outcome, second.images[0].reason.as_str()), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_result_names_the_downloader() {
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["there".to_owned()];
    let images = vec![always("pulled"), image("there", PullPolicy::IfNotPresent, 0)];
    let end = run(&fake, execution(images)).await;
    assert_eq!(outcomes(&end), [New, Already]);
    let [pulled, there] = end.images.as_slice() else { panic!("{end:?}") };
    assert_eq!(pulled.facts.pulled_by, Some(PulledBy::Runtime));
    assert_eq!(pulled.facts.pulled_by_reason, "the fake has no agent");
    assert_eq!((there.facts.pulled_by, there.facts.pulled_by_reason.as_str()), (None, ""));
}

#[tokio::test(start_paused = true)]
async fn a_result_has_the_kubelets_reason() {
    let root = tempfile::tempdir().unwrap();
    let pulled = root.path().join("image_manager/pulled");
    std::fs::create_dir_all(&pulled).unwrap();
    // The fake has the id "sha256:i" for each image.
    let name = prepull_registry::digest::sha256(b"sha256:i").replace(':', "-");
    let record =
        r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","imageRef":"sha256:i"}"#;
    std::fs::write(pulled.join(name), record).unwrap();
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["there".to_owned()];
    fake.script("broken", [Act::Fail(ErrorClass::NotFound, "not found")]);
    let executor = Executor::new(fake, NonZeroUsize::new(2).unwrap(), CheckLimits::default())
        .with_kubelet_records(KubeletRecords::in_root_dir(root.path()));
    let images = vec![always("pulled"), image("there", PullPolicy::IfNotPresent, 0), always("broken")];
    let mut run = start(&Arc::new(executor), execution(images));
    let end = (&mut run.end).await.unwrap();
    let records: Vec<_> = end.images.iter().map(|image| image.facts.kubelet_record).collect();
    let asks = Some(KubeletRecord::NoCredentials);
    assert_eq!(records, [asks, asks, None]);
    assert!(end.images[0].facts.kubelet_record_reason.contains("asks the registry"), "{end:?}");
    // The ledger gets the same.
    while let Ok(update) = run.updates.try_recv() {
        if let TaskUpdate::ImageEnded { index, result } = update {
            assert_eq!(result.facts.kubelet_record, records[index]);
        }
    }
}
