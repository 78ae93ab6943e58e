//! `make fleet`: a real cluster, a release cloudcore-prepull, thousands of simulated edges and one job over all of
//! them, measured. For operators who size a cluster, and for `make bench`.
//!
//! ```text
//!  Options ─▶ Scene (cluster, cloud, fleet) ─▶ measure ─▶ Figures ─▶ table, JSON
//!                                                └─ requests (the API server's metrics), sizes
//! ```

mod figures;
mod measure;
mod options;
mod requests;
mod scene;
mod sizes;
mod table;
mod teller;

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::place::Place;

pub use figures::{Connect, Figures, Idle, JobFigures, Kill, Reports};
pub use measure::Plan;
pub use options::Options;
pub use scene::Scene;
pub use table::print;
pub use teller::Teller;

/// The exit status of a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// Runs the program. The exit status is 0 where every node came to an end and nothing was pulled twice.
pub async fn run(options: Options) -> ExitCode {
    let teller = Teller::new();
    // Held to the end, so that its name and its logs stay what they are.
    let place = match Place::here() {
        Ok(place) => place,
        Err(error) => {
            teller.step(&format!("error: {error:#}"));
            return ExitCode::FAILURE;
        }
    };
    let measured = tokio::select! {
        measured = Figures::measure(&options, &teller) => measured,
        _ = tokio::signal::ctrl_c() => {
            teller.step("Interrupted; everything is stopped.");
            return ExitCode::from(INTERRUPTED);
        }
    };
    teller.step(&format!("Everything is stopped; the logs are in {}", place.logs().display()));
    match measured.and_then(|figures| show(&options, &figures).map(|()| figures)) {
        Ok(figures) if figures.job.is_whole() => ExitCode::SUCCESS,
        Ok(_) => {
            teller.step("The job did not end as it should have: see the table.");
            ExitCode::FAILURE
        }
        Err(error) => {
            teller.step(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

impl Figures {
    /// Starts what the options ask for, measures it, and stops it.
    pub async fn measure(options: &Options, teller: &Teller) -> Result<Self> {
        let (mut scene, connect) = Scene::set(options, teller).await?;
        let idle = match options.idle {
            Some(time) => Some(scene.idle(time, teller).await?),
            None => None,
        };
        let job = scene.job(&options.plan("fleet"), teller).await?;
        let (cluster, machine) = (scene.cluster().version().await?, crate::usage::machine());
        Ok(Self { options: options.clone(), cluster, machine, connect, idle, job })
    }
}

/// The table for people, and one line for programs.
#[allow(clippy::print_stdout)]
fn show(options: &Options, figures: &Figures) -> Result<()> {
    print(figures);
    let json = serde_json::to_string(figures)?;
    match &options.json {
        Some(file) => std::fs::write(file, json + "\n")
            .with_context(|| format!("cannot write --json {}", file.display()))?,
        None => println!("\n{json}"),
    }
    Ok(())
}
