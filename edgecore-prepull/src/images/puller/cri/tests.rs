#![allow(clippy::unwrap_used)]

mod runtime;

use k8s_cri::v1::AuthConfig;
use prepull_api::credentials::Sensitive;

use super::*;
use runtime::FakeRuntime;

#[test]
fn the_digest_is_of_the_own_repository() {
    let list = |digests: &[&str]| digests.iter().map(|&digest| digest.to_owned()).collect::<Vec<_>>();
    let both = list(&["r.io:5000/a/b@sha256:1", "r.io:5000/a@sha256:2"]);
    for (reference, digests, expected) in [
        ("r.io:5000/a/b:v1", &both, Some("sha256:1")),
        ("r.io:5000/a:v1", &both, Some("sha256:2")),
        ("r.io:5000/a", &both, Some("sha256:2")),
        ("r.io:5000/c:v1", &both, None),
        ("r.io/a:1", &list(&["r.io/a@sha256:1", "r.io/a@sha256:2"]), None),
        ("r.io/a:1", &list(&["r.io/a@sha256:1", "r.io/a@sha256:1"]), Some("sha256:1")),
        ("docker.io/library/nginx:1.25", &list(&["nginx@sha256:1"]), Some("sha256:1")),
        ("docker.io/team/app:1", &list(&["team/app@sha256:1", "app@sha256:2"]), Some("sha256:1")),
    ] {
        assert_eq!(pick_digest(reference, digests).as_deref(), expected, "{reference}");
    }
}

#[test]
fn a_credential_names_no_server() {
    let credential = RegistryCredential {
        server: "harbor.example/team".to_owned(),
        username: Sensitive::new("u"),
        password: Sensitive::new("p"),
        ..RegistryCredential::default()
    };
    let expected = AuthConfig { username: "u".to_owned(), password: "p".to_owned(), ..AuthConfig::default() };
    assert_eq!(to_auth_config(&credential), expected);
}

#[tokio::test]
async fn an_absent_runtimes_socket_is_named() {
    let puller = CriPuller::new("unix:///nonexistent/a.sock".parse().unwrap());
    let error = puller.read_version().await.unwrap_err();
    assert_eq!(error.class, ErrorClass::RuntimeDown);
    assert!(error.message.contains("No such file"), "{error}");
    assert!(error.message.contains("unix:///nonexistent/a.sock"), "{error}");
}

#[test]
fn free_space_is_read_at_the_mountpoint() {
    let root = read_image_filesystem("/").unwrap();
    assert!(root.capacity > root.available && root.available > 0, "{root:?}");
    let error = read_image_filesystem("/nonexistent").unwrap_err();
    assert!(error.message.contains("/nonexistent"), "{error}");
}

#[test]
fn image_ids_are_normalised() {
    let digits = "0123456789abcdef".repeat(4);
    let id = format!("sha256:{digits}");
    assert_eq!(parse_image_id(&id).as_ref(), Some(&id), "containerd");
    assert_eq!(parse_image_id(&digits).as_ref(), Some(&id), "CRI-O");
    for other in ["", "sha256:", "r.io/a@sha256:1", &format!("r.io/a@{id}"), &format!("{id}0")] {
        assert_eq!(parse_image_id(other), None, "{other}");
    }
}

#[tokio::test]
async fn a_pull_passes_the_sandbox() {
    let sandbox = SandboxMetadata {
        labels: [("app".to_owned(), "a".to_owned())].into(),
        annotations: [("example/note".to_owned(), "b".to_owned())].into(),
    };
    let credential = RegistryCredential {
        username: Sensitive::new("u"),
        password: Sensitive::new("p"),
        ..RegistryCredential::default()
    };
    let digits = "ab".repeat(32);
    // containerd answers with the id, CRI-O with a digest in a repository.
    for image_ref in [format!("sha256:{digits}"), format!("r.io/a@sha256:{}", "cd".repeat(32))] {
        let runtime = FakeRuntime::start(&image_ref, &digits);
        let puller = CriPuller::new(runtime.endpoint());
        let request = PullRequest {
            credential: Some(&credential),
            sandbox: Some(&sandbox),
            ..PullRequest::new("r.io/a:1")
        };
        let pulled = puller.pull(request, &|_| {}).await.unwrap();
        assert_eq!(pulled.id, Some(format!("sha256:{digits}")), "{image_ref}");
        let present = puller.look_up("r.io/a:1").await.unwrap().unwrap();
        assert_eq!(present.id, Some(format!("sha256:{digits}")));

        let seen = runtime.pulls().pop().unwrap();
        let config = seen.sandbox_config.unwrap();
        assert_eq!(config.labels, [("app".to_owned(), "a".to_owned())].into());
        assert_eq!(config.annotations, [("example/note".to_owned(), "b".to_owned())].into());
        assert_eq!(config.metadata, None);
        assert_eq!(seen.image.unwrap().image, "r.io/a:1");
        assert_eq!(seen.auth.unwrap().username, "u");

        puller.pull(PullRequest::new("r.io/a:1"), &|_| {}).await.unwrap();
        assert_eq!(runtime.pulls().pop().unwrap().sandbox_config, None);
    }
}

#[tokio::test]
async fn a_lost_runtime_differs_from_a_down_one() {
    let mut runtime = FakeRuntime::named("containerd", None, "");
    let puller = CriPuller::new(runtime.endpoint());
    let request = PullRequest::new("r.io/a:1");
    let pull = puller.pull(request, &|_| {});
    let end = async {
        while runtime.pulls().is_empty() {
            tokio::task::yield_now().await;
        }
        runtime.end().await;
    };
    let error = tokio::join!(pull, end).0.unwrap_err();
    assert_eq!(error.class, ErrorClass::RuntimeLost, "{error}");
    let error = puller.pull(request, &|_| {}).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::RuntimeDown, "{error}");
}

#[tokio::test]
async fn a_registry_token_never_becomes_anonymous() {
    let token = RegistryCredential {
        server: "r.io".to_owned(),
        registry_token: Sensitive::new("t"),
        ..RegistryCredential::default()
    };
    let request = PullRequest { credential: Some(&token), ..PullRequest::new("r.io/a:1") };
    let digits = "ab".repeat(32);
    let runtime = FakeRuntime::start(&digits, &digits);
    let error = CriPuller::new(runtime.endpoint()).pull(request, &|_| {}).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Auth, "another credential may serve");
    assert!(error.message.contains("registry token") && error.message.contains("containerd 1"), "{error}");
    assert!(runtime.pulls().is_empty());

    let docker = FakeRuntime::named("docker", Some(&digits), &digits);
    CriPuller::new(docker.endpoint()).pull(request, &|_| {}).await.unwrap();
    assert_eq!(docker.pulls().pop().unwrap().auth.unwrap().registry_token, "t");
}

#[test]
fn the_runtime_never_pulls_without_verification() {
    let verification = |mode| Verification { mode, keys: Vec::new(), unavailable: None };
    assert_eq!(refuse_unverified(None), Ok(None));
    let warning = refuse_unverified(Some(&verification(VerificationMode::Warn))).unwrap().unwrap();
    assert!(warning.contains("not verified"), "{warning}");
    let refused = refuse_unverified(Some(&verification(VerificationMode::Enforce))).unwrap_err();
    assert_eq!(refused.class, ErrorClass::Permanent);
}

#[tokio::test]
async fn pulls_of_the_runtime_stay_unflushed_until_flushed() {
    let digits = "ab".repeat(32);
    let runtime = FakeRuntime::start(&digits, &digits);
    let puller = CriPuller::new(runtime.endpoint());
    assert!(puller.has_unflushed(), "a pull before the start");
    puller.flush().await.unwrap();
    assert!(!puller.has_unflushed());
    puller.pull(PullRequest::new("r.io/a:1"), &|_| {}).await.unwrap();
    assert!(puller.has_unflushed());
    puller.flush().await.unwrap();
    assert!(!puller.has_unflushed());

    let here = PathBuf::from("/");
    let lost = ImageDirectories { unpacked: here.clone(), root: "/absent".into() };
    for (directories, remains) in
        [(lost, true), (ImageDirectories { unpacked: here.clone(), root: here }, false)]
    {
        puller.pull(PullRequest::new("r.io/a:1"), &|_| {}).await.unwrap();
        puller.containerd().flushes.set_directories(directories);
        puller.flush().await.unwrap();
        assert_eq!(puller.has_unflushed(), remains);
    }

    let hangs = FakeRuntime::named("containerd", None, "");
    let puller = CriPuller::new(hangs.endpoint());
    puller.flush().await.unwrap();
    let pull = timeout(Duration::from_millis(50), puller.pull(PullRequest::new("r.io/a:1"), &|_| {}));
    assert!(pull.await.is_err());
    assert!(puller.has_unflushed(), "the runtime may have gone on");
}

#[tokio::test]
async fn only_a_refused_flush_is_an_error() {
    let runtime = FakeRuntime::start("", "");
    let puller = CriPuller::new(runtime.endpoint());
    // A file in place of a directory is the only refusal that every machine has.
    for (root, refused) in [("/absent", None), ("/dev/null/x", Some(ErrorClass::Transient))] {
        let directories = ImageDirectories { unpacked: root.into(), root: root.into() };
        puller.containerd().flushes.set_directories(directories);
        assert_eq!(puller.flush().await.err().map(|error| error.class), refused);
        assert!(puller.has_unflushed());
    }
}
