//! `make fleet`: measurements of a release cloudcore-prepull with a real API server, thousands of simulated edges, and
//! one job over all of them. For operators who size a cluster, and for `make bench`.
//!
//! ```text
//!  Options ─▶ Scene (cluster, cloud, fleet) ─▶ measure ─▶ Figures ─▶ table, JSON
//!                                                └─ requests (the API server's metrics), sizes
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

use crate::measured::measured;

pub use figures::{Connect, Figures, Idle, JobFigures, Kill, Reports};
pub use kruise::KruiseFigures;
pub use listing::Listing;
pub use measure::Plan;
pub use old_jobs::OldJobFigures;
pub use options::Options;
pub use people::{Cost, PeopleFigures, Scrapes};
pub use rotation::RotationFigures;
pub use scene::Scene;
pub use table::{print, print_old_jobs};

/// Runs the program. The exit status is 0 if every node ended and nothing was pulled twice.
pub async fn run(options: Options) -> ExitCode {
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
            let figures = Figures::measure(&options, &teller).await?;
            print(&figures);
            write_json(&options, &figures)?;
            Ok(figures.job.is_whole())
        }
    };
    measured(&teller, measure).await
}

impl Figures {
    /// Starts a fleet with these options, measures it, and stops it.
    pub async fn measure(options: &Options, teller: &Teller) -> Result<Self> {
        let (mut scene, connect) = Scene::start(options, teller).await?;
        let idle = match options.idle {
            Some(time) => Some(scene.idle(time, teller).await?),
            None => None,
        };
        let scraping = if options.people { Some(scene.scrape().await?) } else { None };
        let job = scene.job(&options.plan("fleet"), teller).await?;
        let people = match scraping {
            Some(scraping) => Some(scene.people("fleet", scraping, teller).await?),
            None => None,
        };
        let (cluster, machine) = (scene.cluster().version().await?, prepull_e2e::usage::machine());
        Ok(Self { options: options.clone(), cluster, machine, connect, idle, job, people })
    }
}

/// Writes the figures as one line of JSON.
#[allow(clippy::print_stdout)]
fn write_json(options: &Options, figures: &impl Serialize) -> Result<()> {
    match &options.json {
        Some(file) => crate::measured::write_json(file, figures)?,
        None => println!("\n{}", serde_json::to_string(figures)?),
    }
    Ok(())
}
