//! `WWW-Authenticate`: the scheme by which a registry wants clients to authenticate.

use http::HeaderMap;
use http::header::WWW_AUTHENTICATE;

/// A way to authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    Basic,
    Bearer,
}

/// What a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Challenge {
    pub(crate) scheme: Scheme,
    pub(crate) realm: String,
    pub(crate) service: String,
    pub(crate) scope: String,
}

/// The challenge to answer: a bearer token rather than a password. One to a header, as containerd reads them.
pub(crate) fn parse(headers: &HeaderMap) -> Option<Challenge> {
    let values = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
    let all: Vec<Challenge> = values.filter_map(parse_one).collect();
    let bearer = all.iter().find(|challenge| challenge.scheme == Scheme::Bearer);
    bearer.or_else(|| all.first()).cloned()
}

fn parse_one(text: &str) -> Option<Challenge> {
    let (scheme, mut rest) = split_token(text);
    let scheme = match scheme.to_ascii_lowercase().as_str() {
        "basic" => Scheme::Basic,
        "bearer" => Scheme::Bearer,
        _ => return None,
    };
    let mut challenge =
        Challenge { scheme, realm: String::new(), service: String::new(), scope: String::new() };
    loop {
        let (name, after) = split_token(rest.trim_start());
        let Some(after) = after.strip_prefix('=').filter(|_| !name.is_empty()) else { break };
        let Some((value, after)) = token_or_quoted(after) else { break };
        match name.to_ascii_lowercase().as_str() {
            "realm" => challenge.realm = value,
            "service" => challenge.service = value,
            "scope" => challenge.scope = value,
            _ => {}
        }
        match after.trim_start().strip_prefix(',') {
            Some(more) => rest = more,
            None => break,
        }
    }
    Some(challenge)
}

fn split_token(text: &str) -> (&str, &str) {
    let is_token = |b: char| b.is_ascii_graphic() && !"()<>@,;:\\\"/[]?={}".contains(b);
    text.split_at(text.find(|c| !is_token(c)).unwrap_or(text.len()))
}

fn token_or_quoted(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = split_token(text);
        return Some((value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut escaped = false;
    for (at, c) in quoted.char_indices() {
        match c {
            _ if escaped => {
                value.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => return Some((value, &quoted[at + 1..])),
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn of(values: &[&'static str]) -> Option<(Scheme, String, String, String)> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(WWW_AUTHENTICATE, value.parse().unwrap());
        }
        parse(&headers).map(|c| (c.scheme, c.realm, c.service, c.scope))
    }

    #[test]
    fn a_challenge_is_read_and_a_token_is_preferred() {
        let bearer = |realm: &str, service: &str, scope: &str| {
            Some((Scheme::Bearer, realm.to_owned(), service.to_owned(), scope.to_owned()))
        };
        for (values, expected) in [
            (
                &[r#"Bearer realm="https://a.example/token",service="reg, istry",scope="repository:a:pull""#]
                    [..],
                bearer("https://a.example/token", "reg, istry", "repository:a:pull"),
            ),
            (&[r#"bEARER Realm="x" , service=y"#], bearer("x", "y", "")),
            (&[r#"Bearer realm="a\"b\\c""#], bearer("a\"b\\c", "", "")),
            (&[r#"Basic realm="Registry""#, r#"Bearer realm="t""#], bearer("t", "", "")),
            (&["Negotiate", r#"Bearer realm="t""#], bearer("t", "", "")),
            (&[r#"Bearer realm="never closed"#], bearer("", "", "")),
            (&["Basic"], Some((Scheme::Basic, String::new(), String::new(), String::new()))),
            (&["Digest realm=x"], None),
            (&[], None),
            (&[",,,=,"], None),
        ] {
            assert_eq!(of(values), expected, "{values:?}");
        }
    }
}
