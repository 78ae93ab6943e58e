#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(feature = "crd")]
mod future;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::num::NonZeroU64;

use proptest::prelude::*;

use super::*;
use crate::credentials::Sensitive;
use crate::download::{Deltas, Verification, VerificationMode, Weekday, Zone};
use crate::failure::FailureCode;
use crate::settings::NodeSettings;
use crate::sites::{BlobNews, BlobPeer, BlobSource, BlobState, From, PeerFailure, PeerFault};
use crate::task::{
    ByteProgress, CheckItem, CheckOutcome, ImageFacts, ImageOutcome, ImagePhase, ImageRemoval, ImageResult,
    ImageTask, JobUid, KeepCode, KubeletRecord, MAX_REMOVALS, NoDelta, PullPolicy, PulledBy, RemovalOutcome,
    RemovalResult, SandboxMetadata, TaskOutcome,
};

fn window() -> Window {
    Window {
        days: vec![Weekday::Mon, Weekday::Sun],
        start: "01:30".parse().unwrap(),
        duration: Duration::from_secs(4 * 3600),
        time_zone: Zone::Node,
    }
}

fn settings() -> NodeSettings {
    NodeSettings {
        max_download_rate: NonZeroU64::new(4096),
        peer_max_upload_rate: NonZeroU64::new(8192),
        windows: vec![window()],
        image_gc_high_threshold: Some(70),
        make_room: Some(true),
        keep_unfinished: Some(Duration::from_secs(3600)),
    }
}

fn task_id() -> TaskId {
    TaskId { job: JobUid("uid-1".to_owned()), attempt: 2 }
}

/// Checks both directions: what an older peer sends is read, and what it reads is sent.
fn assert_frame<T: Serialize + DeserializeOwned + PartialEq + Debug>(message: &T, frame: &str) {
    assert_eq!(encode_frame(message).unwrap(), frame);
    assert_eq!(&decode_frame::<T>(frame).unwrap(), message);
}

#[test]
fn a_result_of_a_removal_fits_into_a_message() {
    let reason = truncate_reason(&"\u{1}".repeat(MAX_REASON + 1));
    let (code, outcome) = (Some(KeepCode::PinnedByRuntime), RemovalOutcome::Removable);
    let image = ImageRemoval {
        image: truncate_note(&reason),
        outcome,
        code,
        reason: reason.clone(),
        bytes: u64::MAX,
    };
    let result = TaskResult {
        removal: Some(RemovalResult::from_images(vec![image; 10 * MAX_REMOVALS])),
        reason,
        took: Duration::MAX,
        ..TaskResult::new(task_id(), TaskOutcome::Failed)
    };
    let frame = encode_frame(&EdgeMessage::Result(result)).unwrap();
    assert!(frame.len() < MAX_MESSAGE / 10, "{}", frame.len());
}

#[test]
fn a_result_always_fits_into_a_message() {
    for reason in ["\u{1}", "\"", "\n", "é", "\u{85}", "a"] {
        let reason = truncate_reason(&reason.repeat(MAX_REASON + 1));
        assert!(reason.len() <= MAX_REASON && reason.ends_with('…'), "{reason:?}");
        assert!(truncate_note(&reason).len() <= MAX_NOTE);
        let image = ImageResult {
            digest: Some(format!("sha512:{}", "a".repeat(128))),
            id: Some(format!("sha512:{}", "a".repeat(128))),
            reason: reason.clone(),
            bytes: Some(ByteProgress { done: u64::MAX, total: u64::MAX }),
            code: Some(FailureCode::PlatformMismatch),
            attempts: u32::MAX,
            pinned: Some(false),
            facts: ImageFacts {
                pulled_by: Some(PulledBy::Runtime),
                pulled_by_reason: truncate_note(&reason),
                signed_by: Some(format!("sha256:{}", "f".repeat(12))),
                unshared_reason: String::new(),
                delta_saved_bytes: Some(u64::MAX),
                no_delta: Some(NoDelta::OtherSource),
                no_delta_reason: String::new(),
                kubelet_record: Some(KubeletRecord::OtherRepository),
                kubelet_record_reason: truncate_note(&reason),
            },
            took: Some(Duration::MAX),
            ended: Some(Duration::MAX),
            ..ImageResult::new(ImageOutcome::Failed)
        };
        let result = TaskResult {
            removal: None,
            task: task_id(),
            outcome: TaskOutcome::Failed,
            reason: reason.clone(),
            check: Some(CheckOutcome { passed: false, reason }),
            images: vec![image; MAX_IMAGES],
            took: Duration::MAX,
        };
        encode_frame(&EdgeMessage::Result(result)).unwrap();
    }
}

#[test]
fn edge_messages_keep_their_bytes() {
    assert_frame(
        &EdgeMessage::Hello(Box::new(Hello {
            upgrades: true,
            removes: true,
            version: "0.1.0".to_owned(),
            os: "linux".to_owned(),
            arch: "arm64".to_owned(),
            runtime: Some("containerd 1.6.20".to_owned()),
            image_filesystem: Some(Filesystem { mountpoint: "/var".to_owned(), available: 1, capacity: 2 }),
            max_tasks: Some(3),
            open: [OpenPhase::Running, OpenPhase::NeedsKeys, OpenPhase::Finished]
                .map(|phase| OpenTask { task: task_id(), phase, limited: phase == OpenPhase::Running })
                .to_vec(),
            trusts: Some("ab".to_owned()),
            time_zone: Some("Europe/Berlin".to_owned()),
            windows: vec![window()],
            pins: Some(vec![JobUid("uid-1".to_owned())]),
            peer: Some(PeerDoor { addresses: vec!["10.0.0.1:10006".to_owned()], streams: false }),
            settings: Some(NodeSettings::default()),
        })),
        concat!(
            r#"{"type":"hello","version":"0.1.0","os":"linux","arch":"arm64","runtime":"containerd 1.6.20","#,
            r#""imageFilesystem":{"mountpoint":"/var","available":1,"capacity":2},"maxTasks":3,"open":["#,
            r#"{"task":{"job":"uid-1","attempt":2},"phase":"running","limited":true},"#,
            r#"{"task":{"job":"uid-1","attempt":2},"phase":"needsKeys"},"#,
            r#"{"task":{"job":"uid-1","attempt":2},"phase":"finished"}],"trusts":"ab","timeZone":"Europe/Berlin","#,
            r#""windows":[{"days":["Mon","Sun"],"start":"01:30","duration":14400000,"timeZone":"Node"}],"pins":["uid-1"],"peer":{"addresses":["10.0.0.1:10006"]},"removes":true,"upgrades":true,"settings":{}}"#,
        ),
    );
    assert_frame(
        &EdgeMessage::State(NodeState {
            runtime: Some("containerd 2.1.0".to_owned()),
            image_filesystem: Some(Filesystem { mountpoint: "/var".to_owned(), available: 1, capacity: 2 }),
        }),
        concat!(
            r#"{"type":"state","runtime":"containerd 2.1.0","#,
            r#""imageFilesystem":{"mountpoint":"/var","available":1,"capacity":2}}"#,
        ),
    );
    assert_frame(&EdgeMessage::State(NodeState::default()), r#"{"type":"state"}"#);
    assert_frame(
        &EdgeMessage::Configured { settings: settings(), windows: Vec::new() },
        concat!(
            r#"{"type":"configured","settings":{"maxDownloadRate":4096,"peerMaxUploadRate":8192,"#,
            r#""windows":[{"days":["Mon","Sun"],"start":"01:30","duration":14400000,"timeZone":"Node"}],"#,
            r#""imageGcHighThreshold":70,"makeRoom":true,"keepUnfinished":3600000}}"#,
        ),
    );
    assert_frame(&EdgeMessage::Trusts { bundle: "ab".to_owned() }, r#"{"type":"trusts","bundle":"ab"}"#);
    assert_frame(
        &EdgeMessage::Hello(Box::default()),
        r#"{"type":"hello","version":"","os":"","arch":"","open":[]}"#,
    );
    assert_frame(
        &EdgeMessage::Accepted { task: task_id() },
        r#"{"type":"accepted","task":{"job":"uid-1","attempt":2}}"#,
    );
    let image = |index, phase, bytes, reason: &str| ImageProgress {
        index,
        phase,
        bytes,
        attempts: 1,
        reason: reason.to_owned(),
        code: None,
    };
    assert_frame(
        &EdgeMessage::Progress(TaskProgress {
            task: task_id(),
            images: vec![
                image(0, ImagePhase::Waiting, None, ""),
                image(1, ImagePhase::Pulling, Some(ByteProgress { done: 5, total: 9 }), ""),
                ImageProgress {
                    code: Some(FailureCode::RegistryError),
                    ..image(2, ImagePhase::BackingOff, None, "503")
                },
                image(3, ImagePhase::Done, None, ""),
            ],
            waits: String::new(),
        }),
        concat!(
            r#"{"type":"progress","task":{"job":"uid-1","attempt":2},"images":["#,
            r#"{"index":0,"phase":"waiting","attempts":1},"#,
            r#"{"index":1,"phase":"pulling","bytes":{"done":5,"total":9},"attempts":1},"#,
            r#"{"index":2,"phase":"backingOff","attempts":1,"reason":"503","code":"RegistryError"},"#,
            r#"{"index":3,"phase":"done","attempts":1}]}"#,
        ),
    );
}

#[test]
fn a_progress_without_images_says_what_the_task_waits_for() {
    assert_frame(
        &EdgeMessage::Progress(TaskProgress {
            task: task_id(),
            images: Vec::new(),
            waits: "waits for its window".to_owned(),
        }),
        r#"{"type":"progress","task":{"job":"uid-1","attempt":2},"images":[],"waits":"waits for its window"}"#,
    );
}

#[test]
fn results_keep_their_bytes() {
    let image = |outcome| ImageResult { ..ImageResult::new(outcome) };
    let result = |outcome, images| TaskResult {
        images,
        took: Duration::from_millis(1500),
        ..TaskResult::new(task_id(), outcome)
    };
    assert_frame(
        &EdgeMessage::Result(TaskResult {
            reason: "1 of 4 images failed".to_owned(),
            check: Some(CheckOutcome { passed: false, reason: "disk full".to_owned() }),
            ..result(
                TaskOutcome::Failed,
                vec![
                    ImageResult {
                        digest: Some("sha256:a".to_owned()),
                        id: Some("sha256:b".to_owned()),
                        bytes: Some(ByteProgress { done: 7, total: 7 }),
                        attempts: 1,
                        ..image(ImageOutcome::Pulled)
                    },
                    ImageResult { pinned: Some(true), ..image(ImageOutcome::Present) },
                    ImageResult {
                        facts: ImageFacts {
                            pulled_by_reason: "--fetch=runtime".to_owned(),
                            signed_by: Some("sha256:0123456789ab".to_owned()),
                            ..PulledBy::Runtime.into()
                        },
                        ..image(ImageOutcome::Pulled)
                    },
                    ImageResult {
                        reason: "404".to_owned(),
                        code: Some(FailureCode::NotFound),
                        ..image(ImageOutcome::Failed)
                    },
                    image(ImageOutcome::Stopped),
                ],
            )
        }),
        concat!(
            r#"{"type":"result","task":{"job":"uid-1","attempt":2},"outcome":"failed","reason":"1 of 4 images failed","#,
            r#""check":{"passed":false,"reason":"disk full"},"images":["#,
            r#"{"outcome":"pulled","digest":"sha256:a","id":"sha256:b","bytes":{"done":7,"total":7},"attempts":1},"#,
            r#"{"outcome":"present","attempts":0,"pinned":true},"#,
            r#"{"outcome":"pulled","attempts":0,"pulledBy":"Runtime","pulledByReason":"--fetch=runtime","signedBy":"sha256:0123456789ab"},"#,
            r#"{"outcome":"failed","reason":"404","code":"NotFound","attempts":0},"#,
            r#"{"outcome":"stopped","attempts":0}],"took":1500}"#,
        ),
    );
    for (outcome, name) in [
        (TaskOutcome::Succeeded, "succeeded"),
        (TaskOutcome::DeadlineExceeded, "deadlineExceeded"),
        (TaskOutcome::Cancelled, "cancelled"),
    ] {
        let frame =
            format!(r#"{{"task":{{"job":"uid-1","attempt":2}},"outcome":"{name}","images":[],"took":1500}}"#);
        assert_frame(&result(outcome, Vec::new()), &frame);
    }
}

#[test]
fn image_times_are_optional_milliseconds() {
    let (took, ended) = (Some(Duration::from_millis(1500)), Some(Duration::from_secs(2)));
    let image = ImageResult { took, ended, ..ImageResult::new(ImageOutcome::Pulled) };
    let text = r#"{"outcome":"pulled","attempts":0,"took":1500,"ended":2000}"#;
    assert_eq!(serde_json::to_string(&image).unwrap(), text);
    assert_eq!(serde_json::from_str::<ImageResult>(text).unwrap(), image);
    let older = serde_json::from_str::<ImageResult>(r#"{"outcome":"pulled","attempts":0}"#).unwrap();
    assert_eq!((older.took, older.ended), (None, None));
}

#[test]
fn the_kubelets_record_may_be_missing_or_new() {
    let image = ImageResult {
        facts: ImageFacts {
            kubelet_record: Some(KubeletRecord::OtherRepository),
            kubelet_record_reason: "it has a record".to_owned(),
            ..ImageFacts::default()
        },
        ..ImageResult::new(ImageOutcome::Present)
    };
    let text = r#"{"outcome":"present","attempts":0,"kubeletRecord":"OtherRepository","kubeletRecordReason":"it has a record"}"#;
    assert_eq!(serde_json::to_string(&image).unwrap(), text);
    assert_eq!(serde_json::from_str::<ImageResult>(text).unwrap(), image);
    let newer = text.replace("OtherRepository", "Borrowed");
    let newer = serde_json::from_str::<ImageResult>(&newer).unwrap();
    assert_eq!(newer.facts.kubelet_record, Some(KubeletRecord::Other));
    let older = serde_json::from_str::<ImageResult>(r#"{"outcome":"present","attempts":0}"#).unwrap();
    assert_eq!((older.facts.kubelet_record, older.facts.kubelet_record_reason.as_str()), (None, ""));
}

#[test]
fn the_reason_against_deltas_may_be_missing_or_new() {
    let image = ImageResult {
        facts: ImageFacts {
            delta_saved_bytes: Some(0),
            no_delta: Some(NoDelta::WrongLayer),
            no_delta_reason: "another digest".to_owned(),
            ..ImageFacts::default()
        },
        ..ImageResult::new(ImageOutcome::Pulled)
    };
    let text = r#"{"outcome":"pulled","attempts":0,"deltaSavedBytes":0,"noDelta":"WrongLayer","noDeltaReason":"another digest"}"#;
    assert_eq!(serde_json::to_string(&image).unwrap(), text);
    assert_eq!(serde_json::from_str::<ImageResult>(text).unwrap(), image);
    let newer = serde_json::from_str::<ImageResult>(&text.replace("WrongLayer", "Later")).unwrap();
    assert_eq!(newer.facts.no_delta, Some(NoDelta::Other));
    let older = text.replace(r#""noDelta":"WrongLayer","#, "");
    assert_eq!(serde_json::from_str::<ImageResult>(&older).unwrap().facts.no_delta, None);
}

#[test]
fn an_unknown_puller_is_read() {
    let image = r#"{"outcome":"pulled","attempts":1,"pulledBy":"Neighbour"}"#;
    assert_eq!(serde_json::from_str::<ImageResult>(image).unwrap().facts.pulled_by, Some(PulledBy::Other));
}

#[test]
fn cloud_messages_keep_their_bytes() {
    assert_frame(
        &CloudMessage::Welcome(Welcome {
            session: "s-1".to_owned(),
            heartbeat: Duration::from_secs(15),
            progress_interval: Duration::from_secs(1),
            state_interval: None,
            tickets: None,
        }),
        r#"{"type":"welcome","session":"s-1","heartbeat":15000,"progressInterval":1000}"#,
    );
    assert_frame(
        &CloudMessage::Welcome(Welcome {
            session: "s-1".to_owned(),
            heartbeat: Duration::from_secs(15),
            progress_interval: Duration::from_secs(1),
            state_interval: Some(Duration::from_secs(60)),
            tickets: Some(TicketTerms { key: "ab".to_owned(), now: Duration::from_secs(1) }),
        }),
        r#"{"type":"welcome","session":"s-1","heartbeat":15000,"progressInterval":1000,"stateInterval":60000,"tickets":{"key":"ab","now":1000}}"#,
    );
    assert_frame(
        &CloudMessage::ResultAck { task: task_id() },
        r#"{"type":"resultAck","task":{"job":"uid-1","attempt":2}}"#,
    );
    assert_frame(
        &CloudMessage::Cancel { task: task_id(), reason: "the job is gone".to_owned() },
        r#"{"type":"cancel","task":{"job":"uid-1","attempt":2},"reason":"the job is gone"}"#,
    );
    assert_frame(
        &CloudMessage::Unpin { jobs: [JobUid("uid-1".to_owned())].into() },
        r#"{"type":"unpin","jobs":["uid-1"]}"#,
    );
    assert_frame(
        &CloudMessage::Trust(TrustedCas { bundle: "PEM".to_owned(), renew_within: Duration::from_secs(20) }),
        r#"{"type":"trust","bundle":"PEM","renewWithin":20000}"#,
    );
    assert_frame(&CloudMessage::Settings(NodeSettings::default()), r#"{"type":"settings"}"#);
    assert_frame(
        &CloudMessage::Goaway { after: Duration::from_millis(250), reason: "overload".to_owned() },
        r#"{"type":"goaway","after":250,"reason":"overload"}"#,
    );
}

#[test]
fn an_assignment_keeps_its_bytes() {
    let image = |policy, key, timeout, sandbox| ImageTask {
        image: "nginx".to_owned(),
        reference: "docker.io/library/nginx:latest".to_owned(),
        policy,
        retries: 3,
        key,
        timeout,
        sandbox,
    };
    let sandbox = SandboxMetadata {
        labels: BTreeMap::from([("a".to_owned(), "b".to_owned())]),
        annotations: BTreeMap::from([("c".to_owned(), "d".to_owned())]),
    };
    let credential = |username: &str, password: &str, identity: &str, registry: &str| RegistryCredential {
        server: "r.io".to_owned(),
        username: Sensitive::new(username),
        password: Sensitive::new(password),
        identity_token: Sensitive::new(identity),
        registry_token: Sensitive::new(registry),
    };
    assert_frame(
        &CloudMessage::Assign(Assign {
            task: Task {
                upgrade: None,
                removal: None,
                id: task_id(),
                title: "imageprepulljob/nginx".to_owned(),
                checks: vec![CheckItem::Disk, CheckItem::Cpu, CheckItem::Mem],
                images: vec![
                    image(PullPolicy::Always, 0, Some(Duration::from_secs(60)), Some(sandbox)),
                    image(PullPolicy::IfNotPresent, 1, None, None),
                    image(PullPolicy::Never, 2, None, Some(SandboxMetadata::default())),
                ],
            },
            remaining: Duration::from_secs(300),
            keys: vec![
                PullKey::anonymous(),
                PullKey::Anonymous { note: "no entry".to_owned() },
                PullKey::Credentials {
                    credentials: vec![credential("u", "p", "", ""), credential("", "", "i", "r")],
                },
                PullKey::Unavailable { reason: "no such secret".to_owned() },
            ],
            download: DownloadTerms::default(),
        }),
        concat!(
            r#"{"type":"assign","task":{"id":{"job":"uid-1","attempt":2},"title":"imageprepulljob/nginx","#,
            r#""checks":["disk","cpu","mem"],"images":["#,
            r#"{"image":"nginx","reference":"docker.io/library/nginx:latest","policy":"Always","retries":3,"key":0,"#,
            r#""timeout":60000,"sandbox":{"labels":{"a":"b"},"annotations":{"c":"d"}}},"#,
            r#"{"image":"nginx","reference":"docker.io/library/nginx:latest","policy":"IfNotPresent","retries":3,"key":1},"#,
            r#"{"image":"nginx","reference":"docker.io/library/nginx:latest","policy":"Never","retries":3,"key":2,"#,
            r#""sandbox":{}}]},"remaining":300000,"keys":["#,
            r#"{"kind":"anonymous"},{"kind":"anonymous","note":"no entry"},"#,
            r#"{"kind":"credentials","credentials":[{"server":"r.io","username":"u","password":"p"},"#,
            r#"{"server":"r.io","identityToken":"i","registryToken":"r"}]},"#,
            r#"{"kind":"unavailable","reason":"no such secret"}]}"#,
        ),
    );
}

#[test]
fn download_terms_are_optional_and_stable() {
    let task = Task::new(task_id(), Vec::new());
    let assign = |download| {
        CloudMessage::Assign(Assign {
            task: task.clone(),
            remaining: Duration::ZERO,
            keys: Vec::new(),
            download,
        })
    };
    let head = concat!(
        r#"{"type":"assign","task":{"id":{"job":"uid-1","attempt":2},"title":"","checks":[],"images":[]},"#,
        r#""remaining":0,"keys":[]"#
    );
    assert_frame(&assign(DownloadTerms::default()), &format!("{head}}}"));
    let verify = |mode, unavailable: Option<&str>| Verification {
        mode,
        keys: vec!["PEM".to_owned()],
        unavailable: unavailable.map(str::to_owned),
    };
    let berlin = Window { days: Vec::new(), time_zone: Zone::Named("Europe/Berlin".to_owned()), ..window() };
    assert_frame(
        &assign(DownloadTerms {
            max_rate: NonZeroU64::new(2 << 20),
            windows: vec![window(), berlin],
            delay: Duration::from_secs(7),
            pin: true,
            verify: Some(verify(VerificationMode::Enforce, None)),
            share: true,
            site_rate: NonZeroU64::new(3 << 20),
            deltas: Deltas::Require,
            ..DownloadTerms::default()
        }),
        &[
            head,
            r#","download":{"maxRate":2097152,"windows":["#,
            r#"{"days":["Mon","Sun"],"start":"01:30","duration":14400000,"timeZone":"Node"},"#,
            r#"{"start":"01:30","duration":14400000,"timeZone":"Europe/Berlin"}],"#,
            r#""delay":7000,"pin":true,"verify":{"mode":"Enforce","keys":["PEM"]},"share":true,"siteRate":3145728,"deltas":"Require"}}"#,
        ]
        .concat(),
    );
    assert_frame(
        &assign(DownloadTerms {
            verify: Some(verify(VerificationMode::Warn, Some("no such secret"))),
            ..DownloadTerms::default()
        }),
        &format!(
            r#"{head},"download":{{"verify":{{"mode":"Warn","keys":["PEM"],"unavailable":"no such secret"}}}}}}"#
        ),
    );
    let paused = DownloadTerms { windows: vec![Window::never()], paused: true, ..DownloadTerms::default() };
    assert_frame(
        &assign(paused),
        &[
            head,
            r#","download":{"windows":[{"days":["Other"],"start":"00:00","duration":60000,"timeZone":"UTC"}],"#,
            r#""paused":true}}"#,
        ]
        .concat(),
    );
}

#[test]
fn what_a_site_shares_keeps_its_bytes() {
    let news = |state, done| BlobNews { digest: "sha256:a".to_owned(), size: 9, state, done };
    let failure =
        PeerFailure { digest: "sha256:a".to_owned(), peer: "edge-2".into(), fault: PeerFault::Unreachable };
    let blobs = vec![
        news(BlobState::Wanted, 0),
        news(BlobState::Carrying, 5),
        news(BlobState::Fetching, 6),
        news(BlobState::Here, 0),
        news(BlobState::Dropped, 0),
    ];
    assert_frame(
        &EdgeMessage::Blobs(Blobs { task: task_id(), blobs, failures: vec![failure], reads_streams: false }),
        concat!(
            r#"{"type":"blobs","task":{"job":"uid-1","attempt":2},"blobs":["#,
            r#"{"digest":"sha256:a","size":9,"state":"wanted"},"#,
            r#"{"digest":"sha256:a","size":9,"state":"carrying","done":5},"#,
            r#"{"digest":"sha256:a","size":9,"state":"fetching","done":6},"#,
            r#"{"digest":"sha256:a","size":9,"state":"here"},"#,
            r#"{"digest":"sha256:a","size":9,"state":"dropped"}],"failures":["#,
            r#"{"digest":"sha256:a","peer":"edge-2","fault":"unreachable"}]}"#,
        ),
    );
    let source = |from| BlobSource { digest: "sha256:a".to_owned(), from };
    let peer = BlobPeer {
        node: "edge-2".into(),
        addresses: vec!["10.0.0.2:10006".to_owned()],
        ticket: "12.ab".to_owned(),
    };
    let blobs = vec![
        source(From::Registry { alone: String::new(), max_rate: None }),
        source(From::Registry { alone: "so".to_owned(), max_rate: NonZeroU64::new(7) }),
        source(From::Peers { peers: vec![peer] }),
        source(From::Wait),
    ];
    assert_frame(
        &CloudMessage::Sources(BlobSources { task: task_id(), blobs }),
        concat!(
            r#"{"type":"sources","task":{"job":"uid-1","attempt":2},"blobs":["#,
            r#"{"digest":"sha256:a","from":{"kind":"registry"}},"#,
            r#"{"digest":"sha256:a","from":{"kind":"registry","alone":"so","maxRate":7}},"#,
            r#"{"digest":"sha256:a","from":{"kind":"peers","peers":[{"node":"edge-2","addresses":["10.0.0.2:10006"],"#,
            r#""ticket":"12.ab"}]}},{"digest":"sha256:a","from":{"kind":"wait"}}]}"#,
        ),
    );
}

#[test]
fn unknown_fields_and_types_are_ignored() {
    let newer = r#"{"type":"accepted","task":{"job":"uid-1","attempt":2},"added":"later"}"#;
    assert_eq!(decode_frame::<EdgeMessage>(newer).unwrap(), EdgeMessage::Accepted { task: task_id() });
    let newer = r#"{"outcome":"failed","reason":"so","code":"Later","attempts":1}"#;
    assert_eq!(decode_frame::<ImageResult>(newer).unwrap().code, Some(FailureCode::Other));
    assert_eq!(decode_frame::<EdgeMessage>(r#"{"type":"later"}"#).unwrap(), EdgeMessage::Other);
    let error = decode_frame::<EdgeMessage>(r#"{"kind":"s3cret"}"#).unwrap_err().to_string();
    assert!(error.starts_with("not a message of prepull.v1: ") && !error.contains("s3cret"), "{error}");
}

#[test]
fn oversized_frames_are_neither_sent_nor_read() {
    let text = |length: usize| Sensitive::new("x".repeat(length));
    assert!(encode_frame(&text(MAX_MESSAGE - 2)).is_ok());
    assert!(matches!(encode_frame(&text(MAX_MESSAGE - 1)), Err(DecodeError::TooLarge(_))));
    assert!(matches!(decode_frame::<Sensitive>(&" ".repeat(MAX_MESSAGE + 1)), Err(DecodeError::TooLarge(_))));
}

#[test]
fn a_reason_is_cut_at_a_character_boundary() {
    assert_eq!(truncate_reason("short"), "short");
    assert_eq!(truncate_reason(&"x".repeat(MAX_REASON)), "x".repeat(MAX_REASON));
    let cut = truncate_reason(&"é".repeat(MAX_REASON));
    assert_eq!(cut, format!("{} …", "é".repeat((MAX_REASON - " …".len()) / 2)));
}

proptest! {
    #[test]
    fn decoding_any_text_never_panics(frame in "[ -~é]{0,60}") {
        let _ = decode_frame::<EdgeMessage>(&frame);
        let _ = decode_frame::<CloudMessage>(&frame);
    }
}
