//! The edges, as the leader lists them: read through the API server's proxy, page by page.

use anyhow::{Context, anyhow};
use futures::Stream;
use futures::stream::try_unfold;
use http::Request;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::core::Status;
use prepull_api::edges::sites::{SiteList, SiteQuery};
use prepull_api::edges::{EdgeList, EdgeQuery, ListedEdge, SERVICE};
use prepull_api::task::NodeName;
use serde::de::DeserializeOwned;

use crate::cluster::Cluster;
use crate::problem::{self, MissingRight};

/// Edges of one page: half a megabyte of text, and some milliseconds of the leader.
const PAGE: usize = 1_000;
/// The Service at which edges dial in, which every version has.
pub(crate) const DOOR: &str = "cloudcore-prepull";

/// Reads the edges that the query asks for, one page after another.
pub(crate) fn pages(cluster: &Cluster, query: EdgeQuery) -> impl Stream<Item = anyhow::Result<EdgeList>> {
    // The state is the query for the next page; `None` after the last one.
    try_unfold(Some(EdgeQuery { limit: Some(PAGE), ..query }), move |query| async move {
        let Some(query) = query else { return Ok(None) };
        let page = read_page(cluster, &query).await?;
        let next = page.next.clone().map(|after| EdgeQuery { after: Some(after), ..query });
        Ok(Some((page, next)))
    })
}

/// Reads one edge, and since when the leader knows connections. None if no edge has this name.
pub(crate) async fn read_edge(
    cluster: &Cluster,
    name: &str,
) -> anyhow::Result<(Option<ListedEdge>, jiff::Timestamp)> {
    let query = EdgeQuery { names: vec![NodeName::from(name)], ..EdgeQuery::default() };
    let mut page = read_page(cluster, &query).await?;
    Ok((page.items.pop(), page.known_since.0))
}

/// Reads since when there is the leader of now.
pub(crate) async fn led_since(cluster: &Cluster) -> anyhow::Result<jiff::Timestamp> {
    let query = EdgeQuery { limit: Some(1), ..EdgeQuery::default() };
    Ok(read_page(cluster, &query).await?.known_since.0)
}

/// Reads by which label of their Nodes the leader groups edges into sites. None if it cannot be read, or the leader is too
/// old to tell.
pub(crate) async fn site_label(cluster: &Cluster) -> Option<String> {
    let query = EdgeQuery { limit: Some(1), ..EdgeQuery::default() };
    read_page(cluster, &query).await.ok()?.site_label
}

/// Reads what sites do now.
pub(crate) async fn read_sites(cluster: &Cluster, query: &SiteQuery) -> anyhow::Result<SiteList> {
    read_document(cluster, &query.to_path()).await
}

async fn read_page(cluster: &Cluster, query: &EdgeQuery) -> anyhow::Result<EdgeList> {
    read_document(cluster, &query.to_path()).await
}

/// Reads a document of the leader.
async fn read_document<T: DeserializeOwned>(cluster: &Cluster, path: &str) -> anyhow::Result<T> {
    let namespace = cluster.system_namespace();
    let path = format!("/api/v1/namespaces/{namespace}/services/{SERVICE}/proxy{path}");
    let request = Request::get(path).body(Vec::new()).context("the edges cannot be asked for")?;
    let error = match cluster.client().request::<T>(request).await {
        Ok(page) => return Ok(page),
        Err(error) => anyhow::Error::from(error),
    };
    let Some(answer) = problem::server_answer(&error).filter(|answer| !problem::is_page(answer)) else {
        return Err(error.context("the edges cannot be read"));
    };
    let door =
        if is_without(answer) { find_service(cluster, namespace).await } else { ServiceState::Unknown };
    Err(match explain_status(answer, namespace, door) {
        Some(text) => anyhow!(text),
        None => error.context("the edges cannot be read"),
    })
}

/// What there is of cloudcore-prepull in a namespace where the list has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServiceState {
    /// The Service has no endpoints yet. The API server then reports the Service itself as missing.
    Leaderless,
    /// The Service at which edges dial in, and that of the list is missing.
    There,
    Missing,
    Unknown,
}

async fn find_service(cluster: &Cluster, namespace: &str) -> ServiceState {
    let services = Api::<Service>::namespaced(cluster.client(), namespace);
    if matches!(services.get_opt(SERVICE).await, Ok(Some(_))) {
        return ServiceState::Leaderless;
    }
    match services.get_opt(DOOR).await {
        Ok(Some(_)) => ServiceState::There,
        Ok(None) => ServiceState::Missing,
        Err(_) => ServiceState::Unknown,
    }
}

/// Whether there is no such Service, or nothing behind it.
fn is_without(answer: &Status) -> bool {
    let named = answer.details.as_ref().is_some_and(|details| details.name == SERVICE);
    answer.code == 404 && named
}

/// What an answer means, and its remedy; none if it has no meaning of its own here.
fn explain_status(answer: &Status, namespace: &str, door: ServiceState) -> Option<String> {
    let said = answer.message.trim();
    if let Some(right) = MissingRight::from_answer(answer) {
        return Some(format!(
            "{right}, of the Service {SERVICE}. An administrator of the cluster can grant it: \
             manifests/kubectl-prepull/rbac.yaml has roles with it"
        ));
    }
    let elsewhere = "--system-namespace names the namespace of cloudcore-prepull, if it is another one";
    let check = format!("kubectl prepull check --system-namespace {namespace} looks for the reason");
    let leaderless = || {
        format!(
            "no cloudcore-prepull leads in namespace {namespace}: the Service {SERVICE} has no pod behind it. {check}"
        )
    };
    if is_without(answer) {
        let older = "does not list its edges: it is of an older version, or its manifests are; update both";
        return Some(match door {
            ServiceState::Leaderless => leaderless(),
            ServiceState::There => format!("the cloudcore-prepull of namespace {namespace} {older}"),
            ServiceState::Missing => {
                format!("there is no cloudcore-prepull in namespace {namespace}; {elsewhere}")
            }
            ServiceState::Unknown => format!(
                "namespace {namespace} has no Service {SERVICE}: there is no cloudcore-prepull, or it {older}. {elsewhere}"
            ),
        });
    }
    match answer.code {
        404 if said.contains("there is /edges") => Some(format!(
            "the cloudcore-prepull of namespace {namespace} is of an older version, which doesn't list its sites: update it"
        )),
        421 => Some(format!("the replica behind the Service {SERVICE} is {said}: try again in a moment")),
        503 if said.contains("no endpoints available") => Some(leaderless()),
        // The API server's own words for a pod to which it cannot connect.
        500..=504 if said.contains("error trying to reach service") => Some(format!(
            "the API server cannot connect to the leader, port 10005: it has ended, is of an older version, runs without \
             --edges-listen, or a NetworkPolicy is between them. {check}: {said}"
        )),
        // cloudcore's own: --edges-from, and a leader that has just begun.
        403 | 503 => Some(format!("cloudcore-prepull does not list its edges now: {said}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn said(code: u16, message: &str, door: ServiceState) -> String {
        let details = if code == 404 && message.contains("not found") {
            json!({"name": SERVICE, "kind": "services"})
        } else {
            json!(null)
        };
        let answer = json!({"code": code, "message": message, "details": details});
        explain_status(&serde_json::from_value(answer).unwrap(), "prepull-system", door).unwrap_or_default()
    }

    #[test]
    fn missing_rights_leader_and_version_are_distinguished() {
        let forbidden = "services \"cloudcore-prepull-edges\" is forbidden: User \"jane\" cannot get resource \
                         \"services/proxy\" in API group \"\" in the namespace \"prepull-system\"";
        let missing = "services \"cloudcore-prepull-edges\" not found";
        let refused = "error trying to reach service: dial tcp 10.0.0.7:10005: connect: connection refused";
        let no_pod = "no endpoints available for service \"cloudcore-prepull-edges\"";
        for (code, message, door, words) in [
            (
                403,
                forbidden,
                ServiceState::Unknown,
                ["user jane lacks a right: to get services/proxy in namespace", "rbac.yaml has roles"],
            ),
            (404, missing, ServiceState::Leaderless, ["no cloudcore-prepull leads", "kubectl prepull check"]),
            (404, missing, ServiceState::There, ["is of an older version", "update both"]),
            (
                404,
                missing,
                ServiceState::Missing,
                ["there is no cloudcore-prepull in namespace prepull-system", "--system-namespace"],
            ),
            (404, missing, ServiceState::Unknown, ["has no Service", "older version"]),
            (404, "there is /edges\n", ServiceState::Unknown, ["is of an older version", "update it"]),
            (
                421,
                "not the leader: a leads\n",
                ServiceState::Unknown,
                ["is not the leader: a leads", "try again"],
            ),
            (503, no_pod, ServiceState::Unknown, ["no cloudcore-prepull leads", "kubectl prepull check"]),
            (502, refused, ServiceState::Unknown, ["cannot connect to the leader", "10.0.0.7:10005"]),
            (503, refused, ServiceState::Unknown, ["cannot connect to the leader", "10.0.0.7:10005"]),
            (
                403,
                "the edges are not listed for 10.0.0.1: it is not in --edges-from",
                ServiceState::Unknown,
                ["not listed for 10.0.0.1", "--edges-from"],
            ),
            (
                503,
                "this replica has begun to lead",
                ServiceState::Unknown,
                ["now: this replica", "begun to lead"],
            ),
        ] {
            let said = said(code, message, door);
            assert!(words.iter().all(|word| said.contains(word)), "{code} {message}: {said}");
        }
        assert_eq!(said(401, "Unauthorized", ServiceState::Unknown), "");
    }
}
