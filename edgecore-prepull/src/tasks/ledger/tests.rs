#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant, SystemTime};

use prepull_api::task::{ImageOutcome, ImageTask, JobUid, PullPolicy, Task, TaskOutcome};
use tempfile::TempDir;

use super::*;
use crate::tasks::agent::Now;

fn record(job: &str, attempt: u32) -> TaskRecord {
    let image = ImageTask {
        image: "app:1".to_owned(),
        policy: PullPolicy::Always,
        retries: 3,
        ..ImageTask::new("r.example/app:1")
    };
    let id = TaskId { job: JobUid(job.to_owned()), attempt };
    let task = Task { title: "t".to_owned(), ..Task::new(id, vec![image]) };
    let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    TaskRecord::new(task, Duration::from_secs(300), Now { monotonic: Instant::now(), wall, boot: None })
}

fn files(dir: &TempDir) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir.path().join(TASKS))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn records_come_back_after_a_restart() {
    let dir = TempDir::new().unwrap();
    let mut ledger = Ledger::open(dir.path()).unwrap();
    let (first, mut second) = (record("5f2c-a", 1), record("5f2c-a", 2));
    ledger.save(&first).unwrap();
    ledger.save(&second).unwrap();
    second.remaining = Duration::from_secs(7);
    ledger.save(&second).unwrap();
    drop(ledger);

    let mut ledger = Ledger::open(dir.path()).unwrap();
    assert_eq!(ledger.load().unwrap(), [first.clone(), second.clone()]);
    ledger.remove(first.id()).unwrap();
    ledger.remove(first.id()).unwrap();
    assert_eq!(ledger.load().unwrap(), [second]);
    assert_eq!(files(&dir), ["5f2c-a.2.json"]);
}

#[test]
fn a_second_agent_is_locked_out() {
    let dir = TempDir::new().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    let message = Ledger::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("in use") && message.contains("--state-dir"), "{message}");
    drop(ledger);
    Ledger::open(dir.path()).unwrap();
}

#[test]
fn a_lock_on_a_read_only_disk_still_locks() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join(LOCK);
    // Refuses to open a file for writing, as a read-only file system does.
    let refusing = |kind: io::ErrorKind| {
        move |options: &OpenOptions, path: &Path| {
            if format!("{options:?}").contains("write: true") { Err(kind.into()) } else { options.open(path) }
        }
    };
    let read_only = io::ErrorKind::ReadOnlyFilesystem;
    assert_eq!(open_lock(&path, refusing(read_only)).unwrap_err().kind(), read_only, "there's no lock");
    drop(Ledger::open(dir.path()).unwrap());
    let lock = open_lock(&path, refusing(read_only)).unwrap();
    flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(matches!(Ledger::open(dir.path()), Err(LedgerError::InUse(_))));
    let full = io::ErrorKind::StorageFull;
    assert_eq!(open_lock(&path, refusing(full)).unwrap_err().kind(), full);
}

#[test]
fn unusable_files_are_set_aside() {
    let dir = TempDir::new().unwrap();
    let mut ledger = Ledger::open(dir.path()).unwrap();
    let good = record("good", 1);
    ledger.save(&good).unwrap();
    let tasks = dir.path().join(TASKS);
    let mut short = record("short", 1);
    short.images.clear();
    ledger.save(&short).unwrap();
    fs::write(tasks.join("cut.1.json"), &serde_json::to_vec(&good).unwrap()[..50]).unwrap();
    fs::write(tasks.join("empty.1.json"), "").unwrap();
    fs::write(tasks.join("other.1.json"), serde_json::to_vec(&good).unwrap()).unwrap();
    fs::write(tasks.join("noise.1.json"), [0xff, 0xfe, 0]).unwrap();
    File::create(tasks.join("huge.1.json")).unwrap().set_len(MAX_RECORD + 1).unwrap();
    fs::write(tasks.join("good.1.json.new"), "{").unwrap();

    assert_eq!(ledger.load().unwrap(), [good]);
    let aside = ["cut", "empty", "huge", "noise", "other", "short"];
    let mut expected: Vec<_> = aside.iter().map(|name| format!("{name}.1.json.corrupt")).collect();
    expected.push("good.1.json".to_owned());
    expected.sort();
    assert_eq!(files(&dir), expected);
}

#[test]
fn a_temporarily_unreadable_file_stays() {
    let dir = TempDir::new().unwrap();
    let mut ledger = Ledger::open(dir.path()).unwrap();
    let tasks = dir.path().join(TASKS);
    // Written after an upgrade that was rolled back: we only need to understand the format.
    let newer = format!(r#"{{"format":{},"task":"told in another way"}}"#, RECORD_FORMAT + 1);
    fs::write(tasks.join("newer.1.json"), &newer).unwrap();
    // An error of the operating system. Missing permissions wouldn't do: tests may run as root.
    fs::create_dir(tasks.join("error.1.json")).unwrap();
    assert_eq!(ledger.load().unwrap(), []);
    assert_eq!(files(&dir), ["error.1.json", "newer.1.json"]);
    assert_eq!(fs::read_to_string(tasks.join("newer.1.json")).unwrap(), newer);
}

#[test]
fn no_uid_escapes_or_collides() {
    let dir = TempDir::new().unwrap();
    let mut ledger = Ledger::open(dir.path()).unwrap();
    let long = "a".repeat(65);
    let uids = ["../../etc/passwd", "", ".", "a/b", "a\0b", "ä", "_x", &long, "a.1", "A", "a"];
    for uid in uids {
        ledger.save(&record(uid, 1)).unwrap();
    }
    assert_eq!(files(&dir).len(), uids.len());
    assert_eq!(ledger.load().unwrap().len(), uids.len());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the folder and the lock");
    for uid in uids {
        ledger.remove(record(uid, 1).id()).unwrap();
    }
    assert_eq!(files(&dir), [""; 0]);
}

#[test]
fn newer_records_become_known_words() {
    let dir = TempDir::new().unwrap();
    let mut ledger = Ledger::open(dir.path()).unwrap();
    ledger.save(&record("open", 1)).unwrap();
    ledger.save(&record("ended", 1)).unwrap();
    let change = |name: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let path = dir.path().join(TASKS).join(name);
        let mut record = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut record);
        fs::write(path, record.to_string()).unwrap();
    };
    let image = serde_json::json!({"outcome": "later", "code": "Later", "attempts": 1, "added": 1});
    change("open.1.json", &|record| {
        record["task"]["checks"] = serde_json::json!(["later"]);
        record["task"]["images"][0]["policy"] = "Later".into();
        record["images"] = serde_json::json!([image]);
    });
    change("ended.1.json", &|record| {
        record["images"] = serde_json::json!([]);
        record["result"] = serde_json::json!({"task": {"job": "ended", "attempt": 1}, "outcome": "later",
            "images": [image], "took": 1});
    });
    let records = ledger.load().unwrap();
    let of = |job: &str| records.iter().find(|record| record.id().job.0 == job).unwrap();
    let (open, ended) = (of("open"), of("ended").result.as_ref().unwrap());
    assert_eq!(open.task.images[0].policy, PullPolicy::Other);
    assert_eq!(ended.outcome, TaskOutcome::Failed);
    for image in [open.images[0].as_ref().unwrap(), &ended.images[0]] {
        assert_eq!(image.outcome, ImageOutcome::Failed);
        assert!(image.reason.contains("update edgecore-prepull"), "{image:?}");
    }
}

#[test]
fn a_failed_write_keeps_the_old_record() {
    let dir = TempDir::new().unwrap();
    let mut ledger = Ledger::open(dir.path()).unwrap();
    let old = record("a", 1);
    ledger.save(&old).unwrap();
    // A directory in the place of the new file. Missing permissions wouldn't do: tests may run as root.
    let blocker = dir.path().join(TASKS).join("a.1.json.new");
    fs::create_dir(&blocker).unwrap();
    let mut new = old.clone();
    new.remaining = Duration::ZERO;
    let error = ledger.save(&new).unwrap_err().to_string();
    assert!(error.contains("a.1.json"), "{error}");
    fs::remove_dir(&blocker).unwrap();
    assert_eq!(ledger.load().unwrap(), [old]);
}
