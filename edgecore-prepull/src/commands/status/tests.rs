#![allow(clippy::unwrap_used)]
use std::time::UNIX_EPOCH;

use prepull_api::settings::NodeSettings;
use prepull_api::task::ByteProgress;

use super::*;
use crate::status::{CloudStatus, DownloadStatus};

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_795_000_000)
}

fn at(seconds_ago: u64) -> String {
    humantime::format_rfc3339_seconds(now() - Duration::from_secs(seconds_ago)).to_string()
}

fn well() -> BoxReport {
    let identity = IdentityStatus {
        node: "edge-7".to_owned(),
        certificate_until: "2026-12-15T00:00:00Z".to_owned(),
        has_expired: false,
    };
    let download = DownloadStatus {
        image: "harbor.example/shop/web:v2".to_owned(),
        bytes: Some(ByteProgress { done: 12 << 20, total: 60 << 20 }),
        bytes_per_second: 2 << 20,
        reason: "connection reset".to_owned(),
    };
    let task = TaskStatus {
        title: "spring-release".to_owned(),
        state: "runs".to_owned(),
        images: 3,
        ended: 1,
        waits: String::new(),
        downloads: vec![download],
    };
    let agent = AgentStatus {
        version: "0.1.0".to_owned(),
        since: Some(at(11_100)),
        time: Some(at(0)),
        cloud: CloudStatus {
            connected: true,
            address: "cloud.example:10000".to_owned(),
            since: Some(at(3_700)),
            ..CloudStatus::default()
        },
        settings: NodeSettings::default(),
        tasks: vec![task],
    };
    let disk =
        Filesystem { mountpoint: "/var/lib/containerd".to_owned(), available: 2 << 30, capacity: 30 << 30 };
    let runtime = RuntimeStatus {
        version: "containerd 1.7.24".to_owned(),
        disk: Looked::Known(disk),
        pinning_jobs: Some(2),
    };
    BoxReport {
        identity: Looked::Known(identity),
        agent: Looked::Known(agent),
        runtime: Looked::Known(runtime),
        upgrade: None,
        window: None,
        tasks: None,
    }
}

#[test]
fn a_connected_box_shows_its_downloads() {
    let expected = "\
✓ node edge-7: its certificate is good for 26days 12h
✓ the agent 0.1.0 runs for 3h 5m
✓ connected to cloud.example:10000 for 1h 1m
✓ containerd 1.7.24 answers
  2.00 GiB of 30.00 GiB are free at /var/lib/containerd
  2 jobs keep images from the kubelet's garbage collection
  spring-release: 1 of 3 images ended; it runs
    harbor.example/shop/web:v2  12.00 MiB of 60.00 MiB, 2.00 MiB/s; the last attempt failed: connection reset
";
    assert_eq!(render_report(&well(), now()), expected);
    assert!(well().is_well());
}

#[test]
fn the_agents_time_counts() {
    let mut report = well();
    assert_eq!(report.time(), now());
    let Looked::Known(agent) = &mut report.agent else { panic!() };
    agent.time = None;
    assert_eq!(agent_time(&report.agent), None, "of an earlier release");
    report.agent = Looked::Error("it does not answer".to_owned());
    assert_eq!(agent_time(&report.agent), None);
}

#[test]
fn an_outage_has_reason_and_next_try() {
    let mut report = well();
    let Looked::Known(agent) = &mut report.agent else { panic!() };
    agent.cloud = CloudStatus {
        connected: false,
        address: "cloud.example:10000".to_owned(),
        since: Some(at(252)),
        reason: "connection refused\u{1b}[2K".to_owned(),
        next_try: Some("2026-11-18T11:06:52Z".to_owned()),
    };
    report.window = Some("waits for its window, opens at 01:00 UTC (Wed 18 Nov)".to_owned());
    let text = render_report(&report, now());
    let line =
        "✗ not connected for 4m 12s: cloud.example:10000: connection refused\u{fffd}[2K; tries again in 12s";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("! downloads: the node waits for its window, opens at 01:00 UTC"), "{text}");
    assert!(!report.is_well());
}

#[test]
fn without_the_agent_the_disk_tells_the_tasks() {
    let task = TaskStatus { title: "spring".to_owned(), images: 2, ..TaskStatus::default() };
    let report = BoxReport {
        identity: Looked::Error("this machine has not joined".to_owned()),
        agent: Looked::Error("it does not answer at 127.0.0.1:10004: refused".to_owned()),
        runtime: Looked::Error("no socket".to_owned()),
        upgrade: None,
        window: None,
        tasks: Some(Looked::Known(vec![task])),
    };
    let text = render_report(&report, now());
    let marks: Vec<_> = text.lines().map(|line| line.chars().next().unwrap()).collect();
    assert_eq!(marks, ['✗', '✗', '✗', ' '], "{text}");
    assert!(text.contains("systemctl status edgecore-prepull") && text.contains("spring: 0 of 2"), "{text}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["runtime"]["error"], "no socket");
    assert_eq!(serde_json::to_value(well()).unwrap()["agent"]["cloud"]["connected"], true);
}

#[test]
fn another_program_on_the_port_is_noticed() {
    let address = "127.0.0.1:10004".parse().unwrap();
    for answer in ["HTTP/1.0 404 Not Looked\r\n\r\nno", "SSH-2.0-OpenSSH"] {
        let Looked::Error(error) = read_status(answer, address) else { panic!("{answer}") };
        assert!(error.contains("is no agent"), "{error}");
    }
    let answer = "HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{\"version\":\"0.1.0\",\"new\":1}";
    assert_eq!(read_status(answer, address).known().unwrap().version, "0.1.0");
}
