//! Sites with nodes that share layers: the answer of cloudcore-prepull's `GET /sites`, beside the list of
//! edges and with the same right. `?site=NAME` asks for one site with its downloads.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use super::BadQuery;
use crate::task::NodeName;

/// The path of the sites.
pub const SITES_PATH: &str = "/sites";

/// Which sites are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SiteQuery {
    /// Only this site, and its downloads with it. The list of all sites has none: it would have no bound.
    pub site: Option<String>,
}

impl SiteQuery {
    /// Reads the part of a URL behind `?`.
    ///
    /// # Errors
    /// Names the parameter that is not known.
    pub fn parse(query: &str) -> Result<Self, BadQuery> {
        let mut parsed = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (parameter, value) = pair.split_once('=').unwrap_or((pair, ""));
            let bad = |problem: &str| BadQuery { parameter: parameter.into(), problem: problem.into() };
            if parameter != "site" {
                return Err(bad("there is site"));
            }
            let value = percent_decode_str(value).decode_utf8().map_err(|_| bad("not UTF-8"))?;
            parsed.site = Some(value.into_owned());
        }
        Ok(parsed)
    }

    /// The path with this query, as [`Self::parse`] reads it.
    pub fn to_path(&self) -> String {
        let site =
            self.site.as_ref().map(|site| format!("?site={}", utf8_percent_encode(site, NON_ALPHANUMERIC)));
        format!("{SITES_PATH}{}", site.unwrap_or_default())
    }
}

/// Sites, the most active first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SiteList {
    /// The sites that share layers, or that still remember holders of some; at most a thousand.
    pub items: Vec<SiteActivity>,
    /// Since when the leader counts.
    pub known_since: Time,
    /// The label of a Node that holds its site.
    pub site_label: String,
}

/// What one site does now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SiteActivity {
    /// The value of the site label.
    pub name: String,
    /// Nodes that want or have a layer of a running task.
    pub nodes: usize,
    /// Layers that some node wants.
    pub layers: usize,
    /// Nodes that wait for a layer.
    pub waiting: usize,
    /// Downloads over the uplink, at most 64.
    pub carriers: usize,
    /// Bytes a second of these downloads, as the nodes say.
    pub uplink_bytes_per_second: u64,
    /// Bytes that nodes got from neighbours, as they say.
    pub bytes_shared: u64,
    /// Bytes that nodes downloaded over the uplink, as they say.
    pub bytes_carried: u64,
    /// Downloads that were given to another node, because they made too little progress.
    pub leases_lost: u64,
    /// Downloads out of turn.
    pub claims_refused: u64,
    /// Nodes delisted because neighbours complained about their bytes.
    pub holders_delisted: u64,
    /// The downloads, the fastest first; only where the query names the site.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub downloads: Vec<SiteDownload>,
}

/// A node that downloads a layer over the uplink of its site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SiteDownload {
    /// The node.
    pub node: NodeName,
    /// `sha256:…`
    pub digest: String,
    /// Bytes of the whole layer.
    pub size: u64,
    /// Bytes that the node claims to have.
    pub done: u64,
    /// When it began.
    pub since: Time,
    /// Bytes a second over the last minute, as reported by the node.
    pub bytes_per_second: u64,
    /// Why it downloads for itself alone; absent where it downloads for its site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alone: Option<String>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_query_of_sites_is_read_as_written() {
        let query = SiteQuery { site: Some("größe &=?+".to_owned()) };
        assert_eq!(SiteQuery::parse(query.to_path().split_once('?').unwrap().1), Ok(query));
        assert_eq!(SiteQuery::default().to_path(), "/sites");
        assert!(SiteQuery::parse("limit=1").unwrap_err().to_string().starts_with("limit: "));
    }

    #[test]
    fn a_newer_or_older_answer_is_read() {
        let site: SiteActivity = serde_json::from_str(r#"{"name":"north","carriers":2,"new":1}"#).unwrap();
        assert_eq!(site, SiteActivity { name: "north".to_owned(), carriers: 2, ..SiteActivity::default() });
    }
}
