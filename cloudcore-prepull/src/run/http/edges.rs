//! The list of the edges, for people, who read it through the API server. See [`prepull_api::edges`].
//!
//! The API server passes on neither who asks nor a certificate of its own: it has checked the right to `get` the subresource
//! `services/proxy` before. So this port is for the API server alone, by `--edges-from` or a NetworkPolicy, and what it
//! serves is no secret all the same.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::{Method, Request, StatusCode};
use ipnet::IpNet;
use parking_lot::Mutex;
use prepull_api::edges::sites::{SITES_PATH, SiteList, SiteQuery};
use prepull_api::edges::{BadQuery, EdgeList, EdgeQuery, PATH};
use prepull_program::http::{self, HttpAnswer, TEXT, answer_request};
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::kube_api::leader::Leadership;

/// Questions that wait for the controller. Each takes it some milliseconds, so more at a time gain nothing.
pub(crate) const ASKS: usize = 8;
/// How long a question may wait: the controller takes a second at most for its other work.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections at a time: some people, each with the API server's own connection.
const CONNECTIONS: usize = 64;
const JSON: &str = "application/json";

/// A question, and where its answer goes.
#[derive(Debug)]
pub(crate) enum ControllerQuestion {
    Edges(EdgeQuery, oneshot::Sender<EdgeList>),
    Sites(SiteQuery, oneshot::Sender<SiteList>),
}

/// What is asked for: one of two documents.
enum Query {
    Edges(EdgeQuery),
    Sites(SiteQuery),
}

impl Query {
    /// None where there's no such document.
    fn parse(path: &str, query: &str) -> Option<Result<Self, BadQuery>> {
        match path {
            PATH => Some(EdgeQuery::parse(query).map(Self::Edges)),
            SITES_PATH => Some(SiteQuery::parse(query).map(Self::Sites)),
            _ => None,
        }
    }

    /// Asks the controller. None where it doesn't answer.
    async fn ask_controller(self, controller: &mpsc::Sender<ControllerQuestion>) -> Option<String> {
        match self {
            Self::Edges(query) => {
                ask_for_json(controller, |answer| ControllerQuestion::Edges(query, answer)).await
            }
            Self::Sites(query) => {
                ask_for_json(controller, |answer| ControllerQuestion::Sites(query, answer)).await
            }
        }
    }
}

async fn ask_for_json<T: Serialize>(
    controller: &mpsc::Sender<ControllerQuestion>,
    question: impl FnOnce(oneshot::Sender<T>) -> ControllerQuestion,
) -> Option<String> {
    let (answer, answered) = oneshot::channel();
    controller.send(question(answer)).await.ok()?;
    serde_json::to_string(&answered.await.ok()?).ok()
}

/// Where questions are put, while this replica leads.
#[derive(Debug)]
pub(crate) struct EdgesDesk {
    leadership: Leadership,
    /// Who may ask; anybody if it is empty.
    from: Vec<IpNet>,
    controller: Mutex<Option<mpsc::Sender<ControllerQuestion>>>,
}

impl EdgesDesk {
    pub(crate) fn new(leadership: Leadership, from: Vec<IpNet>) -> Self {
        Self { leadership, from, controller: Mutex::default() }
    }

    /// Passes questions to a controller from now on.
    pub(crate) fn open(&self, controller: mpsc::Sender<ControllerQuestion>) {
        *self.controller.lock() = Some(controller);
    }

    /// Passes on no question any more.
    pub(crate) fn close(&self) {
        *self.controller.lock() = None;
    }

    /// Whether a client at this address may ask. An IPv6 socket shows IPv4 addresses as mapped ones.
    fn admits(&self, address: Option<IpAddr>) -> bool {
        let address = address.map(|address| address.to_canonical());
        self.from.is_empty()
            || address.is_some_and(|address| self.from.iter().any(|net| net.contains(&address)))
    }

    async fn answer<B>(&self, from: Option<IpAddr>, request: Request<B>) -> HttpAnswer {
        let refuse = |status, text: &str| (status, TEXT, format!("{text}\n"));
        if !self.admits(from) {
            let from = from.map(|address| address.to_canonical().to_string()).unwrap_or_default();
            return refuse(
                StatusCode::FORBIDDEN,
                &format!(
                    "the edges are not listed for {from}: it is not in --edges-from, where the API servers are"
                ),
            );
        }
        let query = Query::parse(request.uri().path(), request.uri().query().unwrap_or_default());
        let Some(query) = query else {
            return refuse(StatusCode::NOT_FOUND, "there are /edges and /sites");
        };
        if *request.method() != Method::GET {
            return refuse(StatusCode::METHOD_NOT_ALLOWED, "the edges can only be read");
        }
        let query = match query {
            Ok(query) => query,
            Err(error) => return refuse(StatusCode::BAD_REQUEST, &error.to_string()),
        };
        if let Some(why) = self.leadership.why_not() {
            // Not 503, upon which clients try the same again for long.
            return refuse(StatusCode::MISDIRECTED_REQUEST, &format!("not the leader: {why}"));
        }
        let controller = self.controller.lock().clone();
        let Some(controller) = controller else {
            return refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "this replica has begun to lead, and knows no edges yet",
            );
        };
        match timeout(PATIENCE, query.ask_controller(&controller)).await.ok().flatten() {
            Some(text) => (StatusCode::OK, JSON, text),
            None => refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "the controller does not answer: try again in a moment",
            ),
        }
    }
}

/// Serves the list until `shutdown`.
pub(crate) async fn serve(listener: TcpListener, desk: Arc<EdgesDesk>, shutdown: CancellationToken) {
    let serve_one = |stream: TcpStream| {
        let desk = Arc::clone(&desk);
        async move {
            let from = stream.peer_addr().ok().map(|address| address.ip());
            answer_request(stream, |request| desk.answer(from, request)).await;
        }
    };
    http::serve_connections(listener, CONNECTIONS, shutdown, serve_one).await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    const HERE: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));

    async fn answer(desk: &EdgesDesk, method: Method, target: &str) -> (u16, String) {
        let request = Request::builder().method(method).uri(target).body(()).unwrap();
        let (status, _, text) = desk.answer(HERE, request).await;
        (status.as_u16(), text)
    }

    /// A controller that returns each question as the name of the next page.
    fn open(desk: &EdgesDesk) {
        let (asks, mut asked) = mpsc::channel::<ControllerQuestion>(1);
        desk.open(asks);
        tokio::spawn(async move {
            while let Some(ask) = asked.recv().await {
                let known_since = Time(jiff::Timestamp::UNIX_EPOCH);
                let (query, answer) = match ask {
                    ControllerQuestion::Edges(query, answer) => (query, answer),
                    ControllerQuestion::Sites(query, answer) => {
                        let site_label = query.site.unwrap_or_default();
                        answer.send(SiteList { items: Vec::new(), known_since, site_label }).unwrap();
                        continue;
                    }
                };
                let list = EdgeList {
                    items: Vec::new(),
                    total: 3,
                    connected: 2,
                    next: query.after,
                    known_since,
                    site_label: None,
                    version: None,
                };
                answer.send(list).unwrap();
            }
        });
    }

    #[tokio::test]
    async fn only_a_ready_leader_lists_edges() {
        let desk = EdgesDesk::new(Leadership::undisputed(), Vec::new());
        let (status, text) = answer(&desk, Method::GET, "/edges").await;
        assert_eq!((status, text.contains("knows no edges yet")), (503, true), "{text}");
        open(&desk);
        let (status, text) = answer(&desk, Method::GET, "/edges?after=edge-1").await;
        assert_eq!(
            (status, text.contains(r#""total":3,"connected":2,"next":"edge-1""#)),
            (200, true),
            "{text}"
        );
        let (status, text) = answer(&desk, Method::GET, "/sites?site=north").await;
        assert_eq!((status, text.contains(r#""siteLabel":"north""#)), (200, true), "{text}");
        desk.close();
        assert_eq!(answer(&desk, Method::GET, "/edges").await.0, 503);

        let standby = EdgesDesk::new(Leadership::standby(), Vec::new());
        open(&standby);
        let (status, text) = answer(&standby, Method::GET, "/edges").await;
        assert_eq!((status, text.starts_with("not the leader: ")), (421, true), "{text}");
    }

    #[tokio::test]
    async fn invalid_edge_queries_are_refused_with_reason() {
        let desk = EdgesDesk::new(Leadership::undisputed(), Vec::new());
        open(&desk);
        for (method, target, expected) in [
            (Method::POST, "/edges", (405, "the edges can only be read\n")),
            (Method::GET, "/metrics", (404, "there are /edges and /sites\n")),
            (Method::GET, "/edges?limit=0", (400, "limit: a number from 1 to 2000 is expected\n")),
        ] {
            let (status, text) = answer(&desk, method, target).await;
            assert_eq!((status, text.as_str()), expected, "{target}");
        }
    }

    #[tokio::test]
    async fn with_networks_only_they_are_answered() {
        let networks = vec!["10.1.0.0/16".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let desk = EdgesDesk::new(Leadership::undisputed(), networks);
        for (address, expected) in
            [("10.1.2.3", 503), ("::ffff:10.1.2.3", 503), ("fd00::1", 503), ("10.2.0.1", 403), ("::1", 403)]
        {
            let request = Request::builder().uri("/edges").body(()).unwrap();
            let (status, ..) = desk.answer(address.parse().ok(), request).await;
            assert_eq!(status.as_u16(), expected, "{address}");
        }
    }
}
