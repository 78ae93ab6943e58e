#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, SystemTime};

use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_api::download::DownloadTerms;
use prepull_api::task::{ImageOutcome, ImageResult, ImageTask, JobUid, Removal, Task, TaskResult};
use prepull_api::wire::{OpenPhase, PullKey, TaskProgress};

use super::record::FORMAT_OF_REMOVALS;
use super::*;
use crate::tasks::removal::{PlannedRemoval, RemovalRecord};

pub(super) fn task(job: &str, attempt: u32, images: usize) -> Task {
    let image = |n| ImageTask { image: format!("app:{n}"), ..ImageTask::new(&format!("r.example/app:{n}")) };
    let id = TaskId { job: JobUid(job.to_owned()), attempt };
    Task { title: job.to_owned(), ..Task::new(id, (0..images).map(image).collect()) }
}

pub(super) fn assign(task: Task) -> Assign {
    let credential =
        RegistryCredential { password: Sensitive::new("hunter2"), ..RegistryCredential::default() };
    let keys = vec![PullKey::Credentials { credentials: vec![credential] }];
    Assign { task, remaining: Duration::from_secs(300), keys, download: DownloadTerms::default() }
}

pub(super) fn pulled() -> ImageResult {
    ImageResult { digest: Some("sha256:1".to_owned()), attempts: 1, ..ImageResult::new(ImageOutcome::Pulled) }
}

/// An agent with a clock that the test sets.
pub(super) struct Harness {
    pub(super) agent: TaskAgent,
    pub(super) now: Now,
}

impl Harness {
    pub(super) fn new() -> Self {
        Self::with_max_tasks(1)
    }

    /// An agent that runs `max_tasks` at a time.
    pub(super) fn with_max_tasks(max_tasks: u32) -> Self {
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let mut harness = Self {
            agent: TaskAgent::new(max_tasks.try_into().unwrap()),
            now: Now { monotonic: Instant::now(), wall, boot: Some(BootTime { id: 1, millis: 5_000 }) },
        };
        assert_eq!(harness.on(AgentEvent::Connected), []);
        harness
    }

    pub(super) fn on(&mut self, event: AgentEvent) -> Vec<AgentEffect> {
        self.agent.handle(event, self.now)
    }

    pub(super) fn pass(&mut self, seconds: u64) {
        self.now.monotonic += Duration::from_secs(seconds);
        self.now.wall += Duration::from_secs(seconds);
        self.now.boot.as_mut().unwrap().millis += seconds * 1000;
    }

    /// Assigns the task, and has its record written.
    pub(super) fn run(&mut self, task: &Task) -> Vec<AgentEffect> {
        self.on(AgentEvent::Assign(assign(task.clone())));
        self.on(AgentEvent::Persisted(task.id.clone()))
    }

    pub(super) fn end(&mut self, task: &Task) -> Vec<AgentEffect> {
        let images = task.images.iter().map(|_| pulled()).collect();
        let end = TaskEnd {
            removal: None,
            outcome: TaskOutcome::Succeeded,
            reason: String::new(),
            check: None,
            images,
        };
        self.on(AgentEvent::Ended(task.id.clone(), end))
    }

    pub(super) fn restart(&mut self, records: Vec<TaskRecord>) -> Vec<AgentEffect> {
        self.agent = TaskAgent::new(self.agent.max_tasks());
        self.on(AgentEvent::Loaded(records))
    }
}

pub(super) fn record_of(effects: &[AgentEffect]) -> TaskRecord {
    match effects {
        [AgentEffect::Persist(record)] => (**record).clone(),
        other => panic!("expected one Persist, got {other:?}"),
    }
}

pub(super) fn result_of(effects: &[AgentEffect]) -> TaskResult {
    match effects {
        [AgentEffect::Send(EdgeMessage::Result(result))] => result.clone(),
        other => panic!("expected one Result, got {other:?}"),
    }
}

#[test]
fn a_task_is_stored_accepted_then_started() {
    let mut harness = Harness::new();
    let task = task("a", 1, 2);
    let record = record_of(&harness.on(AgentEvent::Assign(assign(task.clone()))));
    assert_eq!((&record.task, record.images.len()), (&task, 2));
    assert_eq!(harness.agent.open_tasks(), [], "it is not on the disk yet");
    let effects = harness.on(AgentEvent::Persisted(task.id.clone()));
    let [AgentEffect::Send(EdgeMessage::Accepted { task: accepted }), AgentEffect::Start(execution)] =
        &effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!((accepted, &execution.task), (&task.id, &task));
    assert_eq!(execution.terms.keys.len(), 2);
    assert_eq!(harness.agent.open_tasks()[0].phase, OpenPhase::Running);
}

#[test]
fn a_result_is_stored_before_it_is_sent() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    harness.run(&task);
    harness.pass(7);
    let record = record_of(&harness.end(&task));
    assert_eq!(record.result.as_ref().unwrap().took, Duration::from_secs(7));
    assert_eq!(
        harness.on(AgentEvent::ResultAck(task.id.clone())),
        [],
        "nothing was sent that could be acknowledged"
    );
    let result = result_of(&harness.on(AgentEvent::Persisted(task.id.clone())));
    assert_eq!(Some(&result), record.result.as_ref());

    harness.on(AgentEvent::Disconnected);
    assert_eq!(result_of(&harness.on(AgentEvent::Connected)), result);
    assert_eq!(result_of(&harness.on(AgentEvent::Assign(assign(task.clone())))), result);
    assert_eq!(
        result_of(&harness.on(AgentEvent::Cancel { task: task.id.clone(), reason: String::new() })),
        result
    );

    harness.restart(vec![record]);
    harness.on(AgentEvent::Disconnected);
    assert_eq!(result_of(&harness.on(AgentEvent::Connected)), result);
    assert_eq!(harness.on(AgentEvent::ResultAck(task.id.clone())), [AgentEffect::Forget(task.id.clone())]);
    assert_eq!(harness.on(AgentEvent::ResultAck(task.id.clone())), []);
    assert!(harness.agent.is_empty());
}

#[test]
fn the_record_holds_no_credential() {
    let mut harness = Harness::new();
    let record = record_of(&harness.on(AgentEvent::Assign(assign(task("a", 1, 1)))));
    assert!(!serde_json::to_string(&record).unwrap().contains("hunter2"));
    assert!(!format!("{:?}", harness.agent).contains("hunter2"));
}

#[test]
fn a_reassigned_task_gets_new_terms_only() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    harness.run(&task);
    harness.pass(100);
    let effects = harness.on(AgentEvent::Assign(assign(task.clone())));
    let [
        AgentEffect::Persist(record),
        AgentEffect::Renew(_, terms),
        AgentEffect::Send(EdgeMessage::Accepted { .. }),
    ] = &effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!(record.deadline_set, WallClock::from_system_time(harness.now.wall));
    assert_eq!(terms.deadline, harness.now.monotonic + Duration::from_secs(300));
}

#[test]
fn a_restored_task_keeps_ended_images() {
    let mut harness = Harness::new();
    let task = task("a", 1, 3);
    harness.run(&task);
    let ended = AgentEvent::ImageEnded { task: task.id.clone(), index: 1, result: pulled() };
    let record = record_of(&harness.on(ended));

    harness.pass(10);
    assert_eq!(harness.restart(vec![record]), []);
    assert_eq!(harness.agent.open_tasks()[0].phase, OpenPhase::NeedsKeys);
    let effects = harness.on(AgentEvent::Assign(assign(task.clone())));
    let [
        AgentEffect::Persist(_),
        AgentEffect::Send(EdgeMessage::Accepted { .. }),
        AgentEffect::Start(execution),
    ] = &effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!(execution.done, [None, Some(pulled()), None]);
}

#[test]
fn a_restored_finished_task_needs_no_keys() {
    let mut harness = Harness::new();
    let task = task("a", 1, 2);
    let mut record = TaskRecord::new(task.clone(), Duration::from_secs(60), harness.now);
    let failed = ImageResult { outcome: ImageOutcome::Failed, reason: "401".to_owned(), ..pulled() };
    record.images = vec![Some(pulled()), Some(failed)];
    let result = record_of(&harness.restart(vec![record])).result.unwrap();
    assert_eq!((result.outcome, result.reason.as_str()), (TaskOutcome::Failed, "app:1: 401"));
}

#[test]
fn missing_keys_end_a_task_at_its_deadline() {
    let mut harness = Harness::new();
    let task = task("a", 1, 2);
    let mut record = TaskRecord::new(task.clone(), Duration::from_secs(60), harness.now);
    record.images[0] = Some(pulled());
    harness.pass(20);
    harness.restart(vec![record]);
    assert_eq!(harness.agent.next_tick(), Some(harness.now.monotonic + Duration::from_secs(40)));
    harness.pass(39);
    assert_eq!(harness.on(AgentEvent::Tick), []);
    harness.pass(1);
    let result = record_of(&harness.on(AgentEvent::Tick)).result.unwrap();
    assert_eq!(result.outcome, TaskOutcome::DeadlineExceeded);
    let outcomes: Vec<_> = result.images.iter().map(|image| image.outcome).collect();
    assert_eq!(outcomes, [ImageOutcome::Pulled, ImageOutcome::Stopped]);
}

#[test]
fn a_clock_behind_grants_all_time() {
    let at = |millis| Now {
        wall: SystemTime::UNIX_EPOCH + Duration::from_millis(millis),
        boot: None,
        ..Harness::new().now
    };
    let record = TaskRecord::new(task("a", 1, 1), Duration::from_secs(60), at(1_000_000_000));
    for (now, left) in
        [(0, 60_000), (999_999_999, 60_000), (1_000_000_000, 60_000), (1_000_045_000, 15_000), (1 << 50, 0)]
    {
        assert_eq!(record.time_left(at(now)), Duration::from_millis(left), "{now}");
    }
}

#[test]
fn a_clock_jump_ends_no_task() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    let record = TaskRecord::new(task, Duration::from_secs(60), harness.now);
    harness.pass(20);
    // The agent is restarted, and the clock was set in between.
    harness.now.wall += Duration::from_secs(365 * 24 * 3600);
    harness.restart(vec![record.clone()]);
    assert_eq!(harness.agent.next_tick(), Some(harness.now.monotonic + Duration::from_secs(40)));
    // The machine was rebooted, and we don't know how long it was off.
    harness.now.boot = Some(BootTime { id: 2, millis: 30_000 });
    harness.restart(vec![record]);
    assert_eq!(harness.agent.next_tick(), Some(harness.now.monotonic + Duration::from_secs(60)));
}

#[test]
fn a_stopped_executors_result_stands() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    let cancel = || AgentEvent::Cancel { task: task.id.clone(), reason: "job deleted".to_owned() };
    assert_eq!(harness.on(cancel()), [], "unknown");

    harness.run(&task);
    assert_eq!(
        harness.on(cancel()),
        [AgentEffect::Stop { task: task.id.clone(), reason: "job deleted".to_owned() }]
    );
    // The task succeeded before the executor saw the stop.
    let record = record_of(&harness.end(&task));
    assert_eq!(record.result.unwrap().outcome, TaskOutcome::Succeeded);
}

#[test]
fn a_cancel_during_the_write_is_stored() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    harness.on(AgentEvent::Assign(assign(task.clone())));
    assert_eq!(
        harness.on(AgentEvent::Cancel { task: task.id.clone(), reason: "job deleted".to_owned() }),
        []
    );
    let record = record_of(&harness.on(AgentEvent::Persisted(task.id.clone())));
    assert_eq!(record.result.as_ref().unwrap().outcome, TaskOutcome::Cancelled);
    let result = result_of(&harness.on(AgentEvent::Persisted(task.id.clone())));
    assert_eq!(result.reason, "cancelled: job deleted");
}

#[test]
fn a_later_attempt_replaces_an_earlier() {
    let mut harness = Harness::new();
    let (first, second) = (task("a", 1, 1), task("a", 2, 1));
    harness.run(&first);
    let effects = harness.on(AgentEvent::Assign(assign(second.clone())));
    let [AgentEffect::Stop { task, .. }, AgentEffect::Persist(record)] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((task, record.id()), (&first.id, &second.id));

    let mut harness = Harness::new();
    harness.run(&second);
    let result = result_of(&harness.on(AgentEvent::Assign(assign(first.clone()))));
    assert_eq!((result.task, result.outcome), (first.id, TaskOutcome::Cancelled));
    assert_eq!(harness.agent.len(), 1);
}

#[test]
fn excess_tasks_are_refused_without_a_record() {
    let mut harness = Harness::new();
    for n in 0..MAX_OPEN_TASKS {
        harness.run(&task(&format!("job-{n}"), 1, 1));
    }
    let result = result_of(&harness.on(AgentEvent::Assign(assign(task("one-more", 1, 1)))));
    assert_eq!(result.outcome, TaskOutcome::Failed);
    assert!(result.reason.contains("64 tasks"), "{}", result.reason);
    assert_eq!(harness.agent.open_tasks().len(), MAX_OPEN_TASKS);

    let result = result_of(&Harness::new().on(AgentEvent::Assign(assign(task("huge", 1, MAX_IMAGES + 1)))));
    assert_eq!((result.outcome, result.images.len()), (TaskOutcome::Failed, MAX_IMAGES));
}

#[test]
fn a_failed_write_refuses_a_new_task() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    let failed = || AgentEvent::PersistFailed { task: task.id.clone(), reason: "no space left".to_owned() };
    harness.on(AgentEvent::Assign(assign(task.clone())));
    let effects = harness.on(failed());
    assert!(
        matches!(&effects[..], [AgentEffect::Send(EdgeMessage::Result(result)), AgentEffect::Forget(_)] if result.reason.contains("no space left")),
        "{effects:?}"
    );

    harness.run(&task);
    harness.on(AgentEvent::ImageEnded { task: task.id.clone(), index: 0, result: pulled() });
    assert_eq!(harness.on(failed()), []);
    harness.pass(4);
    assert_eq!(harness.on(AgentEvent::Tick), []);
    harness.pass(1);
    assert!(record_of(&harness.on(AgentEvent::Tick)).images[0].is_some());
}

#[test]
fn an_unwritable_result_is_sent_from_memory() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    let failed = || AgentEvent::PersistFailed { task: task.id.clone(), reason: "no space left".to_owned() };
    let acknowledged = || AgentEvent::ResultAck(task.id.clone());
    harness.run(&task);
    harness.end(&task);
    let result = result_of(&harness.on(failed()));
    assert_eq!(harness.agent.open_tasks()[0].phase, OpenPhase::Finished);
    harness.on(AgentEvent::Disconnected);
    assert_eq!(result_of(&harness.on(AgentEvent::Connected)), result);
    // The write is retried. Until its outcome is known, the task isn't forgotten.
    harness.pass(5);
    assert!(record_of(&harness.on(AgentEvent::Tick)).result.is_some());
    assert_eq!(harness.on(acknowledged()), []);
    assert_eq!(result_of(&harness.on(failed())), result);
    assert_eq!(harness.on(acknowledged()), [AgentEffect::Forget(task.id.clone())]);
    assert!(harness.agent.is_empty());
}

#[test]
fn a_task_has_one_pending_write() {
    let mut harness = Harness::new();
    let task = task("a", 1, 3);
    harness.run(&task);
    let ended = |index| AgentEvent::ImageEnded { task: task.id.clone(), index, result: pulled() };
    record_of(&harness.on(ended(0)));
    assert_eq!(harness.on(ended(1)), []);
    assert_eq!(harness.on(ended(2)), []);
    let record = record_of(&harness.on(AgentEvent::Persisted(task.id.clone())));
    assert!(record.images.iter().all(Option::is_some));
    assert_eq!(harness.on(AgentEvent::Persisted(task.id.clone())), []);
}

#[test]
fn a_key_serves_only_its_reference() {
    let mut harness = Harness::new();
    let old = task("a", 1, 3);
    harness.restart(vec![TaskRecord::new(old.clone(), Duration::from_secs(60), harness.now)]);
    let mut new = assign(old.clone());
    new.task.images[0].reference = "evil.example/app:0".to_owned();
    new.task.images[1].key = 7;
    let effects = harness.on(AgentEvent::Assign(new));
    let Some(AgentEffect::Start(execution)) = effects.last() else { panic!("{effects:?}") };
    assert_eq!(execution.task, old, "the accepted task is carried out");
    let kinds: Vec<_> =
        execution.terms.keys.iter().map(|key| matches!(**key, PullKey::Credentials { .. })).collect();
    assert_eq!(kinds, [false, false, true]);
}

#[test]
fn a_crashed_executor_fails_its_task() {
    let mut harness = Harness::new();
    let task = task("a", 1, 2);
    harness.run(&task);
    harness.on(AgentEvent::ImageEnded { task: task.id.clone(), index: 0, result: pulled() });
    harness.on(AgentEvent::Persisted(task.id.clone()));
    let record =
        record_of(&harness.on(AgentEvent::Crashed { task: task.id.clone(), reason: "a bug".to_owned() }));
    let result = record.result.unwrap();
    let outcomes: Vec<_> = result.images.iter().map(|image| image.outcome).collect();
    assert_eq!(outcomes, [ImageOutcome::Pulled, ImageOutcome::Failed]);
    assert_eq!(result.outcome, TaskOutcome::Failed);
}

#[test]
fn progress_needs_a_running_task_and_session() {
    let mut harness = Harness::new();
    let task = task("a", 1, 1);
    let progress = || {
        AgentEvent::Progress(TaskProgress { task: task.id.clone(), images: Vec::new(), waits: String::new() })
    };
    assert_eq!(harness.on(progress()), [], "unknown");
    harness.run(&task);
    assert!(matches!(harness.on(progress())[..], [AgentEffect::Send(EdgeMessage::Progress(_))]));
    harness.on(AgentEvent::Disconnected);
    assert_eq!(harness.on(progress()), []);
}

#[test]
fn a_removal_begins_once_its_choice_is_on_the_disk() {
    let removal = |harness: &mut Harness| {
        let task = Task { removal: Some(Box::<Removal>::default()), ..task("job", 1, 0) };
        harness.run(&task);
        let chosen = RemovalRecord { planned: vec![PlannedRemoval::default()], kept: Vec::new() };
        let effects = harness.on(AgentEvent::Removal(task.id.clone(), Box::new(chosen)));
        (task.id, record_of(&effects))
    };
    let mut harness = Harness::new();
    let (id, record) = removal(&mut harness);
    assert_eq!(
        (record.format, record.removal.as_ref().map(|record| record.planned.len())),
        (FORMAT_OF_REMOVALS, Some(1))
    );
    assert_eq!(harness.on(AgentEvent::Persisted(id.clone())), [AgentEffect::MayRemove(id.clone())]);
    // Without an image the task hasn't ended by that.
    assert_eq!(harness.restart(vec![record]), []);
    assert_eq!(harness.agent.open_tasks()[0].phase, OpenPhase::NeedsKeys);

    // A full disk is the very reason to remove images.
    let mut harness = Harness::new();
    let (id, _) = removal(&mut harness);
    let refused = AgentEvent::PersistFailed { task: id.clone(), reason: "disk full".to_owned() };
    assert_eq!(harness.on(refused), [AgentEffect::MayRemove(id)]);
}
