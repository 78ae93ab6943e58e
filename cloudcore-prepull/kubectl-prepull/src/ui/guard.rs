//! Admits requests of the browser that was given the address, and of no page from elsewhere.
//!
//! The server listens on the loopback address alone. Any page that the browser shows could still send requests there, and a
//! name of its own that points to 127.0.0.1 would make them look like requests of the same origin. So the address has a
//! random token, the host must be the one that was handed out, and requests of other origins are refused.
//! [`peer`](super::peer) checks that the browser is of the same user.

use std::net::SocketAddr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, Method, StatusCode};
use ring::rand::SecureRandom;

/// Header that a change needs to have. A form of another page cannot set it.
const OURS: &str = "x-prepull";

/// What every request is held against.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    token: String,
    hosts: [String; 2],
}

impl Guard {
    /// A guard for a server at this address, with a fresh token of 128 bits, too many to guess.
    ///
    /// # Errors
    ///
    /// If the system has no randomness.
    pub(crate) fn new(address: SocketAddr) -> anyhow::Result<Self> {
        let mut bytes = [0; 16];
        let filled = ring::rand::SystemRandom::new().fill(&mut bytes);
        filled.map_err(|_| anyhow::anyhow!("the system gives no random bytes"))?;
        let token = u128::from_be_bytes(bytes);
        Ok(Self::with_token(format!("{token:032x}"), address.port()))
    }

    fn with_token(token: String, port: u16) -> Self {
        Self { token, hosts: [format!("127.0.0.1:{port}"), format!("localhost:{port}")] }
    }

    /// Address of the page.
    pub(crate) fn url(&self) -> String {
        format!("http://{}/{}/", self.hosts[0], self.token)
    }

    /// Whether a request for this path, which begins with a token, may be answered.
    ///
    /// # Errors
    ///
    /// The status and the text to answer instead.
    pub(crate) fn check_request(
        &self,
        method: &Method,
        headers: &HeaderMap,
        token: &str,
    ) -> Result<(), (StatusCode, &'static str)> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let is_ours = |host: &str| self.hosts.iter().any(|ours| ours == host);
        if !text(HOST.as_str()).is_some_and(is_ours) {
            return Err((StatusCode::MISDIRECTED_REQUEST, "this server is reached as 127.0.0.1 only"));
        }
        if !is_same(token, &self.token) {
            return Err((StatusCode::NOT_FOUND, "open the address that kubectl prepull ui has printed"));
        }
        if let Some(origin) = text(ORIGIN.as_str())
            && !origin.strip_prefix("http://").is_some_and(is_ours)
        {
            return Err((StatusCode::FORBIDDEN, "a page of another origin may not ask"));
        }
        if text("sec-fetch-site").is_some_and(|site| !matches!(site, "same-origin" | "none")) {
            return Err((StatusCode::FORBIDDEN, "a page of another site may not ask"));
        }
        if method != Method::GET && text(OURS).is_none() {
            return Err((StatusCode::FORBIDDEN, "only the page itself may change something"));
        }
        Ok(())
    }
}

/// Compares in a time that does not tell where the two differ.
fn is_same(given: &str, expected: &str) -> bool {
    let differing = given.bytes().zip(expected.bytes()).fold(0, |differing, (a, b)| differing | (a ^ b));
    given.len() == expected.len() && differing == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn asks(method: &Method, token: &str, headers: &[(&'static str, &'static str)]) -> u16 {
        let headers: HeaderMap =
            headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let guard = Guard::with_token("abcd".to_owned(), 4000);
        guard.check_request(method, &headers, token).map_or_else(|(status, _)| status.as_u16(), |()| 200)
    }

    #[test]
    fn only_the_page_itself_is_answered() {
        let host = ("host", "127.0.0.1:4000");
        let of = |name, value| [host, (name, value)];
        assert_eq!(asks(&Method::GET, "abcd", &[host]), 200);
        assert_eq!(asks(&Method::GET, "abcd", &[("host", "localhost:4000")]), 200);
        assert_eq!(asks(&Method::GET, "abcd", &of("origin", "http://127.0.0.1:4000")), 200);
        assert_eq!(asks(&Method::GET, "abcd", &of("sec-fetch-site", "same-origin")), 200);
        assert_eq!(asks(&Method::GET, "abcd", &of("sec-fetch-site", "none")), 200, "typed into the browser");
        assert_eq!(asks(&Method::POST, "abcd", &of("x-prepull", "1")), 200);

        for token in ["", "abc", "abcde", "abce"] {
            assert_eq!(asks(&Method::GET, token, &[host]), 404, "{token}");
        }
        assert_eq!(asks(&Method::GET, "abcd", &[]), 421);
        assert_eq!(asks(&Method::GET, "abcd", &[("host", "evil.example:4000")]), 421, "a rebound name");
        assert_eq!(asks(&Method::GET, "abcd", &[("host", "127.0.0.1:4001")]), 421);
        for origin in ["https://evil.example", "null", "http://127.0.0.1:4001", "https://127.0.0.1:4000"] {
            assert_eq!(asks(&Method::GET, "abcd", &of("origin", origin)), 403, "{origin}");
        }
        assert_eq!(asks(&Method::GET, "abcd", &of("sec-fetch-site", "cross-site")), 403);
        assert_eq!(asks(&Method::GET, "abcd", &of("sec-fetch-site", "same-site")), 403);
        assert_eq!(asks(&Method::POST, "abcd", &[host]), 403, "a form of another page");
    }

    #[test]
    fn every_address_has_its_own_token() {
        let of = || Guard::new(([127, 0, 0, 1], 4000).into()).unwrap().url();
        let (one, other) = (of(), of());
        assert!(
            one != other && one.starts_with("http://127.0.0.1:4000/") && one.len() == 22 + 32 + 1,
            "{one}"
        );
    }
}
