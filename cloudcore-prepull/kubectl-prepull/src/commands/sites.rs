//! `kubectl prepull sites`.

mod table;

use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiff::Timestamp;
use prepull_api::edges::sites::{SiteList, SiteQuery};

use crate::cluster::Cluster;
use crate::edges::read_sites;
use crate::output::{OutputFormat, print, print_object, print_separator};
use crate::problem;
use crate::progress::follow::run_bounded;
use crate::screen::{Screen, sanitize_line};
use crate::session::{CommandOutcome, Session};

/// How often --watch asks the leader: a question takes it some milliseconds.
const INTERVAL: Duration = Duration::from_secs(2);

/// The arguments of `sites`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl prepull sites
  kubectl prepull sites store-17 --watch
  kubectl prepull sites -o json | jq '.items[] | select(.leasesLost > 0) | .name'

The busiest sites come first, at most a thousand. UPLINK is what nodes download over the uplink of their site now, and SHARED
what they got from neighbours since the leader began to lead, both as the nodes say. LOST are downloads that were given to
another node, because they made too little progress. With SITE each download over its uplink is listed.

On a terminal --watch shows a table that moves, elsewhere a table for each change, with -o json a document for each change.

Exit status: 0; with --watch 3 after --timeout, 130 after Ctrl-C.")]
pub(crate) struct SitesArgs {
    /// List the downloads over the uplink of this site.
    #[arg(value_name = "SITE")]
    site: Option<String>,
    /// Go on and show what changes.
    #[arg(short, long)]
    watch: bool,
    /// Watch for at most this time.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, requires = "watch")]
    timeout: Option<Duration>,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &SitesArgs,
) -> anyhow::Result<CommandOutcome> {
    let list = query_sites(cluster, args).await?;
    if args.watch {
        return run_bounded(watch_sites(session, cluster, args, list), args.timeout).await;
    }
    print_sites(session, args, &list)?;
    Ok(CommandOutcome::Done)
}

async fn query_sites(cluster: &Cluster, args: &SitesArgs) -> anyhow::Result<SiteList> {
    read_sites(cluster, &SiteQuery { site: args.site.clone() }).await
}

fn print_sites(session: &Session, args: &SitesArgs, list: &SiteList) -> anyhow::Result<()> {
    let output = session.global.output;
    if let Some(format) = output.and_then(OutputFormat::format) {
        return print_object(list, format);
    }
    if output == Some(OutputFormat::Name) {
        let names: Vec<_> =
            list.items.iter().map(|site| format!("site/{}\n", sanitize_line(&site.name))).collect();
        return print(&names.concat());
    }
    print(&text(session, args, list, session.screen))
}

fn text(session: &Session, args: &SitesArgs, list: &SiteList, screen: Screen) -> String {
    let is_wide = session.global.output == Some(OutputFormat::Wide);
    table::render(list, args.site.is_some(), screen, is_wide, Timestamp::now())
}

/// The line below a table that isn't true any more.
fn silence_line(since: Timestamp) -> String {
    format!("\nthe leader hasn't answered since {}; trying again", since.strftime("%H:%M:%S UTC"))
}

/// Shows the sites until the person stops it.
async fn watch_sites(
    session: &Session,
    cluster: &Cluster,
    args: &SitesArgs,
    mut list: SiteList,
) -> anyhow::Result<CommandOutcome> {
    let moves =
        session.screen.is_terminal && matches!(session.global.output, None | Some(OutputFormat::Wide));
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
    bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    let (mut shown, mut lost_since) = (None, None);
    loop {
        if moves {
            // The person may have changed the size of the window.
            let text = text(session, args, &list, Screen::of_stdout(session.global.no_color));
            bar.set_message(format!(
                "{}{}",
                text.trim_end(),
                lost_since.map(silence_line).unwrap_or_default()
            ));
            bar.tick();
        } else if shown.as_ref() != Some(&list) {
            if let (Some(_), Some(format)) = (&shown, session.global.output.and_then(OutputFormat::format)) {
                print_separator(format)?;
            }
            print_sites(session, args, &list)?;
            shown = Some(list.clone());
        }
        tokio::time::sleep(INTERVAL).await;
        match query_sites(cluster, args).await {
            Ok(new) => (list, lost_since) = (new, None),
            Err(error) => {
                if lost_since.is_none() && !moves {
                    problem::print_note(&format!("trying again: {}", problem::error_text(&error)));
                }
                lost_since.get_or_insert_with(Timestamp::now);
            }
        }
    }
}

#[cfg(test)]
mod tests;
