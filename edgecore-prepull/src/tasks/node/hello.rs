//! The node's description of itself for the cloud.

use std::time::Duration;

use prepull_api::sites::PeerDoor;
use prepull_api::wire::Hello;
use tokio::time::timeout;

use crate::images::puller::Puller;
use crate::metrics::AgentMetrics;

/// Longest wait for the runtime, because the cloud waits for `Hello`. A runtime that takes longer is omitted.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Queries the runtime, and completes what is known of the node already.
pub(super) async fn describe_node(puller: &impl Puller, metrics: &AgentMetrics, known: Hello) -> Hello {
    let (streams, runtime, image_filesystem, pins) = tokio::join!(
        timeout(PATIENCE, puller.can_stream_layers()),
        timeout(PATIENCE, puller.read_version()),
        timeout(PATIENCE, puller.read_filesystem()),
        timeout(PATIENCE, puller.pinning_jobs())
    );
    let runtime = runtime.ok().and_then(Result::ok);
    metrics.set_runtime_up(runtime.is_some());
    Hello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        os: std::env::consts::OS.to_owned(),
        arch: to_go_arch(std::env::consts::ARCH).to_owned(),
        runtime,
        image_filesystem: image_filesystem.ok().and_then(Result::ok),
        trusts: None, // the tunnel knows
        pins: pins.ok().flatten(),
        // The tunnel knows the addresses.
        peer: Some(PeerDoor { addresses: Vec::new(), streams: streams.unwrap_or(false) }),
        removes: true,
        upgrades: true,
        ..known
    }
}

/// Translates Rust's name of an architecture to Go's, which Node objects use.
fn to_go_arch(arch: &str) -> &str {
    match arch {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "loongarch64" => "loong64",
        other => other,
    }
}
