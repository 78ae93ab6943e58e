//! The requests to a registry, from its JSON log.
//!
//! The registry writes one line at the end of a request, with status and bytes of the body; for an unauthorised request
//! it writes the reason instead. Range headers aren't logged, but their responses have status 206. A
//! [`crate::proxy::Proxy`] in front of the registry records more.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::Value;

/// A request to a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryRequest {
    /// Authenticated user; empty if there was none, or if the registry has no users.
    pub user: String,
    /// Method, such as `GET`.
    pub method: String,
    /// Path without the query.
    pub path: String,
    /// Status of the response; 401 for every request that the registry did not authorise.
    pub status: u16,
    /// Bytes of the response's body.
    pub bytes: u64,
}

impl RegistryRequest {
    /// Whether the request is for a layer or a configuration.
    pub fn is_blob(&self) -> bool {
        self.path.contains("/blobs/")
    }

    /// Whether the request is for a manifest.
    pub fn is_manifest(&self) -> bool {
        self.path.contains("/manifests/")
    }
}

/// Requests in the order of their responses.
#[derive(Clone, Debug, Default)]
pub struct RegistryRequests(pub Vec<RegistryRequest>);

impl RegistryRequests {
    /// The requests that satisfy a condition.
    #[must_use]
    pub fn filter(&self, is_met: impl Fn(&RegistryRequest) -> bool) -> Self {
        Self(self.0.iter().filter(|request| is_met(request)).cloned().collect())
    }

    /// Successful fetches of layers and configurations.
    #[must_use]
    pub fn blob_fetches(&self) -> Self {
        self.filter(|request| request.method == "GET" && request.is_blob() && request.status < 300)
    }

    /// The requests for a repository, such as `team/app`.
    #[must_use]
    pub fn for_repository(&self, repository: &str) -> Self {
        let start = format!("/v2/{repository}/");
        self.filter(|request| request.path.starts_with(&start))
    }

    /// Authenticated users.
    pub fn users(&self) -> BTreeSet<&str> {
        self.0.iter().map(|request| request.user.as_str()).filter(|user| !user.is_empty()).collect()
    }

    /// Sum of the bytes of all responses.
    pub fn total_bytes(&self) -> u64 {
        self.0.iter().map(|request| request.bytes).sum()
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Parses the log of a registry.
pub(super) fn parse(log: &str) -> RegistryRequests {
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
        // The registry logs an interrupted request twice.
        if id.is_empty() || !answered.insert(id.clone()) {
            continue;
        }
        requests.push(RegistryRequest {
            user: users.remove(&id).unwrap_or_default(),
            method: text("http.request.method"),
            path: text("http.request.uri").split('?').next().unwrap_or_default().to_owned(),
            status,
            bytes: entry["http.response.written"].as_u64().unwrap_or(0),
        });
    }
    RegistryRequests(requests)
}
