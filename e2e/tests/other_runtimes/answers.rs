//! Answers of CRI-O 1.37, and of cri-dockerd with dockerd 26.1, to pulls, and the expected reactions. The bare codes,
//! the HTML and the answer to silence were seen; all of it was checked against their sources: CRI-O at f954a17e50 with
//! the library that it vendors, cri-dockerd at 246bd657, dockerd 26.1.5.

use prepull_api::failure::FailureCode;
use tonic::Code;

use super::stand_in::Runtime::{self, CriO, Docker};

/// The agent's reaction to a failed pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Retries, as often as the job allows.
    Again,
    /// Tries the next credential, and fails after the last one.
    NextCredential,
    /// Fails, because nothing can help.
    Fails,
}

/// A failed pull.
pub(super) struct Failure {
    pub(super) of: Runtime,
    /// The problem, as a part of a reference.
    pub(super) case: &'static str,
    pub(super) code: Code,
    /// The answer. `IMAGE` stands for the reference, and `REPOSITORY` for the same without its tag.
    pub(super) text: &'static str,
    pub(super) then: Then,
    pub(super) is: FailureCode,
}

const fn failure(
    of: Runtime,
    case: &'static str,
    text: &'static str,
    then: Then,
    is: FailureCode,
) -> Failure {
    // The general form of errors of both runtimes.
    Failure { of, case, code: Code::Unknown, text, then, is }
}

use FailureCode::{NotFound, Other, PlatformMismatch, RateLimited, RegistryError, Unauthorized, Unreachable};
use Then::{Again, Fails, NextCredential};

pub(super) const FAILURES: &[Failure] = &[
    failure(
        CriO,
        "wrong-password",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: authentication required; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: authentication required",
        NextCredential,
        Unauthorized,
    ),
    failure(
        CriO,
        "wrong-password-at-the-token-server",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: unable to retrieve auth token: invalid username/password: authentication required; artifact err: pull artifact: initializing source docker://IMAGE: unable to retrieve auth token: invalid username/password: authentication required",
        NextCredential,
        Unauthorized,
    ),
    failure(
        CriO,
        "token-server-403",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: Requesting bearer token: received unexpected HTTP status: 403 Forbidden; artifact err: pull artifact: initializing source docker://IMAGE: Requesting bearer token: received unexpected HTTP status: 403 Forbidden",
        NextCredential,
        Unauthorized,
    ),
    failure(
        CriO,
        "bare-401",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: unauthorized; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: unauthorized",
        NextCredential,
        Unauthorized,
    ),
    failure(
        CriO,
        "bare-403",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: denied; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: denied",
        NextCredential,
        Unauthorized,
    ),
    failure(
        CriO,
        "default-403",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: requested access to the resource is denied; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: requested access to the resource is denied",
        NextCredential,
        Unauthorized,
    ),
    failure(
        CriO,
        "html-403",
        r#"unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: StatusCode: 403, "<html>\r\n<head><title>403 Forbidden</title></head>\r\n<b..."; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: StatusCode: 403, "<html>\r\n<head><title>403 Forbidden</title></head>\r\n<b...""#,
        NextCredential,
        Unauthorized,
    ),
    failure(
        CriO,
        "html-404",
        r#"unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: StatusCode: 404, "<html>\r\n<head><title>404 Not Found</title></head>\r\n<b..."; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: StatusCode: 404, "<html>\r\n<head><title>404 Not Found</title></head>\r\n<b...""#,
        NextCredential,
        NotFound,
    ),
    failure(
        CriO,
        "unknown-tag",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: manifest unknown; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: manifest unknown",
        NextCredential,
        NotFound,
    ),
    failure(
        CriO,
        "unknown-repository",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: repository name not known to registry; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: repository name not known to registry",
        NextCredential,
        NotFound,
    ),
    failure(
        CriO,
        "other-platform",
        r#"unable to pull image or OCI artifact: pull image err: choosing an image from manifest list docker://IMAGE: no image found in image index for architecture "arm64", variant "v8", OS "linux"; artifact err: pull artifact: choosing an image from manifest list docker://IMAGE: no image found in image index for architecture "arm64", variant "v8", OS "linux""#,
        Fails,
        PlatformMismatch,
    ),
    failure(
        CriO,
        "refused",
        r#"RegistryUnavailable: unable to pull image: initializing source docker://IMAGE: pinging container registry r.example: Get "https://r.example/v2/": dial tcp 192.0.2.1:443: connect: connection refused"#,
        Again,
        Unreachable,
    ),
    failure(
        CriO,
        "no-name",
        r#"unable to pull image: initializing source docker://IMAGE: pinging container registry r.example: Get "https://r.example/v2/": dial tcp: lookup r.example: no such host"#,
        Again,
        Unreachable,
    ),
    failure(
        CriO,
        "busy",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: too many requests; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: too many requests",
        Again,
        RateLimited,
    ),
    failure(
        CriO,
        "bare-429",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: toomanyrequests; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: toomanyrequests",
        Again,
        RateLimited,
    ),
    failure(
        CriO,
        "broken-registry",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: received unexpected HTTP status: 502 Bad Gateway; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: received unexpected HTTP status: 502 Bad Gateway",
        Again,
        RegistryError,
    ),
    failure(
        CriO,
        "odd-code",
        "unable to pull image or OCI artifact: pull image err: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: received unexpected HTTP status: 521 <none>; artifact err: pull artifact: initializing source docker://IMAGE: reading manifest v1 in REPOSITORY: received unexpected HTTP status: 521 <none>",
        Again,
        RegistryError,
    ),
    failure(Docker, "bare-401", "Error response from daemon: unauthorized", NextCredential, Unauthorized),
    failure(Docker, "bare-403", "Error response from daemon: denied", NextCredential, Unauthorized),
    failure(
        Docker,
        "wrong-password",
        r#"Error response from daemon: Head "https://r.example/v2/docker/manifests/v1": unauthorized: authentication required"#,
        NextCredential,
        Unauthorized,
    ),
    failure(
        Docker,
        "no-credential",
        r#"Error response from daemon: Head "https://r.example/v2/docker/manifests/v1": no basic auth credentials"#,
        NextCredential,
        Unauthorized,
    ),
    failure(
        Docker,
        "html-403",
        r#"Error response from daemon: error parsing HTTP 403 response body: invalid character '<' looking for beginning of value: "<html>403</html>""#,
        NextCredential,
        Unauthorized,
    ),
    // The same page with a declared type.
    failure(
        Docker,
        "page-403",
        "Error response from daemon: pull access denied for REPOSITORY, repository does not exist or may require 'docker login': denied: <html>403</html>",
        NextCredential,
        Unauthorized,
    ),
    failure(
        Docker,
        "html-404",
        r#"Error response from daemon: error parsing HTTP 404 response body: invalid character '<' looking for beginning of value: "<html>404</html>""#,
        NextCredential,
        NotFound,
    ),
    failure(
        Docker,
        "unknown-tag",
        "Error response from daemon: manifest for IMAGE not found: manifest unknown: manifest unknown",
        NextCredential,
        NotFound,
    ),
    failure(
        Docker,
        "other-platform",
        // After the beginning of the pull, with no prefix.
        "no matching manifest for linux/arm64/v8 in the manifest list entries",
        Fails,
        PlatformMismatch,
    ),
    failure(
        Docker,
        "refused",
        r#"Error response from daemon: Get "https://r.example/v2/": dial tcp 192.0.2.1:443: connect: connection refused"#,
        Again,
        Unreachable,
    ),
    failure(
        Docker,
        "broken-registry",
        "Error response from daemon: received unexpected HTTP status: 500 Internal Server Error",
        Again,
        RegistryError,
    ),
    failure(
        Docker,
        "unknown-repository",
        "Error response from daemon: repository REPOSITORY not found: name unknown: repository name not known to registry",
        NextCredential,
        NotFound,
    ),
    failure(
        Docker,
        "busy",
        "Error response from daemon: toomanyrequests: too many requests",
        Again,
        RateLimited,
    ),
    // cri-dockerd's error for a download without progress for a minute.
    failure(Docker, "silent", "context canceled", Again, Other),
];

/// A successful pull, and the expected knowledge of the image afterwards.
pub(super) struct Success {
    pub(super) of: Runtime,
    pub(super) reference: &'static str,
    /// Repositories and digests that the runtime lists for the image; a digest is given by its repeated digit.
    pub(super) lists: &'static [(&'static str, char)],
    /// The digest of the reference. `None` if it can't be determined.
    pub(super) digest: Option<char>,
}

pub(super) const SUCCESSES: &[Success] = &[
    Success { of: CriO, reference: "r.example/one:v1", lists: &[("r.example/one", 'a')], digest: Some('a') },
    // For a multi-platform image it lists the index and the manifest, without distinguishing them.
    Success {
        of: CriO,
        reference: "r.example/multi:v1",
        lists: &[("r.example/multi", 'a'), ("r.example/multi", 'b')],
        digest: None,
    },
    Success {
        of: CriO,
        reference: "docker.io/library/nginx:1.25",
        lists: &[("docker.io/library/nginx", 'a'), ("r.example/mirror/nginx", 'b')],
        digest: Some('a'),
    },
    Success {
        of: Docker,
        reference: "docker.io/library/nginx:1.25",
        lists: &[("nginx", 'a'), ("r.example/nginx", 'b')],
        digest: Some('a'),
    },
    Success {
        of: Docker,
        reference: "docker.io/team/app:v1",
        lists: &[("team/app", 'a')],
        digest: Some('a'),
    },
    // The same image under two tags of its repository, with different manifests.
    Success {
        of: Docker,
        reference: "r.example/two:v2",
        lists: &[("r.example/two", 'a'), ("r.example/two", 'b')],
        digest: None,
    },
];
