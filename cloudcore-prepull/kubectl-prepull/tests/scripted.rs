//! The plugin with an API server that is silent, refuses, or is none: a listener with canned answers.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Answers each request with the first of these whose words are in its first line or its body and that was not given yet; if all were,
/// with the last one. Without such words there is no answer.
struct Scripted {
    address: String,
}

impl Scripted {
    fn start(answers: &'static [(&'static str, u16, &'static str)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let given: Arc<[AtomicBool]> = answers.iter().map(|_| AtomicBool::default()).collect();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, given) = (stream.unwrap(), Arc::clone(&given));
                std::thread::spawn(move || serve(&stream, answers, &given));
            }
        });
        Self { address }
    }

    /// A command with its kubeconfig in this directory.
    fn command(&self, line: &str, dir: &Path) -> Command {
        let kubeconfig = dir.join("kubeconfig");
        let text = format!(
            r#"{{"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{{"name": "c", "cluster": {{"server": "http://{}"}}}}],
            "users": [{{"name": "u", "user": {{"token": "s3cret"}}}}],
            "contexts": [{{"name": "c", "context": {{"cluster": "c", "user": "u"}}}}]}}"#,
            self.address
        );
        std::fs::write(&kubeconfig, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-prepull"));
        command.args(line.split_whitespace()).arg("--kubeconfig").arg(&kubeconfig).env_clear();
        command
    }

    /// Exit status, stdout and stderr of a command.
    fn run(&self, line: &str) -> (Option<i32>, String, String) {
        let dir = tempfile::tempdir().unwrap();
        let output = self.command(line, dir.path()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    /// Asserts that the command fails with one line that has these words.
    fn refuses(&self, line: &str, words: &str) {
        let (status, _, said) = self.run(line);
        assert_eq!(status, Some(1), "{line}: {said}");
        assert!(said.contains(words), "{line}: {words:?} is not in {said}");
        for dump in ["Status {", "ApiError", "Some(", "s3cret", "panicked"] {
            assert!(!said.contains(dump), "{line}: {said}");
        }
        assert!(said.starts_with("error: ") && said.trim_end().lines().count() == 1, "{line}: {said}");
        assert!(said.len() < 600, "{line}: {said}");
    }
}

fn serve(stream: &TcpStream, answers: &[(&str, u16, &str)], given: &[AtomicBool]) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut first, mut length) = (String::new(), 0);
        if reader.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            if header.trim().is_empty() {
                break;
            }
            if let Some(text) = header.to_ascii_lowercase().strip_prefix("content-length:") {
                length = text.trim().parse().unwrap();
            }
        }
        let mut asked = vec![0; length];
        reader.read_exact(&mut asked).unwrap();
        let request = first + &String::from_utf8(asked).unwrap();
        let fitting = || answers.iter().zip(given).filter(|((words, ..), _)| request.contains(words));
        let fresh = fitting().find(|(_, given)| !given.swap(true, Ordering::Relaxed));
        let Some(((_, status, body), _)) = fresh.or_else(|| fitting().last()) else { continue };
        let head = format!("HTTP/1.1 {status} Scripted\r\nContent-Length: {}\r\n\r\n", body.len());
        let mut stream = stream;
        if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).is_err() {
            return;
        }
    }
}

#[test]
fn a_silent_api_server_hangs_no_command() {
    let silent = Scripted::start(&[]);
    for line in
        ["status web", "failures web", "retry web", "nodes", "check", "run nginx --wait=0", "why edge-1"]
    {
        let began = Instant::now();
        silent.refuses(
            &format!("{line} --request-timeout 300ms"),
            "has not answered for 300ms (--request-timeout)",
        );
        assert!(began.elapsed() < Duration::from_secs(60), "{line}: {:?}", began.elapsed());
    }
}

#[test]
fn completion_finds_names_on_later_pages() {
    let server = Scripted::start(&[
        (
            "continue=next",
            200,
            r#"{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {},
                "items": [{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "zulu"}}]}"#,
        ),
        (
            "imageprepulljobs?",
            200,
            r#"{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {"continue": "next"},
                "items": [{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "alpha"}}]}"#,
        ),
    ]);
    let dir = tempfile::tempdir().unwrap();
    server.command("status", dir.path());
    let program = dir.path().join("kubectl_complete-prepull");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kubectl-prepull"), &program).unwrap();
    let asked = format!("status --kubeconfig {}/kubeconfig z", dir.path().display());
    let output = Command::new(program).args(asked.split(' ')).env_clear().output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "zulu\n:4\n");
}

#[test]
fn a_closed_pipe_hides_nothing() {
    const ENDED: &str = r#"{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
        "metadata": {"name": "web", "uid": "u", "generation": 1}, "spec": {},
        "status": {"phase": "Completed", "observedGeneration": 1, "summary": {"desired": 1, "successful": 1}}}"#;
    const CHECKED: &str = r#"{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
        "metadata": {"name": "web", "uid": "u", "generation": 1}, "spec": {"recheck": 1},
        "status": {"phase": "Failure", "observedGeneration": 1, "summary": {"desired": 1, "failure": 1},
        "recheck": {"rounds": 1, "missing": 1, "completionTime": "2026-11-24T12:00:00Z"}}}"#;
    let server = Scripted::start(&[
        ("imageprepulljobs/web", 200, ENDED),
        ("imageprepulljobs/web", 200, CHECKED),
        ("imageprepullreports", 200, r#"{"metadata": {}, "items": []}"#),
    ]);
    let dir = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = server.command("verify web", dir.path()).stdout(writer).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn refusals_are_one_sentence_with_remedy() {
    const JOB: &str = r#"{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
        "metadata": {"name": "web", "uid": "u"}, "spec": {"imagePrePullTemplate": {"images": ["a:1"], "nodeNames": ["e"]}}}"#;
    macro_rules! answers {
        ($code:literal, $body:literal) => {
            Scripted::start(&[("GET /", 200, JOB), ("PATCH /", $code, $body), ("POST /", $code, $body)])
        };
    }
    answers!(
        409,
        r#"{"kind": "Status", "status": "Failure", "code": 409, "reason": "Conflict", "message": "Operation cannot be fulfilled"}"#
    )
    .refuses("suspend web", "job web cannot be changed: it was changed by another writer at the same moment: try again");
    answers!(
        422,
        r#"{"kind": "Status", "status": "Failure", "code": 422, "reason": "Invalid", "message": "ImagePrePullJob \"web\" is invalid",
        "details": {"causes": [{"reason": "FieldValueInvalid", "field": "spec.retry", "message": "Invalid value: 2000"}]}}"#
    )
    .refuses("run nginx --name nginx --node e", "job nginx cannot be made: correct spec.retry: Invalid value: 2000");
    answers!(
        403,
        r#"{"kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden",
        "message": "imageprepulljobs \"web\" is forbidden: exceeded quota: team, requested: count/jobs=1"}"#
    )
    .refuses(
        "run nginx --name nginx --node e",
        "job nginx cannot be made: the quota is used up: team, requested: count/jobs=1",
    );
    answers!(
        400,
        r#"{"kind": "Status", "status": "Failure", "code": 400, "message": "admission webhook \"w.example\" denied the request: not on Sunday"}"#
    )
    .refuses("cancel web", "the admission webhook w.example refuses it: not on Sunday");
}

#[test]
fn what_is_no_api_server_is_recognized() {
    const PAGE: &str =
        "<!DOCTYPE html>\n<html><head><title>Hotel Wi-Fi</title></head><body>Room?</body></html>";
    for status in [200, 302, 403, 404, 503, 511] {
        let portal = match status {
            200 => Scripted::start(&[("/", 200, PAGE)]),
            302 => Scripted::start(&[("/", 302, PAGE)]),
            403 => Scripted::start(&[("/", 403, PAGE)]),
            404 => Scripted::start(&[("/", 404, PAGE)]),
            503 => Scripted::start(&[("/", 503, PAGE)]),
            _ => Scripted::start(&[("/", 511, PAGE)]),
        };
        for line in ["status web", "run nginx --wait=0", "nodes"] {
            portal.refuses(line, "a portal or a proxy is in between");
        }
    }
    let expired =
        Scripted::start(&[("/", 401, r#"{"kind": "Status", "code": 401, "message": "Unauthorized"}"#)]);
    for line in ["status web", "nodes", "why edge-1"] {
        expired.refuses(line, "does not accept the credentials of the kubeconfig");
    }
}

/// A job with this version, state and spec.
macro_rules! job {
    ($version:literal, $phase:literal, $spec:literal) => {
        concat!(
            r#"{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob", "metadata": {"name": "web", "uid": "u",
            "resourceVersion": ""#,
            $version,
            r#""}, "status": {"phase": ""#,
            $phase,
            r#""}, "spec": {"#,
            $spec,
            r#""imagePrePullTemplate": {"images": ["a:1"], "nodeNames": ["e"]}}}"#
        )
    };
}

const CONFLICT: &str = r#"{"kind": "Status", "status": "Failure", "code": 409, "reason": "Conflict", "message": "the object has been modified"}"#;

#[test]
fn an_ended_job_is_left_alone() {
    for (line, refusal) in [
        ("cancel web", "job web has ended already"),
        ("pause web", "job web has ended: there is nothing to pause"),
        ("suspend web", "job web has ended: there is nothing to suspend"),
    ] {
        let server = Scripted::start(&[
            ("GET /", 200, job!("7", "InProgress", "")),
            (r#""resourceVersion":"7""#, 409, CONFLICT),
            ("PATCH /", 200, job!("9", "Completed", r#""cancel": true, "pause": true, "suspend": true, "#)),
            ("GET /", 200, job!("8", "Completed", "")),
        ]);
        server.refuses(line, refusal);
    }
}

#[test]
fn a_busy_job_is_still_cancelled() {
    let server = Scripted::start(&[
        ("GET /", 200, job!("7", "InProgress", "")),
        (r#""resourceVersion":"7""#, 409, CONFLICT),
        ("GET /", 200, job!("8", "InProgress", "")),
        (r#""resourceVersion":"8""#, 200, job!("9", "InProgress", r#""cancel": true, "#)),
    ]);
    let (status, said, error) = server.run("cancel web");
    assert_eq!((status, said.trim_end().ends_with("cancelled")), (Some(0), true), "{said}{error}");
}

#[test]
fn stale_pages_change_no_ended_job() {
    for (verb, there, refusal) in [
        ("pause", job!("7", "Completed", ""), "has ended: there is nothing to pause"),
        ("resume", job!("7", "Failure", r#""cancel": true, "pause": true, "#), "was cancelled"),
    ] {
        let answers = [
            ("imageprepulljobs/web HTTP", 200, there),
            ("PATCH /", 200, job!("8", "Completed", r#""pause": true, "#)),
        ];
        let server = Scripted::start(Box::leak(Box::new(answers)));
        let dir = tempfile::tempdir().unwrap();
        let mut command = server.command("ui --no-open --site-label site", dir.path());
        let mut page = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(page.stdout.take().unwrap()).read_line(&mut url).unwrap();
        let (host, token) = url.trim().trim_start_matches("http://").split_once('/').unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        let head = format!(
            "POST /{token}act/web/{verb} HTTP/1.1\r\nHost: {host}\r\nX-Prepull: 1\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        page.kill().unwrap();
        page.wait().unwrap();
        assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains(refusal), "{verb}: {answer}");
    }
}

#[test]
fn why_looks_behind_others_jobs() {
    let job = |name: &str, hour: u32, node: &str, phase: &str| {
        format!(
            r#"{{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob", "metadata": {{"name": "{name}", "uid": "{name}"}},
            "spec": {{"imagePrePullTemplate": {{"images": ["a:1"], "labelSelector": {{}}}}}}, "status": {{"phase": "{phase}",
            "startTime": "2026-11-24T01:00:00Z", "completionTime": "2026-11-24T{hour:02}:00:00Z", "summary": {{"desired": 1}},
            "nodeStatus": [{{"nodeName": "{node}", "phase": "{phase}", "code": "NoSpace"}}]}}}}"#
        )
        .replace(r#""Completed", "code": "NoSpace""#, r#""Successful""#)
    };
    let ours = job("ours", 2, "edge-1", "Failure");
    let others = (3..9).map(|hour| job(&format!("other-{hour}"), hour, "edge-2", "Completed"));
    let items: Vec<_> = others.chain([ours.clone()]).collect();
    let list = format!(
        r#"{{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJobList", "metadata": {{}}, "items": [{}]}}"#,
        items.join(", ")
    );
    let leak = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
    let answers = [
        ("imageprepulljobs?", 200, leak(list)),
        ("imageprepulljobs/ours", 200, leak(ours)),
        (
            "GET /",
            404,
            r#"{"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found", "details": {"name": "x"}}"#,
        ),
    ];
    let (status, said, error) = Scripted::start(Box::leak(Box::new(answers))).run("why edge-1");
    assert_eq!(status, Some(1), "{said}{error}");
    assert!(said.contains("job ours has failed on it, NoSpace"), "{said}{error}");
}

/// A job with a node in its status that lacks its course.
const LARGE_JOB: &str = r#"{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob", "metadata": {"name": "web", "uid": "u"},
        "spec": {"imagePrePullTemplate": {"images": ["a:1"], "labelSelector": {}}}, "status": {"phase": "Completed",
        "startTime": "2026-11-24T01:00:00Z", "completionTime": "2026-11-24T02:00:00Z", "summary": {"desired": 2, "successful": 2},
        "nodeStatus": [{"nodeName": "edge-1", "phase": "Successful", "attempt": 1}]}}"#;
/// Its only report.
const REPORTS: &str = r#"{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullReportList", "metadata": {},
        "items": [{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullReport", "metadata": {"name": "web-0"},
        "jobName": "web", "nodeStatus": [{"nodeName": "edge-1", "phase": "Successful", "attempt": 1,
        "actionFlow": [{"action": "Pull", "status": "True", "time": "2026-11-24T01:30:00Z"}]}]}]}"#;

fn with_large_job() -> Scripted {
    Scripted::start(&[
        ("imageprepulljobs/web", 200, LARGE_JOB),
        ("imageprepullreports?", 200, REPORTS),
        (
            "GET /",
            404,
            r#"{"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found", "details": {"name": "x"}}"#,
        ),
    ])
}

#[test]
fn why_reads_what_the_status_left_out() {
    let server = with_large_job();
    let (_, said, error) = server.run("why edge-1 web");
    assert!(said.contains("job web has succeeded on it: pulled "), "{said}{error}");
}

#[test]
fn a_status_for_programs_reads_each_report_once() {
    // A second request for the reports would find none.
    let server = with_large_job();
    let (status, said, error) = server.run("status web -o json");
    assert_eq!(status, Some(0), "{said}{error}");
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["nodeStatus"][0]["actionFlow"][0]["action"], "Pull");
}

#[test]
fn partial_successes_are_refused() {
    const DONE: &str = r#"{"apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob", "metadata": {"name": "web", "uid": "u"},
        "spec": {"imagePrePullTemplate": {"images": ["nginx:1.25"], "concurrency": 1, "retryTimes": 3, "labelSelector":
            {"matchExpressions": [{"key": "node-role.kubernetes.io/edge", "operator": "Exists"}]}}, "ttlSecondsAfterFinished": 604800},
        "status": {"phase": "Completed", "summary": {"desired": 1, "successful": 1, "skipped": 1},
            "nodeStatus": [{"nodeName": "edge-1", "phase": "Successful"}], "skippedNodes": [{"nodeName": "edge-2", "reason": "NotReady"}]}}"#;
    const TAKEN: &str = r#"{"kind": "Status", "status": "Failure", "code": 409, "reason": "AlreadyExists", "message": "it exists"}"#;
    const FORBIDDEN: &str = r#"{"kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden",
        "message": "nodes is forbidden: User \"jane\" cannot list resource \"nodes\" in API group \"\" at the cluster scope"}"#;
    macro_rules! nodes {
        ($first:literal $(, $name:literal)*) => {
            concat!(r#"{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {}, "items": [{"metadata": {"name": ""#,
                $first, $(r#""}}, {"metadata": {"name": ""#, $name,)* r#""}}]}"#)
        };
    }
    let line = "run nginx:1.25 --name web --concurrency 1 --wait=0";
    macro_rules! server {
        ($code:literal, $nodes:expr) => {
            Scripted::start(&[("POST /", 409, TAKEN), ("/nodes?", $code, $nodes), ("GET /", 200, DONE)])
        };
    }
    server!(200, nodes!("edge-1", "edge-3", "edge-4")).refuses(
        line,
        "job web has ended without 2 nodes that it selects by now, such as edge-3: `kubectl delete ippj web`",
    );
    for server in
        [server!(200, nodes!("edge-1", "edge-2")), server!(200, nodes!("edge-2")), server!(403, FORBIDDEN)]
    {
        let (status, said, error) = server.run(line);
        assert_eq!(status, Some(0), "{error}");
        assert!(said.contains("is there already, with the same spec"), "{said}");
    }
}
