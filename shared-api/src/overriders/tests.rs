#![allow(clippy::unwrap_used, clippy::expect_used)]

use proptest::prelude::*;

use super::*;

const A: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

type Rule<'a> = (&'a str, &'a str, &'a str);

fn apply_in_order(image: &Reference, rules: &[ImageRule]) -> Result<Reference, OverrideError> {
    rules.iter().try_fold(image.clone(), |image, rule| rule.apply(&image))
}

fn image(image: &str, rules: &[Rule<'_>]) -> Result<String, String> {
    let rules: Vec<_> = rules.iter().map(|(c, o, v)| ImageRule::parse(c, o, Some(v)).unwrap()).collect();
    apply_in_order(&Reference::parse(image).unwrap(), &rules)
        .map(|reference| reference.to_string())
        .map_err(|error| error.to_string())
}

#[test]
fn rules_edit_the_text_of_the_reference_as_karmada_does() {
    let cases: [(&str, &[Rule<'_>], &str); 21] = [
        ("nginx:1.25", &[], "nginx:1.25"),
        ("nginx:1.25", &[("Registry", "replace", "r.io")], "r.io/nginx:1.25"),
        ("q.io/nginx:1.25", &[("Registry", "replace", "r.io")], "r.io/nginx:1.25"),
        ("q.io/nginx", &[("Registry", "add", ":5000")], "q.io:5000/nginx"),
        ("nginx", &[("Registry", "add", "r.io")], "r.io/nginx"),
        ("q.io/nginx", &[("Registry", "remove", "")], "nginx"),
        ("nginx", &[("Registry", "remove", "")], "nginx"),
        // The result is parsed again.
        (
            "nginx",
            &[("Registry", "replace", "r.io/proxy"), ("Registry", "replace", "s.io")],
            "s.io/proxy/nginx",
        ),
        ("q.io/a.b/c", &[("Registry", "remove", ""), ("Registry", "replace", "r.io")], "r.io/c"),
        ("q.io/team/app:1", &[("Repository", "replace", "other")], "q.io/other:1"),
        ("q.io/team/app:1", &[("Repository", "add", "/debug")], "q.io/team/app/debug:1"),
        ("app:1", &[("Repository", "add", "-debug")], "app-debug:1"),
        ("app:1", &[("Tag", "replace", "2")], "app:2"),
        ("app", &[("Tag", "replace", "2")], "app:2"),
        ("app:1", &[("Tag", "add", "-alpine")], "app:1-alpine"),
        ("app", &[("Tag", "add", "2")], "app:2"),
        ("app:1", &[("Tag", "remove", "")], "app"),
        ("app", &[("Tag", "remove", "")], "app"),
        (
            "nginx:1",
            &[("Registry", "replace", "r.io"), ("Tag", "add", "-x"), ("Repository", "add", "/y")],
            "r.io/nginx/y:1-x",
        ),
        ("docker.io/library/nginx", &[("Registry", "replace", "r.io")], "r.io/library/nginx"),
        ("localhost:5000/app", &[("Registry", "replace", "r.io:443")], "r.io:443/app"),
    ];
    for (before, rules, after) in cases {
        assert_eq!(image(before, rules), Ok(after.to_owned()), "{before} {rules:?}");
    }
}

#[test]
fn tag_rules_keep_or_drop_the_digest_as_documented() {
    let tag_and_digest = format!("app:1@{A}");
    for (before, rule, after) in [
        (tag_and_digest.as_str(), ("Registry", "replace", "r.io"), format!("r.io/app:1@{A}")),
        (&tag_and_digest, ("Repository", "add", "-x"), format!("app-x:1@{A}")),
        (&tag_and_digest, ("Tag", "replace", "2"), "app:2".to_owned()),
        (&tag_and_digest, ("Tag", "remove", ""), "app".to_owned()),
        (&tag_and_digest, ("Tag", "replace", B), format!("app@{B}")),
        ("app:1", ("Tag", "replace", B), format!("app@{B}")),
        ("app:1", ("Tag", "replace", &format!("@{B}")), format!("app@{B}")),
        ("app:1", ("Tag", "add", &format!("@{B}")), format!("app:1@{B}")),
        ("app", ("Tag", "add", B), format!("app@{B}")),
        (&format!("app@{A}"), ("Tag", "replace", "2"), "app:2".to_owned()),
        (&format!("app@{A}"), ("Tag", "remove", ""), "app".to_owned()),
    ] {
        assert_eq!(image(before, &[rule]), Ok(after), "{before} {rule:?}");
    }
    assert_eq!(
        image(&format!("app@{A}"), &[("Tag", "add", "-x")]).unwrap_err(),
        format!(
            "Tag add \"-x\" cannot be applied to app@{A}: the digest is that of another image; use replace"
        )
    );
    // The digest pins app:1: with it app:1-x would be the wrong image, and without it nothing would be pinned.
    assert_eq!(
        image(&tag_and_digest, &[("Tag", "add", "-x")]).unwrap_err(),
        format!(
            "Tag add \"-x\" cannot be applied to app:1@{A}: the digest is that of another image; use replace"
        )
    );
    assert_eq!(
        image(&format!("app@{A}"), &[("Tag", "add", B)]).unwrap_err(),
        format!("Tag add {B:?} cannot be applied to app@{A}: it has a digest already; use replace")
    );
}

#[test]
fn an_error_quotes_a_result_that_is_not_a_reference() {
    for (before, rule, message) in [
        ("app:1", ("Repository", "replace", "/app"), "Repository replace \"/app\" makes \"/app:1\" of app:1"),
        ("app:1", ("Repository", "replace", "App"), "must be lowercase"),
        ("app:1", ("Registry", "replace", "https://r.io"), "is not a registry host"),
        ("app", ("Registry", "add", ":5000"), "Registry add \":5000\" makes \":5000/app\" of app"),
        ("app", ("Registry", "add", "mirror"), "registry \"mirror\" is not recognised as a host"),
        ("app", ("Registry", "add", "mirror/r.io"), "registry \"mirror\" is not recognised as a host"),
        ("app", ("Tag", "add", "-alpine"), "Tag add \"-alpine\" makes \"app:-alpine\" of app"),
        ("app:1", ("Repository", "replace", "app:2"), "makes \"app:2:1\" of app:1"),
    ] {
        let error = image(before, &[rule]).unwrap_err();
        assert!(error.contains(message), "{before} {rule:?}: {error}");
    }
}

#[test]
fn an_unparsable_rule_names_the_remedy() {
    let rule = |c, o, v| ImageRule::parse(c, o, v).unwrap_err().to_string();
    assert_eq!(
        rule("registry", "add", Some("x")),
        "unknown component \"registry\": use Registry, Repository or Tag"
    );
    assert_eq!(rule("Tag", "set", Some("x")), "unknown operator \"set\": use add, replace or remove");
    assert_eq!(rule("Tag", "add", None), "the operator add needs a value");
    assert_eq!(rule("Tag", "replace", Some("")), "the operator replace needs a value");
    assert_eq!(
        rule("Repository", "remove", None),
        "an image has one repository, which cannot be removed: use replace"
    );
    // It would be a path at docker.io.
    for value in ["mirror", "mirror/cache", "/r.io"] {
        let error = rule("Registry", "replace", Some(value));
        assert!(
            error.ends_with("it needs a dot, a port, or to be localhost; a path belongs in the repository"),
            "{error}"
        );
    }
    for value in ["r.io", "r.io/proxy", "mirror:5000", "localhost", "localhost/proxy", "MIRROR"] {
        ImageRule::parse("Registry", "replace", Some(value)).unwrap();
    }
    // The longest tag may be added to an image without one.
    let longest = "t".repeat(128);
    assert_eq!(image("app", &[("Tag", "add", &longest)]), Ok(format!("app:{longest}")));
    let too_long = "t".repeat(129);
    assert!(rule("Tag", "add", Some(&too_long)).contains("is neither a tag nor a digest"));
    assert!(image("app:1", &[("Tag", "add", &longest)]).unwrap_err().contains("is malformed"));
    for value in ["a b", "sha256:abc", "@1", "1@sha256:abc", "é", "a/b"] {
        for operator in ["add", "replace"] {
            assert_eq!(
                rule("Tag", operator, Some(value)),
                format!("{value:?} is neither a tag nor a digest: write 1.25, sha256:… or @sha256:…")
            );
        }
    }
    let rule = |c, o, v| SecretRule::parse(c, o, v).unwrap_err().to_string();
    assert_eq!(rule("Name", "add", Some("x")), "unknown component \"Name\": use SecretName or Namespace");
    assert!(rule("SecretName", "replace", Some("a/b")).starts_with("\"a/b\" is not the name of a secret"));
    assert!(rule("Namespace", "replace", Some("a.b")).starts_with("\"a.b\" is not a namespace"));
    assert!(rule("SecretName", "add", Some("A/b")).starts_with("\"A\" is not a namespace"));
    assert!(rule("SecretName", "add", Some("a/b/c")).starts_with("\"b/c\" is not the name of a secret"));
}

fn secrets(before: &[&str], rules: &[Rule<'_>]) -> Result<Vec<String>, String> {
    let before = before.iter().map(|text| SecretRef::parse(text).unwrap()).collect();
    let rules: Vec<_> = rules.iter().map(|(c, o, v)| SecretRule::parse(c, o, Some(v)).unwrap()).collect();
    rules
        .iter()
        .try_fold(before, |secrets, rule| rule.apply(secrets))
        .map(|secrets| secrets.iter().map(SecretRef::to_string).collect())
        .map_err(|error| error.to_string())
}

#[test]
fn secret_rules_replace_remove_and_append() {
    let cases: [(&[&str], &[Rule<'_>], &[&str]); 13] = [
        (&["default/secret"], &[("SecretName", "replace", "hangzhou-secret")], &["default/hangzhou-secret"]),
        (&["default/secret"], &[("Namespace", "replace", "edge")], &["edge/secret"]),
        (&[], &[("SecretName", "replace", "x")], &[]),
        (&["a/b"], &[("SecretName", "remove", "")], &[]),
        (&["a/b", "c/d"], &[("Namespace", "remove", "")], &[]),
        (&["a/b"], &[("SecretName", "add", "c")], &["a/b", "a/c"]),
        (&["a/b"], &[("SecretName", "add", "c/d")], &["a/b", "c/d"]),
        (&["a/b"], &[("Namespace", "add", "c")], &["a/b", "c/b"]),
        (&["a/b"], &[("Namespace", "add", "c/d")], &["a/b", "c/d"]),
        (&[], &[("SecretName", "add", "c/d")], &["c/d"]),
        (&["a/b"], &[("SecretName", "add", "b")], &["a/b"]),
        (&["a/b", "a/c"], &[("SecretName", "replace", "d")], &["a/d"]),
        (
            &["a/b"],
            &[("SecretName", "remove", ""), ("SecretName", "add", "c/d"), ("SecretName", "add", "e")],
            &["c/d", "c/e"],
        ),
    ];
    for (before, rules, after) in cases {
        assert_eq!(secrets(before, rules), Ok(after.iter().map(|s| (*s).to_owned()).collect()), "{rules:?}");
    }
}

#[test]
fn half_a_secret_name_is_refused() {
    assert_eq!(
        secrets(&[], &[("SecretName", "add", "x")]).unwrap_err(),
        "SecretName add \"x\" gives no namespace, and the image has no secret to take it from: write {namespace}/{name}"
    );
    assert_eq!(
        secrets(&["a/b"], &[("Namespace", "remove", ""), ("Namespace", "add", "x")]).unwrap_err(),
        "Namespace add \"x\" gives no name, and the image has no secret to take it from: write {namespace}/{name}"
    );
}

#[test]
fn a_secret_reference_is_a_namespace_and_a_name() {
    assert_eq!(SecretRef::parse("default/harbor.pull").unwrap().to_string(), "default/harbor.pull");
    for (text, message) in [
        ("secret", "\"secret\" is not a secret: write {namespace}/{name}"),
        ("", "\"\" is not a secret"),
        ("/x", "\"\" is not a namespace"),
        ("x/", "\"\" is not the name of a secret"),
        ("a/b/c", "\"b/c\" is not the name of a secret"),
        ("a.b/c", "\"a.b\" is not a namespace"),
        ("../x", "\"..\" is not a namespace"),
        ("a/..", "\"..\" is not the name of a secret"),
    ] {
        let error = SecretRef::parse(text).unwrap_err().to_string();
        assert!(error.contains(message), "{text:?}: {error}");
    }
}

proptest! {
    #[test]
    fn rules_produce_a_reference_or_an_error(
        text in crate::image::tests::reference_text(),
        rules in proptest::collection::vec(
            ("Registry|Repository|Tag", "add|replace|remove", "[a-z0-9A-Z./:@_-]{1,8}"),
            0..4,
        ),
    ) {
        let rules: Vec<_> =
            rules.iter().filter_map(|(c, o, v)| ImageRule::parse(c, o, Some(v)).ok()).collect();
        if let Ok(result) = apply_in_order(&Reference::parse(&text).unwrap(), &rules) {
            prop_assert_eq!(Reference::parse(&result.to_string()).unwrap(), result);
        }
    }

    #[test]
    fn replacing_the_registry_changes_nothing_else(text in crate::image::tests::reference_text()) {
        let before = Reference::parse(&text).unwrap();
        let rule = ImageRule::parse("Registry", "replace", Some("r.example:5000")).unwrap();
        let after = rule.apply(&before).unwrap();
        prop_assert_eq!(after.registry(), Some("r.example:5000"));
        prop_assert_eq!(
            (after.repository(), after.tag(), after.digest()),
            (before.repository(), before.tag(), before.digest())
        );
    }
}
