#![allow(clippy::unwrap_used)]

use super::ErrorClass::{Auth, NoSpace, NotFound, Permanent, RuntimeDown, Transient};
use super::{FailureCode as Is, *};

/// Texts that containerd 1.6.20 and docker-registry 2.8.2 wrote, unless a comment says otherwise.
const SEEN: &[(ErrorClass, Is, Code, &str)] = &[
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": failed to resolve reference "r.example/a:1": pulling from host r.example failed with status code [manifests 1]: 401 Unauthorized"#,
    ),
    (
        NotFound,
        Is::NotFound,
        Code::NotFound,
        r#"failed to pull and unpack image "r.example/a:1": failed to resolve reference "r.example/a:1": r.example/a:1: not found"#,
    ),
    (
        Transient,
        Is::Unreachable,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": failed to resolve reference "r.example/a:1": failed to do request: Head "http://r.example/v2/a/manifests/1": dial tcp 127.0.0.1:1: connect: connection refused"#,
    ),
    (
        Transient,
        Is::Unreachable,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": failed to resolve reference "r.example/a:1": failed to do request: Head "https://r.example/v2/a/manifests/1": dial tcp: lookup r.example on 127.0.0.53:53: no such host"#,
    ),
    (
        Transient,
        Is::Unreachable,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": failed to read expected number of bytes: unexpected EOF"#,
    ),
    (
        Transient,
        Is::Unreachable,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": failed to resolve reference "r.example/a:1": failed to do request: Head "http://r.example/v2/a/manifests/1": EOF"#,
    ),
    // From the sources of containerd 2.x, CRI-O and the registries behind them.
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": failed to resolve reference "r.example/a:1": failed to authorize: failed to fetch anonymous token: unexpected status from GET request to https://auth.example/token?scope=x: 401 Unauthorized"#,
    ),
    (
        Transient,
        Is::RegistryError,
        Code::Unknown,
        r#"failed to resolve reference "r.example/a:1": failed to authorize: failed to fetch oauth token: unexpected status: 503 Service Unavailable"#,
    ),
    (
        Transient,
        Is::Unreachable,
        Code::Unknown,
        r#"failed to resolve reference "r.example/a:1": failed to authorize: failed to fetch anonymous token: Get "https://auth.example/token": dial tcp 10.0.0.1:443: i/o timeout"#,
    ),
    (
        Transient,
        Is::RegistryError,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": failed to copy: httpReadSeeker: failed open: unexpected status code https://r.example/v2/a/blobs/sha256:00: 500 Internal Server Error"#,
    ),
    (
        Transient,
        Is::RateLimited,
        Code::Unknown,
        r#"failed to resolve reference "r.example/a:1": pulling from host r.example failed with status code [manifests 1]: 429 Too Many Requests"#,
    ),
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        r#"failed to resolve reference "r.example/a:1": pull access denied, repository does not exist or may require authorization: server message: insufficient_scope: authorization failed"#,
    ),
    (
        Permanent,
        Is::PlatformMismatch,
        Code::Unknown,
        r#"failed to pull and unpack image "r.example/a:1": no match for platform in manifest: not found"#,
    ),
    (
        Permanent,
        Is::InvalidImage,
        Code::Unknown,
        r#"failed to parse image reference "a:b:c": invalid reference format"#,
    ),
    (NotFound, Is::NotFound, Code::Unknown, "reading manifest 1 in r.example/a: manifest unknown"),
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        "reading manifest 1 in r.example/a: unauthorized: authentication required",
    ),
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        "initializing source docker://r.example/a:1: requested access to the resource is denied",
    ),
    (Transient, Is::RegistryError, Code::Unknown, "RegistryUnavailable: pull image failed"),
    (Permanent, Is::InvalidImage, Code::Unknown, "SignatureValidationFailed: image policy"),
    (
        Transient,
        Is::Other,
        Code::Unknown,
        "failed to extract layer sha256:00: mount callback failed: content digest sha256:00: not found",
    ),
    (NoSpace, Is::NoSpace, Code::Unknown, "write /var/lib/containerd/x: no space left on device"),
    (
        NoSpace,
        Is::NoSpace,
        Code::Unknown,
        "failed to extract layer sha256:00: write /x: disk quota exceeded: unknown",
    ),
    // Content that containerd itself lacks isn't an answer of a registry.
    (
        Transient,
        Is::Other,
        Code::NotFound,
        r#"failed to pull and unpack image "r.example/a:1": failed to copy: lease does not exist "edgecore-prepull-00": not found"#,
    ),
    (
        Transient,
        Is::Other,
        Code::NotFound,
        r#"failed to pull and unpack image "r.example/a:1": failed to prepare extraction snapshot "extract-1 sha256:00": parent snapshot sha256:01 does not exist: not found"#,
    ),
    (
        Transient,
        Is::Other,
        Code::NotFound,
        r#"failed to pull and unpack image "r.example/a:1": content digest sha256:00: not found"#,
    ),
    // From CRI-O 1.37 and cri-dockerd with dockerd 26.1, or from their sources.
    (Auth, Is::Unauthorized, Code::Unknown, "Error response from daemon: denied"),
    (Auth, Is::Unauthorized, Code::Unknown, "Error response from daemon: unauthorized"),
    (Auth, Is::Unauthorized, Code::Unknown, "reading manifest 1 in r.example/a: unauthorized"),
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        "unable to pull image or OCI artifact: pull image err: initializing source docker://r.example/a:1: reading manifest 1 in r.example/a: denied; artifact err: get manifest: denied",
    ),
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        r#"initializing source docker://r.example/a:1: reading manifest 1 in r.example/a: StatusCode: 403, "<html><h1>403</h1>""#,
    ),
    (Auth, Is::Unauthorized, Code::Unknown, "reading manifest 1 in r.example/a: StatusCode: 401, <html>"),
    (
        NotFound,
        Is::NotFound,
        Code::Unknown,
        r#"initializing source docker://r.example/a:1: reading manifest 1 in r.example/a: StatusCode: 404, "<html>404</html>""#,
    ),
    (
        NotFound,
        Is::NotFound,
        Code::Unknown,
        r#"Error response from daemon: error parsing HTTP 404 response body: invalid character '<' looking for beginning of value: "<html>""#,
    ),
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        r#"Error response from daemon: error parsing HTTP 403 response body: invalid character '<' looking for beginning of value: "<html>""#,
    ),
    (
        Transient,
        Is::RegistryError,
        Code::Unknown,
        "reading manifest 1 in r.example/a: received unexpected HTTP status: 521 <none>",
    ),
    (
        Transient,
        Is::Unreachable,
        Code::Unknown,
        r#"RegistryUnavailable: unable to pull image: initializing source docker://r.example/a:1: pinging container registry r.example: Get "https://r.example/v2/": dial tcp 192.0.2.1:443: connect: connection refused"#,
    ),
    (
        NotFound,
        Is::NotFound,
        Code::Unknown,
        "reading manifest 1 in r.example/a: repository name not known to registry",
    ),
    (
        NotFound,
        Is::NotFound,
        Code::Unknown,
        "copying system image from manifest list: reading blob sha256:00: blob unknown to registry",
    ),
    (
        Auth,
        Is::Unauthorized,
        Code::Unknown,
        "Error response from daemon: pull access denied for r.example/a, repository does not exist or may require 'docker login': denied: <html><h1>403</h1>",
    ),
    (
        RuntimeDown,
        Is::RuntimeDown,
        Code::Unknown,
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    ),
    // containerd 1.6 and 1.7 during their start.
    (RuntimeDown, Is::RuntimeDown, Code::Unknown, "server is not initialized yet"),
    (
        Transient,
        Is::Unreachable,
        Code::Unknown,
        r#"failed to do request: Head "https://r.example/v2/a/manifests/1": x509: certificate has expired or is not yet valid: current time is before 2026"#,
    ),
    // Texts without a needle: the code decides.
    (RuntimeDown, Is::RuntimeDown, Code::Unavailable, "server is not initialized yet"),
    (Permanent, Is::InvalidImage, Code::InvalidArgument, "something"),
    (NotFound, Is::NotFound, Code::NotFound, "something"),
    (Transient, Is::Other, Code::Unknown, "something never seen before"),
    (Transient, Is::Unreachable, Code::DeadlineExceeded, "context deadline exceeded"),
];

#[test]
fn the_text_decides_class_and_code() {
    for (class, is, code, text) in SEEN {
        assert_eq!(classify(*code, text, "r.example/a:1"), (*class, *is), "{text}");
    }
}

#[test]
fn a_reason_does_not_repeat_the_image() {
    let endpoint: RuntimeEndpoint = "unix:///run/a.sock".parse().unwrap();
    for (text, reason) in [
        (
            r#"failed to pull and unpack image "r.example/a:1": failed to resolve reference "r.example/a:1": r.example/a:1: not found"#,
            "not found",
        ),
        (
            r#"failed to pull and unpack image "r.example/a:1": failed to copy: unexpected EOF"#,
            "failed to copy: unexpected EOF",
        ),
        (r#"failed to parse image reference "a:b:c": x"#, r#"failed to parse image reference "a:b:c": x"#),
        (
            r#"failed to pull and unpack image "r.example/a:1": "#,
            r#"failed to pull and unpack image "r.example/a:1":"#,
        ),
        (r#"failed to pull image "r.example/a:1""#, r#"failed to pull image "r.example/a:1""#),
        ("r.example/a:10: no", "r.example/a:10: no"),
        ("", ""),
    ] {
        let error = to_pull_error(&Status::unknown(text), "r.example/a:1", &endpoint);
        assert_eq!(error.message, reason);
    }
}

#[test]
fn the_name_does_not_decide_the_class() {
    for name in ["r.example/eof:unauthorized", "r.example/401/unauthorized:503"] {
        let text = format!(
            r#"failed to pull and unpack image "{name}": failed to resolve reference "{name}": {name}: not found"#
        );
        assert_eq!(classify(Code::Unknown, &text, name), (NotFound, Is::NotFound), "{text}");
    }
}
