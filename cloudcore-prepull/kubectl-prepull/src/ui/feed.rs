//! Streams of server-sent events: everything at first, and then what has changed.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::Event;
use futures::Stream;
use futures::stream::unfold;
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::sleep;

use super::known::Sent;
use super::rows::NodeRow;
use super::watching::Watching;

/// The time between two parts of a stream: a job that ends a thousand nodes a second does not keep the browser busy.
const PAUSE: Duration = Duration::from_millis(300);

/// A part of a stream.
type Part = Result<Event, Infallible>;

/// The jobs: `hello`, `jobs`, and then `job`, `gone` and `problem`.
pub(crate) fn jobs(watching: Arc<Watching>, cluster: String) -> impl Stream<Item = Part> {
    let mut seen: Option<BTreeMap<String, Sent>> = None;
    let mut problem = watching.problem();
    // What is wrong already is news for a page that is opened now.
    problem.mark_changed();
    let next = move |watching: &Watching| {
        let now = watching.known().jobs();
        let mut events = Vec::new();
        match &seen {
            None => {
                events.push(event("hello", &serde_json::json!({ "cluster": cluster })));
                let rows: Vec<&str> = now.values().map(|row| &*row.json).collect();
                events.push(Event::default().event("jobs").data(format!("[{}]", rows.join(","))));
            }
            Some(seen) => {
                for (name, row) in &now {
                    if seen.get(name).is_none_or(|seen| seen.change != row.change) {
                        events.push(Event::default().event("job").data(&*row.json));
                    }
                }
                events.extend(
                    seen.keys().filter(|name| !now.contains_key(*name)).map(|name| event("gone", name)),
                );
            }
        }
        seen = Some(now);
        if problem.has_changed().unwrap_or(false)
            && let Some(message) = problem.borrow_and_update().clone()
        {
            events.push(event("problem", &serde_json::json!({ "message": message })));
        }
        events
    };
    stream(watching, next)
}

/// The nodes of a job, each with the value of this label: `nodes`, and then `changed` and `gone`.
pub(crate) fn nodes(watching: Arc<Watching>, job: String, site_label: Arc<str>) -> impl Stream<Item = Part> {
    let mut seen: Option<BTreeMap<String, Arc<NodeRow>>> = None;
    let next = move |watching: &Watching| {
        let known = watching.known();
        let (now, sites) = (known.nodes(&job), known.labelled(&site_label));
        let shown = |row| Shown { row, site: sites.get(row.name.as_str()).copied() };
        let mut events = Vec::new();
        match &seen {
            None => events.push(event("nodes", &now.values().map(|row| shown(row)).collect::<Vec<_>>())),
            Some(seen) => {
                let is_new =
                    |row: &&Arc<NodeRow>| !seen.get(&row.name).is_some_and(|seen| Arc::ptr_eq(seen, row));
                let changed: Vec<_> = now.values().filter(is_new).map(|row| shown(row)).collect();
                if !changed.is_empty() {
                    events.push(event("changed", &changed));
                }
                let gone: Vec<_> = seen.keys().filter(|name| !now.contains_key(*name)).collect();
                if !gone.is_empty() {
                    events.push(event("gone", &gone));
                }
            }
        }
        seen = Some(now);
        events
    };
    stream(watching, next)
}

/// A node as it is sent.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    row: &'a NodeRow,
    #[serde(skip_serializing_if = "Option::is_none")]
    site: Option<&'a str>,
}

fn event(name: &str, data: &impl Serialize) -> Event {
    // Only maps with keys that are no texts cannot be written, and there are none.
    Event::default().event(name).data(serde_json::to_string(data).unwrap_or_default())
}

/// A stream of what `next` returns, each time that something has changed.
fn stream(watching: Arc<Watching>, next: impl FnMut(&Watching) -> Vec<Event>) -> impl Stream<Item = Part> {
    let changes = watching.changes();
    let feed = Feed { watching, next, waiting: VecDeque::new(), changes, has_begun: false };
    unfold(feed, |mut feed| async move {
        while feed.waiting.is_empty() {
            if feed.has_begun {
                sleep(PAUSE).await;
                // An error would mean that the sender is gone, which the feed holds.
                let _ = feed.changes.changed().await;
            }
            feed.has_begun = true;
            feed.waiting = (feed.next)(&feed.watching).into();
        }
        let event = feed.waiting.pop_front()?;
        Some((Ok(event), feed))
    })
}

struct Feed<F> {
    watching: Arc<Watching>,
    next: F,
    waiting: VecDeque<Event>,
    changes: watch::Receiver<u64>,
    has_begun: bool,
}
