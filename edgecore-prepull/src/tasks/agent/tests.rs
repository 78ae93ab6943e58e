#![allow(clippy::unwrap_used, clippy::expect_used)]

use prepull_api::credentials::{RegistryCredential, Sensitive};
use prepull_api::task::{ImageTask, JobUid, PullPolicy};
use prepull_api::wire::MAX_IMAGES;

use super::*;

pub(super) fn task(job: &str, attempt: u32, images: usize) -> Task {
    let image = |n| ImageTask {
        image: format!("app:{n}"),
        reference: format!("r.example/app:{n}"),
        policy: PullPolicy::IfNotPresent,
        retries: 0,
        key: 0,
        timeout: None,
        sandbox: None,
    };
    let id = TaskId { job: JobUid(job.to_owned()), attempt };
    Task { id, title: job.to_owned(), checks: Vec::new(), images: (0..images).map(image).collect() }
}

pub(super) fn assign(task: Task) -> Assign {
    let credential =
        RegistryCredential { password: Sensitive::new("hunter2"), ..RegistryCredential::default() };
    let keys = vec![Key::Credentials { credentials: vec![credential] }];
    Assign { task, remaining: Duration::from_secs(300), keys }
}

pub(super) fn pulled() -> ImageResult {
    ImageResult {
        outcome: ImageOutcome::Pulled,
        digest: Some("sha256:1".to_owned()),
        id: None,
        reason: String::new(),
        bytes: None,
        attempts: 1,
    }
}

/// An agent with a clock.
pub(super) struct Bench {
    pub(super) agent: Agent,
    pub(super) now: Now,
}

impl Bench {
    pub(super) fn new() -> Self {
        Self::with(1)
    }

    /// With so many tasks at a time.
    pub(super) fn with(max_tasks: u32) -> Self {
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let mut bench = Self {
            agent: Agent::new(max_tasks.try_into().unwrap()),
            now: Now { monotonic: Instant::now(), wall },
        };
        assert_eq!(bench.on(Event::Connected), []);
        bench
    }

    pub(super) fn on(&mut self, event: Event) -> Vec<Effect> {
        self.agent.handle(event, self.now)
    }

    pub(super) fn pass(&mut self, seconds: u64) {
        self.now.monotonic += Duration::from_secs(seconds);
        self.now.wall += Duration::from_secs(seconds);
    }

    /// Assigns the task, and has its record written.
    pub(super) fn run(&mut self, task: &Task) -> Vec<Effect> {
        self.on(Event::Assign(assign(task.clone())));
        self.on(Event::Persisted(task.id.clone()))
    }

    pub(super) fn end(&mut self, task: &Task) -> Vec<Effect> {
        let images = task.images.iter().map(|_| pulled()).collect();
        let end = TaskEnd { outcome: TaskOutcome::Succeeded, reason: String::new(), check: None, images };
        self.on(Event::Ended(task.id.clone(), end))
    }

    pub(super) fn restart(&mut self, records: Vec<TaskRecord>) -> Vec<Effect> {
        self.agent = Agent::new(self.agent.max_tasks());
        self.on(Event::Loaded(records))
    }
}

pub(super) fn record_of(effects: &[Effect]) -> TaskRecord {
    match effects {
        [Effect::Persist(record)] => (**record).clone(),
        other => panic!("expected one Persist, got {other:?}"),
    }
}

pub(super) fn result_of(effects: &[Effect]) -> TaskResult {
    match effects {
        [Effect::Send(EdgeMessage::Result(result))] => result.clone(),
        other => panic!("expected one Result, got {other:?}"),
    }
}

#[test]
fn a_task_is_stored_then_accepted_then_started() {
    let mut bench = Bench::new();
    let task = task("a", 1, 2);
    let record = record_of(&bench.on(Event::Assign(assign(task.clone()))));
    assert_eq!((&record.task, record.images.len()), (&task, 2));
    assert_eq!(bench.agent.open_tasks(), [], "it is not on the disk yet");
    let effects = bench.on(Event::Persisted(task.id.clone()));
    let [Effect::Send(EdgeMessage::Accepted { task: accepted }), Effect::Start(work)] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((accepted, &work.task), (&task.id, &task));
    assert_eq!(work.terms.keys.len(), 2);
    assert_eq!(bench.agent.open_tasks()[0].phase, OpenPhase::Running);
}

#[test]
fn a_result_is_stored_then_sent_and_kept_until_it_is_acknowledged() {
    let mut bench = Bench::new();
    let task = task("a", 1, 1);
    bench.run(&task);
    bench.pass(7);
    let record = record_of(&bench.end(&task));
    assert_eq!(record.result.as_ref().unwrap().took, Duration::from_secs(7));
    assert_eq!(
        bench.on(Event::ResultAck(task.id.clone())),
        [],
        "nothing was sent that could be acknowledged"
    );
    let result = result_of(&bench.on(Event::Persisted(task.id.clone())));
    assert_eq!(Some(&result), record.result.as_ref());

    bench.on(Event::Disconnected);
    assert_eq!(result_of(&bench.on(Event::Connected)), result);
    assert_eq!(result_of(&bench.on(Event::Assign(assign(task.clone())))), result);
    assert_eq!(result_of(&bench.on(Event::Cancel { task: task.id.clone(), reason: String::new() })), result);

    bench.restart(vec![record]);
    bench.on(Event::Disconnected);
    assert_eq!(result_of(&bench.on(Event::Connected)), result);
    assert_eq!(bench.on(Event::ResultAck(task.id.clone())), [Effect::Forget(task.id.clone())]);
    assert_eq!(bench.on(Event::ResultAck(task.id.clone())), []);
    assert!(bench.agent.is_empty());
}

#[test]
fn the_record_holds_no_credential() {
    let mut bench = Bench::new();
    let record = record_of(&bench.on(Event::Assign(assign(task("a", 1, 1)))));
    assert!(!serde_json::to_string(&record).unwrap().contains("hunter2"));
    assert!(!format!("{:?}", bench.agent).contains("hunter2"));
}

#[test]
fn a_running_task_assigned_again_gets_new_terms_and_no_second_start() {
    let mut bench = Bench::new();
    let task = task("a", 1, 1);
    bench.run(&task);
    bench.pass(100);
    let effects = bench.on(Event::Assign(assign(task.clone())));
    let [Effect::Persist(record), Effect::Renew(_, terms), Effect::Send(EdgeMessage::Accepted { .. })] =
        &effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!(record.deadline_set, WallClock::of(bench.now.wall));
    assert_eq!(terms.deadline, bench.now.monotonic + Duration::from_secs(300));
}

#[test]
fn after_a_restart_the_task_waits_for_keys_and_keeps_what_had_ended() {
    let mut bench = Bench::new();
    let task = task("a", 1, 3);
    bench.run(&task);
    let ended = Event::ImageEnded { task: task.id.clone(), index: 1, result: pulled() };
    let record = record_of(&bench.on(ended));

    bench.pass(10);
    assert_eq!(bench.restart(vec![record]), []);
    assert_eq!(bench.agent.open_tasks()[0].phase, OpenPhase::NeedsKeys);
    let effects = bench.on(Event::Assign(assign(task.clone())));
    let [Effect::Persist(_), Effect::Send(EdgeMessage::Accepted { .. }), Effect::Start(work)] = &effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!(work.done, [None, Some(pulled()), None]);
}

#[test]
fn a_task_whose_images_had_all_ended_needs_no_keys() {
    let mut bench = Bench::new();
    let task = task("a", 1, 2);
    let mut record = TaskRecord::new(task.clone(), Duration::from_secs(60), WallClock::of(bench.now.wall));
    let failed = ImageResult { outcome: ImageOutcome::Failed, reason: "401".to_owned(), ..pulled() };
    record.images = vec![Some(pulled()), Some(failed)];
    let result = record_of(&bench.restart(vec![record])).result.unwrap();
    assert_eq!((result.outcome, result.reason.as_str()), (TaskOutcome::Failed, "app:1: 401"));
}

#[test]
fn the_deadline_passes_while_a_restarted_task_waits_for_keys() {
    let mut bench = Bench::new();
    let task = task("a", 1, 2);
    let mut record = TaskRecord::new(task.clone(), Duration::from_secs(60), WallClock::of(bench.now.wall));
    record.images[0] = Some(pulled());
    bench.pass(20);
    bench.restart(vec![record]);
    assert_eq!(bench.agent.next_tick(), Some(bench.now.monotonic + Duration::from_secs(40)));
    bench.pass(39);
    assert_eq!(bench.on(Event::Tick), []);
    bench.pass(1);
    let result = record_of(&bench.on(Event::Tick)).result.unwrap();
    assert_eq!(result.outcome, TaskOutcome::DeadlineExceeded);
    let outcomes: Vec<_> = result.images.iter().map(|image| image.outcome).collect();
    assert_eq!(outcomes, [ImageOutcome::Pulled, ImageOutcome::Stopped]);
}

#[test]
fn a_clock_in_the_past_gives_the_whole_time_again_and_no_more() {
    let set = WallClock(1_000_000_000);
    let record = TaskRecord::new(task("a", 1, 1), Duration::from_secs(60), set);
    for (now, left) in
        [(0, 60_000), (999_999_999, 60_000), (1_000_000_000, 60_000), (1_000_045_000, 15_000), (u64::MAX, 0)]
    {
        assert_eq!(record.left(WallClock(now)), Duration::from_millis(left), "{now}");
    }
}

#[test]
fn a_cancel_stops_the_executor_and_the_result_says_so() {
    let mut bench = Bench::new();
    let task = task("a", 1, 1);
    let cancel = || Event::Cancel { task: task.id.clone(), reason: "job deleted".to_owned() };
    assert_eq!(bench.on(cancel()), [], "unknown");

    bench.run(&task);
    assert_eq!(
        bench.on(cancel()),
        [Effect::Stop { task: task.id.clone(), reason: "job deleted".to_owned() }]
    );
    // The executor was faster: what it says stands.
    let record = record_of(&bench.end(&task));
    assert_eq!(record.result.unwrap().outcome, TaskOutcome::Succeeded);
}

#[test]
fn a_cancel_before_the_record_is_on_the_disk_ends_through_the_disk_as_well() {
    let mut bench = Bench::new();
    let task = task("a", 1, 1);
    bench.on(Event::Assign(assign(task.clone())));
    assert_eq!(bench.on(Event::Cancel { task: task.id.clone(), reason: "job deleted".to_owned() }), []);
    let record = record_of(&bench.on(Event::Persisted(task.id.clone())));
    assert_eq!(record.result.as_ref().unwrap().outcome, TaskOutcome::Cancelled);
    let result = result_of(&bench.on(Event::Persisted(task.id.clone())));
    assert_eq!(result.reason, "cancelled: job deleted");
}

#[test]
fn a_later_attempt_replaces_an_earlier_one_and_not_the_other_way_round() {
    let mut bench = Bench::new();
    let (first, second) = (task("a", 1, 1), task("a", 2, 1));
    bench.run(&first);
    let effects = bench.on(Event::Assign(assign(second.clone())));
    let [Effect::Stop { task, .. }, Effect::Persist(record)] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((task, record.id()), (&first.id, &second.id));

    let mut bench = Bench::new();
    bench.run(&second);
    let result = result_of(&bench.on(Event::Assign(assign(first.clone()))));
    assert_eq!((result.task, result.outcome), (first.id, TaskOutcome::Cancelled));
    assert_eq!(bench.agent.len(), 1);
}

#[test]
fn tasks_beyond_the_bound_are_refused_without_a_record() {
    let mut bench = Bench::new();
    for n in 0..MAX_OPEN_TASKS {
        bench.run(&task(&format!("job-{n}"), 1, 1));
    }
    let result = result_of(&bench.on(Event::Assign(assign(task("one-more", 1, 1)))));
    assert_eq!(result.outcome, TaskOutcome::Failed);
    assert!(result.reason.contains("64 tasks"), "{}", result.reason);
    assert_eq!(bench.agent.open_tasks().len(), MAX_OPEN_TASKS);

    let result = result_of(&Bench::new().on(Event::Assign(assign(task("huge", 1, MAX_IMAGES + 1)))));
    assert_eq!((result.outcome, result.images.len()), (TaskOutcome::Failed, MAX_IMAGES));
}

#[test]
fn a_record_that_cannot_be_written_refuses_a_new_task_and_delays_a_result() {
    let mut bench = Bench::new();
    let task = task("a", 1, 1);
    let failed = || Event::PersistFailed { task: task.id.clone(), reason: "no space left".to_owned() };
    bench.on(Event::Assign(assign(task.clone())));
    let effects = bench.on(failed());
    assert!(
        matches!(&effects[..], [Effect::Send(EdgeMessage::Result(result)), Effect::Forget(_)] if result.reason.contains("no space left")),
        "{effects:?}"
    );

    bench.run(&task);
    bench.end(&task);
    assert_eq!(bench.on(failed()), []);
    bench.pass(4);
    assert_eq!(bench.on(Event::Tick), []);
    bench.pass(1);
    assert!(record_of(&bench.on(Event::Tick)).result.is_some());
    result_of(&bench.on(Event::Persisted(task.id.clone())));
}

#[test]
fn writes_of_one_task_do_not_pile_up() {
    let mut bench = Bench::new();
    let task = task("a", 1, 3);
    bench.run(&task);
    let ended = |index| Event::ImageEnded { task: task.id.clone(), index, result: pulled() };
    record_of(&bench.on(ended(0)));
    assert_eq!(bench.on(ended(1)), []);
    assert_eq!(bench.on(ended(2)), []);
    let record = record_of(&bench.on(Event::Persisted(task.id.clone())));
    assert!(record.images.iter().all(Option::is_some));
    assert_eq!(bench.on(Event::Persisted(task.id.clone())), []);
}

#[test]
fn a_key_serves_only_the_reference_that_it_was_sent_for() {
    let mut bench = Bench::new();
    let old = task("a", 1, 3);
    bench.restart(vec![TaskRecord::new(old.clone(), Duration::from_secs(60), WallClock::of(bench.now.wall))]);
    let mut new = assign(old.clone());
    new.task.images[0].reference = "evil.example/app:0".to_owned();
    new.task.images[1].key = 7;
    let effects = bench.on(Event::Assign(new));
    let Some(Effect::Start(work)) = effects.last() else { panic!("{effects:?}") };
    assert_eq!(work.task, old, "what was accepted is what is done");
    let kinds: Vec<_> = work.terms.keys.iter().map(|key| matches!(**key, Key::Credentials { .. })).collect();
    assert_eq!(kinds, [false, false, true]);
}

#[test]
fn a_crash_of_the_executor_is_a_result() {
    let mut bench = Bench::new();
    let task = task("a", 1, 2);
    bench.run(&task);
    bench.on(Event::ImageEnded { task: task.id.clone(), index: 0, result: pulled() });
    bench.on(Event::Persisted(task.id.clone()));
    let record = record_of(&bench.on(Event::Crashed { task: task.id.clone(), reason: "a bug".to_owned() }));
    let result = record.result.unwrap();
    let outcomes: Vec<_> = result.images.iter().map(|image| image.outcome).collect();
    assert_eq!(outcomes, [ImageOutcome::Pulled, ImageOutcome::Failed]);
    assert_eq!(result.outcome, TaskOutcome::Failed);
}

#[test]
fn progress_is_of_the_moment() {
    let mut bench = Bench::new();
    let task = task("a", 1, 1);
    let progress = || Event::Progress(Progress { task: task.id.clone(), images: Vec::new() });
    assert_eq!(bench.on(progress()), [], "unknown");
    bench.run(&task);
    assert!(matches!(bench.on(progress())[..], [Effect::Send(EdgeMessage::Progress(_))]));
    bench.on(Event::Disconnected);
    assert_eq!(bench.on(progress()), []);
}
