//! Refused requests, from the audit log of an API server.

use anyhow::{Context, Result};
use serde_json::Value;

/// A request that was refused for lack of rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedRequest {
    /// Name of the user.
    pub user: String,
    /// Verb and path.
    pub request: String,
}

impl RefusedRequest {
    /// Whether a ServiceAccount of this namespace was refused.
    pub fn is_of(&self, namespace: &str) -> bool {
        self.user.starts_with(&format!("system:serviceaccount:{namespace}:"))
    }
}

/// The refusals in an audit log, a line of JSON each.
pub(super) fn parse(log: &str) -> Result<Vec<RefusedRequest>> {
    // The last line may be half written.
    let lines = log.lines().filter(|line| line.ends_with('}'));
    let events: Vec<Value> =
        lines.map(serde_json::from_str).collect::<Result<_, _>>().context("audit log")?;
    let refused = events.into_iter().filter(|event| event["responseStatus"]["code"] == 403);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let refusal = |event: Value| RefusedRequest {
        user: text(&event["user"]["username"]),
        request: format!("{} {}", text(&event["verb"]), text(&event["requestURI"])),
    };
    Ok(refused.map(refusal).collect())
}
