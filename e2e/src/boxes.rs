//! `make site`: one image for the boxes of a site behind one thin uplink, with what the uplink carried, the time, and CPU
//! and memory of each box. For operators who want to know what their site would see, and for tests of sites.
//!
//! ```text
//!  Options ─▶ Boxes (cluster, cloud, registry, Lan, an agent and a containerd in each box)
//!               └─ rows: Run::begin ─▶ (meanwhile) ─▶ Run::finish ─▶ Figures ─▶ table, JSON
//! ```

mod faults;
mod figures;
mod liar;
mod options;
mod rows;
mod run;
mod scene;
mod table;

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::fleet::Teller;
use crate::interrupt::unless_interrupted;
use crate::place::Place;

pub use faults::{Fault, Strike, Struck, strike};
pub use figures::{Figures, OfProcess, Row};
pub use liar::Liar;
pub use options::{Options, SERVING};
pub use run::{Order, Run};
pub use scene::{Boxes, Plan, SiteBox};

/// Exit status after Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Runs the program. The exit status is 0 if every job ended as it should have.
pub async fn run(options: Options) -> ExitCode {
    let teller = Teller::new();
    // Held to the end, so that all parts use the same place.
    let place = match Place::here() {
        Ok(place) => place,
        Err(error) => {
            teller.step(&format!("error: {error:#}"));
            return ExitCode::FAILURE;
        }
    };
    let measured: Option<Result<Figures>> =
        Box::pin(unless_interrupted(rows::measure(&options, &teller))).await;
    let Some(measured) = measured else {
        teller.step("Interrupted; everything is stopped.");
        return ExitCode::from(INTERRUPTED);
    };
    teller.step(&format!("Everything is stopped; the logs are in {}", place.logs().display()));
    let written = measured.and_then(|figures| {
        table::print(&figures);
        write_json(&options, &figures)
    });
    if let Err(error) = written {
        teller.step(&format!("error: {error:#}"));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Writes the figures as one line of JSON.
fn write_json(options: &Options, figures: &Figures) -> Result<()> {
    let Some(file) = &options.json else { return Ok(()) };
    let json = serde_json::to_string(figures)?;
    std::fs::write(file, json + "\n").with_context(|| format!("cannot write --json {}", file.display()))
}
