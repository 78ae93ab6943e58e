//! Errors for wrong input: each names the flag, file or object, the cause, and the remedy.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::net::TcpListener;

/// The program, to be run in `dir` without any of our environment variables.
fn program(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_edgecore-prepull"));
    command.current_dir(dir).env_clear().env("HOME", dir).stdin(Stdio::null());
    command
}

/// Runs the program in a directory with nothing but these files. Returns its exit status and its stderr.
fn run(line: &str, files: &[(&str, &str)]) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let words = line.split(' ').map(|word| if word == "''" { "" } else { word });
    let output = program(dir.path()).args(words).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Checks that a command line ends with `status` and an error that contains each of `words` exactly once.
fn check_error(line: &str, files: &[(&str, &str)], status: i32, words: &[&str]) {
    let (ended, said) = run(line, files);
    assert_eq!(ended, Some(status), "{line}: {said}");
    for word in words {
        assert_eq!(said.matches(word).count(), 1, "{line}: {word:?} does not occur exactly once: {said}");
    }
    assert!(said.starts_with("error: "), "{line}: {said}");
    assert!(!said.contains("panicked"), "{line}: {said}");
}

/// A token of valid form that no server has issued.
fn token() -> String {
    format!("{}.{}.{}", "a".repeat(64), "b".repeat(12), "c".repeat(64))
}

#[test]
fn wrong_usage_has_a_remedy() {
    for (line, words) in [
        ("run --disk-min-free 10", &["--disk-min-free", "has no unit: write 10%, 512MiB or 5GiB"][..]),
        ("run --mem-min-free 100", &["--mem-min-free", "has no unit"]),
        ("run --parallel-pulls 0", &["--parallel-pulls", "\"0\" is not a number of images: write 1 or more"]),
        ("pull --parallel-pulls 0 nginx", &["--parallel-pulls", "write 1 or more"]),
        ("run --image-gc-high-threshold 120", &["\"120\" is not a percentage from 1% to 100%"]),
        ("pull --image-gc-high-threshold 0% nginx", &["\"0%\" is not a percentage from 1% to 100%"]),
        ("run --tunnel-url cloud", &["--tunnel-url", "not a URL of the form wss://HOST[:PORT][/PATH]"]),
        (
            "run --enroll-url http://cloud",
            &["--enroll-url", "not a URL of the form https://HOST[:PORT][/PATH]"],
        ),
        ("run --tunnel-url wss://a,b", &["--tunnel-url", "\"b\" is not a URL"]),
        ("run --runtime-endpoint tcp://x", &["--runtime-endpoint", "such as unix:///run/containerd/"]),
        ("pull --runtime-endpoint x nginx", &["--runtime-endpoint", "such as unix:///run/containerd/"]),
        (
            "join --server http://x --token t --node-name e",
            &["--enroll-url https://HOST:PORT", "takes a host"],
        ),
        ("join --server x:1 --token t --node-name e", &["--tunnel-url wss://HOST:PORT/v1/edge", "x:1"]),
        (
            "join --enroll-url x --tunnel-url wss://x --token t --node-name e",
            &["--enroll-url", "form https://"],
        ),
        ("join --node-name e", &["--server HOST, or both --enroll-url URL and --tunnel-url URL"]),
        ("join --enroll-url https://x --node-name e", &["or both --enroll-url URL and --tunnel-url URL"]),
    ] {
        check_error(line, &[], 2, words);
    }
}

#[test]
fn urls_are_checked_before_the_identity() {
    let many = (1..=9).map(|n| format!("wss://a{n}")).collect::<Vec<_>>().join(",");
    check_error(
        &format!("run --state-dir s --tunnel-url {many}"),
        &[],
        1,
        &["--tunnel-url has 9 URLs: at most 8"],
    );
    // An empty value counts as unset.
    check_error(
        "run --state-dir s --tunnel-url '' --enroll-url ''",
        &[],
        1,
        &["s: this node has not joined"],
    );
    let line = format!("join --server '' --token {} --node-name e --state-dir s", token());
    check_error(&line, &[], 1, &["--enroll-url has no URL of the form https://"]);
}

#[test]
fn a_file_error_shows_its_line_once() {
    for (file, words) in [
        ("a: 1", &["line 1, \"a: 1\": unknown field `a`, expected one of stateDir"][..]),
        ("maxTasks: 1\nmetricsListen: x\n", &["line 2, \"metricsListen: x\": \"x\" is not an address"]),
        ("diskMinFree: 10", &["line 1, \"diskMinFree: 10\"", "\"10\" has no unit: write 10%"]),
        ("diskMinFree: [1]", &["one value is expected here"]),
        (
            "tunnelUrl: [wss://a, http://b]",
            &["\"tunnelUrl: [", "\"http://b\" is not a URL of the form wss://"],
        ),
        ("enrollUrl: {a: b}", &["\"enrollUrl: {", "a URL or a list of URLs is expected here"]),
        ("runtimeEndpoint: x", &["\"runtimeEndpoint: x\"", "is no address of a container runtime"]),
        ("parallelPulls: many", &["\"parallelPulls: many\""]),
        ("hello", &["line 1, \"hello\": "]),
    ] {
        check_error(
            "run --config f --state-dir s",
            &[("f", file)],
            1,
            &[&["--config f, line "], words].concat(),
        );
    }
    check_error("run --config nope", &[], 1, &["--config nope", "No such file or directory"]);
    check_error("run --log a=b=c", &[], 1, &["--log a=b=c is not a filter", "too many '='"]);
}

#[test]
fn an_invalid_token_is_not_quoted() {
    let line = "join --server x --node-name e --state-dir s --token s3cret";
    check_error(line, &[], 1, &["--token: not a join token", "check that it was copied whole"]);
    assert!(!run(line, &[]).1.contains("s3cret"));
}

#[test]
fn a_foreign_state_directory_has_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    for sub in ["pki", "joined", "joined/tasks"] {
        std::fs::create_dir(dir.path().join(sub)).unwrap();
    }
    store_identity(&dir.path().join("joined"), "edge-1");
    std::fs::write(dir.path().join("pki/client.crt"), "").unwrap();
    // Root may read every file. If the tests run as root, the program runs as another user, from a copy that this user
    // may execute.
    let is_root = rustix::process::geteuid().is_root();
    let copy = dir.path().join("program");
    if is_root {
        std::fs::copy(env!("CARGO_BIN_EXE_edgecore-prepull"), &copy).unwrap();
    }
    let set = |path: &str, mode| {
        std::fs::set_permissions(dir.path().join(path), PermissionsExt::from_mode(mode)).unwrap();
    };
    let token = token();
    let run = "--runtime-endpoint /s --tunnel-url wss://a --enroll-url https://a";
    for (locked, mode, line, words) in [
        (
            "pki",
            0o000,
            "run --state-dir .",
            "cannot read ./pki/client.crt: permission denied: run edgecore-prepull as root",
        ),
        (
            "pki",
            0o000,
            &format!("join --server localhost --token {token} --node-name e --state-dir ."),
            "a --state-dir of its own",
        ),
        (
            "joined",
            0o555,
            &format!("run --state-dir joined {run}"),
            "cannot open the lock joined/lock: permission denied",
        ),
    ] {
        set(".", 0o755);
        set(locked, mode);
        let mut command = program(dir.path());
        if is_root {
            command = Command::new(&copy);
            command.current_dir(dir.path()).env_clear().uid(65_534).gid(65_534);
        }
        let output = command.args(line.split(' ')).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(words) && output.status.code() == Some(1), "{line}: {said}");
        set(locked, 0o755);
    }
}

/// Stores an identity like `join`, without a server.
fn store_identity(state_dir: &Path, node: &str) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, format!("system:node:{node}"));
    let certificate = params.self_signed(&key).unwrap().pem();
    std::fs::create_dir_all(state_dir.join("pki")).unwrap();
    for (name, text) in
        [("ca.crt", &certificate), ("client.crt", &certificate), ("client.key", &key.serialize_pem())]
    {
        std::fs::write(state_dir.join("pki").join(name), text).unwrap();
    }
}

#[test]
fn joining_over_another_node_names_both() {
    let dir = tempfile::tempdir().unwrap();
    store_identity(dir.path(), "edge-1");
    let line = format!(
        "join --server localhost --token {} --node-name edge-2 --state-dir {}",
        token(),
        dir.path().display()
    );
    check_error(
        &line,
        &[],
        1,
        &["identity of node edge-1, and not of edge-2", "give --node-name edge-1", "--force"],
    );
}

#[tokio::test]
async fn an_agent_survives_a_closed_stderr() {
    let dir = tempfile::tempdir().unwrap();
    store_identity(dir.path(), "edge-1");
    let cloud = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = cloud.local_addr().unwrap();
    let line = format!(
        "run --state-dir . --tunnel-url wss://{address} --enroll-url https://{address} --metrics-listen off \
         --runtime-endpoint /nope.sock"
    );
    let mut command = program(dir.path());
    command.args(line.split(' ')).stderr(Stdio::piped());
    let mut agent = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
    drop(agent.stderr.take());
    // It dials, logs that the server doesn't speak TLS, and dials again.
    let dials = async {
        for _ in 0..2 {
            drop(cloud.accept().await.unwrap());
        }
    };
    tokio::select! {
        () = dials => {}
        ended = agent.wait() => panic!("it ended: {ended:?}"),
        () = tokio::time::sleep(Duration::from_secs(30)) => panic!("it does not dial"),
    }
    let pid = rustix::process::Pid::from_raw(agent.id().unwrap().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(agent.wait().await.unwrap().code(), Some(0));
}

/// Stores a program for the launcher, and returns it as the record of upgrades has it.
fn store_program(state_dir: &Path, version: &str, program: impl AsRef<[u8]>) -> String {
    let digest = prepull_registry::digest::sha256(program.as_ref());
    let file = state_dir.join("upgrade/programs").join(digest.trim_start_matches("sha256:"));
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, program).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o700)).unwrap();
    format!(r#"{{"digest": "{digest}", "version": "{version}", "image": "agent:{version}"}}"#)
}

/// Stores an upgrade that has proved itself, and perhaps a trial besides. It prints its command line.
fn store_upgrade(state_dir: &Path, trial: &str) {
    let proved = store_program(state_dir, "9", "#!/bin/sh\necho \"launched $*\" >&2\n");
    let base = env!("CARGO_PKG_VERSION");
    let record = format!(r#"{{"base": "{base}", "proved": {proved}, "trial": {trial}}}"#);
    std::fs::write(state_dir.join("upgrade/record.json"), record).unwrap();
}

#[test]
fn settings_of_a_newer_version_reach_it() {
    for (line, file, own) in [
        ("run --config f", "stateDir: s\n", "this node has not joined"),
        ("run --config f", "newKey: 1\nmaxTasks: many\nstateDir: s\n", "unknown field `newKey`"),
        ("run --config=f --new-flag", "stateDir: s\n", "unexpected argument '--new-flag'"),
        ("run --new-flag --state-dir=s --max-tasks x", "", "unexpected argument '--new-flag'"),
        ("run --state-dir s --log a=b=c", "", "--log a=b=c is not a filter"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), file).unwrap();
        let said = || {
            let output = program(dir.path()).args(line.split(' ')).output().unwrap();
            String::from_utf8(output.stderr).unwrap()
        };
        assert!(said().contains(own), "{line}: {}", said());
        store_upgrade(&dir.path().join("s"), "null");
        // A program that can't run itself gives no other one up.
        for _ in 0..10 {
            assert_eq!(said(), format!("launched {line}\n"));
        }
    }
}

/// The command line of an agent that has joined, and that reaches no cloudcore.
fn agent_line(settings: &str) -> String {
    format!("run --state-dir s --tunnel-url wss://127.0.0.1:1 --enroll-url https://127.0.0.1:1 {settings}")
}

/// The flag for an address where no program listens.
fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("--metrics-listen {}", listener.local_addr().unwrap())
}

#[test]
fn a_fault_of_the_machine_counts_no_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("--metrics-listen {}", taken.local_addr().unwrap());
    let provider = "--image-credential-provider-config p --image-credential-provider-bin-dir b";
    for (settings, counted) in [
        // The address of a VPN that isn't up yet.
        ("--metrics-listen 203.0.113.7:10004", 0),
        ("--metrics-listen off --peer-listen 203.0.113.7:10005", 0),
        (&taken, 0),
        (&format!("--metrics-listen off {provider}"), 0),
        ("--metrics-listen off", 1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        store_identity(&dir.path().join("s"), "edge-1");
        store_upgrade(&dir.path().join("s"), "null");
        let line = agent_line(settings);
        let output = program(dir.path()).args(line.split(' ')).output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), format!("launched {line}\n"));
        let record = std::fs::read_to_string(dir.path().join("s/upgrade/record.json")).unwrap();
        assert_eq!(record.matches("millis").count(), counted, "{settings}: {record}");
    }
}

#[test]
fn a_trial_waits_for_a_taken_address() {
    let dir = tempfile::tempdir().unwrap();
    store_identity(&dir.path().join("s"), "edge-1");
    let tried = store_program(&dir.path().join("s"), "10", "#!/bin/sh\necho >>starts\n");
    store_upgrade(&dir.path().join("s"), &format!(r#"{{"program": {tried}, "within": 60, "starts": 0}}"#));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let line = agent_line(&format!("--metrics-listen {}", taken.local_addr().unwrap()));
    let mut command = program(dir.path());
    command.args(line.split(' ')).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let mut lines = BufReader::new(launcher.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("an upgrade waits")));
    assert!(!dir.path().join("starts").exists());
    drop(taken);
    assert!(lines.any(|line| line.unwrap().contains("ended early")));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
}

#[test]
fn status_reads_a_file_of_a_newer_version() {
    let (status, said) = run("status --config f", &[("f", "newKey: 1\nstateDir: s\nmetricsListen: off\n")]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.starts_with("warning: --config f, line 1, \"newKey: 1\": unknown field"), "{said}");
    check_error("status --config nope", &[], 1, &["--config nope"]);
}

#[test]
fn a_failed_trial_on_a_full_disk_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    store_identity(&dir.path().join("s"), "edge-1");
    // The record is written to this file first. A full disk refuses the write as well.
    let script = "#!/bin/sh\nmkdir s/upgrade/record.tmp\n";
    let tried = store_program(&dir.path().join("s"), "10", script);
    // This is the last of three starts.
    let trial = format!(r#"{{"program": {tried}, "within": 60, "starts": 2}}"#);
    store_upgrade(&dir.path().join("s"), &trial);
    let line = agent_line(&free_address());
    let output = program(dir.path()).args(line.split(' ')).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.ends_with(&format!("launched {line}\n")), "{said}");
}

#[test]
fn a_launcher_ends_between_two_starts() {
    let dir = tempfile::tempdir().unwrap();
    store_identity(&dir.path().join("s"), "edge-1");
    let tried = store_program(&dir.path().join("s"), "10", "#!/bin/sh\necho >>starts\n");
    store_upgrade(&dir.path().join("s"), &format!(r#"{{"program": {tried}, "within": 60, "starts": 0}}"#));
    let mut command = program(dir.path());
    let line = agent_line(&free_address());
    command.args(line.split(' ')).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let mut lines = BufReader::new(launcher.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ended early")));
    rustix::process::kill_process(rustix::process::Pid::from_child(&launcher), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(0));
    assert_eq!(std::fs::read_to_string(dir.path().join("starts")).unwrap(), "\n");
}

#[tokio::test]
async fn a_watched_program_ends_with_a_killed_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("s");
    store_identity(&state, "edge-1");
    let tried = store_program(&state, "10", std::fs::read(env!("CARGO_BIN_EXE_edgecore-prepull")).unwrap());
    store_upgrade(&state, &format!(r#"{{"program": {tried}, "within": 60, "starts": 0}}"#));
    let cloud = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = cloud.local_addr().unwrap();
    let line = format!(
        "run --state-dir s --tunnel-url wss://{address} --enroll-url https://{address} {}",
        free_address()
    );
    let mut command = program(dir.path());
    command.args(line.split(' ')).stderr(Stdio::null());
    let mut launcher = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
    let lock = || {
        let lock = std::fs::File::open(state.join("lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
    };
    // The program on trial dials, and not the launcher.
    tokio::time::timeout(Duration::from_secs(30), cloud.accept()).await.unwrap().unwrap();
    assert!(lock().is_err(), "it holds the lock");
    launcher.kill().await.unwrap();
    let freed = async {
        while lock().is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), freed).await.unwrap();
}
