//! The uplink of a site: its rate, its losses, and its traffic.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{DEVICE, Space};

/// An uplink, the same in both directions.
#[derive(Clone, Debug)]
pub struct Uplink {
    /// Bits a second.
    pub rate: u64,
    /// Time from one end to the other, in addition to that in the queue.
    pub delay: Duration,
    /// Part of the packets that is lost, from 0 to 1.
    pub loss: f64,
}

impl Uplink {
    /// An uplink with this rate in bits a second and without losses.
    pub fn with_rate(rate: u64) -> Self {
        Self { rate, delay: Duration::ZERO, loss: 0.0 }
    }
}

/// Smallest burst of the token bucket in bytes: the size that a network card hands over at a time. A smaller bucket
/// would split every packet that the kernel has coalesced.
const LEAST_BURST: u64 = 16 * 1024;
/// Smallest queue before the bucket in bytes.
const LEAST_QUEUE: u64 = 64 * 1024;

/// Gives the uplink its rate and its losses, at both of its ends.
pub(super) async fn shape(uplink: &Uplink, outside: &Space, router: &Space) -> Result<()> {
    let bytes = uplink.rate / 8;
    // 10 ms of the rate, and a queue of a tenth of a second, as in cheap routers.
    let (burst, queue) = ((bytes / 100).max(LEAST_BURST), (bytes / 10).max(LEAST_QUEUE));
    let (rate, burst, queue) = (format!("{}bit", uplink.rate), burst.to_string(), queue.to_string());
    for space in [outside, router] {
        let bucket = ["rate", &rate, "burst", &burst, "limit", &queue];
        space.tc(&[&["qdisc", "add", "dev", DEVICE, "root", "tbf"][..], &bucket].concat()).await?;
    }
    if uplink.loss > 0.0 {
        let part = uplink.loss.to_string();
        let some = ["-m", "statistic", "--mode", "random", "--probability", &part, "-j", "DROP"];
        router.iptables(&[&["-I", "FORWARD", "-i", DEVICE][..], &some].concat()).await?;
        outside.iptables(&[&["-I", "INPUT", "-i", DEVICE][..], &some].concat()).await?;
    }
    Ok(())
}

/// Bytes sent by an end of the uplink. A large packet of the kernel counts as the packets that it's split into.
pub(super) async fn sent_bytes(end: &Space) -> Result<u64> {
    let listed: Value = serde_json::from_str(&end.tc(&["-s", "-j", "qdisc", "show", "dev", DEVICE]).await?)?;
    listed[0]["bytes"].as_u64().with_context(|| format!("tc has counted no bytes: {listed}"))
}
