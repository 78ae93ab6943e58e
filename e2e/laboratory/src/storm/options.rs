//! Options of the storm.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;

/// Everything that can go wrong does, by chance and all at once, on real parts. Afterwards every job must be as it
/// should be.
#[derive(Clone, Debug, Parser)]
#[command(
    after_help = "Examples:\n  make storm MINUTES=30\n  make storm MINUTES=5 ARGS='--seed 7 --edges 50'"
)]
pub(crate) struct StormOptions {
    /// How long the storm blows. The start and the calm after it take some minutes more
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub minutes: u64,
    /// Simulated edges, beside three real nodes
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u16).range(10..=2000))]
    pub edges: u16,
    /// Seed of the faults, their targets and times. By default a random one; it is printed
    #[arg(long, env = "PREPULL_STORM_SEED")]
    pub seed: Option<u64>,
    /// A directory with the edgecore-prepull of an earlier release, which nodes run at times (BEFORE=REVISION makes it)
    #[arg(long, value_name = "DIR")]
    pub before: Option<PathBuf>,
}

impl StormOptions {
    /// The seed that was given, or one of this moment.
    pub(super) fn seed(&self) -> u64 {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.seed.unwrap_or_else(|| now().as_secs())
    }
}
