#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::Duration;

use prepull_api::task::{ImageOutcome, Task, TaskId, TaskOutcome};
use prepull_api::wire::{EdgeMessage, OpenPhase, PullKey};

use super::super::tests::{Harness, assign, record_of, result_of, task};
use super::super::{AgentEffect, AgentEvent, Execution, TaskRecord, WallClock};

fn tasks(count: usize) -> Vec<Task> {
    (0..count).map(|n| task(&format!("job-{n}"), 1, 2)).collect()
}

fn started(effects: &[AgentEffect]) -> Vec<&Execution> {
    let mut started = Vec::new();
    for effect in effects {
        if let AgentEffect::Start(execution) = effect {
            started.push(&**execution);
        }
    }
    started
}

fn ids_started(effects: &[AgentEffect]) -> Vec<TaskId> {
    started(effects).into_iter().map(|execution| execution.task.id.clone()).collect()
}

fn cancel(task: &Task) -> AgentEvent {
    AgentEvent::Cancel { task: task.id.clone(), reason: "job deleted".to_owned() }
}

#[test]
fn at_most_max_tasks_run_in_order() {
    for (limit, count) in [(1, 4), (2, 4), (3, 4), (4, 4), (64, 2)] {
        // The ids are in reverse order: the order of acceptance counts.
        let tasks: Vec<_> = tasks(count).into_iter().rev().collect();
        let mut harness = Harness::with_max_tasks(limit);
        let at_once = count.min(limit as usize);
        for (n, task) in tasks.iter().enumerate() {
            let effects = harness.run(task);
            let accepted = EdgeMessage::Accepted { task: task.id.clone() };
            assert_eq!(effects[0], AgentEffect::Send(accepted), "{limit}: whether it starts or waits");
            let expected = if n < at_once { vec![task.id.clone()] } else { Vec::new() };
            assert_eq!(ids_started(&effects), expected, "{limit}");
        }
        assert!(harness.agent.open_tasks().iter().all(|open| open.phase == OpenPhase::Running));
        for (n, task) in tasks.iter().enumerate() {
            let next = tasks.get(n + at_once).map(|task| task.id.clone());
            let effects = harness.end(task);
            assert_eq!(ids_started(&effects), Vec::from_iter(next), "{limit}");
        }
    }
}

#[test]
fn an_overdue_task_ends_without_a_pull() {
    let mut harness = Harness::new();
    let tasks = tasks(2);
    harness.run(&tasks[0]);
    harness.pass(50);
    harness.run(&tasks[1]);
    assert_eq!(harness.agent.next_tick(), Some(harness.now.monotonic + Duration::from_secs(300)));
    harness.pass(299);
    assert_eq!(harness.on(AgentEvent::Tick), []);
    harness.pass(1);
    let result = record_of(&harness.on(AgentEvent::Tick)).result.unwrap();
    assert_eq!((&result.task, result.outcome), (&tasks[1].id, TaskOutcome::DeadlineExceeded));
    assert!(result.reason.contains("at most 1 at a time"), "{}", result.reason);
    assert!(result.images.iter().all(|image| image.outcome == ImageOutcome::Stopped && image.attempts == 0));
    assert_eq!(result.took, Duration::from_secs(300));
    assert_eq!(started(&harness.end(&tasks[0])), Vec::<&Execution>::new());
}

#[test]
fn an_overdue_task_does_not_start() {
    let mut harness = Harness::new();
    let tasks = tasks(2);
    harness.run(&tasks[0]);
    harness.run(&tasks[1]);
    // The first task ends before the tick that would end the second.
    harness.pass(300);
    let effects = harness.end(&tasks[0]);
    let outcome = |effect: &AgentEffect| match effect {
        AgentEffect::Persist(record) => record.result.as_ref().unwrap().outcome,
        other => panic!("{other:?}"),
    };
    let outcomes: Vec<_> = effects.iter().map(outcome).collect();
    assert_eq!(outcomes, [TaskOutcome::Succeeded, TaskOutcome::DeadlineExceeded]);
}

#[test]
fn a_cancel_leaves_the_queue_immediately() {
    let mut harness = Harness::new();
    let tasks = tasks(3);
    for task in &tasks {
        harness.run(task);
    }
    let record = record_of(&harness.on(cancel(&tasks[1])));
    assert_eq!(record.result.as_ref().unwrap().outcome, TaskOutcome::Cancelled);
    assert_eq!(result_of(&harness.on(AgentEvent::Persisted(tasks[1].id.clone()))), record.result.unwrap());
    assert_eq!(ids_started(&harness.end(&tasks[0])), [tasks[2].id.clone()]);
}

#[test]
fn a_stopping_task_keeps_its_place() {
    let mut harness = Harness::new();
    let (first, second) = (task("a", 1, 1), task("a", 2, 1));
    harness.run(&first);
    let effects = harness.run(&second);
    assert_eq!(ids_started(&effects), Vec::new(), "the earlier attempt is only stopped");
    assert_eq!(ids_started(&harness.end(&first)), [second.id]);
}

#[test]
fn a_crash_frees_its_place() {
    let mut harness = Harness::new();
    let tasks = tasks(2);
    harness.run(&tasks[0]);
    harness.run(&tasks[1]);
    let crashed = AgentEvent::Crashed { task: tasks[0].id.clone(), reason: "a bug".to_owned() };
    assert_eq!(ids_started(&harness.on(crashed)), [tasks[1].id.clone()]);
}

#[test]
fn new_terms_keep_the_old_turn() {
    let mut harness = Harness::new();
    let tasks = tasks(3);
    for task in &tasks {
        harness.run(task);
    }
    harness.pass(200);
    let mut again = assign(tasks[1].clone());
    again.keys = vec![PullKey::anonymous()];
    let effects = harness.on(AgentEvent::Assign(again));
    let [AgentEffect::Persist(record), AgentEffect::Send(EdgeMessage::Accepted { .. })] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(record.deadline_set, WallClock::from_system_time(harness.now.wall));
    let deadline = harness.now.monotonic + Duration::from_secs(300);
    let effects = harness.end(&tasks[0]);
    let [execution] = started(&effects)[..] else { panic!("{effects:?}") };
    assert_eq!((&execution.task, execution.terms.deadline), (&tasks[1], deadline));
    assert!(execution.terms.keys.iter().all(|key| **key == PullKey::anonymous()));
}

#[test]
fn restored_tasks_wait_for_keys_first() {
    let mut harness = Harness::new();
    let tasks = tasks(2);
    let record = |task: &Task| TaskRecord::new(task.clone(), Duration::from_secs(60), harness.now);
    let records = tasks.iter().map(record).collect();
    assert_eq!(harness.restart(records), []);
    let phases =
        |harness: &Harness| harness.agent.open_tasks().iter().map(|open| open.phase).collect::<Vec<_>>();
    assert_eq!(phases(&harness), [OpenPhase::NeedsKeys, OpenPhase::NeedsKeys]);
    let effects = harness.on(AgentEvent::Assign(assign(tasks[1].clone())));
    assert_eq!(ids_started(&effects), [tasks[1].id.clone()], "the first that can work works");
    assert_eq!(ids_started(&harness.on(AgentEvent::Assign(assign(tasks[0].clone())))), Vec::new());
    assert_eq!(phases(&harness), [OpenPhase::Running, OpenPhase::Running]);
    assert_eq!(ids_started(&harness.end(&tasks[1])), [tasks[0].id.clone()]);
}
