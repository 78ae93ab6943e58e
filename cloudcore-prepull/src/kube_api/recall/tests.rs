#![allow(clippy::unwrap_used)]
use serde_json::json;

use super::*;
use crate::kube_api::fake_api::{client_answering, refusal_status};

/// The nodes of each report by its index; `Err` for a report that cannot be read.
type Stored = Vec<(u32, Result<usize, ()>)>;

fn job(desired: usize) -> Value {
    json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
        "metadata": { "name": "a", "uid": "u", "generation": 1, "annotations": { "kept": "" } },
        "spec": { "imagePrePullTemplate": { "images": ["nginx"], "nodeNames": ["a"] } },
        "status": { "phase": "InProgress", "startTime": "2026-01-01T00:00:00Z", "summary": { "desired": desired } },
    })
}

fn report(owner: &str, index: u32, nodes: Result<usize, ()>) -> Value {
    let phase = if nodes.is_ok() { json!("Successful") } else { json!(7) };
    let nodes: Vec<_> = (0..nodes.unwrap_or(1))
        .map(|node| json!({ "nodeName": format!("n{node}"), "phase": phase }))
        .collect();
    json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullReport",
        "metadata": {
            "name": format!("a-u-{index}"), "resourceVersion": "7",
            "ownerReferences": [{ "apiVersion": "v1", "kind": "ImagePrePullJob", "name": "a", "uid": owner }],
        },
        "index": index, "nodeStatus": nodes,
    })
}

/// Reads a job with these reports: the indexes that were found, and the number of requests.
async fn read(desired: usize, owner: &'static str, stored: Stored) -> (Vec<u32>, usize) {
    let (client, requests) = client_answering(move |target| {
        let name = target.rsplit('/').next().unwrap().trim_end_matches('?');
        if target.contains("imageprepulljobs") {
            return job(desired);
        }
        let index: u32 = name.strip_prefix("a-u-").unwrap().parse().unwrap();
        let found = stored.iter().find(|(known, _)| *known == index);
        found.map_or_else(|| refusal_status(404), |(index, nodes)| report(owner, *index, *nodes))
    });
    let (object, reports) = Recalls::new(client).read_with_reports(&JobUid("u".to_owned()), "a").await;
    assert!(object.unwrap().unwrap().metadata.annotations.is_some(), "a job that goes on is read whole");
    let count = requests.lock().unwrap().len();
    (reports.iter().map(|report| report.body.index).collect(), count)
}

#[tokio::test]
async fn reports_are_read_by_name_up_to_the_last() {
    let whole = |indexes: std::ops::Range<u32>, nodes| indexes.map(|index| (index, Ok(nodes))).collect();
    let indexes = |range: std::ops::Range<u32>| range.collect::<Vec<_>>();
    for (desired, stored, found, most) in [
        (1, whole(0..1, 1), indexes(0..1), 3),
        (10_000, whole(0..40, 250), indexes(0..40), 49),
        // Nodes have joined since the status was written, or the reports are short, as those of many images.
        (250, whole(0..30, 250), indexes(0..30), 36),
        (100, whole(0..50, 2), indexes(0..50), 68),
        // Nothing is written yet, or some were deleted.
        (250, vec![], vec![], 20),
        (750, vec![(0, Ok(250)), (7, Ok(250))], vec![0, 7], 37),
        // The leader ended while it made them, or a person deleted some of many.
        (10_000, [whole(0..8, 250), whole(20..40, 250)].concat(), (0..8).chain(20..40).collect(), 49),
        // One that cannot be read is lost, and no end.
        (3, vec![(0, Ok(1)), (1, Err(())), (2, Ok(1))], vec![0, 2], 37),
    ] {
        let (indexes, requests) = read(desired, "u", stored).await;
        assert_eq!(indexes, found, "{desired}");
        assert!(requests <= most, "{desired}: {requests} requests");
    }
}

#[tokio::test]
async fn a_report_of_another_job_is_none() {
    assert_eq!(read(1, "other", vec![(0, Ok(1))]).await.0, Vec::<u32>::new());
}

#[tokio::test]
async fn a_namesakes_reports_are_not_read() {
    let (client, _) = client_answering(|_| job(1));
    let (object, reports) = Recalls::new(client).read_with_reports(&JobUid("other".to_owned()), "a").await;
    assert!(object.is_none() && reports.is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_undecodable_report_keeps_no_leader_waiting() {
    let answering = |is_down: bool| {
        client_answering(move |target| match target.rsplit('/').next().unwrap().trim_end_matches('?') {
            "a-u-0" => report("u", 0, Ok(1)),
            "a" if !is_down => job(2),
            "a" | "a-u-1" => refusal_status(500),
            _ => refusal_status(404),
        })
        .0
    };
    let uid = JobUid("u".to_owned());
    let (recalls, begun) = (Recalls::new(answering(false)), Instant::now());
    let (_, reports) = recalls.read_with_reports(&uid, "a").await;
    assert_eq!(reports.iter().map(|report| report.body.index).collect::<Vec<_>>(), [0]);
    assert!((60..90).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    // In an outage, none is given up.
    let recalls = Recalls::new(answering(true));
    let read = recalls.read_report(&uid, "a", 1);
    assert!(tokio::time::timeout(Duration::from_secs(600), read).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_long_outage_makes_no_report_unreadable() {
    let begun = Instant::now();
    // An outage that ends with a change of etcd's leader.
    let (client, _) = client_answering(move |target| match begun.elapsed().as_secs() {
        _ if target.contains("imageprepulljobs") => job(2),
        0..=89 => refusal_status(503),
        90..=119 => refusal_status(500),
        _ => report("u", 0, Ok(1)),
    });
    let read = Recalls::new(client).read_report(&JobUid("u".to_owned()), "a", 0).await;
    assert!(read.is_some_and(|report| report.is_ok()), "it is read in the end");
}
