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
pub(crate) type Part = Result<Event, Infallible>;

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

/// The nodes of a job, each with the value of this label: `nodes`, and then `changed` and `left`.
pub(crate) fn nodes(watching: Arc<Watching>, job: String, site_label: Arc<str>) -> impl Stream<Item = Part> {
    let mut seen: Option<Nodes> = None;
    let next = move |watching: &Watching| {
        let known = watching.known();
        let (rows, sites) = (known.nodes(&job), known.label_values(&site_label));
        let placed = |(name, row): (String, _)| {
            let site = sites.get(name.as_str()).map(|site| (*site).to_owned());
            (name, SeenNode { row, site })
        };
        let now: Nodes = rows.into_iter().map(placed).collect();
        drop(known);
        let news = news_of_nodes(seen.as_ref(), &now);
        seen = Some(now);
        news.into_iter().map(|(name, data)| Event::default().event(name).data(data)).collect()
    };
    change_stream(watching, next)
}

type Nodes = BTreeMap<String, SeenNode>;

/// A node with its site, whose label may arrive later than its row.
struct SeenNode {
    row: Arc<NodeRow>,
    site: Option<String>,
}

impl SeenNode {
    fn is_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.row, &other.row) && self.site == other.site
    }

    fn shown(&self) -> ShownNode<'_> {
        ShownNode { row: &self.row, site: self.site.as_deref() }
    }
}

/// The events, by name, for a page that has seen these nodes.
fn news_of_nodes(seen: Option<&Nodes>, now: &Nodes) -> Vec<(&'static str, String)> {
    let Some(seen) = seen else {
        return vec![("nodes", json(&now.values().map(SeenNode::shown).collect::<Vec<_>>()))];
    };
    let mut news = Vec::new();
    let is_new = |(name, node): &(&String, &SeenNode)| !seen.get(*name).is_some_and(|seen| seen.is_as(node));
    let changed: Vec<_> = now.iter().filter(is_new).map(|(_, node)| node.shown()).collect();
    if !changed.is_empty() {
        news.push(("changed", json(&changed)));
    }
    let gone: Vec<_> = seen.keys().filter(|name| !now.contains_key(*name)).collect();
    if !gone.is_empty() {
        news.push(("left", json(&gone)));
    }
    news
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
    Event::default().event(name).data(json(data))
}

fn json(data: &impl Serialize) -> String {
    // Only maps with keys that are no texts cannot be written, and there are none.
    serde_json::to_string(data).unwrap_or_default()
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn row(name: &str) -> Arc<NodeRow> {
        let status = serde_json::json!({ "nodeName": name, "phase": "Pending" });
        Arc::new(NodeRow::from_status(&serde_json::from_value(status).unwrap()))
    }

    fn nodes(placed: [(&Arc<NodeRow>, Option<&str>); 2]) -> Nodes {
        let of = |(row, site): (&Arc<NodeRow>, Option<&str>)| {
            (row.name.clone(), SeenNode { row: Arc::clone(row), site: site.map(str::to_owned) })
        };
        placed.into_iter().map(of).collect()
    }

    #[test]
    fn a_late_site_is_sent() {
        let (one, two) = (row("edge-1"), row("edge-2"));
        let first = nodes([(&one, None), (&two, None)]);
        let news = news_of_nodes(None, &first);
        assert!(news.len() == 1 && news[0].0 == "nodes" && !news[0].1.contains("site"), "{news:?}");
        assert_eq!(news_of_nodes(Some(&first), &nodes([(&one, None), (&two, None)])), []);
        let later = nodes([(&one, None), (&two, Some("lyon"))]);
        let news = news_of_nodes(Some(&first), &later);
        let changed: serde_json::Value = serde_json::from_str(&news.first().unwrap().1).unwrap();
        assert_eq!(changed.as_array().map(Vec::len), Some(1));
        assert_eq!((&changed[0]["name"], &changed[0]["site"]), (&"edge-2".into(), &"lyon".into()));
        let gone = nodes([(&two, Some("lyon")), (&two, Some("lyon"))]);
        assert_eq!(news_of_nodes(Some(&later), &gone), [("left", r#"["edge-1"]"#.to_owned())]);
    }
}
