//! The target of a redirect: a `Location` is relative to the URL of the request.

use std::net::Ipv6Addr;

use http::Uri;
use http::uri::PathAndQuery;

/// The URL that a location names. `None` if it is none of HTTP, or has a user.
pub(crate) fn join_url(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next().unwrap_or_default();
    let scheme = base.scheme_str()?;
    let authority = base.authority()?;
    let has_scheme = location.split_once(':').is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    });
    let whole = if has_scheme {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location.is_empty() || location.starts_with('?') {
        format!("{scheme}://{authority}{}{location}", base.path())
    } else {
        let (dir, _) = base.path().rsplit_once('/')?;
        format!("{scheme}://{authority}{dir}/{location}")
    };
    let uri: Uri = whole.parse().ok()?;
    let http = matches!(uri.scheme_str(), Some("http" | "https"));
    let plain = has_plain_host(&uri);
    let path = without_dots(uri.path_and_query()?)?;
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).ok().filter(|_| http && plain)
}

/// Whether the URL has a host, with no user before it, and if it is in brackets then an address without zone: a resolver
/// would take the zone for a part of a name.
pub(crate) fn has_plain_host(uri: &Uri) -> bool {
    let Some(authority) = uri.authority() else { return false };
    let bracketed = authority.host().strip_prefix('[').map(|host| host.trim_end_matches(']'));
    !authority.as_str().contains('@') && bracketed.is_none_or(|host| host.parse::<Ipv6Addr>().is_ok())
}

/// The path without its relative parts.
fn without_dots(path: &PathAndQuery) -> Option<PathAndQuery> {
    if !path.path().split('/').any(|part| matches!(part, "." | "..")) {
        return Some(path.clone());
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in path.path().split('/').skip(1) {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let query = path.query().map(|query| format!("?{query}")).unwrap_or_default();
    format!("/{}{query}", parts.join("/")).parse().ok()
}

/// Where a URL leads: its host in lower case, and its port, or the scheme's where it has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    pub(crate) fn of(uri: &Uri) -> Option<Self> {
        let by_scheme = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        Some(Self { host: uri.host()?.to_ascii_lowercase(), port: uri.port_u16().unwrap_or(by_scheme) })
    }
}

/// Whether two URLs have scheme, host and port in common.
pub(crate) fn same_origin(one: &Uri, other: &Uri) -> bool {
    one.scheme_str() == other.scheme_str() && HostPort::of(one) == HostPort::of(other)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_location_is_relative_to_what_was_asked() {
        for (location, expected) in [
            ("https://cdn.example/blob?sig=1", Some("https://cdn.example/blob?sig=1")),
            ("//cdn.example/blob", Some("https://cdn.example/blob")),
            ("/other?x=1", Some("https://r.example:5000/other?x=1")),
            ("blob2", Some("https://r.example:5000/v2/a/blobs/blob2")),
            ("../manifests/x", Some("https://r.example:5000/v2/a/manifests/x")),
            ("?x=2", Some("https://r.example:5000/v2/a/blobs/one?x=2")),
            ("", Some("https://r.example:5000/v2/a/blobs/one")),
            ("/x#fragment", Some("https://r.example:5000/x")),
            ("/../../x", Some("https://r.example:5000/x")),
            ("/x?to=http://b.example/", Some("https://r.example:5000/x?to=http://b.example/")),
            ("file:///etc/passwd", None),
            ("ftp://r.example/x", None),
            ("gopher:x", None),
            ("https://user:pass@r.example/x", None),
            ("http://", None),
            ("https://bad host/", None),
            ("https://[::1]:5000/x", Some("https://[::1]:5000/x")),
            ("https://[fe80::1%25eth0]/", None),
        ] {
            let base = "https://r.example:5000/v2/a/blobs/one?y=1".parse().unwrap();
            let joined = join_url(&base, location).map(|uri| uri.to_string());
            assert_eq!(joined.as_deref(), expected, "{location}");
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        for (one, other, same) in [
            ("https://a.example/x", "https://A.example:443/y", true),
            ("https://a.example/", "http://a.example/", false),
            ("https://a.example/", "https://a.example:444/", false),
            ("https://a.example/", "https://b.a.example/", false),
        ] {
            assert_eq!(same_origin(&one.parse().unwrap(), &other.parse().unwrap()), same, "{one} {other}");
        }
    }
}
