//! Image references and patterns of registries: one a line.

use prepull_api::credentials::RegistryPattern;
use prepull_api::image::{NormalizedReference, Reference};

pub(crate) fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut normalized = Vec::new();
    for line in text.split('\n') {
        if let Ok(reference) = Reference::parse(line) {
            normalized.push(check_reference(line, &reference));
        }
    }
    for pattern in text.split('\n').filter_map(|line| RegistryPattern::parse(line).ok()) {
        check_pattern(&pattern, &normalized);
    }
    for pattern in text.split('\n').filter_map(|line| RegistryPattern::parse_match_image(line).ok()) {
        check_pattern(&pattern, &normalized);
    }
}

fn check_reference(text: &str, reference: &Reference) -> NormalizedReference {
    assert_eq!(reference.to_string(), text, "a reference displays as it was written");
    let (registry, tag, digest) = (reference.registry(), reference.tag(), reference.digest());
    let parts = Reference::from_parts(registry, reference.repository(), tag, digest);
    assert_eq!(parts.as_ref(), Ok(reference), "the parts of {text} make it again");

    let normalized = reference.normalized();
    let again = Reference::parse(&normalized.to_string()).map(|again| again.normalized());
    assert_eq!(again.as_ref(), Ok(&normalized), "the normalised form of {text} is its own normalised form");
    let (name, tag) = normalized.familiar_name_and_tag();
    let separator = if tag.contains(':') { '@' } else { ':' };
    let familiar = Reference::parse(&format!("{name}{separator}{tag}")).map(|short| short.normalized());
    assert_eq!(familiar.map(|short| short.name()), Ok(normalized.name()), "the familiar name of {text}");
    normalized
}

fn check_pattern(pattern: &RegistryPattern, references: &[NormalizedReference]) {
    let text = pattern.to_string();
    assert_eq!(RegistryPattern::parse_match_image(&text).as_ref(), Ok(pattern), "{text} displays as itself");
    for reference in references {
        let matches = matches(&text, reference);
        assert_eq!(pattern.matches(reference), matches, "whether {text} matches {reference}");
    }
}

/// The kubelet's rule, in the simplest words.
fn matches(pattern: &str, reference: &NormalizedReference) -> bool {
    let (host, path) = pattern.split_once('/').unwrap_or((pattern, ""));
    let (labels, port) = labels_and_port(host);
    let (own_labels, own_port) = self::labels_and_port(reference.registry());
    port == own_port
        && labels.len() == own_labels.len()
        && labels.iter().zip(&own_labels).all(|(glob, label)| glob_matches(glob.as_bytes(), label.as_bytes()))
        && reference.repository().starts_with(path.trim_start_matches('/'))
}

fn labels_and_port(registry: &str) -> (Vec<&str>, Option<&str>) {
    let (host, port) = match registry.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (registry, None),
    };
    (host.split('.').collect(), port)
}

/// One row of the table of all prefixes after the other.
fn glob_matches(glob: &[u8], text: &[u8]) -> bool {
    let mut row: Vec<bool> = (0..=text.len()).map(|length| length == 0).collect();
    for &sign in glob {
        let mut next = vec![false; row.len()];
        for length in 0..row.len() {
            next[length] = match sign {
                b'*' => row[length] || (length > 0 && next[length - 1]),
                sign => length > 0 && row[length - 1] && text[length - 1] == sign,
            };
        }
        row = next;
    }
    row.last() == Some(&true)
}
