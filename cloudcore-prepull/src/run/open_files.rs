//! Open files: each connection takes one, so the need grows with the fleet.

use prepull_program::process;
use tracing::warn;

/// Sessions at a time, at most: `max_connections` of the tunnel.
const SESSIONS: u64 = 20_000;
/// What every flood together takes in addition to the sessions: connections that wait (10,000), silent ones (4,096), those
/// of enrolment and of metrics, and the program's own files.
const BESIDE_SESSIONS: u64 = 17_000;

/// Warns if the limit of this process is too low for this number of edge nodes.
pub(super) fn check_limit(edges: usize) {
    let limit = process::open_files_limit();
    if let Some(needed) = find_need_above(limit, edges) {
        warn!(
            limit,
            needed,
            edges,
            "the limit of open files is too low for this fleet in a flood of connections: raise the hard limit \
             (LimitNOFILE, ulimit -Hn)"
        );
    }
}

/// The number of files that a fleet needs, if the limit is lower.
fn find_need_above(limit: Option<u64>, edges: usize) -> Option<u64> {
    let sessions = u64::try_from(edges).map_or(SESSIONS, |edges| edges.min(SESSIONS));
    let needed = sessions + BESIDE_SESSIONS;
    limit.is_some_and(|limit| limit < needed).then_some(needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_limit_below_the_need_counts() {
        for (limit, edges, need) in [
            (None, 50_000, None),
            // The hard limit of many container runtimes.
            (Some(1_048_576), 20_000, None),
            (Some(20_000), 4, None),
            (Some(20_000), 3_000, None),
            (Some(20_000), 3_001, Some(20_001)),
            (Some(1_024), 0, Some(17_000)),
            // No more sessions than the tunnel takes.
            (Some(36_999), 1_000_000, Some(37_000)),
            (Some(37_000), 1_000_000, None),
        ] {
            assert_eq!(find_need_above(limit, edges), need, "{limit:?}, {edges} edges");
        }
    }
}
