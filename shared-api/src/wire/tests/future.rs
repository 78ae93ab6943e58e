//! Values of a newer peer: each enum that is read from the wire, the agent's ledger or a stored object gets one that this
//! version doesn't know.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::super::*;
use crate::crd::kruise::PullPhase;
use crate::crd::status::{Action, JobPhase, NodePhase, Tristate};
use crate::download::{Deltas, VerificationMode, Weekday, Zone};
use crate::failure::FailureCode;
use crate::sites::{BlobState, From, PeerFault};
use crate::task::{
    CheckItem, ImageOutcome, ImagePhase, KeepCode, KubeletRecord, NoDelta, PullPolicy, PulledBy,
    RemovalOutcome, TaskOutcome,
};

macro_rules! read_as {
    ($($enum:ident: $json:expr => $read:expr,)*) => {
        /// Every enum of the table below.
        const KNOWN: &[&str] = &[$(stringify!($enum)),*];

        #[test]
        fn every_enum_reads_a_value_of_the_future() {
            $(
                let read: $enum = serde_json::from_value($json).expect(stringify!($enum));
                assert_eq!(read, $read);
            )*
        }
    };
}

read_as! {
    EdgeMessage: json!({"type": "later", "task": {"job": "uid-1"}}) => EdgeMessage::Other,
    CloudMessage: json!({"type": "later", "jobs": ["uid-1"]}) => CloudMessage::Other,
    OpenPhase: json!("later") => OpenPhase::Other,
    PullKey: json!({"kind": "later", "token": {"of": "x"}}) => PullKey::Other,
    PullPolicy: json!("Later") => PullPolicy::Other,
    CheckItem: json!("later") => CheckItem::Other,
    ImagePhase: json!("later") => ImagePhase::Other,
    TaskOutcome: json!("later") => TaskOutcome::Other,
    ImageOutcome: json!("later") => ImageOutcome::Other,
    PulledBy: json!("Later") => PulledBy::Other,
    NoDelta: json!("Later") => NoDelta::Other,
    KubeletRecord: json!("Later") => KubeletRecord::Other,
    RemovalOutcome: json!("Later") => RemovalOutcome::Failed,
    KeepCode: json!("Later") => KeepCode::Other,
    FailureCode: json!("Later") => FailureCode::Other,
    // The strict one: an image without a signature must not be pulled by mistake.
    Deltas: json!("Later") => Deltas::Other,
    VerificationMode: json!("Later") => VerificationMode::Enforce,
    Weekday: json!("Later") => Weekday::Other,
    Zone: json!("Later/Zone") => Zone::Named("Later/Zone".to_owned()),
    BlobState: json!("later") => BlobState::Dropped,
    PeerFault: json!("later") => PeerFault::Refused,
    From: json!({"kind": "later", "x": 1}) => From::Wait,
    // Of stored objects: nothing is started, and nothing counts as done.
    JobPhase: json!("Later") => JobPhase::Failure,
    NodePhase: json!("Later") => NodePhase::Unknown,
    Action: json!("Later") => Action::Pull,
    Tristate: json!("Later") => Tristate::Unknown,
    PullPhase: json!("Later") => PullPhase::Failed,
}

/// The names of the enums in this file that are read from JSON.
fn readable_enums(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in source.match_indices("enum ") {
        let (before, after) = source.split_at(at);
        let is_item = matches!(before.rsplit('\n').next(), Some("" | "pub " | "pub(crate) " | "pub(super) "));
        let attributes = before.rsplit("\n\n").next().unwrap_or_default();
        if is_item && attributes.contains("Deserialize") {
            let name = after.trim_start_matches("enum ");
            found.push(name.chars().take_while(|c| c.is_alphanumeric()).collect());
        }
    }
    found
}

fn visit(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            visit(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.extend(readable_enums(&fs::read_to_string(&path).unwrap()));
        }
    }
}

#[test]
fn no_enum_is_missing_above() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    visit(&root.join("src"), &mut found);
    // The ledger on the agent's disk, which an older agent may read.
    visit(&root.join("../edgecore-prepull/src/tasks"), &mut found);
    assert!(found.len() >= 20, "{found:?}");
    found.retain(|name| !KNOWN.contains(&name.as_str()));
    assert!(
        found.is_empty(),
        "an older peer can't read a new value of {found:?}: add a variant with #[serde(other)], and a line above"
    );
}

#[test]
fn messages_of_the_future_are_read() {
    let task = json!({"job": "uid-1", "attempt": 1, "later": 1});
    let frame = json!({
        "type": "assign", "remaining": 1000, "later": {}, "keys": [{"kind": "later", "x": []}],
        "task": {"id": task, "title": "t", "checks": ["disk", "later"], "images": [
            {"image": "a", "reference": "r/a:1", "policy": "Later", "retries": 0, "key": 0, "later": true},
        ]},
        "download": {"verify": {"mode": "Later", "keys": []}, "later": 1, "windows": [
            {"days": ["Mon", "Later"], "start": "01:00", "duration": 1000, "timeZone": "Node"},
        ]},
    });
    let CloudMessage::Assign(assign) = decode_frame(&frame.to_string()).unwrap() else {
        panic!("another message")
    };
    assert_eq!(assign.task.checks, [CheckItem::Disk, CheckItem::Other]);
    assert_eq!((assign.task.images[0].policy, &assign.keys[0]), (PullPolicy::Other, &PullKey::Other));
    assert_eq!(assign.download.windows[0].days, [Weekday::Mon, Weekday::Other]);

    let frame = json!({
        "type": "result", "task": task, "outcome": "later", "took": 1, "later": [],
        "images": [{"outcome": "later", "code": "Later", "attempts": 1, "pulledBy": "Later", "later": 1}],
    });
    let EdgeMessage::Result(result) = decode_frame(&frame.to_string()).unwrap() else {
        panic!("another message")
    };
    assert_eq!((result.outcome, result.images[0].outcome), (TaskOutcome::Other, ImageOutcome::Other));

    let frame = json!({
        "type": "hello", "version": "9", "os": "linux", "arch": "amd64", "later": null,
        "open": [{"task": task, "phase": "later"}],
    });
    let EdgeMessage::Hello(hello) = decode_frame(&frame.to_string()).unwrap() else {
        panic!("another message")
    };
    assert_eq!(hello.open[0].phase, OpenPhase::Other);
}
