//! `kubectl prepull delta`.
//!
//! ```text
//!  OLD, NEW ─▶ registry ─▶ pairs (by platform) ─▶ layers in files ─▶ prepull_delta::make ─▶ diffs ─▶ registry
//!                                                                        └▶ report ─▶ view (a table, or -o json)
//! ```
//!
//! It talks to registries, and not to the API server. That is all in `registry`.

mod credentials;
mod pair;
mod produce;
mod registry;
mod view;

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use prepull_api::image::Reference;

use crate::problem;
use crate::session::{CommandOutcome, Session};
use registry::ImageRegistry;

/// The arguments of `delta`.
#[derive(Debug, Args)]
#[command(after_help = "\
Compares two images file by file, for each platform that both have, and pushes the differences beside NEW, as referrers of its
manifests. Agents that have OLD then download those instead of the layers: docs/deltas.md. Nothing of NEW is changed, and
every difference is applied and compared before it is pushed. Needs room for both images, unpacked, in the scratch directory.

Credentials come from docker's config.json and its credential helpers. The cluster is not asked.

Examples:
  kubectl prepull delta harbor.example/shop/web:v1 harbor.example/shop/web:v2
  kubectl prepull delta web:v1 web:v2 --dry-run
  kubectl prepull delta web:v1 web:v2 --platform linux/arm64 -o json")]
pub(crate) struct DeltaArgs {
    /// The image that nodes have.
    old: String,
    /// The image that they will get; the deltas are pushed to its repository.
    new: String,
    /// Only this platform, such as linux/arm64; may be repeated [default: all that both images have].
    #[arg(long, value_name = "PLATFORM")]
    platform: Vec<String>,
    /// Make and apply the deltas, and push nothing.
    #[arg(long)]
    dry_run: bool,
    /// Docker's configuration, with the credentials [default: $DOCKER_CONFIG/config.json, ~/.docker/config.json, or
    /// podman's auth.json].
    #[arg(long, value_name = "FILE")]
    docker_config: Option<PathBuf>,
    /// Directory with a hosts.toml for each registry, as containerd has it, for mirrors and CAs.
    #[arg(long, value_name = "DIR")]
    registry_config_path: Option<PathBuf>,
    /// Directory for the unpacked images [default: that for temporary files].
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Threads [default: one for each core].
    #[arg(long, value_name = "NUMBER")]
    threads: Option<usize>,
}

pub(crate) async fn run(session: &Session, args: &DeltaArgs) -> anyhow::Result<CommandOutcome> {
    let parse = |text: &str| Reference::parse(text).map_err(|error| problem::WrongUsage(error.to_string()));
    let (old, new) = (parse(&args.old)?.normalized(), parse(&args.new)?.normalized());
    let config = credentials::DockerConfig::read(args.docker_config.as_deref())?;
    let client = registry::client(args.registry_config_path.clone());
    let old = ImageRegistry::open(&client, &config, &old).await?;
    let new = ImageRegistry::open(&client, &config, &new).await?;
    let (olds, news) = (old.platform_images().await?, new.platform_images().await?);
    let pairs = pair::find_pairs(&olds, &news, &args.platform)?;
    let scratch = args.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let threads = args.threads.or_else(|| Some(std::thread::available_parallelism().ok()?.get()));
    let work = produce::DeltaWork { old: &old, new: &new, scratch: &scratch, threads: threads.unwrap_or(1) };
    let mut reports = Vec::new();
    for pair in pairs {
        let platform = pair.new.platform.clone();
        let delta = produce::make(&work, pair).await.with_context(|| platform.clone())?;
        let is_pushed = !args.dry_run && delta.report.is_worth_it();
        if is_pushed {
            produce::push(&new, &delta)
                .await
                .with_context(|| format!("cannot push the delta for {platform}"))?;
        }
        reports.push(view::PlatformReport { pushed: is_pushed, ..delta.report });
    }
    if reports.is_empty() {
        bail!("{} and {} have no platform in common", args.old, args.new);
    }
    let names = reports
        .iter()
        .filter(|report| report.pushed)
        .map(|report| format!("{}@{}", new.name(), report.delta));
    let names: Vec<_> = names.collect();
    let found = view::DeltaReport { old: args.old.clone(), new: args.new.clone(), platforms: reports };
    session.print(&found, names, |_| view::render(&found, args.dry_run, session.screen))?;
    Ok(CommandOutcome::Done)
}
