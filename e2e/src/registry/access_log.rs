//! What a registry was asked, from its JSON log.
//!
//! It writes one line when a request is done, with the status and the bytes of the body; for a refused one it
//! writes instead why it did not authorise it. Range headers are not logged, but their answer is a 206. A
//! [`crate::proxy::Proxy`] in front sees more.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::Value;

/// One request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Who was let in; empty where nobody was, or nobody had to be.
    pub user: String,
    /// `GET`, `HEAD`, …
    pub method: String,
    /// Without the query.
    pub path: String,
    /// Of the answer. 401 for whatever the registry did not authorise.
    pub status: u16,
    /// Of the answer's body.
    pub bytes: u64,
}

impl Request {
    /// Whether it is for a layer or a configuration.
    pub fn is_blob(&self) -> bool {
        self.path.contains("/blobs/")
    }

    /// Whether it is for a manifest.
    pub fn is_manifest(&self) -> bool {
        self.path.contains("/manifests/")
    }
}

/// Requests, in the order of their answers.
#[derive(Clone, Debug, Default)]
pub struct Requests(pub Vec<Request>);

impl Requests {
    /// Those that are so.
    #[must_use]
    pub fn filter(&self, so: impl Fn(&Request) -> bool) -> Self {
        Self(self.0.iter().filter(|request| so(request)).cloned().collect())
    }

    /// Fetches of layers and configurations that were answered.
    #[must_use]
    pub fn blob_fetches(&self) -> Self {
        self.filter(|request| request.method == "GET" && request.is_blob() && request.status < 300)
    }

    /// Those for a repository: `team/app`.
    #[must_use]
    pub fn of(&self, repository: &str) -> Self {
        let start = format!("/v2/{repository}/");
        self.filter(|request| request.path.starts_with(&start))
    }

    /// Who was let in.
    pub fn users(&self) -> BTreeSet<&str> {
        self.0.iter().map(|request| request.user.as_str()).filter(|user| !user.is_empty()).collect()
    }

    /// Bytes of all the answers' bodies.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|request| request.bytes).sum()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

pub(super) fn parse(log: &str) -> Requests {
    let mut users = HashMap::new();
    let mut answered = HashSet::new();
    let mut requests = Vec::new();
    for entry in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
        let id = text("http.request.id");
        if let Some(user) = entry["auth.user.name"].as_str() {
            users.insert(id.clone(), user.to_owned());
        }
        let status = match entry["http.response.status"].as_u64() {
            Some(status) => u16::try_from(status).unwrap_or(0),
            None if text("msg").starts_with("error authorizing") => 401,
            None => continue,
        };
        // A request that broke off is reported twice.
        if id.is_empty() || !answered.insert(id.clone()) {
            continue;
        }
        requests.push(Request {
            user: users.remove(&id).unwrap_or_default(),
            method: text("http.request.method"),
            path: text("http.request.uri").split('?').next().unwrap_or_default().to_owned(),
            status,
            bytes: entry["http.response.written"].as_u64().unwrap_or(0),
        });
    }
    Requests(requests)
}
