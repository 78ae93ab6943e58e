//! `kubectl prepull rates`.

mod table;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;

use anyhow::{Context, bail};
use clap::Args;
use futures::TryStreamExt;
use jiff::Timestamp;
use kube::api::ListParams;
use prepull_api::edges::sites::{SiteList, SiteQuery};
use prepull_api::edges::{EdgeQuery, ListedEdge};
use prepull_api::task::NodeName;
use serde::Serialize;

use crate::amounts::seconds_between;
use crate::cluster::Cluster;
use crate::edges::{pages, read_sites};
use crate::jobs;
use crate::session::{CommandOutcome, Session};
use table::render;

/// Jobs of one page, without spec and status.
const JOBS_OF_A_PAGE: u32 = 500;

/// The arguments of `rates`.
#[derive(Debug, Args)]
#[command(after_help = "\
The busiest come first. UPLINK is what crosses the uplink of a site, RATE what a node gets, over the last minute and as the
agents report. In a site that shares layers, a part of it may come from neighbours; `sites SITE` has its layers one by one.

Examples:
  kubectl prepull rates
  kubectl prepull rates store-17 -o wide
  watch kubectl prepull rates")]
pub(crate) struct RatesArgs {
    /// Only this site.
    #[arg(value_name = "SITE")]
    site: Option<String>,
}

/// What is downloaded now.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Rates {
    sites: Vec<SiteRate>,
    nodes: Vec<NodeRate>,
}

/// Nodes without a site are one row, without a name.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct SiteRate {
    #[serde(skip_serializing_if = "Option::is_none")]
    site: Option<String>,
    uplink_bytes_per_second: u64,
    /// Nodes that download.
    nodes: usize,
    jobs: BTreeSet<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeRate {
    node: NodeName,
    #[serde(skip_serializing_if = "Option::is_none")]
    site: Option<String>,
    bytes_per_second: u64,
    /// Whether a part of it may be of neighbours.
    shared: bool,
    job: String,
    /// The age of the agent's last report.
    age_seconds: u64,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &RatesArgs,
) -> anyhow::Result<CommandOutcome> {
    let (mut edges, mut is_known) = (Vec::new(), args.site.is_none());
    let query = EdgeQuery { connected: Some(true), ..EdgeQuery::default() };
    let mut pages = pin!(pages(cluster, query));
    while let Some(page) = pages.try_next().await? {
        is_known |= page.items.iter().any(|edge| edge.site == args.site);
        edges.extend(page.items.into_iter().filter(|edge| !edge.downloads.is_empty()));
    }
    let sites = read_sites(cluster, &SiteQuery::default()).await?;
    is_known |= sites.items.iter().any(|site| Some(&site.name) == args.site.as_ref());
    if let (false, Some(site)) = (is_known, &args.site) {
        bail!("no connected edge is in site {site}: `kubectl prepull nodes -o wide` has the site of each");
    }
    let rates =
        summarize_rates(&edges, &sites, &jobs_by_uid(cluster).await?, args.site.as_deref(), Timestamp::now());
    let names = rates.nodes.iter().map(|rate| format!("node/{}", rate.node));
    session.print(&rates, names, |is_wide| render(&rates, session.screen, is_wide))?;
    Ok(CommandOutcome::Done)
}

async fn jobs_by_uid(cluster: &Cluster) -> anyhow::Result<BTreeMap<String, String>> {
    let (mut names, mut asked) = (BTreeMap::new(), ListParams::default().limit(JOBS_OF_A_PAGE));
    loop {
        let page = jobs::api(cluster).list_metadata(&asked).await.context("the jobs cannot be read")?;
        names.extend(page.items.into_iter().filter_map(|job| Some((job.metadata.uid?, job.metadata.name?))));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => asked = asked.continue_token(&token),
            None => return Ok(names),
        }
    }
}

/// `site`: only this one.
fn summarize_rates(
    edges: &[ListedEdge],
    list: &SiteList,
    jobs: &BTreeMap<String, String>,
    site: Option<&str>,
    now: Timestamp,
) -> Rates {
    let is_wanted = |of: Option<&str>| site.is_none() || of == site;
    let mut by_site: BTreeMap<Option<String>, SiteRate> = BTreeMap::new();
    let mut nodes = Vec::new();
    for edge in edges.iter().filter(|edge| is_wanted(edge.site.as_deref())) {
        let row = by_site.entry(edge.site.clone()).or_default();
        row.nodes += 1;
        for download in &edge.downloads {
            // A job of another API, or one that was just deleted.
            let job = jobs.get(&download.job.0).cloned().unwrap_or_else(|| "-".to_owned());
            row.jobs.insert(job.clone());
            if !download.shared {
                let bytes = &mut row.uplink_bytes_per_second;
                *bytes = bytes.saturating_add(download.bytes_per_second);
            }
            nodes.push(NodeRate {
                node: edge.name.clone(),
                site: edge.site.clone(),
                bytes_per_second: download.bytes_per_second,
                shared: download.shared,
                job,
                age_seconds: seconds_between(download.heard.0, now),
            });
        }
    }
    let carried = list.items.iter().filter(|site| site.uplink_bytes_per_second > 0);
    for carried in carried.filter(|site| is_wanted(Some(&site.name))) {
        let row = by_site.entry(Some(carried.name.clone())).or_default();
        row.uplink_bytes_per_second =
            row.uplink_bytes_per_second.saturating_add(carried.uplink_bytes_per_second);
    }
    let mut sites: Vec<_> = by_site.into_iter().map(|(site, row)| SiteRate { site, ..row }).collect();
    sites.sort_by_key(|row| Reverse(row.uplink_bytes_per_second));
    nodes.sort_by_key(|row| Reverse(row.bytes_per_second));
    Rates { sites, nodes }
}

#[cfg(test)]
mod tests;
