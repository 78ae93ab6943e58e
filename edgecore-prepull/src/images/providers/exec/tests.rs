#![allow(clippy::unwrap_used)]

use std::time::Instant;

use super::*;

const SOON: Duration = Duration::from_secs(20);

async fn sh_within(limit: Duration, script: &str, input: &[u8]) -> Result<String, ExecError> {
    let args = ["-c".to_owned(), script.to_owned(), "sh".to_owned(), "first arg".to_owned()];
    let env = [("PLUGIN_VARIABLE".to_owned(), "of the configuration".to_owned())];
    let plugin = Plugin {
        program: Path::new("/bin/sh"),
        args: &args,
        env: &env,
        timeout: limit,
        stderr: Stderr::Dropped,
    };
    run(plugin, input).await.map(|output| String::from_utf8(output.bytes().to_vec()).unwrap())
}

async fn sh(script: &str, input: &[u8]) -> Result<String, ExecError> {
    sh_within(SOON, script, input).await
}

fn is_alive(pid: &str) -> bool {
    // A zombie has ended.
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !state.is_empty() && !state.contains(") Z ")
}

async fn ends(pid: &str) {
    let begun = Instant::now();
    while is_alive(pid) {
        assert!(begun.elapsed() < SOON, "process {pid} goes on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_plugin_reads_request_and_writes_answer() {
    assert_eq!(sh("cat; echo :$1", b"request").await.unwrap(), "request:first arg\n");
    // The environment is ours plus the configured variables.
    let environment = sh("echo $PLUGIN_VARIABLE $PATH", b"").await.unwrap();
    let path = std::env::var("PATH").unwrap();
    assert_eq!(environment.trim_end(), format!("of the configuration {path}"));
    // More than a pipe holds, in both directions.
    let long = "x".repeat(300_000);
    assert_eq!(sh("cat", long.as_bytes()).await.unwrap(), long);
    assert_eq!(sh("echo answered", long.as_bytes()).await.unwrap(), "answered\n", "it read nothing");
}

#[tokio::test]
async fn a_failed_plugin_differs_from_an_unstartable() {
    let error = sh("echo s3cret; echo s3cret >&2; exit 3", b"").await.map(drop).unwrap_err().to_string();
    assert_eq!(error, "ended with exit status: 3");
    let error = sh("kill -9 $$", b"").await.map(drop).unwrap_err().to_string();
    assert!(error.starts_with("ended with signal: 9"), "{error}");
    let nowhere = Plugin {
        program: Path::new("/nonexistent/plugin"),
        args: &[],
        env: &[],
        timeout: SOON,
        stderr: Stderr::Dropped,
    };
    let error = run(nowhere, b"").await.map(drop).unwrap_err().to_string();
    assert!(error.starts_with("cannot be started: No such file"), "{error}");
}

#[tokio::test]
async fn a_hanging_plugin_dies_with_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let pids = directory.path().join("pids");
    // The first script hangs itself. The second ends, and leaves a child that holds its output open.
    for script in ["sleep 1000 & echo $$ $! > PIDS; wait", "sleep 1000 & echo $$ $! > PIDS"] {
        let script = script.replace("PIDS", &pids.display().to_string());
        let begun = Instant::now();
        let error = sh_within(Duration::from_millis(500), &script, b"").await.map(drop).unwrap_err();
        assert_eq!(error.to_string(), "gave no answer within 500ms and was killed");
        assert!(begun.elapsed() < SOON);
        for pid in std::fs::read_to_string(&pids).unwrap().split_whitespace() {
            ends(pid).await;
        }
    }
}

#[tokio::test]
async fn a_dropped_run_kills_its_plugin() {
    let directory = tempfile::tempdir().unwrap();
    let pids = directory.path().join("pids");
    let script = format!("sleep 1000 & echo $$ $! > {}; wait", pids.display());
    let running = tokio::spawn(async move { sh(&script, b"").await.map(drop) });
    let begun = Instant::now();
    let started = loop {
        let started = std::fs::read_to_string(&pids).unwrap_or_default();
        if started.ends_with('\n') {
            break started;
        }
        assert!(begun.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    for pid in started.split_whitespace() {
        ends(pid).await;
    }
}

#[tokio::test]
async fn a_plugin_with_too_much_output_dies() {
    for script in ["yes", "head -c 1048577 /dev/zero"] {
        let error = sh(script, b"").await.map(drop).unwrap_err().to_string();
        assert_eq!(error, "wrote more than 1024 KiB and was killed", "{script}");
    }
    assert_eq!(sh("head -c 1048576 /dev/zero", b"").await.unwrap().len(), 1_048_576);
}

#[test]
fn growing_the_output_loses_no_bytes() {
    let mut output = PluginOutput::default();
    let bytes: Vec<u8> = (0..100_000u32).map(|n| n.to_le_bytes()[0]).collect();
    for chunk in bytes.chunks(777) {
        output.push(chunk);
    }
    assert_eq!(output.bytes(), bytes);
}
