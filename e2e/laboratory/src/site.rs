//! `make site`: one image for the boxes of a site behind one thin uplink, with the traffic on the uplink, the time, and
//! CPU and memory of each box. For operators who want to know the effect on their site.
//!
//! ```text
//!  SiteOptions ─▶ Boxes ─▶ rows: Run::begin ─▶ (faults) ─▶ Run::finish ─▶ SiteFigures ─▶ table, JSON
//! ```

mod options;
mod rows;
mod table;
mod updates;

use std::process::ExitCode;

use prepull_e2e::boxes::Row;
use prepull_e2e::teller::Teller;
use serde::Serialize;

pub(crate) use options::SiteOptions;

use crate::measured::{run_measurement, write_json};

/// Everything that a run measures.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SiteFigures {
    /// The options of the run.
    options: SiteOptions,
    /// Cores and memory of this machine.
    machine: String,
    /// Bytes of the image.
    image_bytes: u64,
    /// One row for each job.
    rows: Vec<Row>,
    /// Notes for the reader.
    notes: Vec<String>,
}

/// Runs the program. The exit status is 0 if every job ended as it should have.
pub(crate) async fn run(options: SiteOptions) -> ExitCode {
    let teller = Teller::new();
    let measure = async {
        let figures = rows::measure(&options, &teller).await?;
        table::print(&figures);
        if let Some(file) = &options.json {
            write_json(file, &figures)?;
        }
        Ok(true)
    };
    run_measurement(&teller, measure).await
}
