#![allow(clippy::unwrap_used, clippy::expect_used)]

use proptest::prelude::*;

use super::*;

const SHA: &str = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

fn parts(text: &str) -> (Option<String>, String, Option<String>, Option<String>) {
    let Reference { registry, repository, tag, digest } = Reference::parse(text).unwrap();
    (registry, repository, tag, digest)
}

#[test]
fn a_digest_is_listed_without_its_tag() {
    for (reference, listed) in [
        ("r.io/app:1@sha256:a", "r.io/app@sha256:a"),
        ("r.io:5000/app@sha256:a", "r.io:5000/app@sha256:a"),
        ("r.io:5000/app:1@sha256:a", "r.io:5000/app@sha256:a"),
        ("r.io/app:1", "r.io/app:1"),
    ] {
        assert_eq!(listed_name(reference), listed);
    }
}

#[test]
fn a_host_differs_from_a_repository() {
    let cases: [(&str, Option<&str>, &str); 14] = [
        ("nginx", None, "nginx"),
        ("library/nginx", None, "library/nginx"),
        ("harbor/team/app", None, "harbor/team/app"),
        ("r.io/app", Some("r.io"), "app"),
        ("harbor:5000/app", Some("harbor:5000"), "app"),
        ("localhost/app", Some("localhost"), "app"),
        ("localhost:5000/app", Some("localhost:5000"), "app"),
        ("Harbor/app", Some("Harbor"), "app"),
        ("10.0.0.1/a/b/c", Some("10.0.0.1"), "a/b/c"),
        ("[::1]/app", Some("[::1]"), "app"),
        ("[fd00::1]:5000/app", Some("[fd00::1]:5000"), "app"),
        ("a.b", None, "a.b"),
        ("r.io/localhost/app", Some("r.io"), "localhost/app"),
        ("docker.io/nginx", Some("docker.io"), "nginx"),
    ];
    for (text, registry, repository) in cases {
        let expected = (registry.map(str::to_owned), repository.to_owned(), None, None);
        assert_eq!(parts(text), expected, "{text}");
    }
}

#[test]
fn tags_and_digests_differ_from_ports() {
    let tagged =
        |tag: Option<&str>, digest: Option<&str>| (tag.map(str::to_owned), digest.map(str::to_owned));
    for (text, expected) in [
        ("app:5000".to_owned(), tagged(Some("5000"), None)),
        ("r.io:5000/app".to_owned(), tagged(None, None)),
        ("r.io:5000/app:1_2.3-x".to_owned(), tagged(Some("1_2.3-x"), None)),
        (format!("app@{SHA}"), tagged(None, Some(SHA))),
        (format!("r.io:1/app:1.25@{SHA}"), tagged(Some("1.25"), Some(SHA))),
    ] {
        let (_, _, tag, digest) = parts(&text);
        assert_eq!((tag, digest), expected, "{text}");
    }
}

#[test]
fn normalisation_writes_out_what_docker_implies() {
    for (text, normalized) in [
        ("nginx".to_owned(), "docker.io/library/nginx:latest".to_owned()),
        ("nginx:1.25".to_owned(), "docker.io/library/nginx:1.25".to_owned()),
        ("team/app".to_owned(), "docker.io/team/app:latest".to_owned()),
        ("docker.io/nginx".to_owned(), "docker.io/library/nginx:latest".to_owned()),
        ("index.docker.io/nginx:1".to_owned(), "docker.io/library/nginx:1".to_owned()),
        ("r.io/nginx".to_owned(), "r.io/nginx:latest".to_owned()),
        ("localhost/nginx".to_owned(), "localhost/nginx:latest".to_owned()),
        (format!("nginx@{SHA}"), format!("docker.io/library/nginx@{SHA}")),
        (format!("nginx:1@{SHA}"), format!("docker.io/library/nginx:1@{SHA}")),
    ] {
        assert_eq!(Reference::parse(&text).unwrap().normalized().to_string(), normalized);
    }
}

#[test]
fn familiar_names_are_as_short_as_they_are_written() {
    let id = "a".repeat(64);
    for (text, name, tag) in [
        ("nginx:1.9.1".to_owned(), "nginx", "1.9.1"),
        ("nginx".to_owned(), "nginx", "latest"),
        ("docker.io/library/nginx:1".to_owned(), "nginx", "1"),
        ("index.docker.io/nginx:1".to_owned(), "nginx", "1"),
        ("docker.io/team/app:2".to_owned(), "team/app", "2"),
        ("docker.io/library/a/b:2".to_owned(), "library/a/b", "2"),
        ("r.io:5000/team/app".to_owned(), "r.io:5000/team/app", "latest"),
        ("r.io/library/nginx:1".to_owned(), "r.io/library/nginx", "1"),
        (format!("nginx@{SHA}"), "nginx", SHA),
        (format!("r.io/app:1@{SHA}"), "r.io/app", SHA),
        // Without the registry, these would be read as a host or as an image id.
        ("docker.io/localhost/app:1".to_owned(), "docker.io/localhost/app", "1"),
        ("docker.io/a.b/app:1".to_owned(), "docker.io/a.b/app", "1"),
        (format!("docker.io/library/{id}:1"), &format!("docker.io/library/{id}"), "1"),
    ] {
        let familiar = Reference::parse(&text).unwrap().normalized().familiar_name_and_tag();
        assert_eq!(familiar, (name.to_owned(), tag.to_owned()), "{text}");
    }
}

#[test]
fn the_default_pull_policy_is_that_of_kubernetes() {
    for (text, policy) in [
        ("nginx".to_owned(), PullPolicy::Always),
        ("nginx:latest".to_owned(), PullPolicy::Always),
        (format!("nginx:latest@{SHA}"), PullPolicy::Always),
        ("nginx:1.25".to_owned(), PullPolicy::IfNotPresent),
        (format!("nginx@{SHA}"), PullPolicy::IfNotPresent),
        ("nginx:Latest".to_owned(), PullPolicy::IfNotPresent),
    ] {
        assert_eq!(Reference::parse(&text).unwrap().default_pull_policy(), policy, "{text}");
    }
}

#[test]
fn an_error_names_the_part_that_is_wrong() {
    let long_tag = "t".repeat(129);
    let long_name = format!("r.io/{}", "a".repeat(251));
    let library = "a".repeat(238); // docker.io/library/ is 18 more
    for (text, message) in [
        ("", "the image reference is empty"),
        (&SHA[7..], "is an image id, not a name"),
        ("Nginx", "repository \"Nginx\" in image \"Nginx\" must be lowercase"),
        ("r.io/Team/app", "repository \"Team/app\" in image \"r.io/Team/app\" must be lowercase"),
        ("r_x.io/app", "\"r_x.io\" in image \"r_x.io/app\" is not a registry host"),
        ("-r.io/app", "is not a registry host"),
        ("r..io/app", "is not a registry host"),
        ("r.io:/app", "is not a registry host"),
        ("r.io:http/app", "is not a registry host"),
        ("[::1/app", "is not a registry host"),
        ("[:x]/app", "is not a registry host"),
        ("https://r.io/app", "is not a registry host"),
        ("r.io/", "repository \"\" in image"),
        ("/app", "is malformed: it takes lowercase"),
        ("a//b", "is malformed: it takes lowercase"),
        ("a/b/", "is malformed: it takes lowercase"),
        ("a...b", "is malformed: it takes lowercase"),
        ("a___b", "is malformed: it takes lowercase"),
        ("a._b", "is malformed: it takes lowercase"),
        ("-a", "is malformed: it takes lowercase"),
        ("a-", "is malformed: it takes lowercase"),
        (" nginx", "is malformed: it takes lowercase"),
        ("nginx ", "is malformed: it takes lowercase"),
        ("ngïnx", "is malformed: it takes lowercase"),
        ("app:", "tag \"\" in image \"app:\" is malformed"),
        ("app:.1", "tag \".1\""),
        ("app:-1", "tag \"-1\""),
        ("app:1:2", "tag \"1:2\""),
        (&format!("app:{long_tag}"), "is malformed: it takes at most 128"),
        ("app@", "digest \"\""),
        ("app@sha256:abc", "digest \"sha256:abc\" in image"),
        ("app@md5:9f86d081884c7d659a2feaa0c55ad015", "digest \"md5:"),
        (&format!("app@{}", SHA.to_uppercase()), "is malformed: write sha256:"),
        (&format!("app@{SHA}@{SHA}"), "is malformed: write sha256:"),
        (&long_name, "has 256 bytes; at most 255 are allowed"),
        (&library, "has 256 bytes; at most 255 are allowed"),
    ] {
        let error = Reference::parse(text).unwrap_err().to_string();
        assert!(error.contains(message), "{text:?}: {error}");
    }
    for good in [&format!("app:{}", "t".repeat(128)), "a__b", "a---b", "a.b_c-d", &"a".repeat(237)] {
        assert!(Reference::parse(good).is_ok(), "{good}");
    }
}

#[test]
fn a_part_in_the_wrong_field_is_refused() {
    let from = |registry, repository, tag, digest| {
        Reference::from_parts(registry, repository, tag, digest)
            .map(|r| r.to_string())
            .map_err(|e| e.to_string())
    };
    assert_eq!(
        from(Some("harbor.docker.hub"), "jili/example", Some("v1.0.0"), None),
        Ok("harbor.docker.hub/jili/example:v1.0.0".to_owned())
    );
    assert_eq!(from(None, "nginx", Some("1"), Some(SHA)), Ok(format!("nginx:1@{SHA}")));
    for (registry, repository, tag, message) in [
        (Some("harbor"), "app", None, "registry \"harbor\" is not recognised as a host"),
        (Some("r.io/proxy"), "app", None, "a path belongs in the repository"),
        (Some("r_.io"), "app", None, "is not a registry host"),
        (None, "r.io/app", None, "begins with a host: put it in the registry"),
        (None, "app:1", None, "repository \"app:1\" in image \"app:1\" is malformed"),
        (None, "app", Some("1@sha256:x"), "tag \"1@sha256:x\""),
        (None, "", None, "repository \"\""),
        (None, &SHA[7..], None, "is an image id"),
    ] {
        let error = from(registry, repository, tag, None).unwrap_err();
        assert!(error.contains(message), "{registry:?} {repository:?} {tag:?}: {error}");
    }
}

#[test]
fn an_error_stays_short_whatever_it_quotes() {
    let error = Reference::parse(&"Ä".repeat(100_000)).unwrap_err().to_string();
    assert!(error.len() < 2000, "{}", error.len());
}

/// References that the grammar generates.
pub(crate) fn reference_text() -> impl Strategy<Value = String> {
    let host = "(localhost|[a-zA-Z0-9]([a-zA-Z0-9-]{0,5}[a-zA-Z0-9])?\\.[a-z]{1,4}|\\[[0-9a-f]{0,4}::[0-9a-f]{1,4}\\])(:[0-9]{1,5})?";
    // No dot in the first component: without a registry it would be read as a host.
    let path = "[a-z0-9]{1,5}((_|__|-{1,3})[a-z0-9]{1,3}){0,2}(/[a-z0-9]{1,4}(\\.[a-z0-9]{1,2})?){0,3}";
    let digest = "sha256:[0-9a-f]{64}";
    (
        proptest::option::of(host),
        path,
        proptest::option::of("[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,10}"),
        proptest::option::of(digest),
    )
        .prop_map(|(host, path, tag, digest)| {
            join_parts(host.as_deref(), &path, tag.as_deref(), digest.as_deref())
        })
}

proptest! {
    #[test]
    fn display_is_the_text_that_was_parsed(text in reference_text()) {
        let reference = Reference::parse(&text).unwrap();
        prop_assert_eq!(reference.to_string(), text);
    }

    #[test]
    fn a_reference_rebuilt_from_its_parts_is_the_same(text in reference_text()) {
        let r = Reference::parse(&text).unwrap();
        prop_assert_eq!(Reference::from_parts(r.registry(), r.repository(), r.tag(), r.digest()).unwrap(), r);
    }

    #[test]
    fn familiar_names_parse_to_their_full_names(text in reference_text()) {
        let normalized = Reference::parse(&text).unwrap().normalized();
        let (name, tag) = normalized.familiar_name_and_tag();
        prop_assert_eq!(Reference::parse(&name).unwrap().normalized().name(), normalized.name());
        prop_assert_eq!(Some(tag.as_str()), normalized.digest().or(normalized.tag()));
    }

    #[test]
    fn normalising_is_idempotent(text in reference_text()) {
        let once = Reference::parse(&text).unwrap().normalized();
        prop_assert!(once.tag().is_some() || once.digest().is_some());
        prop_assert_eq!(Reference::parse(&once.to_string()).unwrap().normalized(), once);
    }

    #[test]
    fn any_text_is_refused_or_kept_as_it_is(text in "[ -~é/:@.]{0,40}") {
        if let Ok(reference) = Reference::parse(&text) {
            prop_assert_eq!(reference.to_string(), text);
        }
    }
}
