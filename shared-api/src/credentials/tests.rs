#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::image::{NormalizedReference, Reference};

fn image(text: &str) -> NormalizedReference {
    Reference::parse(text).unwrap().normalized()
}

fn config(auths: &serde_json::Value) -> RegistryConfig {
    RegistryConfig::from_docker_config(json!({ "auths": auths }).to_string().as_bytes()).unwrap()
}

/// Keys of the entries for an image, in the order in which they are tried.
fn keys(config: &RegistryConfig, text: &str) -> Vec<String> {
    config.credentials_for(&image(text)).into_iter().map(|credential| credential.server).collect()
}

/// A config with an entry for each of these keys, and some credential.
fn with_keys(keys: &[&str]) -> RegistryConfig {
    let auths: serde_json::Map<_, _> =
        keys.iter().map(|key| ((*key).to_owned(), json!({"username": "u", "password": "p"}))).collect();
    config(&auths.into())
}

#[test]
fn a_pattern_matches_as_in_the_kubelet() {
    for (pattern, text, expected) in [
        ("r.io", "r.io/app", true),
        ("r.io", "s.io/app", false),
        ("r.io", "r.io.example/app", false),
        ("*.io", "r.io.example/app", false),
        ("r.io", "r.io:5000/app", false),
        ("r.io:5000", "r.io:5000/app", true),
        ("r.io:5000", "r.io/app", false),
        ("r.io:443", "r.io/app", false),
        ("localhost:5000", "localhost:5000/a/b", true),
        ("r.io/team", "r.io/team/app", true),
        ("r.io/team", "r.io/team-b/app", true),
        ("r.io/team/", "r.io/team-b/app", false),
        ("r.io/team/", "r.io/team/app", true),
        ("r.io/team/app", "r.io/team/app:1", true),
        ("r.io/other", "r.io/team/app", false),
        ("r.io/", "r.io/app", true),
        ("https://r.io", "r.io/app", true),
        ("http://r.io:80/", "r.io:80/app", true),
        ("https://r.io/v1/", "r.io/app", true),
        ("https://r.io/v2/team", "r.io/team/app", true),
        ("https://r.io/v2/team", "r.io/other/app", false),
        ("r.io/v1/app", "r.io/v1/app", false),
        ("r.io/v1/v1/app", "r.io/v1/app", true),
        ("*.r.io", "a.r.io/app", true),
        ("*.r.io", "r.io/app", false),
        ("*.r.io", "a.b.r.io/app", false),
        ("*.*.r.io", "a.b.r.io/app", true),
        ("a*c.r.io", "abc.r.io/app", true),
        ("a*c.r.io", "ac.r.io/app", true),
        ("a*c.r.io", "ab.r.io/app", false),
        ("a*b*c.r.io", "axbxbyc.r.io/app", true),
        ("a*b*c.r.io", "axc.r.io/app", false),
        ("*a.r.io", "a.r.io/app", true),
        ("ab*b.r.io", "ab.r.io/app", false),
        ("*.io:5000/team", "r.io:5000/team/app", true),
        ("docker.io", "nginx", true),
        ("docker.io/library", "nginx", true),
        ("docker.io/team", "nginx", false),
        ("index.docker.io", "nginx", false),
        ("[::1]:5000", "[::1]:5000/app", true),
        ("[::1]", "[::1]/app", true),
        ("[::1]", "[::1]:5000/app", false),
    ] {
        let parsed = RegistryPattern::parse(pattern).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(parsed.matches(&image(text)), expected, "{pattern} {text}");
    }
    for pattern in
        ["", "/team", "r..io", "r.io:", "r.io:http", "user:secret@r.io", "r io", "r.io/a b", "r.io/?x", "[]"]
    {
        assert!(RegistryPattern::parse(pattern).is_err(), "{pattern:?}");
    }
}

#[test]
fn entries_are_ordered_by_specificity() {
    let order = ["r.io/team/app", "r.io/team", "*.io/team", "r.io", "r*.io", "*.io", "*.*"];
    let mut patterns: Vec<_> = order.iter().rev().map(|text| RegistryPattern::parse(text).unwrap()).collect();
    patterns.sort_by_key(|pattern| std::cmp::Reverse(pattern.specificity()));
    let sorted: Vec<_> = patterns.iter().map(RegistryPattern::to_string).collect();
    assert_eq!(sorted, order);
}

#[test]
fn all_matching_entries_are_tried_most_specific_first() {
    let config = with_keys(&["r.io", "*.io", "r.io/team", "https://r.io/v2/", "s.io", "r.io:5000"]);
    assert_eq!(keys(&config, "r.io/team/app"), ["r.io/team", "https://r.io/v2/", "r.io", "*.io"]);
    assert_eq!(keys(&config, "r.io:5000/app"), ["r.io:5000"]);
    assert_eq!(keys(&config, "nginx"), ["*.io"], "docker.io is a host like any other");
    assert_eq!(keys(&config, "r.example/app"), Vec::<String>::new());
    assert_eq!(config.registries(), ["*.io", "https://r.io/v2/", "r.io", "r.io/team", "r.io:5000", "s.io"]);
}

#[test]
fn docker_hubs_legacy_key_is_the_fallback() {
    for key in
        ["https://index.docker.io/v1/", "index.docker.io/v1/", "index.docker.io", "https://index.docker.io"]
    {
        let config = with_keys(&[key]);
        assert_eq!(keys(&config, "nginx"), [key]);
        assert_eq!(keys(&config, "docker.io/team/app"), [key]);
        assert_eq!(keys(&config, "r.io/app"), Vec::<String>::new());
    }
    let both = with_keys(&["https://index.docker.io/v1/", "docker.io/team"]);
    assert_eq!(keys(&both, "team/app"), ["docker.io/team"]);
    assert_eq!(keys(&both, "nginx"), ["https://index.docker.io/v1/"]);
}

fn parse_one(entry: &serde_json::Value) -> Result<RegistryCredential, SecretError> {
    let lookup = config(&json!({"r.io": entry})).lookup(&image("r.io/app"));
    lookup.credentials.into_iter().next().ok_or_else(|| lookup.broken[0].clone())
}

#[test]
fn every_form_of_an_entry_is_parsed() {
    let credential = |username: &str, password: &str, identity: &str, registry: &str| RegistryCredential {
        server: "r.io".to_owned(),
        username: Sensitive::new(username),
        password: Sensitive::new(password),
        identity_token: Sensitive::new(identity),
        registry_token: Sensitive::new(registry),
    };
    let user = credential("user", "pa:ss?>", "", "");
    for (entry, expected) in [
        (json!({"username": "user", "password": "pa:ss?>"}), user.clone()),
        (json!({"Username": "user", "PASSWORD": "pa:ss?>", "email": "x@y"}), user.clone()),
        (json!({"auth": "dXNlcjpwYTpzcz8+"}), user.clone()),
        (json!({"auth": "dXNlcjpwYTpzcz8-"}), user.clone()),
        (json!({"auth": "dXNlcjpw\nYTpzcz8+\r\n"}), user.clone()),
        (json!({"auth": "dXNlcjpwYTpzcz8+", "username": "other", "password": "x"}), user),
        (json!({"auth": "dTpw"}), credential("u", "p", "", "")),
        (json!({"auth": "dTpw\n"}), credential("u", "p", "", "")),
        (json!({"auth": "dTpwcA=="}), credential("u", "pp", "", "")),
        (json!({"auth": "dTpwcA"}), credential("u", "pp", "", "")),
        (json!({"auth": "dTo="}), credential("u", "", "", "")),
        (json!({"auth": "dTo=", "identitytoken": "token"}), credential("", "", "token", "")),
        (
            json!({"username": "u", "password": "p", "identityToken": "token"}),
            credential("", "", "token", ""),
        ),
        (json!({"registrytoken": "bearer"}), credential("", "", "", "bearer")),
        (json!({"auth": "dTpw", "registrytoken": null}), credential("u", "p", "", "")),
    ] {
        assert_eq!(parse_one(&entry), Ok(expected), "{entry}");
    }
}

#[test]
fn an_error_about_an_entry_never_quotes_it() {
    for (entry, message) in [
        (json!({"auth": "s3cr*t"}), "the entry for r.io has an auth that is not base64"),
        // Go's decoder, and so the kubelet, skips line breaks and no other white space.
        (json!({"auth": "dTpw "}), "the entry for r.io has an auth that is not base64"),
        (json!({"auth": " dTpw"}), "the entry for r.io has an auth that is not base64"),
        (json!({"auth": "dT\tpw"}), "the entry for r.io has an auth that is not base64"),
        (
            json!({"auth": BASE64_STANDARD.encode("s3cret")}),
            "the entry for r.io has an auth without a colon between user and password once decoded",
        ),
        (
            json!({"auth": BASE64_STANDARD.encode([0xff, b':', 0xfe])}),
            "the entry for r.io has an auth that is not UTF-8 once decoded",
        ),
        (json!({"password": "s3cret"}), "the entry for r.io has a password and no username"),
        (json!({"auth": {"s3cret": 1}}), "the entry for r.io must be a JSON object whose fields are strings"),
        (json!("s3cret"), "the entry for r.io must be a JSON object whose fields are strings"),
        (
            json!({}),
            "the entry for r.io has neither auth, nor username and password, nor a token (what a credential helper \
             stores is not read)",
        ),
    ] {
        assert_eq!(parse_one(&entry).unwrap_err().to_string(), message, "{entry}");
    }
}

#[test]
fn a_malformed_entry_fails_only_what_needs_it() {
    let config = config(&json!({
        "broken.io": {"auth": "*"},
        "fine.io": {"auth": "dTpw"},
        "fine.io/team": {"auth": "*"},
    }));
    assert_eq!(keys(&config, "fine.io/app"), ["fine.io"]);
    let lookup = config.lookup(&image("fine.io/team/app"));
    assert_eq!((lookup.credentials.len(), lookup.broken.len()), (1, 1));
    let lookup = config.lookup(&image("broken.io/app"));
    assert_eq!((lookup.credentials.len(), lookup.broken.len()), (0, 1));
    assert_eq!(config.lookup(&image("other.io/app")), Lookup::default());
}

fn secret(type_: &str, key: &str, value: &str) -> Result<RegistryConfig, String> {
    let data = BTreeMap::from([(key.to_owned(), value.as_bytes().to_vec())]);
    RegistryConfig::from_secret(type_, &data).map_err(|error| error.to_string())
}

#[test]
fn both_types_of_secret_are_parsed() {
    let new = secret(
        "kubernetes.io/dockerconfigjson",
        ".dockerconfigjson",
        r#"{"auths":{"r.io":{"auth":"dTpw"}}}"#,
    );
    let old = secret("kubernetes.io/dockercfg", ".dockercfg", r#"{"r.io":{"auth":"dTpw"}}"#);
    assert_eq!(new.unwrap(), old.unwrap());
}

#[test]
fn too_many_entries_are_refused() {
    let parse = |entries: usize, password: usize| {
        let entry = json!({"username": "u", "password": "p".repeat(password)});
        let entries: serde_json::Map<_, _> =
            (0..entries).map(|n| (format!("r{n}.io"), entry.clone())).collect();
        let old = secret("kubernetes.io/dockercfg", ".dockercfg", &json!(entries).to_string());
        let new = json!({ "auths": entries }).to_string();
        let new = secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson", &new);
        let refusal = |result: Result<_, String>| result.err().unwrap_or_default();
        [refusal(old), refusal(new)]
    };
    assert_eq!(parse(1024, 100), ["", ""]);
    for error in parse(1025, 100) {
        assert!(error.contains(" has 1025 entries; at most 1024 are accepted"), "{error}");
    }
    for error in parse(100_000, 1).into_iter().chain(parse(1, 256 * 1024)) {
        assert!(error.contains("bytes; at most 262144 are accepted"), "{error}");
    }
}

#[test]
fn an_error_about_a_secret_never_quotes_it() {
    let (new, new_key) = ("kubernetes.io/dockerconfigjson", ".dockerconfigjson");
    for (type_, key, value, message) in [
        (
            "Opaque",
            new_key,
            "{}",
            "type \"Opaque\" holds no registry credentials: it must be kubernetes.io/dockerconfigjson or \
             kubernetes.io/dockercfg (kubectl create secret docker-registry makes one)",
        ),
        (new, ".dockercfg", "{}", "the key .dockerconfigjson is missing"),
        ("kubernetes.io/dockercfg", new_key, "{}", "the key .dockercfg is missing"),
        (
            new,
            new_key,
            "{\"auths\": s3cret}",
            ".dockerconfigjson is not JSON: a syntax error at line 1 column 11",
        ),
        (
            new,
            new_key,
            "{\"auths\":\n{",
            ".dockerconfigjson is not JSON: it ends too early at line 2 column 1",
        ),
        (new, new_key, "", ".dockerconfigjson is not JSON: it ends too early at line 1 column 0"),
        (new, new_key, "\"s3cret\"", ".dockerconfigjson must be a JSON object"),
        (new, new_key, "{}", ".dockerconfigjson must be a JSON object with an object named auths in it"),
        (
            new,
            new_key,
            "{\"auths\": \"s3cret\"}",
            ".dockerconfigjson must be a JSON object with an object named auths in it",
        ),
        ("kubernetes.io/dockercfg", ".dockercfg", "[]", ".dockercfg must be a JSON object"),
    ] {
        assert_eq!(secret(type_, key, value).unwrap_err(), message);
    }
}

#[test]
fn nothing_that_can_be_printed_shows_a_password() {
    let config =
        config(&json!({"r.io": {"username": "us3r", "password": "s3cret"}, "s.io": {"auth": "s3cret*"}}));
    let printed = format!("{config:?} {:?}", config.lookup(&image("r.io/app")));
    assert!(!printed.contains("s3cret") && !printed.contains("us3r"), "{printed}");
    // A key that contains a password is not a registry, so it is not listed.
    assert_eq!(with_keys(&["https://user:s3cret@r.io"]).registries(), Vec::<String>::new());
}

#[test]
fn match_images_are_patterns_without_concessions_to_docker() {
    for (text, name, expected) in [
        ("r.io", "r.io/app", true),
        ("r.io", "s.io/app", false),
        ("r.io/", "r.io/app", true),
        ("*.r.io", "a.r.io/app", true),
        ("*.r.io", "r.io/app", false),
        ("*.r.io", "a.b.r.io/app", false),
        ("*", "localhost/app", true),
        ("*.*", "r.io/app", true),
        ("a*.r.io", "abc.r.io/app", true),
        ("a*.r.io", "bc.r.io/app", false),
        ("r.*", "r.io/app", true),
        ("r.io", "r.io:5000/app", false),
        ("r.io:5000", "r.io:5000/app", true),
        ("r.io:5000", "r.io/app", false),
        ("r.io/team", "r.io/team/app", true),
        ("r.io/team", "r.io/team-b/app", true),
        ("r.io/team/", "r.io/team-b/app", false),
        ("r.io/team/*", "r.io/team/app", false),
        ("r.io/v2/", "r.io/v2/app", true),
        ("r.io/v2/", "r.io/app", false),
        ("docker.io", "nginx", true),
        ("index.docker.io", "nginx", false),
        ("docker.io/library/nginx", "nginx", true),
    ] {
        let pattern = RegistryPattern::parse_match_image(text).unwrap();
        assert_eq!(pattern.matches(&image(name)), expected, "{text} {name}");
    }
    for text in ["", "https://r.io", "/team", "r.io:port", "*.*.", "r io", "r.io/a?b"] {
        assert!(RegistryPattern::parse_match_image(text).is_err(), "{text}");
    }
}

#[test]
fn logins_match_by_the_rules_of_secrets() {
    let login = |key: &str, user: &str, password: &str| {
        (key.to_owned(), Sensitive::new(user), Sensitive::new(password))
    };
    let mut config = RegistryConfig::from_logins([
        login("*.io", "star", "p"),
        login("r.io", "host", "p"),
        login("not a registry", "lost", "p"),
        login("s.io", "", "p"),
        login("t.io", "", ""),
    ]);
    config.extend(RegistryConfig::from_logins([login("r.io", "second", "p"), login("r.io/a", "path", "p")]));
    let users = |name: &str| {
        let found = config.credentials_for(&image(name));
        found.iter().map(|credential| credential.username.expose().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(users("r.io/app"), ["path", "host", "second", "star"]);
    assert_eq!(users("r.io/b"), ["host", "second", "star"]);
    assert_eq!(users("u.io/b"), ["star"]);
    let broken =
        |name: &str| config.lookup(&image(name)).broken.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(broken("s.io/app"), ["the entry for s.io has a password and no username"]);
    assert_eq!(broken("t.io/app"), ["the entry for t.io has neither username nor password"]);
}

proptest! {
    #[test]
    fn parsing_any_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
        let data = BTreeMap::from([(".dockerconfigjson".to_owned(), bytes)]);
        let _ = RegistryConfig::from_secret("kubernetes.io/dockerconfigjson", &data);
    }

    #[test]
    fn any_user_and_password_are_decoded(
        user in "[^:\\x00]{1,12}", password in ".{0,12}", padded: bool,
    ) {
        let auth = BASE64_STANDARD.encode(format!("{user}:{password}"));
        let auth = if padded { auth.as_str() } else { auth.trim_end_matches('=') };
        let credential = parse_one(&json!({"auth": auth})).unwrap();
        prop_assert_eq!(credential.username.expose(), user);
        prop_assert_eq!(credential.password.expose(), password);
    }

    #[test]
    fn a_pattern_matches_the_image_that_it_was_made_from(text in crate::image::tests::reference_text(), star: bool) {
        let image = Reference::parse(&text).unwrap().normalized();
        let host = if star && !image.registry().starts_with('[') {
            let (host, port) = image.registry().split_once(':').map_or((image.registry(), ""), |(h, p)| (h, p));
            let stars: Vec<_> = host.split('.').map(|_| "*").collect();
            stars.join(".") + if port.is_empty() { "" } else { ":" } + port
        } else {
            image.registry().to_owned()
        };
        prop_assert!(RegistryPattern::parse(&host).unwrap().matches(&image));
        // An API version after the host is dropped: a repository below `v1` needs a version in front of its own.
        let repository = image.repository();
        let version = if repository.starts_with("v1/") || repository.starts_with("v2/") { "v2/" } else { "" };
        let whole = format!("{host}/{version}{repository}");
        prop_assert!(RegistryPattern::parse(&whole).unwrap().matches(&image));
        let longer = format!("{whole}x");
        prop_assert!(!RegistryPattern::parse(&longer).unwrap().matches(&image));
    }

    #[test]
    fn a_pattern_displays_as_a_text_that_parses_to_it(text in "[a-z*]{1,3}(\\.[a-z*]{1,3}){0,2}(:[0-9]{1,4})?(/[a-z]{1,3}){0,2}/?") {
        let pattern = RegistryPattern::parse(&text).unwrap();
        prop_assert_eq!(RegistryPattern::parse(&pattern.to_string()).unwrap(), pattern);
    }
}
