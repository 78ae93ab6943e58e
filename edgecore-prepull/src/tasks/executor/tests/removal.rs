//! Tasks that remove images.

use prepull_api::task::{ImageRemoval, KeepCode, Removal, RemovalOutcome};

use super::windows::{executor as with_clock, set_clock, terms_of, windows};
use super::*;
use crate::images::puller::HeldImage;
use crate::tasks::removal::RemovalRecord;

fn held(name: &str, needed: Option<KeepCode>) -> HeldImage {
    HeldImage { id: format!("id-{name}"), names: vec![reference(name)], needed, created: None, size: 7 }
}

fn reference(name: &str) -> String {
    format!("r.io/{name}:1")
}

fn removal(names: &[&str], recorded: Option<RemovalRecord>) -> Execution {
    let images = names.iter().map(|name| reference(name)).collect();
    let mut execution = execution(Vec::new());
    execution.task.removal = Some(Box::new(Removal { images, ..Removal::default() }));
    execution.removal = recorded;
    execution
}

/// Lets the task remove as soon as it has recorded its choice.
async fn ends(mut run: Run) -> TaskEnd {
    let recorded = async {
        loop {
            match run.updates.recv().await {
                Some(TaskUpdate::Removal(_)) => run.control.send_modify(|control| control.may_remove = true),
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
    };
    tokio::select! {
        end = run.end => end.unwrap(),
        () = recorded => unreachable!("it waits forever"),
    }
}

fn images(end: &TaskEnd) -> Vec<(&str, RemovalOutcome, Option<KeepCode>)> {
    let images = &end.removal.as_ref().unwrap().images;
    images.iter().map(|image| (image.image.as_str(), image.outcome, image.code)).collect()
}

#[tokio::test(start_paused = true)]
async fn nothing_goes_before_the_choice_is_recorded() {
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None), held("b", Some(KeepCode::InUse))];
    let mut run = start(&executor(&fake), removal(&["a", "b"], None));
    let Some(TaskUpdate::Checked(_)) = run.updates.recv().await else { panic!("no check") };
    let Some(TaskUpdate::Removal(record)) = run.updates.recv().await else { panic!("no choice") };
    assert_eq!((record.planned.len(), record.planned[0].bytes, record.kept.len()), (1, 7, 1));
    sleep(Duration::from_secs(60)).await;
    assert_eq!(fake.state.lock().unwrap().held.len(), 2, "it waits");
    run.control.send_modify(|control| control.may_remove = true);
    let end = ends(run).await;
    assert_eq!(end.outcome, TaskOutcome::Succeeded);
    assert_eq!(
        images(&end),
        [
            ("r.io/a:1", RemovalOutcome::Removed, None),
            ("r.io/b:1", RemovalOutcome::Kept, Some(KeepCode::InUse))
        ]
    );
    assert_eq!(end.removal.unwrap().freed_bytes, 7);
}

#[tokio::test(start_paused = true)]
async fn what_went_before_a_restart_counts() {
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None), held("b", None)];
    let mut run = start(&executor(&fake), removal(&["a", "b"], None));
    let _ = run.updates.recv().await;
    let Some(TaskUpdate::Removal(record)) = run.updates.recv().await else { panic!("no choice") };
    run.end.abort();
    // The power was cut after the first one.
    fake.state.lock().unwrap().held.remove(0);
    let end = ends(start(&executor(&fake), removal(&["a", "b"], Some(*record)))).await;
    let result = end.removal.unwrap();
    assert_eq!((result.removed, result.freed_bytes), (2, 14), "{result:?}");
}

#[tokio::test(start_paused = true)]
async fn the_runtime_may_go_away() {
    let fake = Fake::new();
    {
        let mut state = fake.state.lock().unwrap();
        state.held = vec![held("a", None), held("b", None)];
        let down = || PullError::new(ErrorClass::RuntimeDown, "connection refused");
        state.removal_errors = std::iter::repeat_with(down).take(6).collect();
    }
    let end = ends(start(&executor(&fake), removal(&["a", "b"], None))).await;
    assert_eq!(end.removal.unwrap().removed, 2);

    {
        let mut state = fake.state.lock().unwrap();
        state.held = vec![held("a", None)];
        state.removal_errors = vec![PullError::new(ErrorClass::Permanent, "a read-only disk")];
    }
    let end = ends(start(&executor(&fake), removal(&["a"], None))).await;
    assert_eq!(end.outcome, TaskOutcome::Failed);
    assert_eq!(end.reason, "r.io/a:1 can't be removed: a read-only disk");
}

#[tokio::test(start_paused = true)]
async fn another_tasks_image_stays() {
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None)];
    let executor = executor(&fake);
    let mut other = execution(vec![always(&reference("a"))]);
    other.task.id.attempt = 2;
    executor.hold(&other.task);
    let end = ends(start(&executor, removal(&["a"], None))).await;
    assert_eq!(images(&end), [("r.io/a:1", RemovalOutcome::Kept, Some(KeepCode::Wanted))]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_begins_after_a_removal_of_its_name() {
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None)];
    let executor = executor(&fake);
    // The removal takes a second.
    let removing = ends(start(&executor, removal(&["a"], None)));
    let pulling = async {
        sleep(Duration::from_millis(500)).await;
        let mut pull = execution(vec![always(&reference("a"))]);
        pull.task.id.attempt = 2;
        run_on(&executor, pull).await
    };
    let looking = async {
        sleep(Duration::from_millis(900)).await;
        assert_eq!(fake.pulls(), [""; 0]);
    };
    let (removed, pulled, ()) = tokio::join!(removing, pulling, looking);
    assert_eq!(images(&removed), [("r.io/a:1", RemovalOutcome::Removed, None)]);
    assert_eq!((pulled.outcome, fake.pulls()), (TaskOutcome::Succeeded, vec![reference("a")]));
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_removes_nothing() {
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None)];
    let mut execution = removal(&["a"], None);
    execution.task.removal.as_mut().unwrap().dry_run = true;
    let end = ends(start(&executor(&fake), execution)).await;
    let removable = ImageRemoval {
        image: reference("a"),
        outcome: RemovalOutcome::Removable,
        bytes: 7,
        ..ImageRemoval::default()
    };
    assert_eq!(end.removal.unwrap().images, [removable]);
    assert_eq!(fake.state.lock().unwrap().held.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_came_since_keeps_an_image() {
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None), held("b", None)];
    let mut run = start(&executor(&fake), removal(&["a", "b"], None));
    let _ = run.updates.recv().await;
    let Some(TaskUpdate::Removal(_)) = run.updates.recv().await else { panic!("no choice") };
    fake.state.lock().unwrap().held[0].names.push(reference("stable"));
    run.control.send_modify(|control| control.may_remove = true);
    assert_eq!(
        images(&ends(run).await),
        [
            ("r.io/b:1", RemovalOutcome::Removed, None),
            ("r.io/a:1", RemovalOutcome::Kept, Some(KeepCode::OtherName))
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_image_with_a_doubled_name_goes() {
    let fake = Fake::new();
    let digest = format!("sha256:{}", "a".repeat(64));
    let of_digest = [format!("r.io/a:1@{digest}"), format!("r.io/a@{digest}")];
    for names in [[reference("a"), reference("a")], of_digest] {
        let image = HeldImage { names: names.to_vec(), ..held("a", None) };
        assert!(executor(&fake).images.reserve(&image.names).is_some(), "it may go to make room");
        fake.state.lock().unwrap().held = vec![image];
        let mut execution = removal(&["a"], None);
        execution.task.removal.as_mut().unwrap().images.push(format!("r.io/a@{digest}"));
        let end = ends(start(&executor(&fake), execution)).await;
        assert_eq!(end.removal.unwrap().removed, 1, "{names:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stopped_removal_keeps_the_rest() {
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None), held("b", None)];
    let run = start(&executor(&fake), removal(&["a", "b"], None));
    run.control.send_modify(|control| control.may_remove = true);
    // Each removal takes a second.
    sleep(Duration::from_millis(1500)).await;
    run.control.send_modify(|control| control.stop = Some("cancelled".to_owned()));
    let result = run.end.await.unwrap().removal.unwrap();
    assert_eq!((result.removed, result.kept, result.freed_bytes), (1, 1, 7), "{result:?}");
    assert_eq!(result.images[1].code, Some(KeepCode::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_stop_awaits_the_image_that_is_going() {
    for (answer, outcome, freed, took) in
        [(20, RemovalOutcome::Removed, 7, 21), (100, RemovalOutcome::Failed, 0, 62)]
    {
        let fake = Fake::new();
        {
            let mut state = fake.state.lock().unwrap();
            state.held = vec![held("a", None), held("b", None)];
            state.removal_answer = Duration::from_secs(answer);
        }
        let begun = Instant::now();
        let run = start(&executor(&fake), removal(&["a", "b"], None));
        run.control.send_modify(|control| control.may_remove = true);
        // It's gone after a second.
        sleep(Duration::from_secs(2)).await;
        run.control.send_modify(|control| control.stop = Some("cancelled".to_owned()));
        let end = run.end.await.unwrap();
        assert_eq!((end.outcome, begun.elapsed().as_secs()), (TaskOutcome::Cancelled, took));
        let rest = ("r.io/b:1", RemovalOutcome::Kept, Some(KeepCode::Stopped));
        assert_eq!(images(&end), [("r.io/a:1", outcome, None), rest]);
        assert_eq!(end.removal.unwrap().freed_bytes, freed);
        assert_eq!(fake.state.lock().unwrap().held.len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_awaits_the_image_that_is_going() {
    let fake = Fake::new();
    {
        let mut state = fake.state.lock().unwrap();
        state.held = vec![held("a", None), held("b", None)];
        state.removal_answer = Duration::from_secs(20);
    }
    let mut execution = removal(&["a", "b"], None);
    execution.terms.deadline = (Instant::now() + Duration::from_secs(2)).into_std();
    let run = start(&executor(&fake), execution);
    run.control.send_modify(|control| control.may_remove = true);
    let end = run.end.await.unwrap();
    assert_eq!(end.outcome, TaskOutcome::DeadlineExceeded);
    assert_eq!(end.reason, "the deadline passed; 1 images were removed");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_removal_is_not_tried_again() {
    // The runtime might have removed it nevertheless, so we look; but not where it has ended.
    for (class, looks) in [(ErrorClass::Transient, true), (ErrorClass::RuntimeDown, false)] {
        let fake = Fake::new();
        {
            let mut state = fake.state.lock().unwrap();
            state.held = vec![held("a", None)];
            state.removal_errors = vec![PullError::new(class, "EOF")];
        }
        let begun = Instant::now();
        let run = start(&executor(&fake), removal(&["a"], None));
        run.control.send_modify(|control| control.may_remove = true);
        sleep(Duration::from_millis(1500)).await;
        run.control.send_modify(|control| control.stop = Some("cancelled".to_owned()));
        let end = run.end.await.unwrap();
        assert_eq!(begun.elapsed() >= Duration::from_secs(2), looks, "{class:?}");
        assert_eq!(images(&end), [("r.io/a:1", RemovalOutcome::Kept, Some(KeepCode::Stopped))]);
        assert_eq!(fake.state.lock().unwrap().held.len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_removal_waits_for_its_window() {
    set_clock("00:00:00");
    let fake = Fake::new();
    fake.state.lock().unwrap().held = vec![held("a", None)];
    let mut execution = removal(&["a"], None);
    execution.terms = terms_of(&execution, 300, windows(&["01:00+1h UTC"]), &[]);
    let run = start(&with_clock(&fake), execution);
    run.control.send_modify(|control| control.may_remove = true);
    sleep(Duration::from_secs(3599)).await;
    assert_eq!(fake.state.lock().unwrap().held.len(), 1, "the window is closed");
    let end = ends(run).await;
    assert_eq!(images(&end), [("r.io/a:1", RemovalOutcome::Removed, None)]);
}

#[tokio::test(start_paused = true)]
async fn an_image_is_no_older_than_by_this_machines_clock() {
    // The cloud's time is 40 days ahead.
    let fake = Fake::new();
    let hour = Duration::from_secs(3600);
    let now = std::time::SystemTime::now();
    fake.state.lock().unwrap().held = vec![HeldImage { created: Some(now - hour), ..held("a", None) }];
    let mut execution = removal(&[], None);
    let removal = execution.task.removal.as_deref_mut().unwrap();
    (removal.repositories, removal.older_than) = (vec!["r.io/a".to_owned()], Some(hour * 24));
    let mut executor = Arc::into_inner(executor(&fake)).unwrap();
    let clock = Arc::new(crate::clock::CloudClock::default());
    clock.set(now.duration_since(std::time::UNIX_EPOCH).unwrap() + hour * 24 * 40);
    executor.images.clock = clock;
    let end = ends(start(&Arc::new(executor), execution)).await;
    assert_eq!(images(&end), [("r.io/a:1", RemovalOutcome::Kept, Some(KeepCode::TooYoung))]);
}
