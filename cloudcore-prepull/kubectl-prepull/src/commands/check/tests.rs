#![allow(clippy::unwrap_used, clippy::large_stack_arrays)] // facts are large, and tests have room
use std::collections::BTreeSet;

use jiff::SignedDuration;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use prepull_api::crd::kruise::crds;
use prepull_api::crd::{job, report, settings};
use prepull_api::edges::{EdgeList, ListedEdge};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::facts::{ClusterFacts, EdgeCounts, Slices};
use super::judge::{CheckReport, judge_facts};
use super::*;
use crate::snapshot::assert_snapshot;

const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);
/// A CA that ends in 2036.
const CA: &str = include_str!("tests/ca.pem");

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

fn lease(holder: &str, renewed: i64) -> Lease {
    let renewed = MicroTime(NOW + SignedDuration::from_secs(renewed));
    object(json!({"spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}}))
}

fn pod(name: &str, ready: &str) -> Value {
    json!({"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}})
}

fn door(pods: &[&str]) -> BTreeSet<String> {
    pods.iter().map(|pod| (*pod).to_owned()).collect()
}

fn edge(name: &str, version: Option<&str>, days: i64) -> ListedEdge {
    ListedEdge {
        name: name.into(),
        connected: true,
        version: version.map(str::to_owned),
        certificate_until: Some(Time(NOW + SignedDuration::from_hours(24 * days))),
        ..ListedEdge::default()
    }
}

fn edges(items: Vec<ListedEdge>, total: usize) -> EdgeCounts {
    let connected = items.iter().filter(|edge| edge.connected).count();
    let mut edges = EdgeCounts::default();
    edges.add(
        &EdgeList {
            items,
            total,
            connected,
            next: None,
            known_since: Time(NOW),
            site_label: None,
            version: None,
        },
        NOW,
    );
    edges
}

/// A cluster in which all is well.
fn well() -> ClusterFacts {
    ClusterFacts {
        server: "https://api.example:6443/".to_owned(),
        version: "v1.36.0".to_owned(),
        clock: Some(SignedDuration::from_secs(1)),
        namespace: "prepull-system".to_owned(),
        served: Ok(true),
        jobs: Ok(Some(job::crd())),
        reports: Ok(Some(report::crd())),
        settings: Ok(Some(settings::crd())),
        missing: Ok(Vec::new()),
        lease: Ok(Some(lease("cloudcore-prepull-7d9f_x1", -2))),
        pods: Ok(vec![
            object(pod("cloudcore-prepull-7d9f", "True")),
            object(pod("cloudcore-prepull-8c2k", "True")),
        ]),
        door: Ok(Some(door(&["a"]))),
        ca: Ok(Some(CA.to_owned())),
        cloudcore: Ok(None),
        manager: Ok(None),
        kruise: Ok(None),
        kruise_lease: Ok(None),
        edges: Ok(edges(vec![edge("edge-1", Some(env!("CARGO_PKG_VERSION")), 20)], 1)),
    }
}

/// A cluster in which much is wrong.
fn ill() -> ClusterFacts {
    let mut old = serde_json::to_value(job::crd()).unwrap();
    for version in old["spec"]["versions"].as_array_mut().unwrap() {
        let spec = version.pointer_mut("/schema/openAPIV3Schema/properties/spec/properties").unwrap();
        for field in ["download", "pin", "verify", "windows"] {
            spec.as_object_mut().unwrap().remove(field).unwrap();
        }
    }
    let [pull_job, ..] = crds();
    let forbidden =
        || Err("user jane lacks a right: to get configmaps in namespace prepull-system".to_owned());
    let away = ListedEdge { connected: false, revoked: true, ..edge("edge-9", None, 1) };
    let listed = vec![edge("edge-1", None, 20), edge("edge-2", Some(env!("CARGO_PKG_VERSION")), 1), away];
    ClusterFacts {
        clock: Some(SignedDuration::from_secs(-400)),
        jobs: Ok(Some(object(old))),
        reports: Ok(None),
        settings: Ok(None),
        lease: Ok(Some(lease("cloudcore-prepull-7d9f_x1", -4_000))),
        pods: Ok(vec![
            object(pod("cloudcore-prepull-7d9f", "False")),
            object(pod("cloudcore-prepull-8c2k", "True")),
        ]),
        door: Ok(Some(door(&[]))),
        ca: forbidden(),
        cloudcore: Ok(Some(object(
            json!({"data": {"cloudcore.yaml": "modules: {taskManager: {enable: true}}"}}),
        ))),
        kruise: Ok(Some(pull_job)),
        kruise_lease: Ok(Some(lease("kruise-manager-0", -405))),
        edges: Ok(edges(listed, 3)),
        ..well()
    }
}

fn bad(facts: &ClusterFacts) -> Vec<String> {
    let CheckReport { sections, wrong } = judge_facts(facts, NOW);
    let points = sections.into_iter().flat_map(|section| section.points);
    let bad: Vec<_> = points.filter(|point| point.mark == Mark::Bad).collect();
    assert_eq!(bad.len(), wrong);
    assert!(bad.iter().all(|point| point.remedy.is_some()), "{bad:?}");
    bad.into_iter().map(|point| point.text).collect()
}

#[test]
fn every_fault_has_its_remedy_below() {
    for width in [80, 160] {
        let text = |facts: &ClusterFacts| render(&judge_facts(facts, NOW), Screen::plain(width));
        assert_snapshot(&format!("commands/check/tests/well-{width}.txt"), &text(&well()));
        assert_snapshot(&format!("commands/check/tests/ill-{width}.txt"), &text(&ill()));
    }
}

fn refused<T>() -> Result<T, String> {
    Err("user jane lacks a right".to_owned())
}

#[test]
fn unreadable_facts_are_open_points() {
    assert_eq!(bad(&well()), Vec::<String>::new());
    let blind = ClusterFacts {
        clock: None,
        jobs: refused(),
        reports: refused(),
        settings: refused(),
        missing: refused(),
        lease: refused(),
        pods: refused(),
        door: refused(),
        ca: refused(),
        cloudcore: refused(),
        manager: refused(),
        kruise: refused(),
        kruise_lease: refused(),
        ..well()
    };
    assert_eq!(bad(&blind), Vec::<String>::new());
    let text = render(&judge_facts(&blind, NOW), Screen::plain(80));
    assert!(text.ends_with("Nothing is wrong, as far as could be looked.\n"), "{text}");
}

#[test]
fn a_missing_right_is_no_fault() {
    let missing = crate::rights::all().collect();
    let edges = Err("user jane lacks a right: to get services/proxy".to_owned());
    assert_eq!(bad(&ClusterFacts { missing: Ok(missing), edges, ..well() }), Vec::<String>::new());
}

#[test]
fn each_fault_is_found_alone() {
    for (facts, words) in [
        (ClusterFacts { served: Ok(false), ..well() }, "the definitions are not installed"),
        (
            ClusterFacts { lease: Ok(Some(lease("", -5))), ..well() },
            "the last leader gave its Lease back 6s ago",
        ),
        (ClusterFacts { lease: Ok(Some(lease("a", -60))), ..well() }, "a has not renewed its Lease for 1m"),
        (ClusterFacts { door: Ok(Some(door(&["a", "b"]))), ..well() }, "leads to 2 pods"),
        (ClusterFacts { ca: Ok(Some("no PEM".to_owned())), ..well() }, "is no certificate"),
        (
            ClusterFacts { edges: Err("no cloudcore-prepull leads".to_owned()), ..well() },
            "the edges are not listed: no cloudcore",
        ),
    ] {
        let bad = bad(&facts);
        assert!(bad.len() == 1 && bad[0].contains(words), "{words}: {bad:?}");
    }
    for (second, words) in
        [(2_105_000_000, "the CA of the edges ends in 66d"), (2_120_000_000, "the CA of the edges ended 10")]
    {
        let later = Timestamp::from_second(second).unwrap();
        let text = render(&judge_facts(&ClusterFacts { clock: None, ..well() }, later), Screen::plain(160));
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn ready_pods_count_once_for_all_addresses() {
    let endpoint = |address: &str, pod: &str, ready: Value| json!({"addresses": [address], "conditions": {"ready": ready}, "targetRef": {"kind": "Pod", "name": pod}});
    let led_to = |items: Value| {
        object::<Slices>(json!({ "items": items })).ready_pods().into_iter().collect::<Vec<_>>()
    };
    assert_eq!(led_to(json!([{"endpoints": null}, {}])), Vec::<String>::new());
    // Two address families; a replica that isn't ready; one in an unknown state.
    let (four, six) = (endpoint("10.0.0.7", "a", true.into()), endpoint("fd00::7", "a", true.into()));
    assert_eq!(
        led_to(json!([{"endpoints": [four, endpoint("10.0.0.8", "b", false.into())]}, {"endpoints": [six]}])),
        ["a"]
    );
    assert_eq!(led_to(json!([{"endpoints": [{"addresses": ["10.0.0.9"], "conditions": {}}]}])), ["10.0.0.9"]);
}
