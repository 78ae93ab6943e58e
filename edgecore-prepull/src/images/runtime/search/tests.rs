#![allow(clippy::unwrap_used)]

use tempfile::TempDir;

use super::*;
use crate::images::runtime::fake::{VersionAnswer, serve};

const RUNS: VersionAnswer = VersionAnswer(Ok("containerd"));
const WITHOUT_CRI: VersionAnswer =
    VersionAnswer(Err((Code::Unimplemented, "unknown service runtime.v1.RuntimeService")));
const STARTS: VersionAnswer = VersionAnswer(Err((Code::Unknown, "server is not initialized yet")));

struct Places {
    directory: TempDir,
    search: RuntimeSearch,
}

impl Places {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let places = ["one", "two", "three"].map(|name| directory.path().join(name)).to_vec();
        let docker = directory.path().join("three");
        Self { directory, search: RuntimeSearch::in_places(places, docker) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

#[tokio::test]
async fn sockets_without_cri_are_skipped() {
    let places = Places::new();
    std::os::unix::net::UnixListener::bind(places.path("one")).map(drop).unwrap();
    let _without = serve(&places.path("two"), WITHOUT_CRI);
    let message = places.search.find().await.unwrap_err().to_string();
    for part in
        ["one (no listener)", "two (does not serve CRI v1)", "three (no socket)", "--runtime-endpoint"]
    {
        assert!(message.contains(part), "{message}");
    }
    // The runtime starts later than the agent.
    let _runs = serve(&places.path("three"), RUNS);
    assert_eq!(places.search.find().await, Ok(places.path("three").as_path()));
}

#[tokio::test]
async fn the_first_that_answers_is_kept() {
    let places = Places::new();
    let _second = serve(&places.path("two"), RUNS);
    assert_eq!(places.search.find().await, Ok(places.path("two").as_path()));
    let _first = serve(&places.path("one"), RUNS);
    assert_eq!(places.search.find().await, Ok(places.path("two").as_path()));
}

#[tokio::test]
async fn a_starting_runtime_is_awaited() {
    let places = Places::new();
    let _starts = serve(&places.path("one"), STARTS);
    let _runs = serve(&places.path("two"), RUNS);
    let error = places.search.find().await.unwrap_err();
    assert!(matches!(&error, SearchError::Starting(_, why) if why.contains("not initialized")), "{error}");
    assert_eq!(places.search.found(), None);
}

#[tokio::test]
async fn a_file_is_no_runtime() {
    let places = Places::new();
    std::fs::write(places.path("one"), "").unwrap();
    let _runs = serve(&places.path("two"), RUNS);
    assert_eq!(places.search.find().await, Ok(places.path("two").as_path()));
}
