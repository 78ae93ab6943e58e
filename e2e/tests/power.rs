//! Power cuts of the disk: the remains of a pull are whole, and reported images are there.

mod install;
mod removal;

use std::process::Stdio;

use prepull_e2e::disk::{Disk, SIZE};
use prepull_e2e::images::delta::Delta;
use prepull_e2e::prelude::*;
use tokio::process::Child;
use tokio::time::timeout;

use crate::fetch::{Hand, pull_command, said};

async fn hand_on(format: Format) -> Result<Hand> {
    let hand = Hand::start_with(Registry::start(), Containerd::start_on_disk("edge-1", format)).await;
    hand.with_context(|| format!("on {format:?}"))
}

/// Cuts the power, which also ends a pull, and starts containerd on the remains.
async fn cut_power(hand: &mut Hand, mut pulling: Child) -> Result<()> {
    hand.containerd.cut_power()?;
    pulling.kill().await?;
    hand.containerd.power_on().await
}

#[tokio::test]
async fn an_image_with_a_record_is_whole() -> Result<()> {
    for format in Format::all() {
        let mut hand = hand_on(format).await?;
        let (image, reference) = hand.image("recorded", &[MIB, 32 * MIB])?;
        let pulling = hand.pull(&[&reference])?.spawn()?;
        // Without a pause: the steps after the record take milliseconds.
        let recorded = async {
            while !hand.containerd.has_image(&reference).await? {}
            Ok::<_, anyhow::Error>(())
        };
        timeout(SOON, recorded).await.context("no record")??;
        cut_power(&mut hand, pulling).await?;
        let unpacked = hand.containerd.check_unpacked(&image).await.with_context(|| format!("{format:?}"))?;
        assert_eq!(unpacked, 2, "{format:?}");
        let said = hand.pulls(&[&reference]).await?;
        ensure!(said.contains("1 already there"), "{format:?}: {said}");
    }
    Ok(())
}

#[tokio::test]
async fn power_cuts_between_blobs_are_survived() -> Result<()> {
    for format in Format::all() {
        let mut hand = hand_on(format).await?;
        let (image, reference) = hand.image("blobs", &[MIB / 16, MIB, MIB / 16, 2 * MIB])?;
        hand.link.throttle(Some(4 * MIB));
        for cut in 1..=7 {
            let known = async || Ok::<_, anyhow::Error>(hand.containerd.content_labels().await?.len());
            let before = known().await?;
            let mut pulling = hand.pull(&[&reference])?.spawn()?;
            // Without a pause: containerd has just moved the file of the blob, and that isn't on disk yet.
            let arrived = async {
                while known().await? <= before {}
                Ok::<_, anyhow::Error>(())
            };
            tokio::select! {
                arrived = timeout(SOON, arrived) => arrived.context("no further blob")??,
                _ = pulling.wait() => {}
            }
            cut_power(&mut hand, pulling).await?;
            let whole = hand.containerd.check_unpacked(&image).await;
            whole.with_context(|| format!("{format:?}, cut {cut}"))?;
        }
        hand.link.throttle(None);
        hand.pulls(&[&reference]).await.with_context(|| format!("{format:?}: the last pull"))?;
        assert_eq!(hand.containerd.check_unpacked(&image).await?, 4, "{format:?}: the last pull");
    }
    Ok(())
}

/// Number of cuts of a recording, for each format.
pub(crate) fn cuts() -> usize {
    std::env::var("PREPULL_E2E_CUTS").ok().and_then(|cuts| cuts.parse().ok()).unwrap_or(4)
}

#[tokio::test]
async fn a_pull_survives_a_cut_at_any_write() -> Result<()> {
    for format in Format::all() {
        let mut hand =
            Hand::start_with(Registry::start(), Containerd::start_recorded("edge-1", format)).await?;
        let layers = [MIB / 16, 2 * MIB, MIB, 4 * MIB];
        let (image, reference) = hand.image("recorded-pull", &layers)?;
        let begun = hand.containerd.recorded()?;
        hand.pulls(&[&reference]).await?;
        let reported = hand.containerd.recorded()?;
        // Later writes allow cuts in which the image must be there.
        hand.containerd.pull(&reference, None).await?;
        let recording = hand.containerd.end_recording()?;
        let mut chance = Chance::new(28, 0);
        for cut in recording.cuts(begun, cuts(), &mut chance).into_iter().chain([reported]) {
            let at = || {
                format!("{format:?}: cut before event {cut} of {}, reported at {reported}", recording.len())
            };
            hand.containerd.start_after_cut(&recording, cut, &mut chance).await.with_context(at)?;
            let unpacked = hand.containerd.check_unpacked(&image).await.with_context(at)?;
            let is_there = hand.containerd.has_image(&reference).await?;
            println!("{}: {unpacked} layers, image {is_there}", at());
            ensure!(is_there || cut < reported, "{}: the image was reported, and is gone", at());
            ensure!(!is_there || unpacked == layers.len(), "{}: {unpacked} layers of the image", at());
            hand.pulls(&[&reference]).await.with_context(at)?;
            assert_eq!(hand.containerd.check_unpacked(&image).await.with_context(at)?, layers.len());
            ensure!(hand.containerd.image_status(&reference).await?.is_some(), "{}: CRI lacks it", at());
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_result_survives_a_cut_at_any_write() -> Result<()> {
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.recorded(Format::Ext4).await?;
    let registry = Registry::start().await?;
    let image = Image::of_layers("recorded-task", &[MIB, 2 * MIB, MIB / 16])?;
    let reference = registry.seed(&image, "team/recorded-task:v1")?;
    let begun = node.containerd_mut().recorded()?;
    let job = site.cluster.job("recorded-task").images([&reference]).on(["edge-1"]).apply().await?;
    job.completes().await?;
    let known = node.containerd_mut().recorded()?;
    node.forgets_all_tasks().await?;
    node.kill9_agent()?;
    let recording = node.containerd_mut().end_recording()?;
    let mut chance = Chance::new(28, 1);
    for cut in recording.cuts(begun, cuts() * 2, &mut chance) {
        let at = || format!("cut before event {cut} of {}, the cloud knew at {known}", recording.len());
        node.containerd_mut().start_after_cut(&recording, cut, &mut chance).await.with_context(at)?;
        let says_it_is_there = node.read_ledger()?.iter().any(|task| task.ended || task.images_ended > 0);
        let is_there = node.has_image(&reference).await?;
        let unpacked = node.containerd().check_unpacked(&image).await.with_context(at)?;
        println!("{}: {unpacked} layers, image {is_there}, in the ledger {says_it_is_there}", at());
        ensure!(!is_there || unpacked == 3, "{}: {unpacked} layers", at());
        ensure!(is_there || (!says_it_is_there && cut < known), "{}: the image is gone", at());
        node.restart_agent()?;
        node.is_connected().await.with_context(at)?;
        node.forgets_all_tasks().await.with_context(at)?;
        let output = pull_command(node.containerd(), &[&reference])?.output().await?;
        ensure!(output.status.success(), "{}: {}", at(), said(&output));
        assert_eq!(node.containerd().check_unpacked(&image).await.with_context(at)?, 3);
        node.kill9_agent()?;
    }
    Ok(())
}

/// Pulls in a process that sees a dead disk in place of the directory with containerd's layers. It can read the layers.
async fn pull_onto_dead_disk(hand: &Hand, reference: &str) -> Result<String> {
    let dead = hand.containerd.dir().join("dead");
    std::fs::create_dir(&dead)?;
    let disk = Disk::mount(Format::Ext4, SIZE, hand.containerd.dir(), &dead).await?;
    std::fs::create_dir(dead.join("snapshots"))?;
    disk.cut_power()?;
    let layers = hand.containerd.root().join("io.containerd.snapshotter.v1.overlayfs");
    let script =
        r#"mount --bind "$2/snapshots" "$1/snapshots" && mount --rbind "$1" "$2" && shift 2 && exec "$@""#;
    let mut apart = tokio::process::Command::new("unshare");
    apart.args(["--mount", "sh", "-ec", script, "sh"]).args([&dead, &layers]);
    let pull = hand.pull(&["--retries", "0", reference])?;
    apart.arg(pull.as_std().get_program()).args(pull.as_std().get_args());
    let output = apart.stdout(Stdio::piped()).stderr(Stdio::piped()).output().await?;
    let said = said(&output);
    ensure!(output.status.code() == Some(1), "{said}");
    Ok(said)
}

#[tokio::test]
async fn a_disk_that_refuses_fails_the_attempt() -> Result<()> {
    let hand = Hand::start().await?;
    let (_, reference) = hand.image("refused", &[MIB, MIB])?;
    let said = pull_onto_dead_disk(&hand, &reference).await?;
    ensure!(said.contains("cannot be brought to the disk"), "{said}");
    ensure!(!hand.containerd.has_image(&reference).await?, "it has a record");
    hand.pulls(&[&reference]).await?;
    Ok(())
}

#[tokio::test]
async fn a_refused_flush_isnt_the_deltas_fault() -> Result<()> {
    let hand = Hand::start().await?;
    let [first, second] = [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?];
    hand.pulls(&[&hand.registry.seed(&first, "team/lost:v1")?]).await?;
    let reference = hand.registry.seed(&second, "team/lost:v2")?;
    hand.registry.seed_delta("team/lost", &Delta::between(&first, &second)?)?;
    let before = hand.bytes_of(&second);
    let said = pull_onto_dead_disk(&hand, &reference).await?;
    ensure!(said.contains("cannot be brought to the disk"), "{said}");
    let whole = hand.bytes_of(&second) - before;
    ensure!(whole < 8 * 1024, "{whole} bytes of layers, although their deltas are good: {said}");
    hand.pulls(&[&reference]).await?;
    Ok(())
}

#[tokio::test]
async fn a_blob_without_its_file_is_replaced() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("no-file", &[MIB, MIB])?;
    hand.pulls(&[&reference]).await?;
    let store = hand.containerd.root().join("io.containerd.content.v1.content/blobs/sha256");
    let files: Vec<_> =
        image.blobs().iter().map(|blob| store.join(blob.trim_start_matches("sha256:"))).collect();
    for file in &files {
        std::fs::remove_file(file)?;
    }
    hand.pulls(&[&reference]).await?;
    ensure!(files.iter().all(|file| file.exists()), "containerd has records without files");
    Ok(())
}

#[tokio::test]
async fn a_cut_while_a_layer_is_rebuilt_leaves_it_whole() -> Result<()> {
    let mut hand = hand_on(Format::Ext4).await?;
    let mut before = Image::version("app", 1, 1)?;
    hand.pulls(&[&hand.registry.seed(&before, "team/cut:v1")?]).await?;
    // While the delta arrives, while the tar is written, and once the layer is unpacked.
    for (version, moment) in (2..).zip(["layer-", "tar-", ""]) {
        let at = || format!("cut at {moment:?}");
        let image = Image::version("app", version, 1)?;
        let reference = hand.registry.seed(&image, &format!("team/cut:v{version}"))?;
        hand.registry.seed_delta("team/cut", &Delta::between(&before, &image)?)?;
        let unpacked = hand.containerd.snapshots().await?.len();
        hand.link.throttle((moment == "layer-").then_some(64 * 1024));
        let pulling = hand.pull(&[&reference])?.spawn()?;
        let reached = async {
            loop {
                let is_reached = if moment.is_empty() {
                    hand.containerd.snapshots().await?.len() > unpacked
                } else {
                    // The tar is written within a tenth of a second, so it may be over when we look.
                    let ingests = hand.containerd.ingests().await?;
                    ingests.keys().any(|name| name.starts_with(moment))
                        || hand.containerd.has_image(&reference).await?
                };
                if is_reached {
                    return Ok::<_, anyhow::Error>(());
                }
            }
        };
        timeout(SOON, reached).await.with_context(at)??;
        cut_power(&mut hand, pulling).await?;
        hand.link.throttle(None);
        hand.containerd.check_unpacked(&before).await.with_context(at)?;
        hand.pulls(&[&reference]).await.with_context(at)?;
        hand.containerd.check_unpacked(&image).await.with_context(at)?;
        ensure!(hand.containerd.ingests().await?.is_empty(), "{}: an ingest is left", at());
        before = image;
    }
    Ok(())
}
