//! `kubectl prepull nodes`.

mod table;

use std::pin::pin;

use anyhow::{bail, ensure};
use clap::Args;
use futures::TryStreamExt;
use jiff::Timestamp;
use prepull_api::edges::{Edge, EdgeQuery, MAX_NAMES};
use prepull_api::selector::Selector;
use prepull_api::task::NodeName;

use crate::cluster::Cluster;
use crate::edges::{SystemArgs, pages};
use crate::output::Output;
use crate::output::{Format, print, print_object};
use crate::problem::WrongUsage;
use crate::session::{Ended, Session};
use table::Table;

/// The arguments of `nodes`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl prepull nodes
  kubectl prepull nodes -l topology.kubernetes.io/zone=north --away
  kubectl prepull nodes edge-1 edge-2 -o wide
  kubectl prepull nodes -o json | jq '.items[] | select(.version != \"0.1.0\") | .name'

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
    /// The label of Nodes that holds their site [default: that of cloudcore-prepull run --site-label].
    #[arg(long, value_name = "KEY")]
    site_label: Option<String>,
    #[command(flatten)]
    system: SystemArgs,
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
fn refuse_unknown(asked: &[String], found: &[Edge]) -> anyhow::Result<()> {
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

pub(crate) async fn run(session: &Session, cluster: &Cluster, args: &NodesArgs) -> anyhow::Result<Ended> {
    if !args.nodes.is_empty() {
        let named = EdgeQuery { names: args.query()?.names, ..EdgeQuery::default() };
        // As many names as can be asked for fit on one page.
        let found = pin!(pages(cluster, &args.system, named)).try_next().await?;
        refuse_unknown(&args.nodes, &found.map(|page| page.items).unwrap_or_default())?;
    }
    let mut pages = pin!(pages(cluster, &args.system, args.query()?));
    let output = session.global.output;
    match output.and_then(Output::format) {
        Some(format) => print_all(pages, format).await?,
        None if output == Some(Output::Name) => {
            while let Some(page) = pages.try_next().await? {
                let names: Vec<_> = page.items.iter().map(|edge| format!("node/{}\n", edge.name)).collect();
                print(&names.concat())?;
            }
        }
        None => {
            let mut table = Table::new(Timestamp::now());
            // Only the cells that are shown stay in memory.
            while let Some(page) = pages.try_next().await? {
                table.add(&page);
            }
            print(&table.render(session.screen, output == Some(Output::Wide)))?;
        }
    }
    Ok(Ended::Done)
}

async fn print_all(
    mut pages: std::pin::Pin<&mut impl futures::Stream<Item = anyhow::Result<prepull_api::edges::EdgeList>>>,
    format: Format,
) -> anyhow::Result<()> {
    let Some(mut all) = pages.try_next().await? else { return Ok(()) };
    while let Some(page) = pages.try_next().await? {
        all.items.extend(page.items);
        (all.total, all.connected, all.next) = (page.total, page.connected, page.next);
    }
    all.next = None;
    print_object(&all, format)
}

#[cfg(test)]
mod tests;
