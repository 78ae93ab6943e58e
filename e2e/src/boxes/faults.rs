//! Faults in a site.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use prepull_api::crd::status::ImagePrePullJobStatus;
use serde::Serialize;

use super::figures::Row;
use super::liar::Liar;
use super::run::{Order, Run};
use super::scene::Boxes;
use crate::network::Outlet;
use crate::network::lan::Vlan;
use crate::node::NodeStart;
use crate::teller::Teller;

/// Offset of the wrong clock in seconds, longer than the lifetime of a ticket. It's fast, because to a slow clock no
/// certificate of a new cloud is valid yet.
const CLOCK: i64 = 3600;

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The agent that downloads most is killed and started again, five times
    Killed,
    /// cloudcore is killed, and started again after a while
    CloudAway,
    /// The uplink is cut for a while
    Cut,
    /// Half of the boxes are unplugged for a while
    Split,
    /// A further box whose disk fills up in the middle
    FullDisk,
    /// A further box whose clock is an hour fast
    Clock,
    /// A further box that answers others with garbage
    Garbage,
    /// A further box in another VLAN, which the others cannot reach
    Vlan,
    /// All boxes are isolated from each other, as on a Wi-Fi for guests
    Isolated,
}

impl Fault {
    fn what(self, boxes: usize) -> String {
        match self {
            Self::Killed => format!("{boxes} boxes; the carrier killed 5 times"),
            Self::CloudAway => format!("{boxes} boxes; cloudcore away for a while"),
            Self::Cut => format!("{boxes} boxes; the uplink cut for a while"),
            Self::Split => format!("{boxes} boxes; half unplugged for a while"),
            Self::FullDisk => format!("{boxes} boxes; one with a disk that fills up"),
            Self::Clock => format!("{boxes} boxes; one with a clock 1 h fast"),
            Self::Garbage => format!("{boxes} boxes; one serves garbage"),
            Self::Vlan => format!("{boxes} boxes; one in another VLAN"),
            Self::Isolated => format!("{boxes} boxes; isolated from each other"),
        }
    }
}

/// A job with a fault.
#[derive(Clone, Copy, Debug)]
pub struct Strike {
    /// The fault.
    pub fault: Fault,
    /// Whether the boxes share.
    pub share: bool,
    /// Number of boxes, besides the one that is unlike the others.
    pub boxes: usize,
    /// Duration of a fault in the middle of the job.
    pub broken: Duration,
    /// Limit for the job.
    pub limit: Duration,
}

/// The outcome of a job with a fault.
#[derive(Debug)]
pub struct Struck {
    /// Its cost.
    pub row: Row,
    /// The last status of the job.
    pub status: ImagePrePullJobStatus,
    /// Name of the box that differs from the others, if there was one.
    pub odd: String,
    /// Requests that were answered with garbage.
    pub lies: u64,
}

/// Runs a job with a fault, and returns its cost. Afterwards the site is as before, with the image on its boxes.
pub async fn strike(boxes: &mut Boxes, strike: Strike, teller: Option<&Teller>) -> Result<Struck> {
    let Strike { fault, boxes: count, share, limit, .. } = strike;
    let name = format!("fault-{}", fault.to_possible_value().context("no name")?.get_name());
    // The box that differs from the others, if the fault is one of a single box.
    let odd = name.replace("fault", "odd");
    let mut on = boxes.names(count);
    let liar = add_odd(boxes, fault, &odd).await?;
    let is_odd = boxes.get(&odd).is_ok();
    if is_odd {
        on.push(odd.clone());
    }
    let what = fault.what(on.len());
    if let Some(teller) = teller {
        teller.step(&what);
    }
    if fault == Fault::Isolated {
        isolate(boxes, true).await?;
    }
    if fault == Fault::Garbage {
        // First, so that the others are sent to it.
        let first = Order { share, ..Order::new(&format!("{name}-first"), vec![odd.clone()], limit) };
        Run::of(boxes, &first).await?.finish(boxes, "the one that serves garbage", teller).await?;
    }
    let order = Order { share, ..Order::new(&name, on, limit) };
    let order = match fault {
        // Retrying doesn't help.
        Fault::FullDisk => Order { may_fail: 1, retries: 1, ..order },
        _ => order,
    };
    let run = Run::of(boxes, &order).await?;
    happen(boxes, strike, &odd, &run).await?;
    let (row, status) = run.finish(boxes, &what, teller).await?;
    if fault == Fault::Isolated {
        isolate(boxes, false).await?;
    }
    let lies = liar.map_or(0, |liar| liar.lies());
    if is_odd {
        boxes.remove().await?;
    }
    Ok(Struck { row, status, odd, lies })
}

/// Adds the box that differs from the others, if the fault is one of a single box.
async fn add_odd(boxes: &mut Boxes, fault: Fault, odd: &str) -> Result<Option<Liar>> {
    let (image, size) = (boxes.image.clone(), boxes.image_bytes()?);
    match fault {
        // Room for the download and for unpacking, until something else fills it.
        Fault::FullDisk => {
            boxes.add(odd, Vlan::Office, |start, _| Ok(start.disk(4 * size + (64 << 20)))).await?;
        }
        Fault::Clock => boxes.add(odd, Vlan::Office, |start, _| start.clock_off_by(CLOCK)).await?,
        Fault::Vlan => boxes.add(odd, Vlan::Guests, |start, _| Ok(start)).await?,
        Fault::Garbage => {
            boxes.add(odd, Vlan::Office, |start, outlet| Ok(advertise_liar(start, outlet))).await?;
            let found = boxes.get(odd)?;
            return Ok(Some(Liar::start(&found.outlet, found.node.state_dir(), &image)?));
        }
        _ => {}
    }
    Ok(None)
}

fn advertise_liar<'a>(start: NodeStart<'a>, outlet: &Outlet) -> NodeStart<'a> {
    start.args(&["--peer-advertise", &Liar::address(outlet).to_string()])
}

async fn isolate(boxes: &Boxes, on: bool) -> Result<()> {
    for found in &boxes.all {
        found.outlet.isolate(on).await?;
    }
    Ok(())
}

/// Causes the fault in the middle of the job.
async fn happen(boxes: &mut Boxes, strike: Strike, odd: &str, run: &Run) -> Result<()> {
    let broken = strike.broken;
    match strike.fault {
        Fault::Killed => {
            for percent in [10, 25, 40, 55, 70] {
                run.reaches(boxes, percent).await?;
                let carrier = run.carrier(boxes).await?;
                boxes.all[carrier].node.restart_agent()?;
            }
        }
        Fault::CloudAway => {
            run.reaches(boxes, 40).await?;
            boxes.cloud.kill9()?;
            tokio::time::sleep(broken).await;
            boxes.cloud.restart().await?;
        }
        Fault::Cut => {
            run.reaches(boxes, 40).await?;
            boxes.lan.cut().await?;
            tokio::time::sleep(broken).await;
            boxes.lan.mend().await?;
        }
        Fault::Split => {
            run.reaches(boxes, 40).await?;
            let half = || boxes.all.iter().take(strike.boxes.div_ceil(2));
            for found in half() {
                found.outlet.unplug().await?;
            }
            let reaches =
                half().next().is_none_or(|found| found.outlet.try_connect(boxes.upstream()).is_ok());
            ensure!(!reaches, "a box without its plug reaches the registry");
            tokio::time::sleep(broken).await;
            for found in half() {
                found.outlet.plug().await?;
            }
        }
        Fault::FullDisk => {
            run.reaches(boxes, 40).await?;
            let containerd = boxes.get(odd)?.node.containerd();
            let free = containerd.free_space()?;
            // Fill it to the last byte; the write should fail.
            let _ =
                std::fs::write(containerd.root().join("filler"), vec![0; usize::try_from(free)? + (1 << 20)]);
        }
        Fault::Clock | Fault::Garbage | Fault::Vlan | Fault::Isolated => {}
    }
    Ok(())
}
