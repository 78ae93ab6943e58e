#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use prepull_api::task::{ImageFacts, ImageOutcome, NoDelta, PulledBy};
use prepull_window::parse_window;

use super::*;

fn ended(outcome: ImageOutcome, code: Option<FailureCode>) -> ImageResult {
    let reason = String::new();
    ImageResult { reason, code, attempts: 1, ..ImageResult::new(outcome) }
}

#[test]
fn the_exposition_stays_the_same() {
    let metrics = AgentMetrics::default();
    metrics.set_connected(true);
    metrics.set_session(Some("a:1".to_owned()));
    metrics.set_open_tasks(2);
    metrics.count_task(TaskOutcome::DeadlineExceeded);
    // One image for all families: a family with several lines has them in any order.
    let failed = ended(ImageOutcome::Failed, Some(FailureCode::NoSpace));
    let took = Some(Duration::from_secs(2));
    let facts = ImageFacts {
        delta_saved_bytes: Some(13),
        no_delta: Some(NoDelta::WrongLayer),
        ..PulledBy::Agent.into()
    };
    metrics.count_image(&ImageResult { facts, took, ..failed });
    metrics.count_downloaded(5, false);
    metrics.count_served(7);
    metrics.count_removed(11);
    metrics.count_failed_try(ErrorClass::NoSpace, FailureCode::NoSpace);
    metrics.count_session();
    metrics.set_certificate_end(UNIX_EPOCH + Duration::from_secs(1_800_000_000));
    metrics.count_plugin_run("ecr", PluginOutcome::Ok, Duration::from_secs(1));
    assert_eq!(metrics.render(), include_str!("tests/exposition.txt"));
}

#[test]
fn events_and_session_are_exposed() {
    let metrics = AgentMetrics::default();
    metrics.set_connected(true);
    metrics.count_task(TaskOutcome::Failed);
    let facts = PulledBy::Agent.into();
    metrics.count_image(&ImageResult { facts, ..ended(ImageOutcome::Pulled, None) });
    let text = metrics.render();
    assert!(text.contains("edgecore_prepull_connected 1"), "{text}");
    assert!(text.contains("edgecore_prepull_images_total{outcome=\"there\"} 1"), "{text}");
    assert!(text.contains("edgecore_prepull_pulls_total{by=\"agent\"} 1"), "{text}");
    assert!(!text.contains("image_failures_total{"), "{text}");
    assert!(text.contains("edgecore_prepull_tasks_total{outcome=\"failed\"} 1"), "{text}");
    metrics.set_session(Some("a:1".to_owned()));
    metrics.set_session(Some("b:2".to_owned()));
    let text = metrics.render();
    assert!(text.contains("edgecore_prepull_session{address=\"b:2\"} 1"), "{text}");
    assert!(!text.contains("a:1"), "{text}");
    metrics.set_session(None);
    assert!(!metrics.render().contains("b:2"));
    metrics.count_plugin_run("ecr", PluginOutcome::Timeout, Duration::from_secs(60));
    let text = metrics.render();
    let name = "edgecore_prepull_credential_provider_exec";
    let runs = format!("{name}s_total{{provider=\"ecr\",outcome=\"timeout\"}} 1");
    assert!(text.contains(&runs), "{text}");
    assert!(text.contains(&format!("{name}_duration_seconds_sum{{provider=\"ecr\"}} 60.0")), "{text}");
}

#[test]
fn the_window_metrics_follow_the_clock() {
    let metrics = AgentMetrics::default();
    let clock = Arc::new(CloudClock::default());
    // A time of a clock that is set.
    let year = 30 * 365 * 24 * 3600;
    let at = |second: u64| {
        clock.set(Duration::from_secs(year + second));
        metrics.look_at_windows();
        let counted = &metrics.counted;
        (counted.download_window_open.get(), counted.download_window_change_timestamp_seconds.get())
    };
    assert_eq!(at(0), (0, 0), "nothing is known before the settings are read");
    let windows = ["01:00+4h"].map(|window| parse_window(window).unwrap());
    metrics.set_windows(Openings::new(&windows, Duration::ZERO, Some("UTC")), clock.clone());
    let change = |second: u64| i64::try_from(year + second).unwrap();
    assert_eq!(at(0), (0, change(3600)));
    assert_eq!(at(3600), (1, change(5 * 3600)));
    assert_eq!(at(5 * 3600), (0, change(25 * 3600)));
    clock.set(Duration::from_secs(2 * 3600));
    metrics.look_at_windows();
    assert_eq!(metrics.counted.download_window_open.get(), 0, "the clock isn't set");
    // Without windows, always.
    let metrics = AgentMetrics::default();
    metrics.set_windows(Openings::always(), Arc::default());
    assert!(metrics.render().contains("edgecore_prepull_download_window_open 1\n"));
}

#[test]
fn dashboard_and_manual_name_existing_metrics() {
    let texts = [
        include_str!("../../../manifests/monitoring/alerts.yaml"),
        include_str!("../../../manifests/monitoring/dashboard.json"),
        include_str!("../../../docs/operations/monitoring.md"),
    ];
    let named = |text: &'static str| {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let names = words.filter_map(|word| word.strip_prefix("edgecore_prepull_"));
        let suffixes = ["_total", "_bucket", "_count", "_sum"];
        let name =
            |name: &'static str| suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        names.map(name).collect::<Vec<_>>()
    };
    for text in &texts[..2] {
        for name in named(text) {
            assert!(Counted::NAMES.contains(&name), "there is no edgecore_prepull_{name}");
        }
    }
    let manual = named(texts[2]);
    for name in Counted::NAMES {
        assert!(
            manual.contains(name),
            "docs/operations/monitoring.md does not explain edgecore_prepull_{name}"
        );
    }
}
