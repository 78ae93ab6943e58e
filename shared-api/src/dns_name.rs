//! Kubernetes' rules for the names of objects and namespaces (RFC 1123).

/// Whether a text can name a namespace: at most 63 lowercase letters, digits and dashes.
pub(crate) fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && has_label_characters(text)
}

/// Most bytes of the name of an object.
pub(crate) const MAX_NAME: usize = 253;

/// Whether a text can name an object: labels joined by dots, at most [`MAX_NAME`]. Kubernetes bounds the whole and
/// not each label.
pub(crate) fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= MAX_NAME && text.split('.').all(has_label_characters)
}

fn has_label_characters(text: &str) -> bool {
    let is_alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.bytes().next().is_some_and(is_alphanumeric)
        && text.bytes().last().is_some_and(is_alphanumeric)
        && text.bytes().all(|b| is_alphanumeric(b) || b == b'-')
}
