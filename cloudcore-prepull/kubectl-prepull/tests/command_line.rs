//! Error texts and exit statuses without a cluster, and for wrong usage.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};

/// Runs the program in a directory with only these files, and returns its exit status, its stdout and its stderr.
fn run(line: &str, files: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_kubectl-prepull"))
        .args(line.split_whitespace())
        .current_dir(dir.path())
        .env_clear()
        .env("HOME", dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Asserts the exit status, and that the error contains all the words.
fn assert_error(line: &str, files: &[(&str, &str)], status: i32, words: &[&str]) {
    let (ended, _, said) = run(line, files);
    assert_eq!(ended, Some(status), "{line}: {said}");
    for word in words {
        assert!(said.contains(word), "{line}: {word:?} is not in {said}");
    }
    assert!(said.starts_with("error: ") && !said.contains("panicked"), "{line}: {said}");
}

/// A kubeconfig of a cluster that does not answer: no server listens on port 1.
const DEAD: &str = r#"{
    "apiVersion": "v1", "kind": "Config", "current-context": "c",
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "s3cret"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
}"#;

#[test]
fn an_unusable_kubeconfig_names_the_flag() {
    assert_error("status web", &[], 1, &["there is no kubeconfig: give --kubeconfig FILE, set KUBECONFIG"]);
    assert_error(
        "status web --kubeconfig nope",
        &[],
        1,
        &["--kubeconfig nope cannot be used", "No such file"],
    );
    assert_error("status web --kubeconfig a", &[("a", "not: [yaml")], 1, &["--kubeconfig a cannot be used"]);
    let files = [("dead", DEAD)];
    assert_error("status web --kubeconfig dead --context x", &files, 1, &["--context x: ", "it has c"]);
    let unset = DEAD.replace(r#""current-context": "c""#, r#""current-context": """#);
    let words = ["has no current context", "kubectl config use-context"];
    assert_error("status web --kubeconfig a", &[("a", &unset)], 1, &words);
}

#[test]
fn an_unreachable_cluster_is_named_without_credentials() {
    for line in ["status web", "retry web", "suspend web", "resume web", "cancel web"] {
        let line = format!("{line} --kubeconfig dead");
        let words = ["the API server https://127.0.0.1:1/ (context c) cannot be reached", "refused"];
        assert_error(&line, &[("dead", DEAD)], 1, &words);
        let (_, _, said) = run(&line, &[("dead", DEAD)]);
        assert!(!said.contains("s3cret") && !said.contains("ServiceError"), "{said}");
    }
}

#[test]
fn wrong_usage_has_its_own_exit_status() {
    for (line, words) in [
        ("stauts web", ["unrecognized subcommand", "'status'"]),
        ("status", ["not provided", "<JOB>"]),
        ("from", ["not provided", "<TYPE/NAME|--filename <FILE>>"]),
        ("from deployment/web -f web.yaml", ["cannot be used with", "--filename <FILE>"]),
        ("plan", ["not provided", "<JOB|--filename <FILE>>"]),
        ("plan web -f job.yaml", ["cannot be used with", "--filename <FILE>"]),
        ("status web -o xml", ["--output", "json, yaml, name, wide"]),
    ] {
        assert_error(line, &[], 2, &words);
    }
}

#[test]
fn help_and_completion_need_no_cluster() {
    let (ended, help, _) = run("--help", &[]);
    assert_eq!(ended, Some(0));
    assert!(help.contains("Usage: kubectl prepull [OPTIONS] <COMMAND>"), "{help}");
    for shell in ["bash", "zsh", "fish"] {
        let (ended, script, said) = run(&format!("completion {shell}"), &[]);
        assert!(ended == Some(0) && script.contains("kubectl-prepull"), "{shell}: {said}");
    }
}
