//! The cost of a pull through the agent against one by the runtime, the memory of both programs, and the duration of a
//! small job.
//!
//! Times are compared as ratios within one run, in alternating rounds, since the machines are noisy.

mod download;
mod nodes;
mod overhead;
mod pulls;

use std::process::ExitCode;

use prepull_e2e::prelude::*;

use super::print_bar;

pub(crate) async fn run() -> Result<ExitCode> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    overhead::measure().await?;
    download::measure().await?;
    nodes::measure().await?;
    Ok(ExitCode::SUCCESS)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], values[middle])
    } else {
        values[middle]
    }
}

/// The median of the ratios of two series, the least of them and the most.
fn ratios(of: &[f64], to: &[f64]) -> [f64; 3] {
    let mut ratios: Vec<_> = of.iter().zip(to).map(|(of, to)| of / to).collect();
    let median = median(&mut ratios);
    [median, ratios[0], ratios[ratios.len() - 1]]
}
