//! The query and the answer of cloudcore-prepull's `GET /edges`.
//!
//! The leader answers it, on a port of its own. People reach it through the API server, with the right to `get` the
//! subresource `services/proxy` of the Service [`SERVICE`]:
//!
//! ```text
//! GET /api/v1/namespaces/prepull-system/services/cloudcore-prepull-edges/proxy/edges?limit=500&connected=false
//! ```

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use crate::selector::Selector;
use crate::task::{JobUid, NodeName};
use crate::wire::Filesystem;

pub mod sites;

/// The Service through which the API server reaches the leader. Its only port has no name, so that none is part of the
/// name by which RBAC grants the right.
pub const SERVICE: &str = "cloudcore-prepull-edges";
/// The path of the list.
pub const PATH: &str = "/edges";
/// The label of a Node that holds its site, unless the query names another one.
pub const SITE_LABEL: &str = "topology.kubernetes.io/zone";
/// Edges of one answer, unless the query has a limit.
pub const DEFAULT_LIMIT: usize = 500;
/// The most edges of one answer: about a megabyte, and some milliseconds of the controller.
pub const MAX_LIMIT: usize = 2000;
/// The most names of one query: they have to fit into the head of a request.
pub const MAX_NAMES: usize = 100;

/// Which edges are asked for. What is not set does not restrict them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdgeQuery {
    /// The most edges of the answer; [`DEFAULT_LIMIT`] if not set, at most [`MAX_LIMIT`].
    pub limit: Option<usize>,
    /// Only edges after this one, by name: [`EdgeList::next`] of the answer before.
    pub after: Option<NodeName>,
    /// Only edges with these labels on their Node.
    pub selector: Selector,
    /// Only these edges, at most [`MAX_NAMES`].
    pub names: Vec<NodeName>,
    /// Only edges that are connected, or that are not.
    pub connected: Option<bool>,
    /// The label that holds the site. If not set, the leader uses its own --site-label.
    pub site_label: Option<String>,
}

/// Why a query cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{parameter}: {problem}")]
pub struct BadQuery {
    parameter: String,
    problem: String,
}

impl EdgeQuery {
    /// Reads the part of a URL behind `?`.
    ///
    /// # Errors
    /// Names the parameter that is not known or has a wrong value: a filter that is ignored would show too much.
    pub fn parse(query: &str) -> Result<Self, BadQuery> {
        let mut parsed = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (parameter, value) = pair.split_once('=').unwrap_or((pair, ""));
            let bad =
                |problem: &str| BadQuery { parameter: parameter.to_owned(), problem: problem.to_owned() };
            let value = value.replace('+', " ");
            let value = percent_decode_str(&value).decode_utf8().map_err(|_| bad("not UTF-8"))?;
            match parameter {
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
                    let limit =
                        limit.ok_or_else(|| bad(&format!("a number from 1 to {MAX_LIMIT} is expected")))?;
                    parsed.limit = Some(limit);
                }
                "after" => parsed.after = Some(NodeName(value.into_owned())),
                "labelSelector" => {
                    parsed.selector = Selector::parse(&value).map_err(|error| bad(&error.to_string()))?;
                }
                "names" => {
                    parsed.names =
                        value.split(',').filter(|name| !name.is_empty()).map(NodeName::from).collect();
                    if parsed.names.len() > MAX_NAMES {
                        return Err(bad(&format!("at most {MAX_NAMES} names are accepted")));
                    }
                }
                "connected" => {
                    let connected = value.parse().map_err(|_| bad("true or false is expected"))?;
                    parsed.connected = Some(connected);
                }
                "siteLabel" => parsed.site_label = Some(value.into_owned()),
                _ => {
                    return Err(bad("there are limit, after, labelSelector, names, connected and siteLabel"));
                }
            }
        }
        Ok(parsed)
    }

    /// The path with this query, as [`Self::parse`] reads it.
    pub fn to_path(&self) -> String {
        /// All but letters, digits and four characters without a meaning in a query.
        const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'/');
        let names: Vec<_> = self.names.iter().map(NodeName::as_str).collect();
        let parameters = [
            ("limit", self.limit.map(|limit| limit.to_string())),
            ("after", self.after.as_ref().map(ToString::to_string)),
            ("labelSelector", Some(self.selector.to_string()).filter(|text| !text.is_empty())),
            ("names", (!names.is_empty()).then(|| names.join(","))),
            ("connected", self.connected.map(|connected| connected.to_string())),
            ("siteLabel", self.site_label.clone()),
        ];
        let mut path = PATH.to_owned();
        for (parameter, value) in parameters {
            let Some(value) = value else { continue };
            path.push(if path.contains('?') { '&' } else { '?' });
            path.push_str(parameter);
            path.push('=');
            path.extend(utf8_percent_encode(&value, ESCAPED));
        }
        path
    }

    /// Whether the query asks for an edge with this name and this state of its connection. Doesn't look at labels.
    pub fn wants(&self, name: &NodeName, connected: bool) -> bool {
        self.connected.is_none_or(|wanted| wanted == connected)
            && (self.names.is_empty() || self.names.contains(name))
    }

    /// The most edges of the answer.
    pub fn limit(&self) -> usize {
        self.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT)
    }
}

/// Edges in the order of their names, and how many there are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeList {
    /// One page of the edges that were asked for.
    pub items: Vec<ListedEdge>,
    /// The edges that were asked for, over all pages.
    pub total: usize,
    /// Those of them that are connected.
    pub connected: usize,
    /// The `after` of the next page; absent on the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<NodeName>,
    /// Since when connections are known: the beginning of the leader's term. What was connected only before it is shown as
    /// not connected, and with no [`ListedEdge::last_seen`].
    pub known_since: Time,
    /// The label that holds [`ListedEdge::site`]. Absent from older leaders, which use [`SITE_LABEL`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site_label: Option<String>,
    /// The version of the leader, which agents should have. Absent from older leaders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// An edge node of the cluster, with the known facts about its agent. Facts from the agent itself are absent until it has
/// connected, and if it's too old to report them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedEdge {
    /// Name of the Node.
    pub name: NodeName,
    /// Whether it has a session.
    pub connected: bool,
    /// When the session began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected_since: Option<Time>,
    /// When the last session of this term ended. Absent while it is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<Time>,
    /// Whether the Node is Ready.
    pub ready: bool,
    /// The value of the label for sites.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<String>,
    /// Version of edgecore-prepull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Operating system, as in Node objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// Architecture, as in Node objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arch: Option<String>,
    /// Name and version of the container runtime. Absent while it does not answer the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// The file system of the images, as last reported by the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Filesystem>,
    /// End of the newest certificate that was issued to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_until: Option<Time>,
    /// Whether it is kept out by `node revoke`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub revoked: bool,
    /// Tasks that it has accepted and not finished; those of a node that is not connected as it last said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<u32>,
    /// How many tasks it works on at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tasks: Option<u32>,
    /// What it downloads now. Absent from leaders that don't follow that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub downloads: Vec<EdgeDownload>,
}

/// What a task of an edge downloads now, as its agent reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EdgeDownload {
    /// UID of the job.
    pub job: JobUid,
    /// Bytes a second over the last minute.
    pub bytes_per_second: u64,
    /// Whether its site shares the layers, so that a part of the bytes may be those of neighbours. What then crosses the
    /// uplink is in the list of sites.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// When the agent last reported progress.
    pub heard: Time,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_query_is_read_as_it_is_written() {
        let query = EdgeQuery {
            limit: Some(7),
            after: Some("edge-1".into()),
            selector: Selector::parse("site in (a,b),!old,x=1").unwrap(),
            names: vec!["edge-2".into(), "edge.3".into()],
            connected: Some(false),
            site_label: Some("example.com/größe &=?".to_owned()),
        };
        assert_eq!(EdgeQuery::parse(query.to_path().split_once('?').unwrap().1), Ok(query));
        assert_eq!(EdgeQuery::default().to_path(), "/edges");
        assert_eq!(EdgeQuery::parse(""), Ok(EdgeQuery::default()));
        let selector = EdgeQuery::parse("labelSelector=site+in+(a)").unwrap().selector;
        assert_eq!(selector, Selector::parse("site in (a)").unwrap());
    }

    #[test]
    fn an_unknown_parameter_is_refused_by_name() {
        let many = format!("names={}", vec!["a"; MAX_NAMES + 1].join(","));
        for (query, parameter) in [
            ("limit=0", "limit"),
            ("limit=2001", "limit"),
            ("limit=x", "limit"),
            ("connected=yes", "connected"),
            ("labelSelector=a%20in", "labelSelector"),
            ("label=a", "label"),
            ("names=%ff", "names"),
            (&many, "names"),
        ] {
            let error = EdgeQuery::parse(query).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{parameter}: ")), "{query}: {error}");
        }
    }

    /// Scripts of users read it.
    #[test]
    fn the_answer_keeps_its_bytes() {
        let time = |second| Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap());
        let known = ListedEdge {
            name: "edge-1".into(),
            connected: true,
            connected_since: Some(time(1)),
            last_seen: None,
            ready: true,
            site: Some("north".to_owned()),
            version: Some("0.1.0".to_owned()),
            os: Some("linux".to_owned()),
            arch: Some("arm64".to_owned()),
            runtime: Some("containerd 1.7.24".to_owned()),
            disk: Some(Filesystem { mountpoint: "/var".to_owned(), available: 1, capacity: 2 }),
            certificate_until: Some(time(2)),
            revoked: true,
            tasks: Some(0),
            max_tasks: Some(1),
            downloads: vec![EdgeDownload {
                job: JobUid("uid".to_owned()),
                bytes_per_second: 7,
                shared: true,
                heard: time(3),
            }],
        };
        let unknown = ListedEdge { name: "edge-2".into(), ..ListedEdge::default() };
        let list = EdgeList {
            items: vec![known, unknown],
            total: 3,
            connected: 1,
            next: Some("edge-2".into()),
            known_since: time(0),
            site_label: Some("line".to_owned()),
            version: Some("0.2.0".to_owned()),
        };
        let text = concat!(
            r#"{"items":[{"name":"edge-1","connected":true,"connectedSince":"1970-01-01T00:00:01Z","ready":true,"#,
            r#""site":"north","version":"0.1.0","os":"linux","arch":"arm64","runtime":"containerd 1.7.24","#,
            r#""disk":{"mountpoint":"/var","available":1,"capacity":2},"certificateUntil":"1970-01-01T00:00:02Z","#,
            r#""revoked":true,"tasks":0,"maxTasks":1,"downloads":[{"job":"uid","bytesPerSecond":7,"shared":true,"#,
            r#""heard":"1970-01-01T00:00:03Z"}]},{"name":"edge-2","connected":false,"ready":false}],"#,
            r#""total":3,"connected":1,"next":"edge-2","knownSince":"1970-01-01T00:00:00Z","siteLabel":"line","version":"0.2.0"}"#,
        );
        assert_eq!(serde_json::to_string(&list).unwrap(), text);
        assert_eq!(serde_json::from_str::<EdgeList>(text).unwrap(), list);
        let of_before = text.replace(r#","siteLabel":"line","version":"0.2.0""#, "");
        let list = serde_json::from_str::<EdgeList>(&of_before).unwrap();
        assert_eq!((list.site_label, list.version), (None, None));
    }
}
