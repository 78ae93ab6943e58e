//! Lists of URLs, from flags and files.

use std::fmt;

use prepull_registry::Proxies;
use serde::{Deserialize, Serialize};

use super::url::{BadUrl, CloudEndpoint, ENROLL_SCHEME, TUNNEL_SCHEME};

/// The URLs of a list are replicas of cloudcore, or routes to it. Trying all eight takes at most 40 s (5 s each), less
/// than the longest wait between two rounds.
const MOST_URLS: usize = 8;

/// URLs of one of cloudcore's ports, in the order in which we try them. A flag separates them by commas; a file has a
/// list or a single string.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "OneOrMany", into = "Vec<String>")]
pub struct Urls(Vec<String>);

#[derive(Deserialize)]
#[serde(untagged, expecting = "a URL or a list of URLs is expected here")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl Urls {
    /// Parses the URLs and drops duplicates. The result is never empty.
    pub(crate) fn parse_endpoints(&self, scheme: &'static str) -> Result<Vec<CloudEndpoint>, BadUrl> {
        let mut endpoints = Vec::new();
        for url in &self.0 {
            let endpoint = CloudEndpoint::parse(url, scheme)?;
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
        match endpoints.len() {
            0 => Err(BadUrl::None { scheme }),
            1..=MOST_URLS => Ok(endpoints),
            count => Err(BadUrl::TooMany { scheme, count, most: MOST_URLS }),
        }
    }

    /// The URLs as we dial them: each directly, and then each through its proxy, if it has one. The environment's proxies
    /// are often meant for registries alone, and a proxy may refuse cloudcore's ports, so a direct connection that works
    /// is kept.
    pub(crate) fn endpoints_to_dial(
        &self,
        scheme: &'static str,
        proxies: &Proxies,
    ) -> Result<Vec<CloudEndpoint>, BadUrl> {
        let mut ways = self.parse_endpoints(scheme)?;
        let proxied: Vec<_> = ways.iter().filter_map(|endpoint| endpoint.through_proxy(proxies)).collect();
        ways.extend(proxied);
        Ok(ways)
    }

    /// Whether the list has no URL.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Checks a URL of the tunnel, as flags and files give it.
pub(crate) fn parse_tunnel_url(text: &str) -> Result<String, BadUrl> {
    parse_url(text, TUNNEL_SCHEME)
}

/// Checks a URL for joining and renewing, as flags and files give it.
pub(crate) fn parse_enroll_url(text: &str) -> Result<String, BadUrl> {
    parse_url(text, ENROLL_SCHEME)
}

/// Accepts an empty text, because an environment variable that is set to nothing counts as unset.
fn parse_url(text: &str, scheme: &'static str) -> Result<String, BadUrl> {
    let text = text.trim();
    if !text.is_empty() {
        CloudEndpoint::parse(text, scheme)?;
    }
    Ok(text.to_owned())
}

impl<T: AsRef<str>> FromIterator<T> for Urls {
    fn from_iter<I: IntoIterator<Item = T>>(urls: I) -> Self {
        let mut all = Vec::new();
        for urls in urls {
            let urls = urls.as_ref().split(',').map(str::trim).filter(|url| !url.is_empty());
            all.extend(urls.map(str::to_owned));
        }
        Self(all)
    }
}

impl From<&str> for Urls {
    fn from(url: &str) -> Self {
        Self::from_iter([url])
    }
}

impl From<String> for Urls {
    fn from(url: String) -> Self {
        Self::from_iter([url])
    }
}

impl From<&String> for Urls {
    fn from(url: &String) -> Self {
        Self::from_iter([url])
    }
}

impl From<Vec<String>> for Urls {
    fn from(urls: Vec<String>) -> Self {
        Self::from_iter(urls)
    }
}

impl From<OneOrMany> for Urls {
    fn from(urls: OneOrMany) -> Self {
        match urls {
            OneOrMany::One(url) => url.into(),
            OneOrMany::Many(urls) => urls.into(),
        }
    }
}

impl From<Urls> for Vec<String> {
    fn from(urls: Urls) -> Self {
        urls.0
    }
}

impl fmt::Display for Urls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn proxies_come_after_all_direct_ways() {
        let ways = |no_proxy: &str| {
            let variables = [("HTTPS_PROXY", "http://u:p@proxy:3128"), ("NO_PROXY", no_proxy)];
            let proxies = Proxies::from_variables(|name| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            });
            let urls = Urls::from_iter(["wss://a:1/", "wss://b:2/"]);
            urls.endpoints_to_dial(TUNNEL_SCHEME, &proxies)
                .unwrap()
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
        };
        let (a, b) = ("a:1 through http://proxy:3128", "b:2 through http://proxy:3128");
        assert_eq!(ways(""), ["a:1", "b:2", a, b]);
        assert_eq!(ways("b"), ["a:1", "b:2", a]);
        assert_eq!(ways("*"), ["a:1", "b:2"]);
    }

    #[test]
    fn a_list_is_commas_or_json() {
        let (a, b) = ("wss://a/v1/edge", "wss://b:7/v1/edge");
        let both = Urls(vec![a.to_owned(), b.to_owned()]);
        assert_eq!(Urls::from(vec![a.to_owned(), b.to_owned()]), both);
        assert_eq!(Urls::from(format!(" {a}, {b},")), both);
        assert_eq!(Urls::from(both.to_string()), both);
        let json = |text: String| serde_json::from_str::<Urls>(&text).unwrap();
        assert_eq!(json(format!("[\"{a}\", \"{b}\"]")), both);
        assert_eq!(json(format!("\"{a}\"")), Urls(vec![a.to_owned()]));
        assert_eq!(json(serde_json::to_string(&both).unwrap()), both);
    }

    #[test]
    fn duplicates_and_bad_lists_are_handled() {
        let dialled = |text: &str| {
            let endpoints = Urls::from(text).parse_endpoints("wss")?;
            Ok::<_, BadUrl>(endpoints.iter().map(CloudEndpoint::authority).collect::<Vec<_>>())
        };
        assert_eq!(dialled("wss://b:1,wss://a:1,wss://b:1").unwrap(), ["b:1", "a:1"]);
        let error = |text: &str| dialled(text).unwrap_err().to_string();
        assert_eq!(error(","), "--tunnel-url has no URL of the form wss://HOST[:PORT][/PATH]");
        assert!(error("wss://a,https://b").contains("\"https://b\" is not a URL"));
        let many: Vec<_> = (0..=MOST_URLS).map(|n| format!("wss://a:{}", n + 1)).collect();
        assert_eq!(error(&many.join(",")), "--tunnel-url has 9 URLs: at most 8 are taken");
        let none = Urls::default().parse_endpoints("https").unwrap_err().to_string();
        assert!(none.starts_with("--enroll-url has no URL of the form https://"), "{none}");
    }
}
