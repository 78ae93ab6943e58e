//! The delta of one platform: made, and pushed.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use anyhow::Context;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use prepull_api::enroll::hex;
use prepull_delta::make::{Made, Resources, Root, Tar, TarFile, make_diff};
use prepull_delta::manifest::{
    ARTIFACT_TYPE, DeltaLayer, Draft, DraftBlob, EMPTY_CONFIG, EMPTY_CONFIG_DIGEST, MANIFEST_TYPE, Reused,
    TAR_DIFF,
};
use prepull_registry::digest::sha256;
use prepull_registry::manifest::Descriptor;
use ring::digest::{Context as Digest, SHA256};

use super::pair::{ImageLayer, Pair, PlatformImage};
use super::registry::ImageRegistry;
use super::view::{LayerReport, PlatformReport};
use crate::problem;

/// Memory for files that are compared at the same time.
const MEMORY: u64 = 1 << 30;

pub(super) struct DeltaWork<'a> {
    pub(super) old: &'a ImageRegistry,
    pub(super) new: &'a ImageRegistry,
    pub(super) scratch: &'a Path,
    pub(super) threads: usize,
}

/// A delta that can be pushed.
pub(super) struct PreparedDelta {
    pub(super) report: PlatformReport,
    draft: Draft,
    /// Of the new image.
    manifest: Vec<u8>,
    /// The blobs of the diffs.
    diffs: Vec<(Descriptor, File)>,
}

/// Downloads both images, as far as needed, and makes the diffs of the layers that changed.
pub(super) async fn make(work: &DeltaWork<'_>, pair: Pair<'_>) -> anyhow::Result<PreparedDelta> {
    let platform = &pair.new.platform;
    let mut changed: Vec<&ImageLayer> = Vec::new();
    for layer in pair.to_unpack() {
        // The same layer may be there twice.
        if !changed.iter().any(|known| known.blob.digest == layer.blob.digest) {
            changed.push(layer);
        }
    }
    let sum = |layers: &[&ImageLayer]| layers.iter().map(|layer| layer.blob.size).sum::<u64>();
    let olds: Vec<&ImageLayer> =
        if changed.is_empty() { Vec::new() } else { pair.old.layers.iter().collect() };
    let bar = Bar::start(&format!("{platform}: downloading"), sum(&olds) + sum(&changed));
    let mut old_tars = Vec::new();
    for layer in &olds {
        old_tars.push(work.old.download_layer(layer, work.scratch, &mut |bytes| bar.add(bytes)).await?);
    }
    let mut new_tars = Vec::new();
    for layer in &changed {
        new_tars.push(work.new.download_layer(layer, work.scratch, &mut |bytes| bar.add(bytes)).await?);
    }
    drop(bar);
    let root = Root::read(old_tars.iter().map(|tar| tar as &dyn Tar).collect());
    let root = root.context("cannot read the old image")?;
    let bar = Bar::start(&format!("{platform}: comparing"), new_tars.iter().map(Tar::size).sum());
    let (mut layers, mut diffs, mut reports) = (Vec::new(), Vec::new(), Vec::new());
    for (layer, tar) in changed.iter().zip(&new_tars) {
        let (delta, report, diff) = make_layer(work, &root, layer, tar, &bar)?;
        let is_old = pair.is_old(layer);
        // A node that hasn't rebuilt an old layer has its blob.
        if !is_old {
            reports.push(report);
        }
        if diff.is_some() || !is_old {
            layers.push(delta);
            diffs.extend(diff);
        }
    }
    drop(bar);
    let draft = draft(&pair, layers);
    let report = PlatformReport {
        platform: platform.clone(),
        delta: sha256(&draft.to_json()),
        source: pair.old.manifest.digest.clone(),
        target: pair.new.manifest.digest.clone(),
        bytes: reports.iter().map(|layer| layer.bytes).sum(),
        whole: reports.iter().map(|layer| layer.whole).sum(),
        reused: draft.reused.len(),
        layers: reports,
        pushed: false,
    };
    Ok(PreparedDelta { report, draft, manifest: pair.new.content.clone(), diffs })
}

type MadeLayer = (DeltaLayer, LayerReport, Option<(Descriptor, File)>);

/// The diff of one layer, or the layer itself where that is no larger.
fn make_layer(
    work: &DeltaWork<'_>,
    root: &Root<'_>,
    layer: &ImageLayer,
    tar: &TarFile,
    bar: &Bar,
) -> anyhow::Result<MadeLayer> {
    let mut diff = tempfile::tempfile_in(work.scratch).context("cannot write to --scratch")?;
    let settings = Resources { threads: work.threads, memory: MEMORY };
    let mut done = 0;
    let Made { size, uncompressed, unshrunk } = make_diff(root, tar, &mut diff, &settings, &mut |now| {
        bar.add(now - done);
        done = now;
    })?;
    let Descriptor { digest: to, size: whole, media_type, .. } = layer.blob.clone();
    let is_diff = size < whole;
    let report = LayerReport {
        layer: to.clone(),
        bytes: size.min(whole),
        whole,
        uncompressed,
        is_diff,
        unshrunk: unshrunk.into_iter().map(Into::into).collect(),
    };
    let uncompressed = Some(uncompressed);
    if !is_diff {
        return Ok((
            DeltaLayer { digest: to.clone(), to, size: whole, media_type, uncompressed },
            report,
            None,
        ));
    }
    let digest = hash_file(&mut diff)?;
    let media_type = TAR_DIFF.to_owned();
    let blob =
        Descriptor { media_type: media_type.clone(), digest: digest.clone(), size, ..Descriptor::default() };
    Ok((DeltaLayer { to, digest, size, media_type, uncompressed }, report, Some((blob, diff))))
}

fn draft(pair: &Pair<'_>, layers: Vec<DeltaLayer>) -> Draft {
    let content = |descriptor: &Descriptor| DraftBlob {
        media_type: descriptor.media_type.clone(),
        digest: descriptor.digest.clone(),
        size: descriptor.size,
    };
    let PlatformImage { manifest, config, layers: all, .. } = pair.new;
    let reused = all.iter().filter(|layer| !layers.iter().any(|made| made.to == layer.blob.digest));
    Draft {
        target: content(manifest),
        config: content(config),
        source: pair.old.manifest.digest.clone(),
        source_config: pair.old.config.digest.clone(),
        reused: reused
            .map(|layer| Reused { digest: layer.blob.digest.clone(), diff_id: layer.diff_id.clone() })
            .collect(),
        layers,
    }
}

/// The digest of a file, from its beginning.
fn hash_file(file: &mut File) -> anyhow::Result<String> {
    file.rewind()?;
    let (mut digest, mut piece) = (Digest::new(&SHA256), vec![0; 64 << 10]);
    loop {
        let read = file.read(&mut piece)?;
        if read == 0 {
            return Ok(format!("sha256:{}", hex(digest.finish().as_ref())));
        }
        digest.update(&piece[..read]);
    }
}

/// Pushes the blobs, and then the manifest that refers to them.
pub(super) async fn push(new: &ImageRegistry, delta: &PreparedDelta) -> anyhow::Result<()> {
    let PreparedDelta { draft, manifest, diffs, .. } = delta;
    for (blob, file) in diffs {
        let open = || {
            let mut file = file.try_clone()?;
            file.rewind()?;
            Ok(Box::new(file) as Box<dyn Read + Send>)
        };
        new.push_blob(blob, &open).await?;
    }
    let target = Descriptor {
        digest: draft.target.digest.clone(),
        size: manifest.len() as u64,
        ..Descriptor::default()
    };
    let empty = Descriptor {
        digest: EMPTY_CONFIG_DIGEST.to_owned(),
        size: EMPTY_CONFIG.len() as u64,
        ..Descriptor::default()
    };
    let bytes = |content: &[u8]| {
        let content = content.to_vec();
        move || Ok(Box::new(std::io::Cursor::new(content.clone())) as Box<dyn Read + Send>)
    };
    new.push_blob(&target, &bytes(manifest)).await?;
    new.push_blob(&empty, &bytes(EMPTY_CONFIG)).await?;
    let content = draft.to_json();
    let referrer = Descriptor {
        media_type: MANIFEST_TYPE.to_owned(),
        digest: sha256(&content),
        size: content.len() as u64,
        platform: None,
        artifact_type: Some(ARTIFACT_TYPE.to_owned()),
        annotations: draft.annotations(),
    };
    new.push_referrer(&draft.target.digest, &referrer, &content).await
}

/// The progress of one step, on standard error: a bar on a terminal, and elsewhere a line.
struct Bar(ProgressBar);

impl Bar {
    fn start(what: &str, bytes: u64) -> Self {
        let bar = ProgressBar::new(bytes);
        let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes} of {total_bytes} {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what.to_owned());
        if bar.is_hidden() {
            problem::print_note(&format!("{what} {}", HumanBytes(bytes)));
        }
        Self(bar)
    }

    fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
