//! The row of an update: boxes with several versions of an image go to the next one by deltas.

use anyhow::{Result, ensure};
use prepull_e2e::boxes::{Order, Row, Run};
use prepull_e2e::images::delta::Delta;
use prepull_e2e::images::{Image, MIB};

use super::rows::Rows;

const REPOSITORY: &str = "shop/program";
/// Versions that the boxes have, in turn, before the update.
const VERSIONS: u64 = 3;

impl Rows<'_> {
    /// Updates all boxes by deltas that have `changed` bytes each. Returns a note: what the uplink has carried beside the deltas.
    pub(super) async fn measure_update(&mut self, changed: u64) -> Result<String> {
        let size = self.options.image_size.max(changed);
        let version = |number| Image::release("update", number, size, changed);
        let seed = |image: &Image, tag: u64| self.boxes.registry.seed(image, &format!("{REPOSITORY}:v{tag}"));
        let target = version(VERSIONS + 1)?;
        let reference = seed(&target, VERSIONS + 1)?;
        let names = self.boxes.names(self.boxes.all.len());
        let mut deltas = 0;
        for (number, skip) in (1..=VERSIONS).zip(0..) {
            let on: Vec<_> = names.iter().skip(skip).step_by(VERSIONS.try_into()?).cloned().collect();
            if on.is_empty() {
                continue;
            }
            self.teller.step(&format!("{} boxes pull version {number}", on.len()));
            let image = version(number)?;
            let delta = Delta::between(&image, &target)?;
            self.boxes.registry.seed_delta(REPOSITORY, &delta)?;
            deltas += delta.size();
            let reference = seed(&image, number)?;
            self.run(&format!("version-{number}"), "the version before", reference, on).await?;
        }
        let what = format!("{} boxes, {VERSIONS} versions, deltas", names.len());
        self.teller.step(&what);
        let row = self.run("update", &what, reference, names).await?;
        let reports = self.boxes.cluster.existing_job("update").reports().await?;
        let nodes = reports.iter().flat_map(|report| &report.body.node_status);
        let by_layer =
            nodes.filter(|node| node.image_status.iter().any(|image| image.facts.no_delta.is_some()));
        let by_layer: Vec<_> = by_layer.map(|node| &node.node_name).collect();
        ensure!(by_layer.is_empty(), "these took the layer: {by_layer:?}");
        let thousandths = row.down * 1000 / deltas.max(1);
        let note = format!(
            "{what}: the uplink carried {} KiB for deltas of {} KiB, × {}.{:03}; the new layers have {} MiB.",
            row.down / 1024,
            deltas / 1024,
            thousandths / 1000,
            thousandths % 1000,
            target.size() / MIB
        );
        self.done.push(row);
        Ok(note)
    }

    /// A job over these boxes, which share.
    async fn run(&self, name: &str, what: &str, image: String, on: Vec<String>) -> Result<Row> {
        let order = Order::new(name, on, self.options.limit);
        let run = Run::of(&self.boxes, &Order { image: Some(image), share: true, ..order }).await?;
        Ok(run.finish(&self.boxes, what, Some(self.teller)).await?.0)
    }
}
