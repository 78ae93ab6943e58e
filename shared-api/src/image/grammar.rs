//! The grammar of distribution's references, written by hand: it is small, and a regular-expression engine is not.

/// Longest tag in bytes.
pub(super) const MAX_TAG: usize = 128;

/// Whether a text is a tag.
pub(crate) fn is_tag(text: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.len() <= MAX_TAG
        && text.bytes().next().is_some_and(is_word)
        && text.bytes().all(|b| is_word(b) || b == b'.' || b == b'-')
}

/// Whether a text is a digest: an algorithm that OCI registers, and the right number of digits.
pub(crate) fn is_digest(text: &str) -> bool {
    let digits = |hex: &str, length: usize| hex.len() == length && hex.bytes().all(is_lower_hex);
    match text.split_once(':') {
        Some(("sha256", hex)) => digits(hex, 64),
        Some(("sha384", hex)) => digits(hex, 96),
        Some(("sha512", hex)) => digits(hex, 128),
        _ => false,
    }
}

pub(super) fn is_lower_hex(b: u8) -> bool {
    matches!(b, b'0'..=b'9' | b'a'..=b'f')
}

/// Docker's rule for telling a host from the first component of a repository.
pub(crate) fn looks_like_host(first: &str) -> bool {
    first == "localhost" || first.contains(['.', ':']) || first.chars().any(|c| c.is_ascii_uppercase())
}

/// Whether a text is a DNS name or an IPv6 address in brackets, with or without a port.
pub(super) fn is_host(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let port_is_fine = port.is_none_or(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
    let host_is_fine = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(address) => !address.is_empty() && address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':'),
        None => host.split('.').all(|label| {
            let alnum = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
            alnum(label.bytes().next())
                && alnum(label.bytes().last())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        }),
    };
    port_is_fine && host_is_fine
}

pub(super) fn is_repository(text: &str) -> bool {
    text.split('/').all(is_path_component)
}

/// Whether a text is runs of lowercase letters and digits, joined by one dot, one or two underscores, or any number
/// of dashes.
fn is_path_component(text: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let mut separator = String::new();
    let mut ends_in_alnum = false;
    for c in text.chars() {
        if c.is_ascii() && alnum(c as u8) {
            let joins = separator.is_empty()
                || matches!(separator.as_str(), "." | "_" | "__")
                || separator.bytes().all(|b| b == b'-');
            if !joins || (!separator.is_empty() && !ends_in_alnum) {
                return false;
            }
            separator.clear();
            ends_in_alnum = true;
        } else {
            if !ends_in_alnum {
                return false; // begins with a separator
            }
            separator.push(c);
        }
    }
    ends_in_alnum && separator.is_empty()
}
