//! The laboratory: measures, shows and shakes the system on the parts of the harness, [`prepull_e2e`]. No test needs it.
//!
//! - [`demo`]: `make demo`, a small cluster, edge nodes and a job.
//! - [`fleet`]: `make fleet`, one job over simulated edges, measured.
//! - [`site`]: `make site`, one image for the boxes of a site, measured.
//! - [`storm`]: `make storm`, faults by chance and all at once.
//! - [`bench`]: `make bench`, the numbers to hold.
//!
//! It's one program, since each one would be linked with all of the harness.

mod bench;
mod demo;
mod fleet;
mod interrupt;
mod measured;
mod site;
mod storm;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

/// Programs that measure, show and shake the system. They need the environment that e2e/setup/with-parts.sh makes.
#[derive(Parser)]
#[command(name = "laboratory", version)]
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
enum Laboratory {
    /// Shows a job from two registries to three nodes; KEEP=1 leaves the cluster running
    Demo,
    Fleet(fleet::FleetOptions),
    Site(site::SiteOptions),
    Storm(storm::StormOptions),
    /// Measures pulls through the agent, its memory, and a small job
    BenchAgent,
    /// Measures jobs over fleets of up to 10,000 simulated edges, or NODES of the environment
    BenchFleet,
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    Ok(match Laboratory::parse() {
        Laboratory::Demo => demo::run().await,
        Laboratory::Fleet(options) => fleet::run(options).await,
        Laboratory::Site(options) => site::run(options).await,
        // It holds every part of the scene.
        Laboratory::Storm(options) => Box::pin(storm::run(options)).await,
        Laboratory::BenchAgent => bench::agent::run().await?,
        Laboratory::BenchFleet => bench::fleet::run().await?,
    })
}
