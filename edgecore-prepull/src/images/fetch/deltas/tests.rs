#![allow(clippy::unwrap_used)]

use super::*;
use crate::images::fetch::FetchSettings;
use crate::images::puller::cri::CriPuller;
use crate::images::runtime::fake::{FakeAnswers, serve};

/// An image store with one image, or one that answers with an error.
#[derive(Clone)]
struct FakeImages(Result<&'static str, Code>);

impl FakeAnswers for FakeImages {
    const SERVICE: &'static str = "containerd.services.images.v1.Images";

    fn answer(&self, _: &str) -> Result<Vec<u8>, Status> {
        let name = self.0.map_err(|code| Status::new(code, "not now"))?;
        // Field 1 of ListImagesResponse is an image, with its name as field 1.
        let field = |content: &[u8]| [&[10, u8::try_from(content.len()).unwrap()], content].concat();
        Ok(field(&field(name.as_bytes())))
    }
}

fn fetcher(socket: &std::path::Path) -> Fetcher {
    let endpoint = format!("unix://{}", socket.display()).parse().unwrap();
    Fetcher::new(CriPuller::new(endpoint).containerd(), FetchSettings::default())
}

#[tokio::test]
async fn a_silent_runtime_isnt_taken_for_an_answer() {
    let reference = Reference::parse("r.example/app:v2").unwrap().normalized();
    let down = Err(ErrorClass::RuntimeDown);
    for (answer, expected) in [
        (Ok("mirror.example/app:v1"), Ok(true)),
        (Ok("r.example/other:v1"), Ok(false)),
        (Err(Code::Unknown), Ok(false)),
        (Err(Code::Unavailable), down),
        (Err(Code::DeadlineExceeded), Err(ErrorClass::Transient)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("containerd.sock");
        let _server = serve(&socket, FakeImages(answer));
        let found = fetcher(&socket).has_image_of(&reference).await;
        assert_eq!(found.map_err(|error| error.class), expected, "{answer:?}");
    }
    let fetcher = fetcher(std::path::Path::new("/nonexistent/containerd.sock"));
    let error = fetcher.has_image_of(&reference).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::RuntimeDown, "{error}");
    for rule in [Rule::Auto, Rule::Require] {
        let refused = DeltaSearch::Silent(error.clone()).under_rule(rule).unwrap_err();
        assert_eq!(refused, error, "{rule:?}");
    }
    let late = || DeltaSearch::Silent(PullError::new(ErrorClass::Transient, "late"));
    assert_eq!(late().under_rule(Rule::Require).unwrap_err().class, ErrorClass::Transient);
    assert!(late().under_rule(Rule::Auto).unwrap().0.is_none());
}
