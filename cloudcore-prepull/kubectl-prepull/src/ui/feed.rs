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

/// The jobs: `hello`, `state`, `jobs`, and then `job`, `gone` and `state`.
pub(crate) fn jobs(watching: Arc<Watching>, cluster: String) -> impl Stream<Item = Part> {
    let mut seen: Option<BTreeMap<String, Sent>> = None;
    let mut seen_state = String::new();
    let next = move |watching: &Watching| {
        let known = watching.known();
        let now = known.has_jobs().then(|| known.jobs());
        let state = serde_json::to_string(&known.hearing().state()).unwrap_or_default();
        drop(known);
        let mut events = Vec::new();
        if seen_state.is_empty() {
            events.push(json_event("hello", &serde_json::json!({ "cluster": cluster })));
        }
        if state != seen_state {
            events.push(Event::default().event("state").data(&state));
            seen_state = state;
        }
        // An empty list would read as a cluster without jobs.
        let Some(now) = now else { return events };
        match &seen {
            None => {
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
                    seen.keys().filter(|name| !now.contains_key(*name)).map(|name| json_event("gone", name)),
                );
            }
        }
        seen = Some(now);
        events
    };
    change_stream(watching, next)
}

/// The nodes of a job, each with the value of this label: `nodes`, and then `changed` and `gone`.
pub(crate) fn nodes(watching: Arc<Watching>, job: String, site_label: Arc<str>) -> impl Stream<Item = Part> {
    let mut seen: Option<BTreeMap<String, Arc<NodeRow>>> = None;
    let next = move |watching: &Watching| {
        let known = watching.known();
        let (now, sites) = (known.nodes(&job), known.label_values(&site_label));
        let shown = |row| ShownNode { row, site: sites.get(row.name.as_str()).copied() };
        let mut events = Vec::new();
        match &seen {
            None => events.push(json_event("nodes", &now.values().map(|row| shown(row)).collect::<Vec<_>>())),
            Some(seen) => {
                let is_new =
                    |row: &&Arc<NodeRow>| !seen.get(&row.name).is_some_and(|seen| Arc::ptr_eq(seen, row));
                let changed: Vec<_> = now.values().filter(is_new).map(|row| shown(row)).collect();
                if !changed.is_empty() {
                    events.push(json_event("changed", &changed));
                }
                let gone: Vec<_> = seen.keys().filter(|name| !now.contains_key(*name)).collect();
                if !gone.is_empty() {
                    events.push(json_event("gone", &gone));
                }
            }
        }
        seen = Some(now);
        events
    };
    change_stream(watching, next)
}

/// A node as it is sent.
#[derive(Serialize)]
struct ShownNode<'a> {
    #[serde(flatten)]
    row: &'a NodeRow,
    #[serde(skip_serializing_if = "Option::is_none")]
    site: Option<&'a str>,
}

fn json_event(name: &str, data: &impl Serialize) -> Event {
    // Only maps with keys that are no texts cannot be written, and there are none.
    Event::default().event(name).data(serde_json::to_string(data).unwrap_or_default())
}

/// A stream of what `next` returns, each time that something has changed.
fn change_stream(
    watching: Arc<Watching>,
    next: impl FnMut(&Watching) -> Vec<Event>,
) -> impl Stream<Item = Part> {
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
