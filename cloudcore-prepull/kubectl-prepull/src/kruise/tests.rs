//! The texts of a job and of a list of OpenKruise, at 80 and at 160 columns, and the records that they are made of.
#![allow(clippy::unwrap_used, clippy::needless_pass_by_value)] // documents are written where they are used

use jiff::SignedDuration;
use prepull_api::crd::status::NodePhase;
use serde_json::{Value, json};

use super::*;
use crate::progress::render::render_view;
use crate::screen::Screen;
use crate::snapshot::assert_snapshot;

const START: &str = "2026-11-22T10:00:00Z";
const END: &str = "2026-11-22T10:04:12Z";

fn now() -> Timestamp {
    END.parse().unwrap()
}

fn job(image: &str, status: Value) -> ImagePullJob {
    let name = format!("spring-{}", image.len());
    serde_json::from_value(json!({
        "metadata": { "name": name, "namespace": "shop", "uid": image },
        "spec": { "image": image, "parallelism": 2 },
        "status": status,
    }))
    .unwrap()
}

/// The NodeImage of a node that has one tag of nginx, asked for by these jobs.
fn node(name: &str, jobs: &[&str], state: &Value) -> NodeImage {
    let owners: Vec<_> = jobs.iter().map(|uid| json!({ "uid": uid })).collect();
    serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": { "images": { "nginx": { "tags": [{ "tag": "1.25", "version": 2, "ownerReferences": owners }] } } },
        "status": { "imageStatuses": { "nginx": { "tags": [state] } } },
    }))
    .unwrap()
}

fn state(phase: &str, message: &str) -> Value {
    json!({ "tag": "1.25", "version": 2, "phase": phase, "message": message, "progress": 40, "startTime": START })
}

fn seen(job: ImagePullJob, nodes: &[NodeImage]) -> KruiseJob {
    let mut records: Vec<_> = nodes.iter().filter_map(|node| records::node_record(&job, node)).collect();
    records::apply_job_status(&job, &mut records);
    let name = KruiseName { kind: KruiseKind::Pull, name: job.name_any() };
    KruiseJob { name, namespace: "shop".to_owned(), list: None, jobs: vec![(job, records)] }
}

fn snapshots(name: &str, seen: &KruiseJob) {
    for width in [80, 160] {
        let text = render_view(&seen.view(now()), Screen::plain(width), false);
        assert_snapshot(&format!("kruise/tests/{name}-{width}.txt"), &text);
    }
}

const NGINX: &str = "docker.io/library/nginx:1.25";

fn running() -> KruiseJob {
    let refused = "docker.io: the registry refuses the credentials of shop/harbor: 401";
    let nodes = [
        node("edge-1", &[NGINX], &state("Succeeded", "")),
        node("edge-2", &[NGINX], &state("Pulling", "")),
        node("edge-3", &[NGINX, "other"], &state("Failed", refused)),
        node(
            "edge-4",
            &[NGINX],
            &state("Waiting", "waits for its window, opens at 01:00 Europe/Berlin (Mon 23 Nov)"),
        ),
        node("edge-5", &["other"], &state("Failed", "of another job")),
        node(
            "edge-6",
            &[NGINX],
            &json!({ "tag": "1.25", "version": 1, "phase": "Failed", "message": "old" }),
        ),
    ];
    let status = json!({ "desired": 8, "active": 2, "succeeded": 1, "failed": 1, "failedNodes": ["edge-3"],
        "message": "job is running, progress 25.0%", "startTime": START });
    seen(job(NGINX, status), &nodes)
}

#[test]
fn kruise_jobs_look_like_our_own() {
    snapshots("running", &running());
    let status = json!({ "desired": 3, "active": 0, "succeeded": 1, "failed": 2, "failedNodes": ["edge-2", "gone"],
        "message": "job exceeds activeDeadlineSeconds", "startTime": START, "completionTime": END });
    let nodes =
        [node("edge-1", &[NGINX], &state("Succeeded", "")), node("edge-2", &[NGINX], &state("Waiting", ""))];
    snapshots("ended", &seen(job(NGINX, status), &nodes));
}

#[test]
fn refused_and_paused_jobs_are_marked() {
    let refused = json!({ "message": "can not set both selector and podSelector" });
    let view = seen(job(NGINX, refused), &[]).view(now());
    let text = render_view(&view, Screen::plain(160), false);
    assert!(
        text.contains("can not set both") && text.contains("kubectl -n shop edit imagepulljob/"),
        "{text}"
    );
    let mut paused = job(NGINX, json!({ "desired": 2, "startTime": START }));
    paused.spec.template.parallelism =
        Some(k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::String("0".to_owned()));
    let text = render_view(&seen(paused, &[]).view(now()), Screen::plain(160), false);
    assert!(text.contains("Suspended") && text.contains("parallelism 0 pauses it"), "{text}");
}

#[test]
fn a_list_shows_each_images_job() {
    let list: ImageListPullJob = serde_json::from_value(json!({
        "metadata": { "name": "spring", "namespace": "shop" },
        "spec": { "images": [NGINX, "harbor.example/shop/web:v2"] },
        "status": { "desired": 2, "active": 1, "completed": 0, "startTime": START },
    }))
    .unwrap();
    let web = json!({ "desired": 8, "active": 0, "succeeded": 8, "failed": 0, "message": "job has completed",
        "startTime": START, "completionTime": END });
    let mut seen = running();
    seen.name = KruiseName { kind: KruiseKind::List, name: "spring".to_owned() };
    seen.jobs.push((job("harbor.example/shop/web:v2", web), Vec::new()));
    seen.list = Some(list);
    snapshots("list", &seen);
    let view = serde_json::to_value(seen.view(now() + SignedDuration::from_secs(1))).unwrap();
    assert_eq!(
        (&view["job"], &view["namespace"], &view["parts"][1]["phase"], &view["nodes"]["desired"]),
        (&"imagelistpulljob/spring".into(), &"shop".into(), &"Completed".into(), &16.into())
    );
}

#[test]
fn the_jobs_status_decides_about_failures() {
    let ended = json!({ "desired": 2, "succeeded": 1, "failed": 1, "failedNodes": ["edge-2"], "startTime": START,
        "completionTime": END });
    let nodes = [
        node("edge-1", &[NGINX], &state("Failed", "since, for another job")),
        node("edge-2", &[NGINX], &state("Succeeded", "")),
    ];
    let seen = seen(job(NGINX, ended), &nodes);
    let phases: Vec<_> = seen.jobs[0].1.iter().map(|node| (node.node_name.as_str(), node.phase)).collect();
    assert_eq!(phases, [("edge-1", NodePhase::Successful), ("edge-2", NodePhase::Failure)]);
}
