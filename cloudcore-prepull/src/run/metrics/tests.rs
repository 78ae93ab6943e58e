#![allow(clippy::unwrap_used)]
use std::collections::BTreeSet;
use std::time::Duration;

use prepull_api::task::{
    ByteProgress, ImageFacts, ImageOutcome, JobUid, NoDelta, NodeName, PulledBy, TaskId, TaskOutcome,
    TaskResult,
};
use prepull_engine::fleet::session::SessionId;
use prepull_engine::prepull::controller::StatusOrReport;
use prepull_engine::shared::objects::{ObjectId, Unreadable};
use prepull_engine::sites::{CarrierReport, SiteCounters};

use super::sites::SiteSeries;
use super::*;
use crate::edges::pki::CaCensus;

fn node() -> NodeName {
    NodeName("edge-1".to_owned())
}

fn job() -> JobUid {
    JobUid("u".to_owned())
}

fn dispatched(outcome: DispatchOutcome) -> Input {
    controller::Input::Dispatched { job: job(), node: node(), attempt: 1, outcome, keys: None }.into()
}

fn written(outcome: WriteOutcome) -> Input {
    controller::Input::Written {
        job: job(),
        object: StatusOrReport::Status,
        version: 1,
        outcome,
        stored: None,
    }
    .into()
}

fn result(outcome: TaskOutcome) -> Input {
    let task = TaskId { job: job(), attempt: 1 };
    let image = |outcome, code| ImageResult { code, attempts: 1, ..ImageResult::new(outcome) };
    let timed = |image: ImageResult| {
        let (took, ended) = (Some(Duration::from_secs(2)), Some(Duration::from_secs(12)));
        let bytes = Some(ByteProgress { done: 1000, total: 1000 });
        ImageResult { took, ended, bytes, facts: PulledBy::Agent.into(), ..image }
    };
    let whole = ImageFacts { no_delta: Some(NoDelta::WrongLayer), ..ImageFacts::default() };
    let images = match outcome {
        TaskOutcome::Succeeded => vec![timed(image(ImageOutcome::Pulled, None))],
        TaskOutcome::Failed | TaskOutcome::Other => vec![
            ImageResult { facts: whole, ..image(ImageOutcome::Pulled, None) },
            image(ImageOutcome::Failed, Some(FailureCode::Unauthorized)),
            // Of an edge without codes.
            image(ImageOutcome::Failed, None),
        ],
        TaskOutcome::DeadlineExceeded => vec![image(ImageOutcome::Stopped, Some(FailureCode::Timeout))],
        TaskOutcome::Cancelled => Vec::new(),
    };
    let result = TaskResult { images, ..TaskResult::new(task, outcome) };
    let message = EdgeMessage::Result(result);
    FleetEvent::Session(SessionEvent::Message { node: node(), session: SessionId(1), message }).into()
}

fn node_image_written(written: WrittenNodeImage) -> Input {
    kruise::Input::Node(node_images::Input::Written(node(), written)).into()
}

fn kruise_job_written(outcome: WriteOutcome) -> Input {
    kruise::Input::Job(jobs::Input::Written { target: jobs::WriteTarget::PullJob(job()), outcome }).into()
}

fn site(name: &str) -> SiteReport {
    let carrier = |node: &str, bytes_per_second| CarrierReport {
        node: node.into(),
        digest: "sha256:1".to_owned(),
        size: 100,
        done: 50,
        since: jiff::Timestamp::UNIX_EPOCH,
        bytes_per_second,
        alone: "",
    };
    SiteReport {
        site: name.to_owned(),
        carriers: vec![carrier("edge-1", 7), carrier("edge-2", 5)],
        counters: SiteCounters {
            leases_lost: 1,
            claims_refused: 2,
            holders_delisted: 3,
            bytes_shared: 4,
            bytes_carried: 5,
        },
        ..SiteReport::default()
    }
}

#[test]
fn bytes_of_deltas_and_neighbours_count_apart() {
    let metrics = Metrics::default();
    let image = |saved, from_peers| ImageResult {
        bytes: Some(ByteProgress { done: 1000, total: 1000 }),
        from_peers,
        facts: ImageFacts {
            delta_saved_bytes: saved,
            no_delta: Some(NoDelta::OtherSource),
            ..PulledBy::Agent.into()
        },
        ..ImageResult::new(ImageOutcome::Pulled)
    };
    // The second one claims more than there is.
    metrics.count_images(&[image(Some(900), Some(60)), image(Some(u64::MAX), Some(u64::MAX))]);
    let text = metrics.render();
    for (by, bytes) in [("agent", 40), ("peer", 60), ("delta", 1900)] {
        let line = format!("cloudcore_prepull_pulled_image_bytes_total{{by=\"{by}\"}} {bytes}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
    let refused = "cloudcore_prepull_refused_deltas_total{reason=\"OtherSource\"} 2\n";
    assert!(text.contains(refused), "{text}");
}

/// The samples of one metric, which come in no order, in alphabetical order.
fn sorted(text: &str) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    let is_sample = |line: &&str| !line.starts_with('#');
    for block in lines.chunk_by_mut(|one, other| is_sample(one) == is_sample(other)) {
        if block.first().is_some_and(is_sample) {
            block.sort_unstable();
        }
    }
    lines.join("\n") + "\n"
}

/// Dashboards and alerts of users depend on every byte of a name, a label and a help text.
#[test]
fn the_whole_exposition_stays_as_it_is() {
    let metrics = Metrics::default();
    let times = |count: usize, metrics: &Metrics, input: &dyn Fn() -> Input| {
        (0..count).for_each(|_| metrics.count_input(&input()));
    };
    times(1, &metrics, &|| dispatched(DispatchOutcome::Sent(SessionId(1))));
    times(2, &metrics, &|| dispatched(DispatchOutcome::Offline));
    times(3, &metrics, &|| dispatched(DispatchOutcome::Unsendable(String::new())));
    times(5, &metrics, &|| dispatched(DispatchOutcome::Postponed(String::new())));
    let withheld = || DispatchOutcome::Withheld { secrets: Vec::new(), reason: String::new() };
    times(4, &metrics, &|| dispatched(withheld()));
    times(6, &metrics, &|| dispatched(DispatchOutcome::TooOld(String::new())));
    times(1, &metrics, &|| written(WriteOutcome::Done));
    times(2, &metrics, &|| written(WriteOutcome::Gone));
    times(3, &metrics, &|| written(WriteOutcome::Failed));
    times(1, &metrics, &|| result(TaskOutcome::Succeeded));
    times(2, &metrics, &|| result(TaskOutcome::Failed));
    times(3, &metrics, &|| result(TaskOutcome::DeadlineExceeded));
    times(4, &metrics, &|| result(TaskOutcome::Cancelled));
    times(1, &metrics, &|| Input::Tick);
    times(1, &metrics, &|| node_image_written(WrittenNodeImage::Done(None)));
    times(4, &metrics, &|| node_image_written(WrittenNodeImage::Refused(None)));
    times(1, &metrics, &|| node_image_written(WrittenNodeImage::Failed));
    times(1, &metrics, &|| kruise_job_written(WriteOutcome::Done));
    times(3, &metrics, &|| kruise_job_written(WriteOutcome::Gone));
    times(4, &metrics, &|| kruise_job_written(WriteOutcome::Failed));
    let task = TaskId { job: job(), attempt: 1 };
    let offline =
        node_images::Input::Dispatched { node: node(), task, outcome: DispatchOutcome::Offline, keys: None };
    metrics.count_input(&kruise::Input::Node(offline).into());
    let id = ObjectId { namespace: "shop".to_owned(), name: "web".to_owned(), uid: job() };
    let unreadable =
        Unreadable { id, generation: 1, error: String::new(), start_time: None, completion_time: None };
    metrics.count_input(&kruise::Input::Job(jobs::Input::PullJob(Err(unreadable))).into());

    let phases =
        [(JobPhase::Init, 1), (JobPhase::InProgress, 2), (JobPhase::Completed, 3), (JobPhase::Failure, 4)];
    metrics.set_levels(phases, 7);
    let nodes = Summary { pending: 4, in_progress: 3, failure: 1, ..Summary::default() };
    metrics.set_job_nodes([("over", &nodes), ("spring", &nodes)].into_iter());
    metrics.set_job_nodes([("spring", &nodes)].into_iter());
    metrics.measure_write(WriteOutcome::Done, Duration::from_millis(30));
    metrics.set_leadership(&Leadership::undisputed());
    let census = CaCensus { connected: 9, informed: 7, renewed: 5, unable: 1, old_subject: 3 };
    metrics.edges().set_outdated(&census);

    metrics.count_site_event(SiteEventKind::HolderDelisted);
    metrics.set_sites(&[site("north"), site("south")], 1000, 2000);
    metrics.set_sites(&[site("north")], 3000, 4000);

    metrics.count_traces("sent", 2);
    metrics.count_traces("lost", 1);

    assert_eq!(sorted(&metrics.render()), include_str!("tests/exposition.txt"));
}

/// Every metric of a text that begins with the prefix, without the prefix and the suffixes of samples.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let names = words.filter_map(|word| word.strip_prefix("cloudcore_prepull_"));
    let suffixes = ["_total", "_bucket", "_count", "_sum"];
    names.map(|name| suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)).collect()
}

#[test]
fn dashboards_alerts_and_docs_match_the_metrics() {
    let exist: BTreeSet<_> = [Counted::NAMES, EdgeMetrics::NAMES, RosterMetrics::NAMES, SiteSeries::NAMES]
        .concat()
        .into_iter()
        .collect();
    let alerts = include_str!("../../../../manifests/monitoring/alerts.yaml");
    let dashboard = include_str!("../../../../manifests/monitoring/dashboard.json");
    for text in [alerts, dashboard] {
        assert!(named(text).len() > 5);
        assert_eq!(named(text).difference(&exist).collect::<Vec<_>>(), Vec::<&&str>::new());
    }
    let manual = include_str!("../../../../docs/operations/monitoring.md");
    let in_manual = named(manual);
    assert_eq!(exist.difference(&in_manual).collect::<Vec<_>>(), Vec::<&&str>::new());
    // Each alert leads to what is to be done.
    for alert in alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(manual.contains(&format!("\n#### {alert}\n")), "{alert} has no paragraph");
        let runbook = format!("runbook: docs/operations/monitoring.md#{}\n", alert.to_lowercase());
        assert!(alerts.contains(&runbook), "{alert} names no paragraph");
    }
}

#[test]
fn job_series_are_bounded_and_removed() {
    let metrics = Metrics::default();
    let nodes = Summary { pending: 1, ..Summary::default() };
    let names: Vec<_> = (0..MAX_JOBS + 50).map(|number| format!("job-{number:03}")).collect();
    let series = |metrics: &Metrics| metrics.render().matches("_job_nodes{").count();
    metrics.set_job_nodes(names.iter().map(|name| (name.as_str(), &nodes)));
    assert_eq!(series(&metrics), 5 * MAX_JOBS);
    metrics.set_job_nodes(names.iter().skip(120).map(|name| (name.as_str(), &nodes)));
    assert_eq!(series(&metrics), 5 * 30);
    metrics.set_job_nodes(std::iter::empty());
    assert_eq!(series(&metrics), 0);
}

#[test]
fn cleared_work_leaves_no_gauge_behind() {
    let nodes = Summary { pending: 1, ..Summary::default() };
    let census = CaCensus { connected: 9, informed: 7, renewed: 5, unable: 1, old_subject: 3 };
    let phases = [JobPhase::Init, JobPhase::InProgress, JobPhase::Completed, JobPhase::Failure];
    let sites = [SiteReport { counters: SiteCounters::default(), ..site("north") }];
    let gauges: [&dyn Fn(&Metrics); 4] = [
        &|metrics| metrics.set_levels(phases.map(|phase| (phase, 1)), 7),
        &|metrics| metrics.set_job_nodes(std::iter::once(("spring", &nodes))),
        &|metrics| metrics.set_sites(&sites, 3000, 4000),
        &|metrics| metrics.edges().set_outdated(&census),
    ];
    let stay = gauges.map(|set| {
        let metrics = Metrics::default();
        metrics.clear_work(4000);
        let idle = sorted(&metrics.render());
        set(&metrics);
        assert_ne!(sorted(&metrics.render()), idle);
        metrics.clear_work(4000);
        sorted(&metrics.render()) != idle
    });
    assert_eq!(stay, [false; 4]);
}

#[test]
fn only_the_most_active_sites_have_series() {
    let metrics = Metrics::default();
    let sites: Vec<_> = (0..60).map(|number| site(&format!("site-{number}"))).collect();
    let series = |metrics: &Metrics| metrics.render().matches("_site_carriers{").count();
    metrics.set_sites(&sites, 0, 0);
    assert_eq!(series(&metrics), 50);
    metrics.set_sites(&sites[55..], 0, 0);
    assert_eq!(series(&metrics), 5);
    metrics.set_sites(&[], 0, 0);
    assert!(!metrics.render().contains(r#"site=""#));
}
