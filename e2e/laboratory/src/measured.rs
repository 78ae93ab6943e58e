//! The common parts of the measuring programs: reported steps, an end, figures in a file.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use prepull_e2e::place::Place;
use prepull_e2e::teller::Teller;
use serde::Serialize;

use crate::interrupt::{INTERRUPTED, unless_interrupted};

/// Measures until the end or Ctrl-C. The exit status is 0 if `measure` returns true.
pub(crate) async fn run_measurement(
    teller: &Teller,
    measure: impl Future<Output = Result<bool>>,
) -> ExitCode {
    // Held to the end, so that all parts use the same place.
    let place = match Place::here() {
        Ok(place) => place,
        Err(error) => {
            teller.step(&format!("error: {error:#}"));
            return ExitCode::FAILURE;
        }
    };
    let Some(measured) = Box::pin(unless_interrupted(measure)).await else {
        teller.step("Interrupted; everything is stopped.");
        return ExitCode::from(INTERRUPTED);
    };
    teller.step(&format!("Everything is stopped; the logs are in {}", place.logs().display()));
    match measured {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            teller.step("The job did not end as it should have: see the table.");
            ExitCode::FAILURE
        }
        Err(error) => {
            teller.step(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes the figures to the file as one line of JSON.
pub(crate) fn write_json(file: &Path, figures: &impl Serialize) -> Result<()> {
    let json = serde_json::to_string(figures)?;
    std::fs::write(file, json + "\n").with_context(|| format!("cannot write --json {}", file.display()))
}
