//! `make fleet`: measurements of a release cloudcore-prepull with a real API server, thousands of simulated edges, and
//! one job over all of them. For operators who size a cluster, and for `make bench`.
//!
//! ```text
//!  FleetOptions ─▶ FleetScene (cluster, cloud, fleet) ─▶ measure ─▶ FleetFigures ─▶ table, JSON
//!                                                          └─ requests (the API server's metrics), sizes
//! ```

mod figures;
mod kruise;
mod listing;
mod measure;
mod old_jobs;
mod options;
mod people;
mod requests;
mod rotation;
mod scene;
mod sizes;
mod table;

use std::process::ExitCode;

use anyhow::Result;
use prepull_e2e::teller::Teller;
use serde::Serialize;

use crate::measured::run_measurement;

pub(crate) use figures::{Connect, FleetFigures, Idle, JobFigures, Kill};
pub(crate) use kruise::KruiseFigures;
pub(crate) use listing::EdgeListing;
pub(crate) use old_jobs::OldJobFigures;
pub(crate) use options::FleetOptions;
pub(crate) use people::PeopleFigures;
pub(crate) use rotation::RotationFigures;
pub(crate) use scene::FleetScene;
pub(crate) use table::{print, print_old_jobs};

/// Runs the program. The exit status is 0 if every node ended and nothing was pulled twice.
pub(crate) async fn run(options: FleetOptions) -> ExitCode {
    let teller = Teller::new();
    let measure = async {
        if options.rotate {
            let figures = RotationFigures::measure(&options, &teller).await?;
            write_json(&options, &figures)?;
            Ok(figures.is_whole())
        } else if let Some(old) = options.old_jobs {
            let figures = OldJobFigures::measure(&options, old, &teller).await?;
            table::print_old_jobs(&figures);
            write_json(&options, &figures)?;
            Ok(figures.is_whole())
        } else if options.kruise {
            let figures = KruiseFigures::measure(&options, &teller).await?;
            table::print_kruise(&figures);
            write_json(&options, &figures)?;
            Ok(figures.is_whole())
        } else {
            let figures = FleetFigures::measure(&options, &teller).await?;
            print(&figures);
            write_json(&options, &figures)?;
            Ok(figures.job.is_whole())
        }
    };
    run_measurement(&teller, measure).await
}

impl FleetFigures {
    /// Starts a fleet with these options, measures it, and stops it.
    pub(crate) async fn measure(options: &FleetOptions, teller: &Teller) -> Result<Self> {
        let (mut scene, connect) = FleetScene::start(options, teller).await?;
        let idle = match options.idle {
            Some(time) => Some(scene.measure_idle(time, teller).await?),
            None => None,
        };
        let scraping = if options.people { Some(scene.start_scraping().await?) } else { None };
        let job = scene.measure_job(&options.job_to_measure("fleet"), teller).await?;
        let people = match scraping {
            Some(scraping) => Some(scene.measure_people("fleet", scraping, teller).await?),
            None => None,
        };
        let (cluster, machine) = (scene.cluster().version().await?, prepull_e2e::usage::describe_machine());
        Ok(Self { options: options.clone(), cluster, machine, connect, idle, job, people })
    }
}

/// Writes the figures as one line of JSON.
#[allow(clippy::print_stdout)]
fn write_json(options: &FleetOptions, figures: &impl Serialize) -> Result<()> {
    match &options.json {
        Some(file) => crate::measured::write_json(file, figures)?,
        None => println!("\n{}", serde_json::to_string(figures)?),
    }
    Ok(())
}
