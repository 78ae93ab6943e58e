//! Figures as a table for people.

#![allow(clippy::print_stdout)]

use prepull_e2e::boxes::{OfProcess, Row};

use super::SiteFigures;

/// Prints the figures to standard output.
pub(super) fn print(figures: &SiteFigures) {
    let SiteFigures { options, machine, image_bytes, rows, notes } = figures;
    println!(
        "\nAn image of {} MiB in {} layers; an uplink of {} kbit/s, {} ms, {} % lost",
        mib(*image_bytes),
        options.layers,
        options.rate / 1000,
        options.delay.as_millis(),
        options.loss * 100.0
    );
    println!("All parts on this machine: {machine}\n");
    println!(
        "{:46} {:^17} {:>6} {:^15}  {:^20}  {:^20}  {:^13}",
        "", "uplink, down", "up", "time", "agent", "containerd", "cloudcore"
    );
    println!(
        "{:46} {:>8} {:>8} {:>6} {:>7} {:>7}  {:>13} {:>6}  {:>13} {:>6}  {:>6} {:>6}",
        "", "MiB", "× image", "MiB", "s", "× alone", "CPU s", "MiB", "CPU s", "MiB", "CPU s", "MiB"
    );
    let alone = rows.first().map_or(1.0, |row| row.seconds);
    for row in rows {
        println!("{}", format_row(row, *image_bytes, alone));
    }
    println!("\nCPU: mean and most of a box; MiB: the largest memory of a box.");
    for note in notes {
        println!("{note}");
    }
}

fn format_row(row: &Row, image: u64, alone: f64) -> String {
    format!(
        "{:46} {:>8} {:>8.2} {:>6} {:>7.1} {:>7.2}  {}  {}  {:>6.2} {:>6}",
        row.what,
        mib(row.down),
        thousandths(row.down, image),
        mib(row.up),
        row.seconds,
        row.seconds / alone,
        processes(&row.agents),
        processes(&row.containerds),
        row.cloud.cpu_seconds,
        mib(row.cloud.peak)
    )
}

fn processes(all: &[OfProcess]) -> String {
    let count = f64::from(u32::try_from(all.len()).unwrap_or(u32::MAX)).max(1.0);
    let mean = all.iter().map(|process| process.cpu_seconds).sum::<f64>() / count;
    let most = all.iter().map(|process| process.cpu_seconds).fold(0.0, f64::max);
    let peak = all.iter().map(|process| process.peak).max().unwrap_or(0);
    format!("{mean:>6.2} {most:>6.2} {:>6}", mib(peak))
}

/// The ratio of two numbers of bytes, to a thousandth.
fn thousandths(bytes: u64, of: u64) -> f64 {
    f64::from(u32::try_from(bytes * 1000 / of.max(1)).unwrap_or(u32::MAX)) / 1000.0
}

/// Formats bytes as MiB, in tenths.
fn mib(bytes: u64) -> String {
    let tenths = bytes * 10 / (1024 * 1024);
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_compares_with_one_box_alone() {
        let process = |cpu_seconds, peak| OfProcess { cpu_seconds, peak };
        let row = Row {
            what: "3 boxes".to_owned(),
            boxes: 3,
            seconds: 30.0,
            down: 3 << 20,
            up: 1 << 19,
            have: 3,
            from_registry: 0,
            from_peers: 0,
            most_served: 0,
            cloud: process(0.25, 3 << 20),
            agents: vec![process(1.0, 1 << 20), process(3.0, 2 << 20)],
            containerds: vec![process(0.5, 1 << 20)],
        };
        let words = format_row(&row, 2 << 20, 20.0);
        let words: Vec<_> = words.split_whitespace().skip(2).collect();
        assert_eq!(
            words,
            [
                "3.0", "1.50", "0.5", "30.0", "1.50", "2.00", "3.00", "2.0", "0.50", "0.50", "1.0", "0.25",
                "3.0"
            ]
        );
    }
}
