//! `make bench`: the cost of a pull, a session and a job, with the bars that they keep to. A missed bar is reported and
//! doesn't fail the program; only a failed measurement does.

#![allow(clippy::print_stdout)]

pub(crate) mod agent;
pub(crate) mod fleet;

/// Prints a value with its bar, and whether the bar is met.
fn print_bar(what: &str, value: f64, limit: f64, unit: &str) {
    let verdict = if value <= limit { "ok" } else { "MISSED" };
    println!("  {what}: {value:.2}{unit} (bar {limit}{unit}) {verdict}");
}
