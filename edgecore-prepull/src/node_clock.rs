//! The clock of the node's own windows.

use anyhow::ensure;
use prepull_api::download::MAX_WINDOWS;
use tracing::warn;

use crate::config::DownloadWindow;
use crate::tasks::agent::NodeWindows;
use crate::time_zone;

/// The node's time zone, and the windows of its settings.
pub(crate) fn node_clock(windows: Vec<DownloadWindow>) -> anyhow::Result<NodeWindows> {
    let count = windows.len();
    ensure!(count <= MAX_WINDOWS, "{count} times --download-window; at most {MAX_WINDOWS} are allowed");
    let time_zone = time_zone::find_name();
    if time_zone.is_none() {
        warn!(
            "the time zone of this machine is not known: windows in the node's own zone are in UTC (set TZ to a name of the IANA database)"
        );
    }
    let windows = windows.into_iter().map(|DownloadWindow(window)| window).collect();
    Ok(NodeWindows { time_zone, windows, cloud_windows: Vec::new() })
}
