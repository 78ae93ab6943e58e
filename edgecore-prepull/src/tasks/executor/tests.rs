#![allow(clippy::unwrap_used, clippy::expect_used)]

mod providers;

use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_api::task::{Bytes, ImagePhase, ImageTask, JobUid, PullPolicy, SandboxMetadata, Task, TaskId};

use super::*;
use crate::images::puller::fake::{Act, Fake};

fn image(name: &str, policy: PullPolicy, retries: u32) -> ImageTask {
    ImageTask {
        image: name.to_owned(),
        reference: name.to_owned(),
        policy,
        retries,
        key: 0,
        timeout: None,
        sandbox: None,
    }
}

fn always(name: &str) -> ImageTask {
    image(name, PullPolicy::Always, 0)
}

fn work(images: Vec<ImageTask>) -> Work {
    let id = TaskId { job: JobUid("job".to_owned()), attempt: 1 };
    Work {
        check: None,
        done: vec![None; images.len()],
        terms: Terms {
            deadline: (Instant::now() + Duration::from_secs(300)).into_std(),
            keys: images.iter().map(|_| Arc::new(Key::anonymous())).collect(),
        },
        task: Task { id, title: "job".to_owned(), checks: vec![CheckItem::Disk], images },
    }
}

fn credentials(passwords: &[&str]) -> Arc<Key> {
    let credential = |password: &&str| RegistryCredential {
        server: "r.example".to_owned(),
        username: Sensitive::new("u"),
        password: Sensitive::new(*password),
        ..RegistryCredential::default()
    };
    Arc::new(Key::Credentials { credentials: passwords.iter().map(credential).collect() })
}

/// A task that runs.
struct Run {
    control: watch::Sender<Control>,
    reports: mpsc::Receiver<Report>,
    end: tokio::task::JoinHandle<TaskEnd>,
}

fn executor(fake: &Arc<Fake>) -> Arc<Executor<Fake>> {
    let mut executor = Executor::new(fake.clone(), NonZeroUsize::new(2).unwrap(), Limits::default());
    executor.random = || 1.0;
    Arc::new(executor)
}

fn start(executor: &Arc<Executor<Fake>>, work: Work) -> Run {
    let (control, receiver) = watch::channel(Control { terms: work.terms.clone(), stop: None });
    let (sender, reports) = mpsc::channel(1000);
    let executor = executor.clone();
    Run { control, reports, end: tokio::spawn(async move { executor.run(work, receiver, sender).await }) }
}

async fn run(fake: &Arc<Fake>, work: Work) -> TaskEnd {
    start(&executor(fake), work).end.await.unwrap()
}

fn outcomes(end: &TaskEnd) -> Vec<ImageOutcome> {
    end.images.iter().map(|image| image.outcome).collect()
}

use ImageOutcome::{Failed, Present as Already, Pulled as New, Stopped};
use ImagePhase::{Done, Pulling};

/// An image in a report: index, phase, bytes done.
type Told = (u32, ImagePhase, Option<u64>);

#[tokio::test(start_paused = true)]
async fn images_are_pulled_a_few_at_a_time_over_the_whole_node() {
    let fake = Fake::new();
    let executor = executor(&fake);
    let begun = Instant::now();
    let first = start(&executor, work((0..6).map(|n| always(&format!("a{n}"))).collect()));
    tokio::task::yield_now().await;
    let second = start(&executor, work(vec![always("b0"), always("b1")]));
    let second = second.end.await.unwrap();
    assert_eq!(second.outcome, TaskOutcome::Succeeded);
    // The short task waited for what ran when it came, not for the whole of the long one.
    assert_eq!(begun.elapsed().as_secs(), 2);
    let first = first.end.await.unwrap();
    assert_eq!(outcomes(&first), [New; 6]);
    assert_eq!(begun.elapsed().as_secs(), 4);
    assert_eq!(fake.state.lock().unwrap().most, 2);
}

#[tokio::test(start_paused = true)]
async fn what_passes_is_tried_again_and_what_does_not_is_not() {
    let fake = Fake::new();
    let refused = || Act::Fail(ErrorClass::Transient, "connection refused");
    fake.script("flaky", [refused(), refused(), Act::Take(1)]);
    fake.script("broken", [refused(), refused(), refused(), Act::Take(1)]);
    fake.script("gone", [Act::Fail(ErrorClass::NotFound, "not found")]);
    fake.script("locked", [Act::Password("secret")]);
    let images = ["flaky", "broken", "gone", "locked"].map(|name| image(name, PullPolicy::Always, 2));
    let end = run(&fake, work(images.to_vec())).await;
    assert_eq!(outcomes(&end), [New, Failed, Failed, Failed]);
    let attempts: Vec<_> = end.images.iter().map(|image| image.attempts).collect();
    assert_eq!(attempts, [3, 3, 1, 1]);
    assert_eq!(end.images[1].reason, "connection refused");
    assert_eq!(
        end.images[3].reason,
        "401 Unauthorized (pulled anonymously: no secret is named for this image)"
    );
    assert_eq!(end.reason, "3 of 4 images failed, the first: broken: connection refused");
    let mut given_up = fake.state.lock().unwrap().given_up.clone();
    given_up.sort();
    assert_eq!(given_up, ["gone", "locked"], "another task may go on with what broke");
}

#[tokio::test(start_paused = true)]
async fn tries_are_spread_by_exponential_backoff_and_hold_no_place() {
    let fake = Fake::new();
    let refused = Act::Fail(ErrorClass::Transient, "EOF");
    fake.script("a", vec![refused.clone(); 8]);
    fake.script("b", vec![refused; 8]);
    let begun = Instant::now();
    let images = vec![image("a", PullPolicy::Always, 7), image("b", PullPolicy::Always, 7), always("c")];
    let mut run = start(&executor(&fake), work(images));
    let third = loop {
        if let Report::ImageEnded { index: 2, .. } = run.reports.recv().await.unwrap() {
            break begun.elapsed();
        }
    };
    assert_eq!(third.as_secs(), 1);
    run.end.await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 1 + 2 + 4 + 8 + 16 + 30 + 30);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_is_away_is_waited_for_and_costs_no_try() {
    let fake = Fake::new();
    fake.state.lock().unwrap().outages = 3;
    let down = Act::Fail(ErrorClass::RuntimeDown, "connection refused");
    fake.script("a", [down.clone(), down, Act::Take(1)]);
    let end = run(&fake, work(vec![always("a")])).await;
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    assert!(end.check.unwrap().passed);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_stays_away_ends_with_the_deadline_and_is_named() {
    let fake = Fake::new();
    fake.state.lock().unwrap().outages = usize::MAX;
    let begun = Instant::now();
    let end = run(&fake, work(vec![always("a")])).await;
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::DeadlineExceeded, vec![Stopped]));
    assert_eq!(begun.elapsed().as_secs(), 300);
    assert_eq!(end.reason, "the deadline passed; 1 of 1 images are missing; connection refused");
    assert_eq!(end.images[0].reason, "the deadline passed before its turn came");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_not_fit_pulls_nothing() {
    let fake = Fake::new();
    fake.state.lock().unwrap().free = 9;
    let mut run = start(&executor(&fake), work(vec![always("a")]));
    let end = (&mut run.end).await.unwrap();
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::Failed, vec![Failed]));
    assert!(end.reason.starts_with("check failed: disk: /images has"), "{}", end.reason);
    assert_eq!(fake.pulls(), [""; 0]);
    assert!(matches!(run.reports.recv().await, Some(Report::Checked(outcome)) if !outcome.passed));
}

#[tokio::test(start_paused = true)]
async fn policies_mean_what_the_kubelet_means() {
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["old".to_owned()];
    let images = vec![
        image("old", PullPolicy::IfNotPresent, 0),
        image("new", PullPolicy::IfNotPresent, 0),
        image("absent", PullPolicy::Never, 3),
        image("old", PullPolicy::Never, 0),
    ];
    let end = run(&fake, work(images)).await;
    assert_eq!(outcomes(&end), [Already, New, Failed, Already]);
    assert_eq!(end.images[2].reason, "image absent is not present and its pull policy is Never");
    assert_eq!(end.images[0].digest.as_deref(), Some("sha256:d"));
    assert_eq!(fake.pulls(), ["new"]);
    let end = run(&fake, work(vec![always("old")])).await;
    assert_eq!(outcomes(&end), [New]);
}

#[tokio::test(start_paused = true)]
async fn credentials_are_tried_in_order_within_one_try() {
    let fake = Fake::new();
    fake.script("a", vec![Act::Password("right"); 3]);
    fake.script("b", vec![Act::Password("right"); 2]);
    fake.script("hidden", [Act::Fail(ErrorClass::NotFound, "not found"), Act::Password("no")]);
    let mut work = work(["a", "b", "hidden"].map(|name| image(name, PullPolicy::Always, 5)).to_vec());
    work.terms.keys = vec![
        credentials(&["old", "older", "right"]),
        credentials(&["old", "older"]),
        credentials(&["x", "y"]),
    ];
    let end = run(&fake, work).await;
    assert_eq!(outcomes(&end), [New, Failed, Failed]);
    assert_eq!(end.images[0].attempts, 1);
    assert_eq!(end.images[1].reason, "401 Unauthorized (2 credentials were tried)");
    assert_eq!(end.images[2].reason, "not found (2 credentials were tried)");
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_unavailable_fails_the_image_without_a_request() {
    let fake = Fake::new();
    let mut work = work(vec![always("a"), always("b")]);
    let reason = "secret default/a is missing".to_owned();
    work.terms.keys[0] = Arc::new(Key::Unavailable { reason: reason.clone() });
    let end = run(&fake, work).await;
    assert_eq!((outcomes(&end), &end.images[0].reason), (vec![Failed, New], &reason));
    assert_eq!(fake.pulls(), ["b"]);
}

#[tokio::test(start_paused = true)]
async fn one_reference_is_pulled_once_over_all_tasks() {
    for policy in [PullPolicy::Always, PullPolicy::IfNotPresent] {
        let fake = Fake::new();
        let executor = executor(&fake);
        let same = || work(vec![image("a", policy, 0), image("a", policy, 0)]);
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
async fn another_key_asks_the_registry_itself() {
    let fake = Fake::new();
    fake.script("a", [Act::Take(1), Act::Password("right")]);
    let executor = executor(&fake);
    let mut with_wrong_password = work(vec![always("a")]);
    with_wrong_password.terms.keys = vec![credentials(&["wrong"])];
    let first = start(&executor, work(vec![always("a")]));
    tokio::task::yield_now().await;
    let second = start(&executor, with_wrong_password).end.await.unwrap();
    assert_eq!(outcomes(&first.end.await.unwrap()), [New]);
    assert_eq!(outcomes(&second), [Failed]);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_stops_pulls_and_can_be_moved() {
    let fake = Fake::new();
    fake.script("long", [Act::Take(1000)]);
    fake.script("flaky", vec![Act::Fail(ErrorClass::Transient, "EOF"); 100]);
    let begun = Instant::now();
    let work = work(vec![always("short"), always("long"), image("flaky", PullPolicy::Always, 100)]);
    let run = start(&executor(&fake), work);
    sleep(Duration::from_secs(200)).await;
    run.control.send_modify(|control| {
        control.terms.deadline = (Instant::now() + Duration::from_secs(300)).into_std();
    });
    let end = run.end.await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 500);
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::DeadlineExceeded, vec![New, Stopped, Stopped]));
    assert_eq!(end.images[1].reason, "the deadline passed while it was being pulled");
    assert!(
        end.images[2].reason.ends_with("between two tries; the last try failed: EOF"),
        "{}",
        end.images[2].reason
    );
    assert_eq!(fake.state.lock().unwrap().dropped, ["long"]);
    assert_eq!(fake.state.lock().unwrap().given_up, [""; 0], "the next attempt goes on with it");
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_pulls_at_once_and_says_what_was_done() {
    let fake = Fake::new();
    fake.script("long", [Act::Take(100)]);
    let begun = Instant::now();
    let run =
        start(&executor(&fake), work(vec![always("short"), always("long"), always("next"), always("last")]));
    sleep(Duration::from_millis(60_500)).await;
    run.control.send_modify(|control| control.stop = Some("job deleted".to_owned()));
    let end = run.end.await.unwrap();
    assert_eq!(begun.elapsed().as_millis(), 60_500);
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::Cancelled, vec![New, Stopped, New, New]));
    assert_eq!(end.images[1].bytes, Some(Bytes { done: 50, total: 100 }));
    assert_eq!(end.reason, "cancelled: job deleted; 1 of 4 images are missing");
    let state = fake.state.lock().unwrap();
    assert_eq!(
        (&state.dropped[..], &state.given_up[..]),
        (&["long".to_owned()][..], &["long".to_owned()][..])
    );
}

#[tokio::test(start_paused = true)]
async fn what_ended_before_a_restart_is_left_alone() {
    let fake = Fake::new();
    fake.state.lock().unwrap().free = 0;
    let mut work = work(vec![always("done"), always("open")]);
    let done = ImageResult {
        outcome: Failed,
        digest: None,
        id: None,
        reason: "not found".to_owned(),
        bytes: None,
        attempts: 4,
    };
    work.done[0] = Some(done.clone());
    work.check = Some(CheckOutcome { passed: true, reason: String::new() });
    let end = run(&fake, work).await;
    assert_eq!((&end.images[0], end.images[1].outcome), (&done, New));
    assert_eq!(fake.pulls(), ["open"]);
}

#[tokio::test(start_paused = true)]
async fn progress_is_told_once_a_second_at_most_and_only_what_changed() {
    let fake = Fake::new();
    fake.script("a", [Act::Take(10)]);
    fake.script("b", [Act::Take(60)]);
    let executor = executor(&fake);
    let begun = Instant::now();
    let mut run = start(&executor, work(vec![always("a"), always("b"), always("c")]));
    let mut told: Vec<(u128, Vec<Told>)> = Vec::new();
    while let Some(report) = run.reports.recv().await {
        if let Report::Progress(images) = report {
            let images =
                images.iter().map(|image| (image.index, image.phase, image.bytes.map(|bytes| bytes.done)));
            told.push((begun.elapsed().as_millis(), images.collect()));
            if told.len() == 2 {
                executor.pace().new_listener();
            }
        }
    }
    let expected = [
        (200, vec![(0, Pulling, None), (1, Pulling, None)]),
        (5_200, vec![(0, Pulling, Some(50))]),
        // Somebody new: all but what has not begun.
        (6_200, vec![(0, Pulling, Some(50)), (1, Pulling, None)]),
        (10_200, vec![(0, Done, Some(100)), (2, Pulling, None)]),
        (11_200, vec![(2, Done, Some(100))]),
        (30_200, vec![(1, Pulling, Some(50))]),
    ];
    assert_eq!(told, expected);
    run.end.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn new_keys_serve_the_images_that_come_later() {
    let fake = Fake::new();
    fake.script("a", [Act::Take(10)]);
    fake.script("b", [Act::Take(10)]);
    fake.script("c", [Act::Password("new")]);
    let mut work = work(vec![always("a"), always("b"), always("c")]);
    work.terms.keys = vec![credentials(&["old"]); 3];
    let run = start(&executor(&fake), work);
    sleep(Duration::from_secs(5)).await;
    run.control.send_modify(|control| control.terms.keys = vec![credentials(&["new"]); 3]);
    assert_eq!(outcomes(&run.end.await.unwrap()), [New; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_task_without_images_succeeds() {
    let end = run(&Fake::new(), work(Vec::new())).await;
    assert_eq!((end.outcome, end.images.len()), (TaskOutcome::Succeeded, 0));
}

#[tokio::test(start_paused = true)]
async fn a_try_takes_no_longer_than_it_may_and_the_next_one_has_its_own_time() {
    let fake = Fake::new();
    fake.script("slow", [Act::Take(200), Act::Take(200), Act::Take(99)]);
    fake.script("slower", vec![Act::Take(200); 3]);
    let limited = |name, retries| ImageTask {
        timeout: Some(Duration::from_secs(100)),
        ..image(name, PullPolicy::Always, retries)
    };
    let mut work = work(vec![limited("slow", 2), limited("slower", 1)]);
    work.terms.deadline = (Instant::now() + Duration::from_secs(3000)).into_std();
    let begun = Instant::now();
    let end = run(&fake, work).await;
    assert_eq!(begun.elapsed().as_secs(), (100 + 1) + (100 + 2) + 99);
    assert_eq!(outcomes(&end), [New, Failed]);
    assert_eq!((end.images[0].attempts, end.images[1].attempts), (3, 2));
    assert_eq!(end.images[1].reason, "not pulled within timeoutSeconds (100s)");
    let state = fake.state.lock().unwrap();
    assert_eq!(state.dropped.iter().filter(|name| *name == "slow").count(), 2, "stopped in the runtime");
    assert_eq!(state.given_up, [""; 0], "what was fetched serves the next one");
}

#[tokio::test(start_paused = true)]
async fn the_deadline_of_the_task_stays_above_the_time_of_a_try() {
    let fake = Fake::new();
    fake.script("slow", vec![Act::Take(1000); 9]);
    let image =
        ImageTask { timeout: Some(Duration::from_secs(1000)), ..image("slow", PullPolicy::Always, 9) };
    let begun = Instant::now();
    let end = run(&fake, work(vec![image])).await;
    assert_eq!((end.outcome, outcomes(&end)), (TaskOutcome::DeadlineExceeded, vec![Stopped]));
    assert_eq!(begun.elapsed().as_secs(), 300);
}

#[tokio::test(start_paused = true)]
async fn the_runtime_is_told_of_the_sandbox_and_tells_the_images_id() {
    let fake = Fake::new();
    let sandbox = SandboxMetadata {
        labels: [("app".to_owned(), "a".to_owned())].into(),
        annotations: [("note".to_owned(), "b".to_owned())].into(),
    };
    let told = ImageTask { sandbox: Some(sandbox.clone()), ..always("a") };
    let end = run(&fake, work(vec![told, image("a", PullPolicy::IfNotPresent, 0), always("a")])).await;
    assert_eq!(outcomes(&end), [New, Already, Already]);
    for image in &end.images {
        assert_eq!(image.id.as_deref(), Some("sha256:i"));
    }
    assert_eq!(fake.state.lock().unwrap().sandboxes, [Some(sandbox)]);
}

#[tokio::test(start_paused = true)]
async fn what_was_looked_at_in_vain_is_said_where_the_registry_refuses() {
    let fake = Fake::new();
    fake.script("locked", [Act::Password("secret")]);
    fake.script("gone", [Act::Fail(ErrorClass::NotFound, "not found")]);
    let mut work = work(vec![always("locked"), always("gone")]);
    let note = "secret default/a has no entry for r.example".to_owned();
    let key = Arc::new(Key::Anonymous { note });
    work.terms.keys = vec![key.clone(), key];
    let end = run(&fake, work).await;
    assert_eq!(
        end.images[0].reason,
        "401 Unauthorized (pulled anonymously: secret default/a has no entry for r.example)"
    );
    assert_eq!(end.images[1].reason, "not found");
}
