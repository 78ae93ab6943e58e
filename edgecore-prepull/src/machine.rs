//! Load and memory of this machine.

/// Reads the load average of the last minute, and the number of processors of the machine. The load is the whole
/// machine's, even if this process may use fewer processors.
pub(crate) fn read_load() -> Option<(f64, usize)> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    parse_load(&load, &std::fs::read_to_string("/proc/stat").ok()?)
}

pub(crate) fn parse_load(load: &str, stat: &str) -> Option<(f64, usize)> {
    let load = load.split_ascii_whitespace().next()?.parse().ok()?;
    let is_processor = |line: &&str| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    Some((load, stat.lines().filter(is_processor).count()))
}

/// Reads the available and the total memory in bytes.
pub(crate) fn read_memory() -> Option<(u64, u64)> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

pub(crate) fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((field("MemAvailable")?, field("MemTotal")?))
}
