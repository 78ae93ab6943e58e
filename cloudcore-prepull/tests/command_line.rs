//! Error messages of the command line: what is wrong, with which object, why, and what would be right.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};

/// Runs the program in a directory with only these files, and returns its exit status and its stderr.
fn run(line: &str, files: &[(&str, &str)]) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_cloudcore-prepull"))
        .args(line.split(' ').map(|word| if word == "''" { "" } else { word }))
        .current_dir(dir.path())
        .env_clear()
        .env("HOME", dir.path())
        // What the program thinks of the limits of this machine is not the subject.
        .env("PREPULL_LOG", "error")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Asserts the exit status, and that the error contains all the words.
fn assert_error(line: &str, files: &[(&str, &str)], status: i32, words: &[&str]) {
    let (ended, said) = run(line, files);
    assert_eq!(ended, Some(status), "{line}: {said}");
    for word in words {
        assert!(said.contains(word), "{line}: {word:?} is not in {said}");
    }
    assert!(said.starts_with("error: "), "{line}: {said}");
    assert!(!said.contains("panicked"), "{line}: {said}");
}

#[test]
fn a_usage_error_names_flag_and_value() {
    for (line, words) in [
        (
            "run --lease-duration 5s",
            ["--lease-duration 5s", "must be longer than --lease-renew-deadline 10s"],
        ),
        ("run --lease-retry-period 1", ["--lease-retry-period", "time unit needed"]),
        ("run --heartbeat 0s", ["--heartbeat", "from 1s to 5m"]),
        ("run --edge-cert-ttl 1m", ["--edge-cert-ttl", "the default is 30d"]),
        ("run --advertise https://cloud", ["--advertise", "neither a DNS name nor an IP address"]),
        ("run --namespace Prepull_System", ["--namespace", "lower-case letters"]),
        ("token list --namespace ''", ["--namespace", "lower-case letters"]),
        ("run --ca-cert ca.crt", ["--ca-key <FILE>", "were not provided"]),
        ("token create --node EDGE_1", ["EDGE_1", "as in `kubectl get nodes`"]),
        ("token create --ttl 31d", ["--ttl", "at most 30 days"]),
        ("plan --job job.yaml -o xml", ["--output", "table, json, yaml"]),
    ] {
        assert_error(line, &[], 2, &words);
    }
}

#[test]
fn a_missing_cluster_lists_the_places_tried() {
    for line in ["run", "token list", "plan --job job.yaml"] {
        let files = [("job.yaml", include_str!("../../manifests/samples/minimal.yaml"))];
        assert_error(line, &files, 1, &["no cluster found: give --kubeconfig", ".kube/config"]);
        let (_, said) = run(line, &files);
        assert_eq!(said.matches("No such file or directory").count(), 1, "{said}");
    }
    assert_error("run --kubeconfig nope", &[], 1, &["--kubeconfig nope", "No such file"]);
    assert_error("run --kubeconfig a", &[("a", "not: [yaml")], 1, &["--kubeconfig a", "unclosed bracket"]);
}

#[test]
fn startup_errors_use_the_log_format() {
    let (ended, said) = run("run --log-format json --kubeconfig nope", &[]);
    assert_eq!(ended, Some(1), "{said}");
    let line: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!(line["level"], "ERROR", "{said}");
    let error = line["fields"]["error"].as_str().unwrap();
    assert!(error.contains("--kubeconfig nope") && error.contains("No such file"), "{said}");
    // Where there is no log yet, or none is wanted as JSON, a person reads it.
    assert_error("run --log-format json --log a=b=c", &[], 1, &["--log a=b=c is not a filter"]);
}

/// A kubeconfig of a cluster that does not answer: nothing listens on port 1.
const DEAD: &str = r#"{
    "apiVersion": "v1", "kind": "Config", "current-context": "c",
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "s3cret"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
}"#;

#[test]
fn an_unreachable_cluster_is_named() {
    let files = [("dead", DEAD), ("job.yaml", include_str!("../../manifests/samples/minimal.yaml"))];
    for line in ["token create", "token list", "token revoke 0123456789ab", "plan --job job.yaml"] {
        let line = format!("{line} --kubeconfig dead");
        let words = ["the API server https://127.0.0.1:1/ of the kubeconfig", "Connection refused"];
        assert_error(&line, &files, 1, &words);
        let (_, said) = run(&line, &files);
        assert!(!said.contains("s3cret") && said.matches("client error").count() == 1, "{said}");
    }
}

#[test]
fn ca_files_are_checked_before_leading() {
    let files = [("dead", DEAD), ("ca.crt", "no certificate"), ("ca.key", "no key")];
    assert_error(
        "run --kubeconfig dead --ca-cert nope --ca-key ca.key",
        &files,
        1,
        &["--ca-cert", "reading nope"],
    );
    let words = ["ca.crt with ca.key holds no CA", "not a PEM block CERTIFICATE"];
    assert_error("run --kubeconfig dead --ca-cert ca.crt --ca-key ca.key", &files, 1, &words);
}

#[test]
fn the_clusters_own_ca_is_refused() {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let certificate = params.self_signed(&key).unwrap().pem();
    let kubeconfig = DEAD.replace(r#"127.0.0.1:1""#, r#"127.0.0.1:1", "certificate-authority": "ca.crt""#);
    let files = [("of-cluster", &*kubeconfig), ("ca.crt", &*certificate), ("ca.key", &*key.serialize_pem())];
    let line = "run --kubeconfig of-cluster --ca-cert ca.crt --ca-key ca.key";
    assert_error(line, &files, 1, &["is the cluster's own", "a CA that is used for nothing else"]);
}

#[test]
fn an_invalid_token_id_is_never_quoted() {
    for id in ["../../secrets/x", "0123456789AB", "abc.0123456789ab.s3cret"] {
        let line = format!("token revoke {id} --kubeconfig dead");
        assert_error(
            &line,
            &[("dead", DEAD)],
            1,
            &["12 hex digits, as `cloudcore-prepull token list` shows"],
        );
        assert!(!run(&line, &[("dead", DEAD)]).1.contains(id));
    }
}
