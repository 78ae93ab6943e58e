//! Windows, caps and signatures of a task, which may change while it runs.

use std::time::SystemTime;

use prepull_api::download::{Verification, VerificationMode};
use prepull_api::wire::Assign;
use prepull_window::parse_window;

use super::*;
use crate::tasks::agent::{AgentEffect, AgentEvent, NodeWindows, Now, TaskAgent, TaskTerms};

thread_local! {
    /// The node's clock.
    static CLOCK: Arc<CloudClock> = Arc::default();
}

/// Sets the current time of day, in UTC.
pub(super) fn set_clock(time: &str) {
    let time: jiff::Timestamp = format!("2026-01-10T{time}Z").parse().unwrap();
    let since = time.duration_since(jiff::Timestamp::UNIX_EPOCH);
    CLOCK.with(|clock| clock.set(Duration::try_from(since).unwrap()));
}

fn wall() -> SystemTime {
    CLOCK.with(|clock| clock.wall())
}

pub(super) fn executor(fake: &Arc<Fake>) -> Arc<Executor<Fake>> {
    let mut executor = Executor::new(fake.clone(), NonZeroUsize::new(2).unwrap(), CheckLimits::default());
    executor.images.random = || 1.0;
    executor.images.clock = CLOCK.with(Arc::clone);
    Arc::new(executor)
}

pub(super) fn windows(texts: &[&str]) -> DownloadTerms {
    let windows = texts.iter().map(|text| parse_window(text).unwrap()).collect();
    DownloadTerms { windows, ..DownloadTerms::default() }
}

/// The execution that the agent makes of an assignment with these terms, with the node's own windows.
pub(super) fn terms_of(
    execution: &Execution,
    seconds: u64,
    download: DownloadTerms,
    own: &[&str],
) -> TaskTerms {
    let clock = NodeWindows { windows: windows(own).windows, ..NodeWindows::default() };
    let mut agent = TaskAgent::new(std::num::NonZeroU32::MIN).with_clock(clock);
    let now = Now { monotonic: Instant::now().into_std(), wall: wall(), boot: None };
    let task = execution.task.clone();
    let (id, remaining) = (task.id.clone(), Duration::from_secs(seconds));
    let keys = vec![PullKey::anonymous()];
    agent.handle(AgentEvent::Assign(Assign { task, remaining, keys, download }), now);
    let effects = agent.handle(AgentEvent::Persisted(id), now);
    let started = effects.into_iter().find_map(|effect| match effect {
        AgentEffect::Start(execution) => Some(execution.terms),
        _ => None,
    });
    started.unwrap()
}

pub(super) fn windowed(images: Vec<ImageTask>, seconds: u64, texts: &[&str]) -> Execution {
    let mut execution = execution(images);
    execution.terms = terms_of(&execution, seconds, windows(texts), &[]);
    execution
}

/// The reasons for waiting in the updates so far.
fn said(run: &mut Run) -> Vec<String> {
    let mut said = Vec::new();
    while let Ok(update) = run.updates.try_recv() {
        if let TaskUpdate::Progress { waits, .. } = update {
            said.push(waits);
        }
    }
    said.dedup();
    said
}

#[tokio::test(start_paused = true)]
async fn nothing_begins_before_the_window() {
    set_clock("00:00:00");
    let fake = Fake::new();
    let executor = executor(&fake);
    let mut run = start(&executor, windowed(vec![always("a")], 300, &["01:00+1h Europe/Berlin"]));
    sleep(Duration::from_secs(10)).await;
    // It is one o'clock in Berlin.
    assert_eq!(run.end.await.unwrap().outcome, TaskOutcome::Succeeded);

    set_clock("00:00:00");
    run = start(&executor, windowed(vec![always("b")], 300, &["01:00+1h UTC"]));
    sleep(Duration::from_secs(3599)).await;
    let waits = "waits for its window, opens at 01:00 UTC (Sat 10 Jan)";
    assert_eq!((fake.pulls(), said(&mut run)), (vec!["a".to_owned()], vec![waits.to_owned()]));
    sleep(Duration::from_secs(2)).await;
    assert_eq!(fake.pulls(), ["a", "b"]);
    let end = run.end.await.unwrap();
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
}

#[tokio::test(start_paused = true)]
async fn a_look_needs_no_window() {
    set_clock("00:00:00");
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["there".to_owned()];
    let looks = vec![image("there", PullPolicy::Never, 0), image("gone", PullPolicy::Never, 0)];
    let mut look = windowed(looks, 300, &["01:00+1h UTC"]);
    look.task.checks.clear();
    let begun = Instant::now();
    let end = start(&executor(&fake), look).end.await.unwrap();
    assert_eq!((outcomes(&end), begun.elapsed().as_secs()), (vec![Already, Failed], 0));
}

#[tokio::test(start_paused = true)]
async fn a_closed_window_costs_no_try() {
    set_clock("01:59:50");
    let fake = Fake::new();
    fake.script("a", [Act::Take(100), Act::Take(5)]);
    let executor = executor(&fake);
    let mut run = start(&executor, windowed(vec![always("a")], 60, &["01:00+1h UTC", "03:00+1h UTC"]));
    sleep(Duration::from_secs(11)).await;
    {
        let state = fake.state.lock().unwrap();
        assert_eq!((state.running, state.given_up.len()), (0, 0), "what was fetched stays");
    }
    assert!(said(&mut run).iter().any(|waits| waits.contains("opens at 03:00 UTC")));
    sleep(Duration::from_secs(3600)).await;
    let end = run.end.await.unwrap();
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    assert_eq!(fake.pulls(), ["a", "a"]);
}

#[tokio::test(start_paused = true)]
async fn after_the_last_byte_no_window_closes() {
    set_clock("01:59:50");
    let fake = Fake::new();
    fake.script("a", [Act::Unpack(5, 600)]);
    let begun = Instant::now();
    let run = start(&executor(&fake), windowed(vec![always("a")], 60, &["01:00+1h UTC"]));
    let end = run.end.await.unwrap();
    assert_eq!((outcomes(&end), end.images[0].attempts), (vec![New], 1));
    assert_eq!((begun.elapsed().as_secs(), fake.pulls().len()), (605, 1));
}

#[tokio::test(start_paused = true)]
async fn present_images_need_no_window() {
    set_clock("00:00:00");
    let fake = Fake::new();
    fake.state.lock().unwrap().present = vec!["there".to_owned()];
    let begun = Instant::now();
    let present = || image("there", PullPolicy::IfNotPresent, 0);
    let end = start(&executor(&fake), windowed(vec![present()], 300, &["01:00+1h UTC"])).end.await.unwrap();
    assert_eq!((outcomes(&end), begun.elapsed().as_secs()), (vec![Already], 0));

    // Together with a missing image, which gets its check for room when its window opens.
    let mut mixed =
        windowed(vec![present(), image("gone", PullPolicy::IfNotPresent, 0)], 300, &["01:00+1h UTC"]);
    mixed.task.checks.clear();
    let mut run = start(&executor(&fake), mixed);
    let ended = async {
        loop {
            if let TaskUpdate::ImageEnded { index, result } = run.updates.recv().await.unwrap() {
                return (index, result.outcome);
            }
        }
    };
    assert_eq!((ended.await, begun.elapsed().as_secs()), ((0, Already), 0));
    assert_eq!(outcomes(&run.end.await.unwrap()), [Already, New]);
    assert_eq!(begun.elapsed().as_secs(), 3601);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_counts_open_time_only() {
    set_clock("01:59:50");
    let fake = Fake::new();
    fake.script("a", [Act::Take(10_000), Act::Take(10_000)]);
    let begun = Instant::now();
    let run = start(&executor(&fake), windowed(vec![always("a")], 60, &["01:00+1h UTC", "03:00+1h UTC"]));
    let end = run.end.await.unwrap();
    assert_eq!(end.outcome, TaskOutcome::DeadlineExceeded);
    assert_eq!(begun.elapsed().as_secs(), 10 + 3600 + 50);
}

#[tokio::test(start_paused = true)]
async fn a_removed_window_releases_the_task() {
    set_clock("12:00:00");
    let fake = Fake::new();
    let executor = executor(&fake);
    let execution = windowed(vec![always("a")], 300, &["01:00+1h UTC"]);
    let free = terms_of(&execution, 300, DownloadTerms::default(), &[]);
    let mut run = start(&executor, execution);
    sleep(Duration::from_secs(100)).await;
    assert_eq!(said(&mut run).len(), 1);
    run.control.send_modify(|control| control.terms = free);
    let begun = Instant::now();
    assert_eq!(run.end.await.unwrap().outcome, TaskOutcome::Succeeded);
    assert!(begun.elapsed() < Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn the_nodes_windows_apply_to_each_task() {
    for of_task in [&["00:30+1h UTC"][..], &[]] {
        set_clock("00:40:00");
        let fake = Fake::new();
        let mut execution = execution(vec![always("a")]);
        execution.terms = terms_of(&execution, 300, windows(of_task), &["01:00+1h UTC"]);
        let begun = Instant::now();
        let run = start(&executor(&fake), execution);
        assert_eq!(run.end.await.unwrap().outcome, TaskOutcome::Succeeded);
        assert!(begun.elapsed() >= Duration::from_secs(20 * 60));
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_jump_is_noticed_within_a_minute() {
    set_clock("12:00:00");
    let fake = Fake::new();
    let run = start(&executor(&fake), windowed(vec![always("a")], 300, &["01:00+1h UTC"]));
    sleep(Duration::from_secs(600)).await;
    assert!(fake.pulls().is_empty());
    set_clock("01:10:00");
    let begun = Instant::now();
    assert_eq!(run.end.await.unwrap().outcome, TaskOutcome::Succeeded);
    assert!(begun.elapsed() < Duration::from_secs(65));
}

#[tokio::test(start_paused = true)]
async fn new_signature_terms_restart_a_pull() {
    set_clock("12:00:00");
    let fake = Fake::new();
    fake.script("a", [Act::Take(100), Act::Take(5)]);
    let run = start(&executor(&fake), windowed(vec![always("a")], 300, &[]));
    sleep(Duration::from_secs(10)).await;
    let rate = |rate| DownloadTerms { max_rate: std::num::NonZeroU64::new(rate), ..DownloadTerms::default() };
    run.control.send_modify(|control| control.terms.download = Arc::new(rate(4096)));
    sleep(Duration::from_secs(10)).await;
    assert_eq!(fake.pulls(), ["a"]);
    let verify = Verification { mode: VerificationMode::Warn, keys: Vec::new(), unavailable: None };
    let terms = DownloadTerms { verify: Some(verify), ..rate(4096) };
    run.control.send_modify(|control| control.terms.download = Arc::new(terms));
    let end = run.end.await.unwrap();
    assert_eq!((fake.pulls(), end.images[0].attempts), (vec!["a".to_owned(), "a".to_owned()], 1));
}

#[tokio::test(start_paused = true)]
async fn a_pull_begins_again_to_share() {
    set_clock("12:00:00");
    let fake = Fake::new();
    fake.script("a", [Act::Take(100), Act::Take(5)]);
    let run = start(&executor(&fake), windowed(vec![always("a")], 300, &[]));
    sleep(Duration::from_secs(10)).await;
    let terms =
        DownloadTerms { share: true, site_rate: std::num::NonZeroU64::new(4096), ..DownloadTerms::default() };
    run.control.send_modify(|control| control.terms.download = Arc::new(terms));
    let end = run.end.await.unwrap();
    assert_eq!((fake.pulls(), end.images[0].attempts), (vec!["a".to_owned(), "a".to_owned()], 1));
}
