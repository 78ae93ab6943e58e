//! Overriders: an image on the first line, then a rule `component operator value` or a secret `namespace/name` on each.

use std::collections::BTreeSet;

use prepull_api::image::Reference;
use prepull_api::overriders::{ImageRule, SecretRef, SecretRule};

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (image, rules) = text.split_once('\n').unwrap_or((text, ""));
    let mut image = Reference::parse(image).ok();
    let mut secrets = Vec::new();
    for line in rules.split('\n') {
        if let Ok(secret) = SecretRef::parse(line) {
            assert_eq!(secret.to_string(), line);
            secrets.push(secret);
            continue;
        }
        let mut words = line.splitn(3, ' ');
        let (component, operator) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let value = words.next();
        if let (Some(before), Ok(rule)) = (&image, ImageRule::parse(component, operator, value)) {
            image = Some(apply_rule(&rule, component, operator, value, before));
        }
        if let Ok(rule) = SecretRule::parse(component, operator, value)
            && let Ok(after) = rule.apply(secrets.clone())
        {
            let distinct: BTreeSet<_> = after.iter().collect();
            assert_eq!(distinct.len(), after.len(), "{rule} leaves no secret twice: {after:?}");
            assert!(after.iter().all(|secret| SecretRef::parse(&secret.to_string()).as_ref() == Ok(secret)));
            if operator == "remove" {
                assert_eq!(after, []);
            }
            secrets = after;
        }
    }
}

/// The image after the rule; the one before, where the rule refuses it.
fn apply_rule(
    rule: &ImageRule,
    component: &str,
    operator: &str,
    value: Option<&str>,
    before: &Reference,
) -> Reference {
    let Ok(after) = rule.apply(before) else { return before.clone() };
    let text = after.to_string();
    assert_eq!(Reference::parse(&text).as_ref(), Ok(&after), "{rule} makes {text} of {before}");
    let value = value.unwrap_or_default();
    let (old, new) = match component {
        "Registry" => (before.registry(), after.registry()),
        "Repository" => (Some(before.repository()), Some(after.repository())),
        _ => (before.tag(), after.tag()),
    };
    match (component, operator) {
        // Another registry may include a path, which the next rule sees in the repository, and the value may include a
        // tag or a digest, for an image that has none.
        ("Registry" | "Repository", _) => {
            assert!(
                before.tag().is_none_or(|tag| after.tag() == Some(tag)),
                "{rule} makes {text} of {before}"
            );
            let digest = before.digest();
            assert!(digest.is_none() || digest == after.digest(), "{rule} makes {text} of {before}");
            if operator == "replace" {
                assert!(text.contains(value), "{rule} makes {text} of {before}");
            }
        }
        (_, "remove") => assert_eq!((after.tag(), after.digest()), (None, None), "{rule}, {before}"),
        (_, "replace") if !value.contains(':') => {
            assert_eq!((after.tag(), after.digest()), (Some(value), None), "{rule}, {before}");
        }
        (_, "add") if !value.contains(':') => {
            assert_eq!(new, Some(format!("{}{value}", old.unwrap_or_default()).as_str()), "{rule}, {before}");
        }
        _ => assert!(after.digest().is_some_and(|digest| value.ends_with(digest)), "{rule}, {before}"),
    }
    after
}
