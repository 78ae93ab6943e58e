#![allow(clippy::unwrap_used)]
use prepull_api::crd::status::NodePhase;
use serde_json::json;

use super::*;

fn job(name: &str, uid: &str) -> ImagePrePullJob {
    serde_json::from_value(json!({
        "apiVersion": "operations.kubeedge.io/v1alpha1", "kind": "ImagePrePullJob",
        "metadata": { "name": name, "uid": uid },
        "spec": { "imagePrePullTemplate": { "images": ["a:1"] } },
    }))
    .unwrap()
}

fn report(name: &str, uid: &str, nodes: &[(&str, &str)]) -> ImagePrePullReport {
    let nodes: Vec<_> =
        nodes.iter().map(|(node, phase)| json!({ "nodeName": node, "phase": phase })).collect();
    serde_json::from_value(json!({
        "metadata": { "name": name, "labels": { JOB_UID_LABEL: uid } }, "nodeStatus": nodes,
    }))
    .unwrap()
}

fn refreshed(known: &mut PageState) -> u64 {
    known.refresh_rows(Timestamp::UNIX_EPOCH, Duration::from_secs(1))
}

#[test]
fn reports_join_jobs_by_uid() {
    let mut known = PageState::default();
    known.take_report(Event::Apply(report("web-0", "1", &[("edge-1", "InProgress")])));
    assert!(known.nodes("web").is_empty());
    known.take_job(Event::Apply(job("web", "1")));
    known.take_report(Event::Apply(report("web-1", "1", &[("edge-2", "Pending")])));
    known.take_report(Event::Apply(report("web-0", "0", &[("edge-3", "Failure")])));
    assert_eq!(known.nodes("web").into_keys().collect::<Vec<_>>(), ["edge-1", "edge-2"]);
    // A job of the same name is another one.
    known.take_job(Event::Apply(job("web", "0")));
    assert_eq!(known.nodes("web").into_keys().collect::<Vec<_>>(), ["edge-3"]);
    known.take_report(Event::Delete(report("web-0", "0", &[])));
    assert!(known.nodes("web").is_empty());
}

#[test]
fn a_node_leads_to_its_report() {
    let mut known = PageState::default();
    known.take_job(Event::Apply(job("web", "1")));
    known.take_report(Event::Apply(report("web-0", "1", &[("edge-1", "Pending")])));
    known.take_report(Event::Apply(report("web-1", "1", &[("edge-2", "Pending"), ("edge-3", "Pending")])));
    known.take_report(Event::Apply(report("api-0", "2", &[("edge-4", "Pending")])));
    assert_eq!(known.report_of("web", "edge-3").as_deref(), Some("web-1"));
    assert_eq!(known.report_of("web", "edge-4"), None, "of another job");
    assert_eq!(known.report_of("api", "edge-4"), None, "its job isn't known");
    let mut again = job("web", "1");
    again.status = serde_json::from_value(json!({ "firstAttempt": 3 })).unwrap();
    known.take_job(Event::Apply(again));
    assert_eq!(known.report_of("web", "edge-3"), None, "of an earlier run");
}

#[test]
fn earlier_runs_do_not_count() {
    let of = |name: &str, first_attempt: Option<u32>, phase: &str| {
        let mut report = report(name, "1", &[(name, phase)]);
        report.body.first_attempt = first_attempt;
        Event::Apply(report)
    };
    let failed = |known: &PageState| {
        let row: serde_json::Value = serde_json::from_str(&known.jobs()["web"].json).unwrap();
        row["failures"].as_array().map(Vec::len)
    };
    let mut known = PageState::default();
    known.take_job(Event::Apply(job("web", "1")));
    known.take_report(of("edge-1", None, "Failure"));
    known.take_report(of("edge-2", None, "Failure"));
    let first = refreshed(&mut known);
    assert_eq!((known.nodes("web").len(), failed(&known)), (2, Some(1)));
    let mut again = job("web", "1");
    again.status = serde_json::from_value(json!({ "firstAttempt": 3 })).unwrap();
    known.take_job(Event::Apply(again));
    known.take_report(of("edge-1", Some(3), "Pending"));
    assert!(refreshed(&mut known) > first);
    assert_eq!(known.nodes("web").into_keys().collect::<Vec<_>>(), ["edge-1"]);
    assert_eq!(failed(&known), Some(0));
    assert!(known.jobs_of("edge-2").is_empty());
    assert_eq!(known.jobs_of("edge-1").len(), 1);
}

#[test]
fn a_lists_bytes_are_no_download() {
    let mut known = PageState::default();
    let part = |name: &str, done: u64| {
        let image =
            json!({ "image": "a:1", "status": "Unknown", "bytes": { "done": done, "total": 1_000_000 } });
        let nodes = json!([{ "nodeName": name, "phase": "InProgress", "imageStatus": [image] }]);
        let labels = json!({ JOB_UID_LABEL: "1" });
        let report = json!({ "metadata": { "name": name, "labels": labels }, "nodeStatus": nodes });
        serde_json::from_value::<ImagePrePullReport>(report).unwrap()
    };
    let rate = |known: &mut PageState, second: u64| {
        known.refresh_rows(Timestamp::UNIX_EPOCH, Duration::from_secs(second));
        let row: serde_json::Value = serde_json::from_str(&known.jobs()["web"].json).unwrap();
        row["bytesPerSecond"].clone()
    };
    let mut running = job("web", "1");
    let status = json!({ "phase": "InProgress", "summary": { "desired": 2, "inProgress": 2 } });
    running.status = serde_json::from_value(status).unwrap();
    known.take_job(Event::Apply(running));
    known.take_report(Event::Init);
    known.take_report(Event::InitApply(part("edge-1", 600_000)));
    assert!(rate(&mut known, 1).is_null());
    known.take_report(Event::InitApply(part("edge-2", 400_000)));
    known.take_report(Event::InitDone);
    assert!(rate(&mut known, 11).is_null(), "it was there before");
    known.take_report(Event::Apply(part("edge-2", 500_000)));
    assert_eq!(rate(&mut known, 21), 10_000);
}

#[test]
fn unchanged_rows_are_not_resent() {
    let mut known = PageState::default();
    known.take_job(Event::Apply(job("web", "1")));
    known.take_report(Event::Apply(report("r", "1", &[("edge-1", "Pending"), ("edge-2", "Pending")])));
    let first = refreshed(&mut known);
    let (rows, nodes) = (known.jobs(), known.nodes("web"));
    assert_eq!(refreshed(&mut known), first, "nothing has happened");
    known.take_report(Event::Apply(report("r", "1", &[("edge-1", "Pending"), ("edge-2", "Failure")])));
    assert!(refreshed(&mut known) > first);
    let now = known.nodes("web");
    assert!(Arc::ptr_eq(&nodes["edge-1"], &now["edge-1"]) && !Arc::ptr_eq(&nodes["edge-2"], &now["edge-2"]));
    assert_ne!(known.jobs()["web"], rows["web"], "its failures are part of the row");
}

#[test]
fn kruise_jobs_are_rows_with_namespace() {
    let mut known = PageState::default();
    let of = |namespace: &str, succeeded: i32| -> ImagePullJob {
        serde_json::from_value(json!({
            "metadata": { "name": "web", "namespace": namespace },
            "spec": { "image": "nginx:1.25" },
            "status": { "desired": 2, "succeeded": succeeded, "startTime": "1970-01-01T00:00:00Z" },
        }))
        .unwrap()
    };
    known.take_pull_job(Event::Apply(of("shop", 1)));
    known.take_pull_job(Event::Apply(of("team", 1)));
    known.take_job(Event::Apply(job("web", "1")));
    let first = refreshed(&mut known);
    let names = ["imagepulljob/web -n shop", "imagepulljob/web -n team", "web"];
    assert_eq!(known.jobs().into_keys().collect::<Vec<_>>(), names);
    assert_eq!(refreshed(&mut known), first, "nothing has happened");
    known.take_pull_job(Event::Apply(of("shop", 2)));
    known.take_pull_job(Event::Delete(of("team", 1)));
    assert!(refreshed(&mut known) > first);
    let rows = known.jobs();
    let row: serde_json::Value = serde_json::from_str(&rows[names[0]].json).unwrap();
    assert_eq!((&row["job"], &row["nodes"]["successful"]), (&names[0].into(), &2.into()));
    assert_eq!(rows.len(), 2);
}

#[test]
fn a_list_replaces_what_was_known() {
    let mut known = PageState::default();
    for name in ["old", "kept"] {
        known.take_job(Event::Apply(job(name, name)));
        known.take_report(Event::Apply(report(name, name, &[("edge-1", "Pending")])));
    }
    assert!(!known.has_jobs(), "no list has ended");
    known.take_job(Event::Init);
    known.take_job(Event::InitApply(job("kept", "kept")));
    known.take_job(Event::InitDone);
    known.take_report(Event::Init);
    known.take_report(Event::InitApply(report("kept", "kept", &[("edge-1", "Pending")])));
    known.take_report(Event::InitDone);
    assert!(!known.has_jobs(), "a row is still to be made");
    refreshed(&mut known);
    assert!(known.has_jobs());
    assert_eq!(known.jobs().into_keys().collect::<Vec<_>>(), ["kept"]);
    assert_eq!((known.nodes("kept").len(), known.reports.len()), (1, 1));
}

#[test]
fn an_edge_leads_to_its_jobs() {
    let mut known = PageState::default();
    for name in ["api", "web"] {
        known.take_job(Event::Apply(job(name, name)));
    }
    known.take_report(Event::Apply(report("a", "api", &[("edge-1", "Pending")])));
    known.take_report(Event::Apply(report("w", "web", &[("edge-2", "Pending"), ("edge-1", "Failure")])));
    // Its job is gone.
    known.take_report(Event::Apply(report("o", "old", &[("edge-1", "Failure")])));
    let phases =
        |node: &str| known.jobs_of(node).into_iter().map(|(job, row)| (job, row.phase)).collect::<Vec<_>>();
    assert_eq!(phases("edge-1"), [("api", NodePhase::Pending), ("web", NodePhase::Failure)]);
    assert_eq!(phases("edge-2"), [("web", NodePhase::Pending)]);
    assert_eq!(phases("edge-3"), []);
}

#[test]
fn new_labels_of_nodes_are_news() {
    let node = |labels: serde_json::Value| -> Event<PartialObjectMeta<Node>> {
        let metadata = json!({ "name": "edge-1", "labels": labels });
        Event::Apply(
            serde_json::from_value(json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata }))
                .unwrap(),
        )
    };
    let mut known = PageState::default();
    let mut before = refreshed(&mut known);
    for (labels, is_news) in [
        (json!({ "zone": "lyon" }), true),
        (json!({ "zone": "lyon" }), false),
        (json!({ "zone": "pune" }), true),
        (json!({}), true),
        (json!({}), false),
    ] {
        known.take_node(node(labels.clone()));
        let now = refreshed(&mut known);
        assert_eq!(now > before, is_news, "{labels}");
        before = now;
    }
}

#[test]
fn news_of_the_connection_reaches_pages() {
    let mut known = PageState::default();
    let first = refreshed(&mut known);
    known.update_hearing(|hearing| hearing.note_loss("jobs", "refused".to_owned(), Timestamp::UNIX_EPOCH));
    let lost = refreshed(&mut known);
    assert!(lost > first);
    known.update_hearing(|hearing| hearing.forget("reports"));
    assert_eq!(refreshed(&mut known), lost, "that was heard before");
}
