//! The rows of the table, one after the other, over the same boxes.

use std::time::Duration;

use anyhow::Result;
use prepull_e2e::boxes::{Boxes, Fault, Order, Row, Run, Strike, Struck, strike};
use prepull_e2e::images::MIB;
use prepull_e2e::registry::PullThrough;
use prepull_e2e::teller::Teller;

use super::{SiteFigures, SiteOptions};

/// How long what breaks in the middle stays broken.
const BROKEN: Duration = Duration::from_secs(15);

/// Starts a site, and measures each row.
pub(super) async fn measure(options: &SiteOptions, teller: &Teller) -> Result<SiteFigures> {
    teller.step(&format!("etcd, kube-apiserver, cloudcore, a registry, {} boxes", options.nodes));
    let boxes = Boxes::start(&options.site_plan()).await?;
    teller.step("all boxes are connected");
    let mut rows = Rows { options, teller, boxes, done: Vec::new() };
    rows.measure_row("alone", "one box alone", 1, false).await?;
    let apart = usize::from(options.apart.min(options.nodes));
    if apart > 0 {
        rows.measure_row("apart", &format!("{apart} boxes, each by itself"), apart, false).await?;
        rows.measure_cached(apart).await?;
    }
    let all = usize::from(options.nodes);
    if options.share {
        rows.measure_row("shared", &format!("{all} boxes, sharing"), all, true).await?;
    }
    let update = match options.delta_size {
        Some(changed) => Some(rows.measure_update(changed).await?),
        None => None,
    };
    // Last, because a box that has reached no other box doesn't try again for some minutes.
    let (last, first): (Vec<Fault>, Vec<Fault>) =
        options.fault.iter().copied().partition(|fault| *fault == Fault::Isolated);
    for fault in first.into_iter().chain(last) {
        rows.measure_fault(fault, all).await?;
    }
    let Rows { boxes, done, .. } = rows;
    let notes: Vec<_> = notes(&done, apart, usize::from(options.nodes)).into_iter().chain(update).collect();
    let (machine, image_bytes) = (prepull_e2e::usage::describe_machine(), boxes.image_bytes()?);
    Ok(SiteFigures { options: options.clone(), machine, image_bytes, rows: done, notes })
}

/// Notes beside the table: the time that all boxes would need by themselves, and the sources of the bytes.
fn notes(rows: &[Row], apart: usize, all: usize) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(row) = rows.get(1).filter(|row| (1..all).contains(&apart) && row.boxes == apart) {
        let (all, apart) = (u32::try_from(all).unwrap_or(u32::MAX), u32::try_from(apart).unwrap_or(u32::MAX));
        let minutes = row.seconds * f64::from(all) / f64::from(apart) / 60.0;
        let mib = row.down * u64::from(all) / u64::from(apart) / MIB;
        notes.push(format!(
            "{all} boxes, each by itself: about {mib} MiB and {minutes:.0} min, from the row of {apart}."
        ));
    }
    for row in rows.iter().filter(|row| row.from_peers > 0) {
        notes.push(format!(
            "{}: agents count {} MiB from the registry and {} MiB from other boxes, of which the busiest has served {} MiB.",
            row.what,
            row.from_registry / MIB,
            row.from_peers / MIB,
            row.most_served / MIB
        ));
    }
    notes
}

pub(super) struct Rows<'a> {
    pub(super) options: &'a SiteOptions,
    pub(super) teller: &'a Teller,
    pub(super) boxes: Boxes,
    pub(super) done: Vec<Row>,
}

impl Rows<'_> {
    /// A job over the first boxes. Afterwards the image is removed from them.
    async fn measure_row(&mut self, name: &str, what: &str, count: usize, share: bool) -> Result<()> {
        self.teller.step(what);
        let order = Order::new(name, self.boxes.names(count), self.options.limit);
        let run = Run::of(&self.boxes, &Order { share, ..order }).await?;
        let (row, _) = run.finish(&self.boxes, what, Some(self.teller)).await?;
        self.done.push(row);
        self.boxes.forget_image().await
    }

    /// A job over the first boxes, with a fault.
    async fn measure_fault(&mut self, fault: Fault, count: usize) -> Result<()> {
        let struck = Strike {
            fault,
            share: self.options.share,
            boxes: count,
            broken: BROKEN,
            limit: self.options.limit,
        };
        let Struck { row, status, odd, lies } = strike(&mut self.boxes, struck, Some(self.teller)).await?;
        if lies > 0 {
            self.teller.step(&format!("  {lies} requests were answered with garbage"));
        }
        for node in status.node_status.iter().filter(|node| node.node_name == odd && !node.reason.is_empty())
        {
            self.teller.step(&format!("  {odd}: {}", node.reason));
        }
        self.done.push(row);
        self.boxes.forget_image().await
    }

    /// Two jobs over the first boxes, with a pull-through cache on the first box.
    async fn measure_cached(&mut self, count: usize) -> Result<()> {
        let upstream = self.boxes.upstream();
        let cache = PullThrough::start(&self.boxes.get("edge-1")?.outlet, upstream).await?;
        self.boxes.registry.route_by_mirror(cache.addr(), upstream)?;
        self.measure_row("cache-empty", &format!("{count} boxes, pull-through cache, empty"), count, false)
            .await?;
        self.measure_row(
            "cache-full",
            &format!("{count} boxes, pull-through cache that has it"),
            count,
            false,
        )
        .await?;
        self.boxes.registry.route_to(upstream)
    }
}
