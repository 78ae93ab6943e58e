#![allow(clippy::unwrap_used)]
use prepull_api::task::{CheckItem, ImageTask, JobUid, Task};

use super::*;
use crate::sim::behaviour::PullDurations;

const SECOND: Duration = Duration::from_secs(1);

/// A machine with its counts and its events.
struct Bench {
    machine: SimulatedMachine,
    counts: Arc<FleetCounters>,
    begun: Instant,
    events: VecDeque<AgentEvent>,
}

impl Bench {
    fn new(behaviour: Behaviour) -> Self {
        let counts = Arc::new(FleetCounters::new());
        let machine =
            SimulatedMachine::new(Arc::new(behaviour), Chance::new(1, 1), false, Arc::clone(&counts));
        Self { machine, counts, begun: Instant::now(), events: VecDeque::new() }
    }

    fn pulling(pull: Duration) -> Self {
        Self::new(Behaviour { pull: PullDurations::Fixed(pull), ..Behaviour::default() })
    }

    fn start(&mut self, at: Duration, work: Execution) {
        self.machine.start_task(work, self.begun + at, &mut self.events);
    }

    /// Lets time pass in the edge's way, from one due moment to the next.
    fn until(&mut self, end: Duration) {
        while let Some(next) = self.machine.next_due().filter(|next| *next <= self.begun + end) {
            self.machine.advance(next, &mut self.events);
        }
    }

    /// Images that have ended, each with its outcome.
    fn images(&self) -> Vec<(usize, ImageOutcome)> {
        let ended = self.events.iter().filter_map(|event| match event {
            AgentEvent::ImageEnded { index, result, .. } => Some((*index, result.outcome)),
            _ => None,
        });
        ended.collect()
    }

    fn ends(&self) -> Vec<(TaskOutcome, Vec<ImageOutcome>)> {
        let ended = self.events.iter().filter_map(|event| match event {
            AgentEvent::Ended(_, end) => {
                Some((end.outcome, end.images.iter().map(|image| image.outcome).collect()))
            }
            _ => None,
        });
        ended.collect()
    }
}

/// A task with this many images and a deadline of a minute.
fn work(begun: Instant, attempt: u32, images: usize) -> Execution {
    let image = |number: usize| ImageTask {
        image: format!("image-{number}"),
        ..ImageTask::new(&format!("registry.example/image-{number}"))
    };
    let task = Task {
        title: "job".to_owned(),
        checks: vec![CheckItem::Disk],
        ..Task::new(TaskId { job: JobUid("job".to_owned()), attempt }, (0..images).map(image).collect())
    };
    let terms = TaskTerms {
        deadline: begun + 60 * SECOND,
        keys: Vec::new(),
        download: Arc::default(),
        windows: None,
    };
    Execution { removal: None, task, check: None, done: vec![None; images], terms }
}

#[test]
fn images_are_pulled_one_after_another() {
    use ImageOutcome::Pulled;
    let mut bench = Bench::pulling(2 * SECOND);
    bench.start(Duration::ZERO, work(bench.begun, 1, 3));
    bench.until(5 * SECOND);
    assert_eq!(bench.images(), [(0, Pulled), (1, Pulled)]);
    assert_eq!(bench.ends(), []);
    bench.until(6 * SECOND);
    assert_eq!(bench.ends(), [(TaskOutcome::Succeeded, vec![Pulled; 3])]);
    assert_eq!(bench.machine.next_due(), None);
    let tally = bench.counts.tally();
    assert_eq!((tally.pulls, tally.whole, tally.pulled_twice, tally.running), (3, 3, 0, 0));
}

#[test]
fn a_restart_loses_only_the_running_pull() {
    let mut bench = Bench::pulling(2 * SECOND);
    let task = work(bench.begun, 1, 3);
    bench.start(Duration::ZERO, task.clone());
    bench.until(3 * SECOND);
    bench.machine.restart();
    bench.until(10 * SECOND);
    assert_eq!(bench.images(), [(0, ImageOutcome::Pulled)]);
    // The agent's ledger has the first image.
    let mut rest = task;
    rest.done[0] = Some(result(ImageOutcome::Pulled, 1));
    bench.start(10 * SECOND, rest);
    bench.until(14 * SECOND);
    assert_eq!(bench.ends(), [(TaskOutcome::Succeeded, vec![ImageOutcome::Pulled; 3])]);
    let tally = bench.counts.tally();
    assert_eq!((tally.pulls, tally.whole, tally.pulled_twice, tally.most_at_once), (4, 3, 0, 1));
}

#[test]
fn only_the_same_attempt_repeats_a_pull() {
    let mut bench = Bench::pulling(SECOND);
    bench.start(Duration::ZERO, work(bench.begun, 1, 2));
    bench.until(2 * SECOND);
    bench.start(2 * SECOND, work(bench.begun, 2, 2));
    assert_eq!(bench.ends()[1], (TaskOutcome::Succeeded, vec![ImageOutcome::Present; 2]));
    assert_eq!(bench.counts.tally().pulled_twice, 0);
    bench.start(2 * SECOND, work(bench.begun, 1, 2));
    assert_eq!(bench.counts.tally().pulled_twice, 2);
}

#[test]
fn a_requested_tag_counts_for_a_minute() {
    let mut bench = Bench::pulling(SECOND);
    let of_node_image = |begun| {
        let mut work = work(begun, 1, 1);
        work.task.id.job = JobUid("uid.hash".to_owned());
        work
    };
    bench.start(Duration::ZERO, of_node_image(bench.begun));
    bench.until(2 * SECOND);
    bench.start(20 * SECOND, of_node_image(bench.begun));
    bench.until(21 * SECOND);
    assert_eq!(bench.counts.tally().pulled_twice, 1);
    bench.start(62 * SECOND, of_node_image(bench.begun));
    assert_eq!(bench.counts.tally().pulled_twice, 1);
}

#[test]
fn an_early_end_keeps_complete_images() {
    use ImageOutcome::{Pulled, Stopped};
    let mut bench = Bench::pulling(40 * SECOND);
    bench.start(Duration::ZERO, work(bench.begun, 1, 2));
    bench.until(100 * SECOND);
    assert_eq!(bench.ends(), [(TaskOutcome::DeadlineExceeded, vec![Pulled, Stopped])]);

    let mut bench = Bench::pulling(40 * SECOND);
    let task = work(bench.begun, 1, 2);
    bench.start(Duration::ZERO, task.clone());
    bench.until(50 * SECOND);
    bench.machine.renew_terms(
        &task.task.id,
        TaskTerms {
            deadline: bench.begun + 100 * SECOND,
            keys: Vec::new(),
            download: Arc::default(),
            windows: None,
        },
    );
    bench.until(70 * SECOND);
    bench.machine.stop_task(&task.task.id, "enough", bench.begun + 70 * SECOND, &mut bench.events);
    assert_eq!(bench.ends(), [(TaskOutcome::Cancelled, vec![Pulled, Stopped])]);
    assert_eq!((bench.machine.next_due(), bench.counts.tally().running), (None, 0));
}

#[test]
fn progress_rises_once_a_second() {
    let pull = PullDurations::Fixed(10 * SECOND);
    let mut bench = Bench::new(Behaviour { pull, image_bytes: 1000, ..Behaviour::default() });
    bench.start(Duration::ZERO, work(bench.begun, 1, 1));
    bench.until(10 * SECOND);
    let said = bench.events.iter().filter_map(|event| match event {
        AgentEvent::Progress(progress) => progress.images[0].bytes.map(|bytes| bytes.done),
        _ => None,
    });
    let said: Vec<_> = said.collect();
    assert_eq!(said.len(), 10, "{said:?}");
    assert!(said.windows(2).all(|pair| pair[0] < pair[1]) && said[9] <= 1000, "{said:?}");
}

#[test]
fn the_fail_rate_is_reproducible() {
    let run = |seed| {
        let behaviour = Behaviour { fail_rate: 0.25, seed, ..Behaviour::default() };
        let mut bench = Bench::new(behaviour);
        bench.machine.chance = Chance::new(seed, 1);
        bench.start(Duration::ZERO, work(bench.begun, 1, 200));
        bench.images()
    };
    let failed = run(5).iter().filter(|(_, outcome)| *outcome == ImageOutcome::Failed).count();
    assert!((30..70).contains(&failed), "{failed}");
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
}
