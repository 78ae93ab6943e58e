//! CPU time and memory of a process, as the kernel counts them.

use std::time::Duration;

use anyhow::{Context, Result};

/// Ticks a second in /proc/PID/stat: the same on every Linux since 2.6, regardless of the kernel's own clock rate.
const TICKS: f64 = 100.0;

/// CPU time and memory of a process at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// CPU time since the start of the process.
    pub cpu: Duration,
    /// Resident memory in bytes.
    pub rss: u64,
    /// Largest resident memory so far, in bytes.
    pub peak: u64,
}

impl Usage {
    /// Reads the usage of a process.
    pub fn of_process(pid: u32) -> Result<Self> {
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {path}: is the process gone?"))
        };
        parse(&read("stat")?, &read("status")?).with_context(|| format!("cannot understand /proc/{pid}"))
    }

    /// Reads the usage of this process.
    pub fn of_this_process() -> Result<Self> {
        Self::of_process(std::process::id())
    }
}

fn parse(stat: &str, status: &str) -> Option<Usage> {
    // Fields 14 and 15. The name, field 2, may contain blanks and parentheses: what follows its last one is field 3.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<u32>().ok();
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    Some(Usage {
        cpu: Duration::from_secs_f64(f64::from(ticks(14)? + ticks(15)?) / TICKS),
        rss: kib("VmRSS:")? * 1024,
        peak: kib("VmHWM:")? * 1024,
    })
}

/// Describes this machine: cores and memory.
pub fn describe_machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZeroUsize::get);
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = total.and_then(|kib| kib.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
    format!("{cores} cores, {} GiB", kib.div_ceil(1024 * 1024))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn usage_is_parsed_with_any_process_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 1 0 0 0 150 50 0 0 20 0 3 0 99 0 0";
        let status = "Name:\ta) b (c\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n";
        let Usage { cpu, rss, peak } = parse(stat, status).unwrap();
        assert_eq!((cpu, rss, peak), (Duration::from_secs(2), 1 << 20, 2 << 20));
        assert!(Usage::of_this_process().unwrap().rss > 1 << 20);
    }
}
