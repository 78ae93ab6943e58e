//! The requests of the page.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use axum::extract::{ConnectInfo, Path, Query, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::stream::select;
use futures::{Stream, TryStreamExt};
use prepull_api::crd::report::ImagePrePullReport;
use prepull_api::edges::EdgeQuery;
use prepull_api::edges::sites::SiteQuery;
use prepull_api::task::NodeName;
use serde::Deserialize;
use serde_json::{Value, json};

use super::assets::asset;
use super::feed;
use super::guard::Guard;
use super::peer::{PagePeer, is_own_user};
use super::watching::Watching;
use crate::cluster::Cluster;
use crate::commands::{cancel, events, pause, resume, retry, suspend};
use crate::edges;
use crate::jobs::Changed;
use crate::{jobs, problem, rights};

/// Headers of every answer: the page loads and asks only its own server, and can't be framed or cached.
const HEADERS: [(&str, &str); 6] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
];

/// What every request needs.
pub(crate) struct PageContext {
    pub(crate) guard: Guard,
    /// Where it is served.
    pub(crate) address: SocketAddr,
    pub(crate) cluster: Cluster,
    pub(crate) watching: Arc<Watching>,
    /// The Node label with the site.
    pub(crate) site_label: Arc<str>,
}

/// The routes of the page.
pub(crate) fn router(page: Arc<PageContext>) -> Router {
    Router::new()
        .route("/{token}/", get(index))
        .route("/{token}/{file}", get(file))
        .route("/{token}/live", get(live))
        .route("/{token}/live/{job}", get(live_of_job))
        .route("/{token}/node/{job}/{node}", get(node))
        .route("/{token}/events/{job}", get(events_of_job))
        .route("/{token}/groups", get(groups))
        .route("/{token}/edges", get(all_edges))
        .route("/{token}/jobs/{node}", get(jobs_of_node))
        .route("/{token}/sites", get(sites))
        .route("/{token}/leader", get(leader))
        .route("/{token}/may", get(allowed_actions))
        .route("/{token}/act/{job}/{verb}", post(act_on_job))
        .layer(from_fn_with_state(Arc::clone(&page), guard_request))
        .with_state(page)
}

async fn guard_request(
    State(page): State<Arc<PageContext>>,
    ConnectInfo(PagePeer(peer)): ConnectInfo<PagePeer>,
    request: Request,
    next: Next,
) -> Response {
    let token = request.uri().path().split('/').nth(1).unwrap_or_default();
    let mut response = match page.guard.check_request(request.method(), request.headers(), token) {
        Ok(()) if is_own_user(peer, page.address) => next.run(request).await,
        Ok(()) => (StatusCode::FORBIDDEN, "the page is for the user who started it").into_response(),
        Err(refusal) => refusal.into_response(),
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

/// What went wrong, for the person.
struct PageError(String);

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        (StatusCode::BAD_GATEWAY, self.0).into_response()
    }
}

type JsonAnswer = Result<Json<Value>, PageError>;

fn json_answer(page: &PageContext, answered: anyhow::Result<Value>) -> JsonAnswer {
    answered.map(Json).map_err(|error| {
        let error = problem::explain(error, page.cluster.place());
        PageError(problem::error_text(&error))
    })
}

async fn index() -> Response {
    serve_asset("index.html")
}

async fn file(Path((_, name)): Path<(String, String)>) -> Response {
    serve_asset(&name)
}

fn serve_asset(name: &str) -> Response {
    match asset(name) {
        Some((kind, text)) => ([(CONTENT_TYPE, kind)], text).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn live(State(page): State<Arc<PageContext>>) -> impl IntoResponse {
    Sse::new(live_jobs(&page)).keep_alive(KeepAlive::default())
}

/// The jobs and the nodes of one of them, in one stream: a browser has six connections for all windows of the page.
async fn live_of_job(
    State(page): State<Arc<PageContext>>,
    Path((_, job)): Path<(String, String)>,
) -> impl IntoResponse {
    let nodes = feed::nodes(Arc::clone(&page.watching), job, Arc::clone(&page.site_label));
    Sse::new(select(live_jobs(&page), nodes)).keep_alive(KeepAlive::default())
}

fn live_jobs(page: &PageContext) -> impl Stream<Item = feed::Part> + use<> {
    let place = page.cluster.place();
    let cluster = place.context.clone().unwrap_or_else(|| place.server.clone());
    feed::jobs(Arc::clone(&page.watching), cluster)
}

/// All that is known of a node of a job.
async fn node(
    State(page): State<Arc<PageContext>>,
    Path((_, job, node)): Path<(String, String, String)>,
) -> JsonAnswer {
    let record_in = |report: ImagePrePullReport| {
        report.body.node_status.into_iter().find(|record| record.node_name == node)
    };
    let read = async {
        // An open node that is pulling is asked for every two seconds, and a job may have a hundred reports.
        let its_report = page.watching.known().report_of(&job, &node);
        if let Some(name) = its_report {
            let report = jobs::reports_api(&page.cluster).get_opt(&name).await;
            let report = report.with_context(|| format!("report {name} cannot be read"))?;
            if let Some(record) = report.and_then(record_in) {
                return Ok(json!(record));
            }
        }
        let found = jobs::get(&page.cluster, &job).await?;
        let mut reports = std::pin::pin!(jobs::reports(&page.cluster, &found));
        while let Some(reports) = reports.try_next().await? {
            if let Some(record) = reports.into_iter().find_map(record_in) {
                return Ok(json!(record));
            }
        }
        Err(anyhow!("job {job} has no node {node}"))
    };
    json_answer(&page, read.await)
}

/// The events of a job, the oldest first.
async fn events_of_job(
    State(page): State<Arc<PageContext>>,
    Path((_, job)): Path<(String, String)>,
) -> JsonAnswer {
    let read = async {
        let job = jobs::get(&page.cluster, &job).await?;
        let mut events = events::of_job(&page.cluster, &job).await?;
        events.sort();
        Ok(json!(events))
    };
    json_answer(&page, read.await)
}

#[derive(Deserialize)]
struct Grouping {
    label: String,
}

/// The value of a label of each node that has it.
async fn groups(
    State(page): State<Arc<PageContext>>,
    Query(Grouping { label }): Query<Grouping>,
) -> Json<Value> {
    Json(json!(page.watching.known().label_values(&label)))
}

/// The jobs of a node, by name, each with its row there.
async fn jobs_of_node(
    State(page): State<Arc<PageContext>>,
    Path((_, node)): Path<(String, String)>,
) -> Json<Value> {
    Json(json!(page.watching.known().jobs_of(&node)))
}

#[derive(Deserialize)]
struct OneEdge {
    edge: Option<NodeName>,
}

/// All edges, or one of them, from the leader.
async fn all_edges(
    State(page): State<Arc<PageContext>>,
    Query(OneEdge { edge }): Query<OneEdge>,
) -> JsonAnswer {
    let query = EdgeQuery {
        site_label: Some(page.site_label.to_string()),
        names: Vec::from_iter(edge),
        ..EdgeQuery::default()
    };
    let pages = edges::pages(&page.cluster, query);
    let listed = pages.try_fold(Vec::new(), async |mut edges, page| {
        edges.extend(page.items);
        Ok(edges)
    });
    json_answer(&page, listed.await.map(|edges| json!({ "edges": edges })))
}

#[derive(Deserialize)]
struct OneSite {
    site: Option<String>,
}

/// The sites that share layers, or one of them with its downloads.
async fn sites(State(page): State<Arc<PageContext>>, Query(OneSite { site }): Query<OneSite>) -> JsonAnswer {
    let list = edges::read_sites(&page.cluster, &SiteQuery { site }).await;
    json_answer(&page, list.map(|list| json!(list)))
}

/// Since when there is the leader of now; null where the person may not know.
async fn leader(State(page): State<Arc<PageContext>>) -> Json<Value> {
    let since = edges::led_since(&page.cluster).await.ok();
    Json(json!({ "since": since }))
}

/// What the person may do.
async fn allowed_actions(State(page): State<Arc<PageContext>>) -> JsonAnswer {
    let may = rights::has_right(&page.cluster, &rights::CHANGE).await;
    json_answer(&page, may.map(|change| json!({ "change": change })))
}

/// Suspends, pauses, resumes, retries or cancels a job.
async fn act_on_job(
    State(page): State<Arc<PageContext>>,
    Path((_, job, verb)): Path<(String, String, String)>,
) -> JsonAnswer {
    let cluster = &page.cluster;
    let done = async {
        match verb.as_str() {
            "suspend" => suspend::suspend(cluster, &job).await,
            "pause" => pause::pause(cluster, &job).await.map(Changed::into_job),
            "resume" => resume::resume(cluster, &job).await.map(Changed::into_job),
            "retry" => retry::retry(cluster, &job).await,
            "cancel" => cancel::cancel(cluster, &job).await,
            _ => return Err(anyhow!("there is no {verb}")),
        }?;
        Ok(json!({}))
    };
    json_answer(&page, done.await)
}
