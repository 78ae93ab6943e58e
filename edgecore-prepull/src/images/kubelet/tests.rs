#![allow(clippy::unwrap_used)]
use std::fs;

use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

const ID: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const REFERENCE: &str = "harbor.example/shop/web:v2";

/// The root directory of a kubelet that has pulled nothing.
fn kubelet() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for dir in ["pulled", "pulling"] {
        fs::create_dir_all(root.path().join(IMAGE_MANAGER).join(dir)).unwrap();
    }
    root
}

/// Writes a file at once, as the kubelet does: it may be read meanwhile.
fn write(root: &TempDir, dir: &str, key: &str, content: &str) -> PathBuf {
    let path = root.path().join(IMAGE_MANAGER).join(dir).join(file_name(key));
    fs::write(root.path().join("new"), content).unwrap();
    fs::rename(root.path().join("new"), &path).unwrap();
    path
}

/// A record as the kubelet of 1.35 and later writes it.
fn record(id: &str, mapping: &Value) -> String {
    let mut record = json!({
        "kind": "ImagePulledRecord", "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "lastUpdatedTime": "2026-11-21T09:00:00Z", "imageRef": id,
    });
    if mapping.as_object().is_some_and(|mapping| !mapping.is_empty()) {
        record["credentialMapping"] = mapping.clone();
    }
    record.to_string() + "\n"
}

fn intent(image: &str) -> String {
    json!({"kind": "ImagePullIntent", "apiVersion": "kubelet.config.k8s.io/v1beta1", "image": image})
        .to_string()
}

async fn reason(root: &TempDir, id: &str, reference: &str) -> Option<AskReason> {
    KubeletRecords::in_root_dir(root.path()).find_reason(id, reference).await
}

async fn kind(root: &TempDir) -> Option<KubeletRecord> {
    reason(root, ID, REFERENCE).await.map(|reason| reason.record)
}

#[test]
fn files_have_the_kubelets_names() {
    // From the kubelet's own test data.
    let name = "sha256-b3c0cc4278800b03a308ceb2611161430df571ca733122f0a40ac8b9792a9064";
    assert_eq!(file_name("testimageref").to_str(), Some(name));
}

#[tokio::test]
async fn records_decide_as_in_the_kubelet() {
    use KubeletRecord::{NoCredentials, OtherRepository, SomeCredentials};
    let everyone = json!({"nodePodsAccessible": true});
    let secret = json!({"kubernetesSecrets": [{"uid": "u", "namespace": "shop", "name": "harbor", "credentialHash": "h"}]});
    let account = json!({"kubernetesServiceAccounts": [{"uid": "u", "namespace": "shop", "name": "web"}]});
    for (mapping, expected) in [
        (json!({"harbor.example/shop/web": everyone}), None),
        (json!({"harbor.example/shop/web": everyone, "mirror.example/web": secret}), None),
        (json!({"harbor.example/shop/web": secret}), Some(SomeCredentials)),
        (json!({"harbor.example/shop/web": account}), Some(SomeCredentials)),
        (json!({"harbor.example/shop/web": {}}), Some(NoCredentials)),
        (json!({"harbor.example/shop/web": {"kubernetesSecrets": null}}), Some(NoCredentials)),
        (json!({"mirror.example/shop/web": everyone}), Some(OtherRepository)),
        (json!({"harbor.example/shop/web2": everyone}), Some(OtherRepository)),
        (json!({}), Some(NoCredentials)),
        (Value::Null, Some(NoCredentials)),
    ] {
        let root = kubelet();
        write(&root, "pulled", ID, &record(ID, &mapping));
        assert_eq!(kind(&root).await, expected, "{mapping}");
        let alpha = record(ID, &mapping).replace("v1beta1", "v1alpha1");
        write(&root, "pulled", ID, &alpha);
        assert_eq!(kind(&root).await, expected, "{mapping}");
    }
}

#[tokio::test]
async fn a_reason_begins_with_its_meaning() {
    let root = kubelet();
    let long = format!("mirror.example/{}", "a".repeat(200));
    let everyone = json!({"nodePodsAccessible": true});
    let says = async |mapping: Value| {
        write(&root, "pulled", ID, &record(ID, &mapping));
        reason(&root, ID, REFERENCE).await.unwrap().text
    };
    let asks = "by default, the kubelet asks the registry before a pod may use this image: ";
    let text = says(json!({"a.example/w": everyone, "b.example/w": everyone, "c.example/w": everyone})).await;
    let because = "it has a record of it from another repository, a.example/w, b.example/w and 1 more";
    assert_eq!(text, format!("{asks}{because}"));
    let text = says(json!({long: everyone})).await;
    assert!(text.starts_with(asks) && text.len() <= prepull_api::wire::MAX_NOTE, "{text}");
}

#[tokio::test]
async fn short_names_are_the_same_repository() {
    let root = kubelet();
    let everyone = json!({"nginx": {"nodePodsAccessible": true}});
    write(&root, "pulled", ID, &record(ID, &everyone));
    assert_eq!(reason(&root, ID, "docker.io/library/nginx:1.27").await, None);
}

#[tokio::test]
async fn ids_of_cri_o_have_no_prefix() {
    let root = kubelet();
    let bare = ID.strip_prefix("sha256:").unwrap();
    let other = json!({"mirror.example/web": {"nodePodsAccessible": true}});
    write(&root, "pulled", bare, &record(bare, &other));
    assert_eq!(kind(&root).await, Some(KubeletRecord::OtherRepository));
}

#[tokio::test]
async fn a_record_of_another_image_is_ignored() {
    let root = kubelet();
    write(&root, "pulled", ID, &record("sha256:other", &json!({})));
    assert_eq!(kind(&root).await, None);
}

#[tokio::test]
async fn unreadable_records_are_named() {
    for content in ["", "{", "[]", "{\"kind\": \"Secret\", \"apiVersion\": \"v1\"}"] {
        let root = kubelet();
        let path = write(&root, "pulled", ID, content);
        let reason = reason(&root, ID, REFERENCE).await.unwrap();
        assert_eq!(reason.record, KubeletRecord::Unreadable, "{content}");
        let beginning = path.to_str().unwrap().chars().take(100).collect::<String>();
        assert!(reason.text.contains(&beginning), "{reason:?}");
    }
}

#[tokio::test]
async fn without_records_there_is_no_warning() {
    let root = tempfile::tempdir().unwrap();
    assert_eq!(kind(&root).await, None);
    fs::create_dir(root.path().join(IMAGE_MANAGER)).unwrap();
    assert_eq!(kind(&root).await, None);
    fs::create_dir(root.path().join(IMAGE_MANAGER).join("pulled")).unwrap();
    assert_eq!(kind(&root).await, None);
}

#[tokio::test(start_paused = true)]
async fn an_unfinished_pull_warns_later() {
    for (image, expected) in [
        (REFERENCE, Some(KubeletRecord::Pulling)),
        ("harbor.example/shop/web", None),
        ("harbor.example/shop/web:v3", None),
    ] {
        let root = kubelet();
        write(&root, "pulling", image, &intent(image));
        let begun = Instant::now();
        assert_eq!(kind(&root).await, expected, "{image}");
        assert_eq!(begun.elapsed() >= PULL_PATIENCE, expected.is_some(), "{image}");
    }
    let root = kubelet();
    write(&root, "pulling", "nginx", &intent("nginx:latest"));
    let found = reason(&root, ID, "docker.io/library/nginx:latest").await;
    assert_eq!(found.map(|found| found.record), Some(KubeletRecord::Pulling));
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_ends_soon_decides() {
    let root = kubelet();
    let other = json!({"mirror.example/web": {"nodePodsAccessible": true}});
    write(&root, "pulled", ID, &record(ID, &other));
    let of_pull = write(&root, "pulling", REFERENCE, &intent(REFERENCE));
    let ends = async {
        sleep(PULL_PATIENCE / 2).await;
        let both = json!({"mirror.example/web": {"nodePodsAccessible": true}, "harbor.example/shop/web": {"nodePodsAccessible": true}});
        write(&root, "pulled", ID, &record(ID, &both));
        fs::remove_file(of_pull).unwrap();
    };
    let (found, ()) = tokio::join!(kind(&root), ends);
    assert_eq!(found, None);
}

#[test]
fn a_hanging_disk_delays_by_seconds() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(2).build().unwrap();
    let root = kubelet();
    // Opening it blocks: no process writes to it.
    let hangs = root.path().join(IMAGE_MANAGER).join("pulled").join(file_name(ID));
    mkfifoat(CWD, &hangs, Mode::RUSR).unwrap();
    let records = KubeletRecords::in_root_dir(root.path());
    let look = || records.find_reason(ID, REFERENCE);
    let looks = async {
        assert_eq!(tokio::join!(look(), look(), look()), (None, None, None));
        tokio::task::spawn_blocking(|| ()).await.unwrap();
    };
    let limit = LOOK_PATIENCE * 4;
    runtime.block_on(async { timeout(limit, looks).await }).unwrap();
    // Dropping it would wait for the thread.
    runtime.shutdown_background();
}
