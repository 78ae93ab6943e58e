//! Measures the list of the edges in the way of a person's tool: page by page, from the leader itself.

use std::time::Instant;

use anyhow::{Result, ensure};
use prepull_api::edges::{EdgeList, EdgeQuery};
use prepull_e2e::cloud::Cloud;
use prepull_e2e::plain_http;
use serde::Serialize;

/// The cost of the list of all edges.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EdgeListing {
    /// Edges in the list.
    pub edges: usize,
    /// Those that were connected, on the last page.
    pub connected: usize,
    /// Pages of the usual size.
    pub pages: usize,
    /// Bytes of all pages.
    pub bytes: usize,
    /// Seconds for all pages, one after the other.
    pub seconds: f64,
    /// Seconds for the slowest page.
    pub slowest_page_seconds: f64,
}

impl EdgeListing {
    /// Reads all pages.
    pub(super) async fn measure(cloud: &Cloud) -> Result<Self> {
        let (mut query, begun) = (EdgeQuery::default(), Instant::now());
        let mut listing =
            Self { edges: 0, connected: 0, pages: 0, bytes: 0, seconds: 0.0, slowest_page_seconds: 0.0 };
        loop {
            let asked = Instant::now();
            let (status, body) = plain_http::get(cloud.edges_addr(), &query.to_path()).await?;
            ensure!(status == 200, "the edges are not listed: {status} {body}");
            listing.slowest_page_seconds = listing.slowest_page_seconds.max(asked.elapsed().as_secs_f64());
            let list: EdgeList = serde_json::from_str(&body)?;
            listing.pages += 1;
            listing.bytes += body.len();
            listing.edges += list.items.len();
            listing.connected = list.connected;
            query.after = list.next;
            if query.after.is_none() {
                listing.seconds = begun.elapsed().as_secs_f64();
                return Ok(listing);
            }
        }
    }
}
