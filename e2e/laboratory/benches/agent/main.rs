//! `make bench`: the cost of a pull through the agent against one by the runtime, the memory of both programs, and the
//! duration of a small job.
//!
//! Times are compared as ratios within one run, in alternating rounds, since the machines are noisy. A missed bar is
//! reported and doesn't fail the program; only a failed measurement does.

#![allow(clippy::print_stdout)]

mod download;
mod nodes;
mod overhead;
mod pulls;

use prepull_e2e::prelude::*;

#[tokio::main]
async fn main() -> Result<()> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    overhead::measure().await?;
    download::measure().await?;
    nodes::measure().await
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

/// Prints a value with its bar, and whether the bar is met.
fn print_bar(what: &str, value: f64, limit: f64, unit: &str) {
    let verdict = if value <= limit { "ok" } else { "MISSED" };
    println!("  {what}: {value:.2}{unit} (bar {limit}{unit}) {verdict}");
}
