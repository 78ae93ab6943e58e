//! Checks of the node before the first pull: a pure decision on readings of the machine.

use prepull_api::task::{CheckItem, CheckOutcome};
use prepull_api::wire::Filesystem;

use crate::config::CheckLimits;
use crate::tasks::NOT_KNOWN;

/// State of the machine, as far as it could be read.
#[derive(Clone, Debug)]
pub(crate) struct Readings {
    /// File system of the runtime's images, or the reason why it can't be read.
    pub(crate) disk: Result<Filesystem, String>,
    /// Bytes there that removing images would free.
    pub(crate) removable: u64,
    /// Load average of the last minute, and the number of processors.
    pub(crate) load: Option<(f64, usize)>,
    /// Available and total memory in bytes.
    pub(crate) memory: Option<(u64, u64)>,
}

/// Decides whether the node may pull. The reason names every failed item, and not only the first.
pub(crate) fn check_readings(items: &[CheckItem], limits: &CheckLimits, readings: &Readings) -> CheckOutcome {
    let problems: Vec<String> =
        items.iter().filter_map(|item| find_problem(*item, limits, readings)).collect();
    CheckOutcome { passed: problems.is_empty(), reason: problems.join("; ") }
}

fn find_problem(item: CheckItem, limits: &CheckLimits, readings: &Readings) -> Option<String> {
    match item {
        CheckItem::Other => Some(format!("an item of checkItems is {NOT_KNOWN}")),
        CheckItem::Disk => {
            let disk = match &readings.disk {
                Ok(disk) => disk,
                Err(problem) => return Some(format!("disk: {problem}")),
            };
            let needed = limits.disk_min_free.in_bytes(disk.capacity);
            let removable = readings.removable;
            (disk.available.saturating_add(removable) < needed).then(|| {
                let removable = match removable >> 20 {
                    0 => String::new(),
                    mib => format!(", and {mib} MiB in images that nothing needs"),
                };
                format!(
                    "disk: {} has {} MiB free{removable}, less than --disk-min-free {} ({} MiB)",
                    disk.mountpoint,
                    disk.available >> 20,
                    limits.disk_min_free,
                    needed >> 20
                )
            })
        }
        CheckItem::Cpu => {
            let Some((load, processors)) = readings.load else {
                return Some("cpu: the load cannot be read from /proc/loadavg".to_owned());
            };
            #[allow(clippy::cast_precision_loss)] // the number of processors is far below 2^52
            let percent = load * 100.0 / processors.max(1) as f64;
            (percent > f64::from(limits.cpu_max_load.0)).then(|| {
                format!(
                    "cpu: load is {percent:.0}% per processor, more than --cpu-max-load {}",
                    limits.cpu_max_load
                )
            })
        }
        CheckItem::Mem => {
            let Some((available, whole)) = readings.memory else {
                return Some("mem: the memory cannot be read from /proc/meminfo".to_owned());
            };
            let needed = limits.mem_min_free.in_bytes(whole);
            (available < needed).then(|| {
                format!(
                    "mem: {} MiB available, less than --mem-min-free {} ({} MiB)",
                    available >> 20,
                    limits.mem_min_free,
                    needed >> 20
                )
            })
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::machine::{parse_load, parse_meminfo, read_load, read_memory};

    const GIB: u64 = 1 << 30;

    fn readings(free: u64, load: f64, memory: u64) -> Readings {
        Readings {
            disk: Ok(Filesystem {
                mountpoint: "/var/lib/images".to_owned(),
                available: free,
                capacity: 100 * GIB,
            }),
            removable: 0,
            load: Some((load, 4)),
            memory: Some((memory, 8 * GIB)),
        }
    }

    #[test]
    fn the_reason_names_every_failed_item() {
        let limits = CheckLimits::default();
        let bad = readings(GIB, 16.0, 1 << 20);
        assert!(check_readings(&[], &limits, &bad).passed);
        assert!(check_readings(&[CheckItem::Disk], &limits, &readings(10 * GIB, 16.0, 0)).passed);
        let outcome = check_readings(&[CheckItem::Disk, CheckItem::Cpu, CheckItem::Mem], &limits, &bad);
        assert!(!outcome.passed);
        assert_eq!(
            outcome.reason,
            "disk: /var/lib/images has 1024 MiB free, less than --disk-min-free 10% (10240 MiB); \
             cpu: load is 400% per processor, more than --cpu-max-load 90%; \
             mem: 1 MiB available, less than --mem-min-free 100 MiB (100 MiB)"
        );
    }

    #[test]
    fn removable_images_count_as_free() {
        let judge = |free, removable| {
            let readings = Readings { removable, ..readings(free, 0.0, 8 * GIB) };
            check_readings(&[CheckItem::Disk], &CheckLimits::default(), &readings).reason
        };
        assert_eq!(judge(4 * GIB, 6 * GIB), "");
        assert_eq!(
            judge(4 * GIB, 5 * GIB),
            "disk: /var/lib/images has 4096 MiB free, and 5120 MiB in images that nothing needs, less than --disk-min-free 10% (10240 MiB)"
        );
    }

    #[test]
    fn an_unreadable_item_fails() {
        let nothing =
            Readings { disk: Err("no such mount".to_owned()), removable: 0, load: None, memory: None };
        for item in [CheckItem::Disk, CheckItem::Cpu, CheckItem::Mem] {
            assert!(!check_readings(&[item], &CheckLimits::default(), &nothing).passed, "{item:?}");
        }
    }

    #[test]
    fn an_unknown_item_fails() {
        let outcome =
            check_readings(&[CheckItem::Other], &CheckLimits::default(), &readings(90 * GIB, 0.0, 8 * GIB));
        assert!(!outcome.passed && outcome.reason.contains("update edgecore-prepull"), "{outcome:?}");
    }

    #[test]
    fn load_and_memory_can_be_read() {
        assert!(read_load().is_some_and(|(_, processors)| processors > 0));
        assert_eq!(parse_load("1.50 0.1 0.1 1/2 3", "cpu  1\ncpu0 1\ncpu1 1\nintr 5\n"), Some((1.5, 2)));
        let (available, whole) = read_memory().unwrap();
        assert!(available <= whole);
        assert_eq!(parse_meminfo("MemTotal: 8 kB\nMemAvailable: 4 kB\n"), Some((4096, 8192)));
        assert_eq!(parse_meminfo("garbage"), None);
    }
}
