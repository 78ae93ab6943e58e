//! `kubectl prepull nodes`.

mod table;

use std::pin::pin;

use anyhow::{bail, ensure};
use clap::{Args, ValueEnum};
use futures::TryStreamExt;
use jiff::Timestamp;
use prepull_api::edges::{EdgeList, EdgeQuery, ListedEdge, MAX_NAMES};
use prepull_api::selector::Selector;
use prepull_api::task::NodeName;

use crate::cluster::Cluster;
use crate::edges::pages;
use crate::problem::WrongUsage;
use crate::session::{CommandOutcome, Session};
use crate::version;
use table::Table;

/// The arguments of `nodes`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl prepull nodes
  kubectl prepull nodes -l topology.kubernetes.io/zone=north --away
  kubectl prepull nodes edge-1 edge-2 -o wide
  kubectl prepull nodes --sort disk | head
  kubectl prepull nodes --outdated -o name

CONNECTED is since when, or when it was last seen. After a change of the leader that is not known of those that have not
come back. TASKS are those that it has, of as many as it works on at a time. On a narrow terminal columns are left out;
-o wide has all of them. A name that no edge has is an error.")]
pub(crate) struct NodesArgs {
    /// Only these edges.
    #[arg(value_name = "NODE")]
    nodes: Vec<String>,
    /// Only edges with these labels on their Node, as for kubectl.
    #[arg(short = 'l', long, value_name = "SELECTOR", value_parser = Selector::parse)]
    selector: Option<Selector>,
    /// Only edges that are connected.
    #[arg(long, conflicts_with = "away")]
    connected: bool,
    /// Only edges that are not connected.
    #[arg(long)]
    away: bool,
    /// Only connected edges with an agent older than cloudcore-prepull.
    #[arg(long)]
    outdated: bool,
    /// The order: the fullest disk, the oldest version, or the edge that is away for longest first [default: by name].
    #[arg(long, value_enum, value_name = "BY")]
    sort: Option<EdgeOrder>,
    /// The label of Nodes that holds their site [default: that of cloudcore-prepull run --site-label].
    #[arg(long, value_name = "KEY")]
    site_label: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EdgeOrder {
    /// Least free space first
    Disk,
    /// Oldest agent first
    Version,
    /// Away for longest first
    Seen,
}

impl NodesArgs {
    fn query(&self) -> anyhow::Result<EdgeQuery> {
        if self.nodes.len() > MAX_NAMES {
            bail!(WrongUsage(format!("at most {MAX_NAMES} nodes can be named: choose them by -l")));
        }
        Ok(EdgeQuery {
            selector: self.selector.clone().unwrap_or_default(),
            names: self.nodes.iter().map(|name| NodeName::from(name.as_str())).collect(),
            connected: (self.connected || self.away).then_some(self.connected),
            site_label: self.site_label.clone(),
            ..EdgeQuery::default()
        })
    }
}

/// Fails for names that no edge has.
fn refuse_unknown(asked: &[String], found: &[ListedEdge]) -> anyhow::Result<()> {
    let is_there = |name: &&str| found.iter().any(|edge| edge.name.as_str() == *name);
    let unknown: Vec<_> = asked.iter().map(String::as_str).filter(|name| !is_there(name)).collect();
    if let Some(verb) = unknown.first().filter(|name| VERBS.contains(name)) {
        bail!("no edge is called {verb}, and `nodes` only lists edges: kubectl prepull node {verb} NAME");
    }
    let names = unknown.join(", ");
    ensure!(unknown.is_empty(), "no edge is called {names}: `kubectl prepull nodes` without names lists all");
    Ok(())
}

/// The commands of `node`, which are easily taken for those of `nodes`.
const VERBS: [&str; 2] = ["revoke", "allow"];

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &NodesArgs,
) -> anyhow::Result<CommandOutcome> {
    if !args.nodes.is_empty() {
        let named = EdgeQuery { names: args.query()?.names, ..EdgeQuery::default() };
        // As many names as can be asked for fit on one page.
        let found = pin!(pages(cluster, named)).try_next().await?;
        refuse_unknown(&args.nodes, &found.map(|page| page.items).unwrap_or_default())?;
    }
    let Some(mut all) = read_all_pages(cluster, args).await? else { return Ok(CommandOutcome::Done) };
    filter_and_sort(&mut all, args.outdated, args.sort);
    let names: Vec<_> = all.items.iter().map(|edge| format!("node/{}", edge.name)).collect();
    session.print(&all, names, |is_wide| {
        let mut table = Table::new(Timestamp::now());
        table.add(&all);
        table.render(session.screen, is_wide)
    })?;
    Ok(CommandOutcome::Done)
}

/// All pages as one list. An edge has less than a kilobyte.
async fn read_all_pages(cluster: &Cluster, args: &NodesArgs) -> anyhow::Result<Option<EdgeList>> {
    let mut pages = pin!(pages(cluster, args.query()?));
    let Some(mut all) = pages.try_next().await? else { return Ok(None) };
    while let Some(page) = pages.try_next().await? {
        all.items.extend(page.items);
        (all.total, all.connected) = (page.total, page.connected);
    }
    all.next = None;
    Ok(Some(all))
}

/// Leaves out what isn't wanted, and puts the rest in order.
fn filter_and_sort(list: &mut EdgeList, outdated: bool, order: Option<EdgeOrder>) {
    if outdated {
        // An older leader doesn't say its version.
        let leader = list.version.as_deref().unwrap_or(env!("CARGO_PKG_VERSION"));
        let wanted = version::parse(leader);
        // A version of another kind, such as of a build of one's own, is not judged.
        let is_old = |edge: &ListedEdge| match edge.version.as_deref() {
            None => true,
            Some(theirs) => version::parse(theirs).is_some_and(|theirs| Some(theirs) < wanted),
        };
        list.items.retain(|edge| edge.connected && is_old(edge));
        (list.total, list.connected) = (list.items.len(), list.items.len());
    }
    match order {
        None => {}
        Some(EdgeOrder::Disk) => {
            let free = |edge: &ListedEdge| edge.disk.as_ref().map_or(u64::MAX, |disk| disk.available);
            list.items.sort_by_key(free);
        }
        Some(EdgeOrder::Version) => {
            list.items.sort_by_cached_key(|edge| edge.version.as_deref().and_then(version::parse));
        }
        Some(EdgeOrder::Seen) => list.items.sort_by_key(|edge| {
            (
                edge.connected,
                edge.last_seen.as_ref().map(|time| time.0),
                edge.connected_since.as_ref().map(|time| time.0),
            )
        }),
    }
}

#[cfg(test)]
mod tests;
