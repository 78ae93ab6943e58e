//! `kubectl prepull sites`.

mod table;

use clap::Args;
use jiff::Timestamp;
use prepull_api::edges::sites::SiteQuery;

use crate::cluster::Cluster;
use crate::edges::{SystemArgs, sites};
use crate::output::{Output, print, print_object};
use crate::screen::tame;
use crate::session::{Ended, Session};

/// The arguments of `sites`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl prepull sites
  kubectl prepull sites store-17
  kubectl prepull sites -o json | jq '.items[] | select(.leasesLost > 0) | .name'

The busiest sites come first, at most a thousand. UPLINK is what nodes download over the uplink of their site now, and SHARED
what they got from neighbours since the leader began to lead, both as the nodes say. LOST are downloads that were given to
another node, because they made too little progress. With SITE each download over its uplink is listed.")]
pub(crate) struct SitesArgs {
    /// List the downloads over the uplink of this site.
    #[arg(value_name = "SITE")]
    site: Option<String>,
    #[command(flatten)]
    system: SystemArgs,
}

pub(crate) async fn run(session: &Session, cluster: &Cluster, args: &SitesArgs) -> anyhow::Result<Ended> {
    let list = sites(cluster, &args.system, &SiteQuery { site: args.site.clone() }).await?;
    let output = session.global.output;
    match output.and_then(Output::format) {
        Some(format) => print_object(&list, format)?,
        None if output == Some(Output::Name) => {
            let names: Vec<_> =
                list.items.iter().map(|site| format!("site/{}\n", tame(&site.name))).collect();
            print(&names.concat())?;
        }
        None => {
            let is_wide = output == Some(Output::Wide);
            let with_downloads = args.site.is_some();
            print(&table::render(&list, with_downloads, session.screen, is_wide, Timestamp::now()))?;
        }
    }
    Ok(Ended::Done)
}

#[cfg(test)]
mod tests;
