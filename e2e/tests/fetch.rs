//! Downloads by the agent, with unpacking by the runtime. `edgecore-prepull pull` has the agent's executor and needs no
//! cloud.

use std::process::{Output, Stdio};
use std::time::Duration;

use prepull_api::crd::download::DownloadSpec;
use prepull_api::task::PulledBy;
use prepull_e2e::prelude::*;
use prepull_e2e::proxy::ProxiedRequest;
use prepull_e2e::registry;
use tokio::io::{AsyncBufReadExt, BufReader};

/// A containerd that reaches its registry through a link, and pulls by hand into it.
pub(crate) struct Hand {
    pub(crate) registry: Registry,
    pub(crate) link: Proxy,
    pub(crate) containerd: Containerd,
}

impl Hand {
    pub(crate) async fn start() -> Result<Self> {
        Self::start_on(Registry::start(), None).await
    }

    /// The same with another registry, and with containerd's data on a disk of this many bytes if given.
    pub(crate) async fn start_on(registry: registry::RegistryStart, disk: Option<u64>) -> Result<Self> {
        Self::start_with(registry, Containerd::start_on("edge-1", disk)).await
    }

    pub(crate) async fn start_with(
        registry: registry::RegistryStart,
        containerd: impl Future<Output = Result<Containerd>>,
    ) -> Result<Self> {
        let registry = registry.await?;
        let link = Proxy::for_http(registry.addr())?;
        registry.route_through(&link)?;
        Ok(Self { registry, link, containerd: containerd.await? })
    }

    /// An image in the registry, with its reference.
    pub(crate) fn image(&self, name: &str, layers: &[u64]) -> Result<(Image, String)> {
        let image = Image::of_layers(name, layers)?;
        let reference = self.registry.seed(&image, &format!("team/{name}:v1"))?;
        Ok((image, reference))
    }

    /// `edgecore-prepull pull` with the agent's own fetch.
    pub(crate) fn pull(&self, arguments: &[&str]) -> Result<tokio::process::Command> {
        pull_command(&self.containerd, arguments)
    }

    /// Pulls to a successful end.
    pub(crate) async fn pulls(&self, arguments: &[&str]) -> Result<String> {
        let output = self.pull(arguments)?.output().await?;
        let said = said(&output);
        ensure!(output.status.success(), "{said}");
        Ok(said)
    }

    /// Waits until more than this many bytes of the image's blobs have crossed the link.
    pub(crate) async fn has_fetched(&self, image: &Image, bytes: u64) -> Result<()> {
        eventually("the download goes on", SOON, async || {
            let fetched = self.bytes_of(image);
            ensure!(fetched > bytes, "{fetched} bytes so far");
            Ok(())
        })
        .await
    }

    /// Requests for blobs so far.
    pub(crate) fn blob_requests(&self) -> Vec<ProxiedRequest> {
        self.link.records().into_iter().filter(|record| record.path.contains("/blobs/")).collect()
    }

    /// Bytes of all blobs of an image that have crossed the link.
    pub(crate) fn bytes_of(&self, image: &Image) -> u64 {
        image.blobs().iter().map(|blob| self.link.bytes_of(blob)).sum()
    }
}

/// `edgecore-prepull pull` into a containerd, with the agent's own fetch.
pub(crate) fn pull_command(containerd: &Containerd, arguments: &[&str]) -> Result<tokio::process::Command> {
    let mut command = tokio::process::Command::new(prepull_e2e::parts::program_path("edgecore-prepull")?);
    command.args(["pull", "--fetch", "agent", "--runtime-endpoint", &containerd.endpoint()]);
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    Ok(command)
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[tokio::test]
async fn a_fetch_equals_a_pull_by_the_runtime() -> Result<()> {
    let hand = Hand::start().await?;
    let other = Containerd::start("edge-2").await?;
    let index = Image::multi_arch("fetched")?;
    let repeated = Image::of_layers("layered", &[MIB, 3 * MIB, 2 * MIB, MIB, MIB])?;
    // Two that share layers, each from a repository of its own.
    let base = ("base", [2 * MIB, MIB]);
    let below = Image::on_base(base.0, &base.1, "below", MIB)?;
    let above = Image::on_base(base.0, &base.1, "above", 2 * MIB)?;
    for (image, name) in [(&index, "index"), (&repeated, "layered"), (&below, "below"), (&above, "above")] {
        let reference = hand.registry.seed(image, &format!("team/{name}:v1"))?;
        let before = hand.blob_requests().len();
        let summary = hand.pulls(&[&reference]).await?;
        ensure!(summary.contains("1 pulled"), "{summary}");
        let requests = &hand.blob_requests()[before..];
        for blob in requests.iter().map(|record| &record.path) {
            assert_eq!(requests.iter().filter(|record| record.path == *blob).count(), 1, "{requests:#?}");
        }
        ensure!(!requests.is_empty(), "the link has seen no blob");

        // The same image by the runtime alone.
        other.pull(&reference, None).await?;
        assert_eq!(hand.containerd.names_of(image.digest()).await?, other.names_of(image.digest()).await?);
        assert_eq!(hand.containerd.image_status(&reference).await?, other.image_status(&reference).await?);
        assert_eq!(hand.containerd.content_labels().await?, other.content_labels().await?);
        assert_eq!(hand.containerd.snapshots().await?, other.snapshots().await?);
        assert_eq!(hand.containerd.ingests().await?, other.ingests().await?);
        assert_eq!(hand.containerd.leases().await?, other.leases().await?, "nothing is held on to");

        // Everything is there: the tag is resolved, and no blob is requested.
        let (blobs, all) = (hand.blob_requests().len(), hand.link.records().len());
        let summary = hand.pulls(&[&reference]).await?;
        ensure!(summary.contains("1 already there"), "{summary}");
        assert_eq!(hand.blob_requests().len(), blobs);
        let asked: Vec<_> = hand.link.records().split_off(all);
        ensure!(asked.iter().all(|record| record.method == "HEAD") && asked.len() <= 2, "{asked:#?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_moving_tag_keeps_the_fetched_image() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("moves", &[4 * MIB])?;
    let next = Image::of_layers("moved", &[4 * MIB])?;
    hand.link.throttle(Some(2 * MIB));
    let pulling = hand.pull(&[&reference])?.spawn()?;
    hand.has_fetched(&image, MIB).await?;
    hand.registry.seed(&next, "team/moves:v1")?;
    let output = pulling.wait_with_output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    assert_eq!(hand.containerd.images().await?.get(&reference).map(String::as_str), Some(image.digest()));
    assert_eq!(hand.bytes_of(&next), 0, "the runtime has downloaded the other image");
    ensure!(hand.containerd.image_status(&reference).await?.is_some(), "the CRI does not know the tag");

    hand.link.throttle(None);
    hand.pulls(&[&reference]).await?;
    assert_eq!(hand.containerd.images().await?.get(&reference).map(String::as_str), Some(next.digest()));
    Ok(())
}

#[tokio::test]
async fn twenty_cut_links_cost_hardly_more() -> Result<()> {
    const CUTS: u64 = 20;
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("cut", &[24 * MIB, 24 * MIB, 16 * MIB])?;
    let pulling = hand.pull(&["--retries", "30", &reference])?.spawn()?;
    for cut in 1..=CUTS {
        hand.link.throttle(Some(48 * MIB));
        hand.has_fetched(&image, image.size() * cut / (CUTS + 1)).await?;
        hand.link.cut();
    }
    let output = pulling.wait_with_output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    let (fetched, size) = (hand.bytes_of(&image), image.size());
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    let ratio = fetched as f64 / size as f64;
    println!("cut {CUTS} times: {ratio:.4} of {size} bytes");
    ensure!(ratio <= 1.02, "{ratio} of the image");
    Ok(())
}

#[tokio::test]
async fn a_killed_download_resumes() -> Result<()> {
    const SIZE: u64 = 32 * MIB;
    let mut hand = Hand::start().await?;
    for what in ["agent", "containerd"] {
        let (image, reference) = hand.image(&format!("killed-{what}"), &[SIZE, SIZE / 2])?;
        hand.link.throttle(Some(16 * MIB));
        let mut pulling = hand.pull(&["--retries", "30", &reference])?.spawn()?;
        for kill in 1..=4 {
            hand.has_fetched(&image, image.size() * kill / 5).await?;
            if what == "agent" {
                pulling.kill().await?;
                pulling = hand.pull(&["--retries", "30", &reference])?.spawn()?;
            } else {
                hand.containerd.restart().await?;
            }
        }
        hand.link.throttle(None);
        let output = pulling.wait_with_output().await?;
        ensure!(output.status.success(), "{what}: {}", said(&output));
        let fetched = hand.bytes_of(&image);
        #[allow(clippy::cast_precision_loss)] // far below 2^52
        let ratio = fetched as f64 / image.size() as f64;
        println!("{what} killed 4 times: {ratio:.4} of {} bytes", image.size());
        ensure!(ratio <= 1.06, "{what}: {ratio} of the image");
        ensure!(hand.containerd.has_image(&reference).await?);
    }
    Ok(())
}

#[tokio::test]
async fn twenty_power_cuts_cost_hardly_more() -> Result<()> {
    const CUTS: u64 = 20;
    let mut hand = Hand::start().await?;
    let (image, reference) = hand.image("power", &[28 * MIB, 20 * MIB, 16 * MIB])?;
    let size = image.size();
    // On a busy machine, bytes that have crossed the link wait for the agent and are lost with each cut: the slower the
    // link, the fewer of them.
    hand.link.throttle(Some(2 * MIB));
    let begun = std::time::Instant::now();
    for cut in 1..=CUTS {
        let before = hand.bytes_of(&image);
        let mut pulling = hand.pull(&["--retries", "30", &reference])?.spawn()?;
        hand.has_fetched(&image, before + (size - before) / (CUTS + 4 - cut)).await?;
        // Both at the same time, as in a power cut.
        pulling.start_kill()?;
        hand.containerd.kill9()?;
        let ended = pulling.wait().await?;
        let fetched = hand.bytes_of(&image);
        ensure!(fetched < size && ended.code().is_none(), "{fetched} of {size} bytes at cut {cut}: {ended}");
        hand.containerd.restart().await?;
    }
    hand.link.throttle(None);
    hand.pulls(&["--retries", "30", &reference]).await?;
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    let ratio = hand.bytes_of(&image) as f64 / size as f64;
    println!("power cut {CUTS} times: {ratio:.4} of {size} bytes, in {:.1?}", begun.elapsed());
    // The bar is 1.02, and an idle machine needs half of it; a busy one must not fail here.
    ensure!(ratio <= 1.05, "{ratio} of the image");
    ensure!(hand.containerd.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn images_fetch_shared_layers_once() -> Result<()> {
    let hand = Hand::start().await?;
    let images: Vec<_> = (0..5).map(|n| Image::small(&format!("shares-{n}"))).collect::<Result<_>>()?;
    let references: Vec<_> = images
        .iter()
        .enumerate()
        .map(|(n, image)| hand.registry.seed(image, &format!("team/shares-{n}:v1")))
        .collect::<Result<_>>()?;
    hand.link.throttle(Some(MIB));
    let mut arguments = vec!["--parallel-pulls", "5"];
    arguments.extend(references.iter().map(String::as_str));
    hand.pulls(&arguments).await?;
    let requests = hand.blob_requests();
    for record in &requests {
        let blob = record.path.rsplit('/').next().unwrap_or_default();
        let times = requests.iter().filter(|other| other.path.ends_with(blob)).count();
        assert_eq!(times, 1, "{blob} was asked for {times} times");
    }
    for reference in &references {
        ensure!(hand.containerd.has_image(reference).await?, "{reference}");
    }
    Ok(())
}

#[tokio::test]
async fn discarded_layers_are_not_downloaded_again() -> Result<()> {
    let hand = Hand::start_with(Registry::start(), Containerd::start_discarding("edge-1")).await?;
    let image = |name: &str| {
        let image = Image::on_base("discarded", &[2 * MIB, MIB], name, MIB)?;
        let reference = hand.registry.seed(&image, &format!("team/discarded-{name}:v1"))?;
        anyhow::Ok((image, reference))
    };
    let ((first, of_first), (second, of_second)) = (image("one")?, image("two")?);
    hand.pulls(&[&of_first]).await?;
    let is_layer = |image: &Image, blob: &str| {
        // The configuration has at most some hundred bytes.
        std::fs::metadata(image.blob_file(blob)).is_ok_and(|file| file.len() >= MIB)
    };
    let layers = |image: &Image| image.blobs().iter().filter(|blob| is_layer(image, blob)).count();
    assert_eq!((layers(&first), layers(&second)), (3, 3));
    eventually("the layers are discarded", SOON, async || {
        let content = hand.containerd.content_labels().await?;
        let left: Vec<_> = first.blobs().iter().filter(|blob| content.contains_key(*blob)).collect();
        ensure!(left.len() == 1, "{left:?}");
        Ok(())
    })
    .await?;

    // Of the second image only the missing blobs: its configuration and its upper layer.
    let asked = |before: usize| {
        let blobs = hand.blob_requests().split_off(before);
        blobs.into_iter().map(|record| record.path.rsplit('/').next().unwrap_or_default().to_owned())
    };
    let before = hand.blob_requests().len();
    hand.pulls(&[&of_second]).await?;
    let mut own: Vec<_> =
        second.blobs().iter().filter(|blob| !first.blobs().contains(blob)).cloned().collect();
    let mut fetched: Vec<_> = asked(before).collect();
    own.sort();
    fetched.sort();
    // The configuration lists the uncompressed digests, and is fetched like any other blob.
    fetched.dedup();
    assert_eq!(fetched, own);
    let before = hand.blob_requests().len();
    hand.pulls(&[&of_first, &of_second]).await?;
    assert_eq!(asked(before).collect::<Vec<_>>(), Vec::<String>::new(), "what is unpacked was fetched again");

    // Everything is as after pulls by the runtime alone.
    let other = Containerd::start_discarding("edge-2").await?;
    for reference in [&of_first, &of_second] {
        other.pull(reference, None).await?;
    }
    eventually("both are in the same state", SOON, async || {
        ensure!(hand.containerd.content_labels().await? == other.content_labels().await?, "content differs");
        Ok(())
    })
    .await?;
    assert_eq!(hand.containerd.content_labels().await?, other.content_labels().await?);
    assert_eq!(hand.containerd.snapshots().await?, other.snapshots().await?);
    assert_eq!(hand.containerd.ingests().await?, other.ingests().await?);
    assert_eq!(hand.containerd.leases().await?, other.leases().await?, "nothing is held on to");
    Ok(())
}

#[tokio::test]
async fn an_oversized_image_is_refused_first() -> Result<()> {
    let hand = Hand::start_on(Registry::start(), Some(48 * MIB)).await?;
    let (image, reference) = hand.image("too-large", &[16 * MIB, 16 * MIB])?;
    let output =
        hand.pull(&["--retries", "0", "--image-gc-high-threshold", "85%", &reference])?.output().await?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1), "{text}");
    ensure!(
        text.contains("no room for the image") && text.contains("--image-gc-high-threshold 85%"),
        "{text}"
    );
    assert_eq!(hand.blob_requests(), Vec::new());
    assert_eq!(hand.bytes_of(&image), 0);

    // A registry's answer about the layers decides in close cases: these hardly shrink when they are compressed.
    hand.containerd.resize_disk(100 * MIB).await?;
    hand.pulls(&["--retries", "0", "--image-gc-high-threshold", "85%", &reference]).await?;
    Ok(())
}

#[tokio::test]
async fn two_images_that_exceed_the_disk_conflict() -> Result<()> {
    let hand = Hand::start_on(Registry::start(), Some(100 * MIB)).await?;
    // Each takes 24 MiB to download and as much unpacked; 15 MiB stay free.
    let images = ["first", "second"].map(|name| hand.image(name, &[12 * MIB, 12 * MIB]));
    let images = images.into_iter().collect::<Result<Vec<_>>>()?;
    hand.link.throttle(Some(8 * MIB));
    let pull = || {
        let references = images.iter().map(|(_, reference)| reference.as_str());
        let arguments = ["--retries", "0", "--image-gc-high-threshold", "85%", "--parallel-pulls", "2"];
        hand.pull(&[&arguments[..], &references.collect::<Vec<_>>()].concat())
    };
    let output = pull()?.output().await?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1), "{text}");
    ensure!(text.contains("no room for the image") && text.contains("are for images that are"), "{text}");
    ensure!(text.contains("1 pulled"), "{text}");
    let mut fetched: Vec<_> = images.iter().map(|(image, _)| hand.bytes_of(image)).collect();
    fetched.sort_unstable();
    // In addition to the registry's answers about the unpacked sizes of two layers, four bytes each.
    ensure!(fetched[0] <= 8 && fetched[1] > 24 * MIB, "{fetched:?}");

    hand.link.throttle(None);
    hand.containerd.resize_disk(150 * MIB).await?;
    let output = pull()?.output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    Ok(())
}

#[tokio::test]
async fn a_limit_holds_over_all_images() -> Result<()> {
    /// `--max-download-rate 1MiB`, in bytes a second.
    const RATE: f64 = 1_048_576.0;
    const WINDOW: Duration = Duration::from_secs(10);
    let hand = Hand::start().await?;
    let pulls = (0..3).map(|n| hand.image(&format!("limited-{n}"), &[3 * MIB, 3 * MIB]));
    let pulls = pulls.collect::<Result<Vec<_>>>()?;
    let mut arguments = vec!["--max-download-rate", "1MiB"];
    arguments.extend(pulls.iter().map(|(_, reference)| reference.as_str()));
    let mut pulling = hand.pull(&arguments)?.spawn()?;
    let mut samples = Vec::new();
    let begun = std::time::Instant::now();
    loop {
        samples.push((begun.elapsed(), hand.link.bytes(), begun.elapsed()));
        if pulling.try_wait()?.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let output = pulling.wait_with_output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    // On a busy machine a sample comes late, or its count after its time. So use the time from before the first count
    // to after the second. The last megabyte is left out: it ends before its window does.
    let last = samples.iter().rposition(|(_, bytes, _)| *bytes < 17 * MIB).unwrap_or(0);
    let rate = |from: usize| {
        let (at, before, _) = samples[from];
        let (_, after, then) = samples[from..=last].iter().find(|(then, ..)| *then >= at + WINDOW)?;
        #[allow(clippy::cast_precision_loss)] // far below 2^52
        let bytes = (after - before) as f64;
        Some(bytes / then.saturating_sub(at).as_secs_f64() / RATE)
    };
    let rates: Vec<f64> = (0..last).filter_map(rate).collect();
    let least = rates.iter().copied().reduce(f64::min).context("too short")?;
    let most = rates.iter().copied().reduce(f64::max).context("too short")?;
    println!("{} windows of ten seconds: {least:.3} to {most:.3} of the limit", rates.len());
    ensure!(most <= 1.05, "{most:.3} times the limit");
    // On a machine without time for the agent single windows are slower; if all of them are, it's a fault.
    ensure!(most >= 0.9, "{most:.3} of the limit at best");
    Ok(())
}

#[tokio::test]
async fn a_disk_filled_by_a_download_recovers() -> Result<()> {
    let hand = Hand::start_on(Registry::start(), Some(100 * MIB)).await?;
    let (image, reference) = hand.image("fills", &[16 * MIB, 8 * MIB])?;
    hand.link.throttle(Some(4 * MIB));
    let pulling = hand.pull(&["--retries", "0", &reference])?.spawn()?;
    hand.has_fetched(&image, 4 * MIB).await?;
    hand.containerd.resize_disk(12 * MIB).await?;
    let output = pulling.wait_with_output().await?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1) && text.contains("no space left on device"), "{text}");
    eventually("the room is there again", SOON, async || {
        let free = hand.containerd.free_space()?;
        ensure!(free > 8 * MIB, "{free} bytes are free");
        Ok(())
    })
    .await?;
    hand.containerd.resize_disk(100 * MIB).await?;
    hand.link.throttle(None);
    hand.pulls(&[&reference]).await?;
    Ok(())
}

/// The duration of a pull, by the runtime or through the agent.
async fn timed(pull: impl Future<Output = Result<()>>) -> Result<Duration> {
    let begun = std::time::Instant::now();
    pull.await?;
    Ok(begun.elapsed())
}

#[tokio::test]
async fn a_kubelets_pull_shares_the_download() -> Result<()> {
    const SIZE: u64 = 24 * MIB;
    let hand = Hand::start().await?;
    for (name, arguments, agent_first) in [
        ("agent-first", &[][..], true),
        ("kubelet-first", &[][..], false),
        ("agent-first-limited", &["--max-download-rate", "512KiB"][..], true),
        ("kubelet-first-limited", &["--max-download-rate", "512KiB"][..], false),
    ] {
        let (image, reference) = hand.image(name, &[SIZE / 2, SIZE / 2])?;
        hand.link.throttle(Some(4 * MIB));
        let mut agent = hand.pull(&[arguments, &[&reference]].concat())?;
        let by_kubelet = Box::pin(timed(hand.containerd.pull(&reference, None)));
        let (took, output) = if agent_first {
            let agent = agent.spawn()?;
            hand.has_fetched(&image, MIB).await?;
            let took = by_kubelet.await?;
            (took, agent.wait_with_output().await?)
        } else {
            let later = async {
                hand.has_fetched(&image, MIB).await?;
                anyhow::Ok(agent.output().await?)
            };
            tokio::try_join!(by_kubelet, later)?
        };
        ensure!(output.status.success(), "{name}: {}", said(&output));
        let fetched = hand.bytes_of(&image);
        println!("{name}: the kubelet's pull took {took:?}; {fetched} bytes of {}", image.size());
        ensure!(fetched <= image.size() * 102 / 100, "{name}: {fetched} bytes of {}", image.size());
        // Alone it takes six seconds; a limit would make it 48.
        ensure!(took < Duration::from_secs(18), "{name}: {took:?}: {}", said(&output));
    }
    Ok(())
}

#[tokio::test]
async fn without_ranges_nothing_is_written_twice() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("no-ranges", &[8 * MIB])?;
    hand.link.ignore_ranges();
    hand.link.throttle(Some(8 * MIB));
    let pulling = hand.pull(&["--retries", "5", &reference])?.spawn()?;
    hand.has_fetched(&image, 4 * MIB).await?;
    hand.link.cut();
    let output = pulling.wait_with_output().await?;
    ensure!(output.status.success(), "{}", said(&output));
    let layer = image.blobs().last().context("no layer")?;
    let asked: Vec<_> =
        hand.blob_requests().into_iter().filter(|record| record.path.ends_with(layer.as_str())).collect();
    let last = asked.last().context("no request")?;
    ensure!(asked.len() == 2 && last.range.is_some() && last.status == 200, "{asked:#?}");
    Ok(())
}

#[tokio::test]
async fn a_damaged_blob_is_fetched_elsewhere() -> Result<()> {
    let hand = Hand::start().await?;
    // A mirror in front of the registry, which damages the layer.
    let mirror = Proxy::for_http(hand.registry.addr())?;
    let host = hand.registry.host().to_owned();
    let (server, first) = (hand.link.addr(), mirror.addr());
    hand.containerd.own_registry_host(&host, |hosts| {
        let dir = hosts.join(&host);
        std::fs::create_dir_all(&dir)?;
        let text = format!(
            "server = \"http://{server}\"\n[host.\"http://{first}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
        );
        Ok(std::fs::write(dir.join("hosts.toml"), text)?)
    })?;
    let (image, reference) = hand.image("damaged", &[MIB])?;
    let layer = image.blobs().last().context("no layer")?;
    mirror.damage(layer);
    hand.pulls(&["--retries", "0", &reference]).await?;
    ensure!(mirror.bytes_of(layer) >= MIB && hand.link.bytes_of(layer) >= MIB, "one place alone");
    assert_eq!(hand.containerd.ingests().await?.len(), 0, "what was damaged is in the way of later pulls");

    // On all endpoints: the image fails, and a later pull isn't affected.
    let (image, reference) = hand.image("damaged-everywhere", &[MIB])?;
    let layer = image.blobs().last().context("no layer")?;
    mirror.damage(layer);
    hand.link.damage(layer);
    let output = hand.pull(&["--retries", "0", &reference])?.output().await?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1) && text.contains("the bytes that arrived are not"), "{text}");
    assert_eq!(hand.containerd.ingests().await?.len(), 0, "what was damaged is in the way of later pulls");
    Ok(())
}

#[tokio::test]
async fn a_damaged_rest_costs_no_try() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("rest", &[4 * MIB])?;
    hand.link.throttle(Some(2 * MIB));
    let mut pulling = hand.pull(&[&reference])?.spawn()?;
    hand.has_fetched(&image, MIB).await?;
    pulling.kill().await?;
    hand.link.throttle(None);
    // All of its bytes are there, and wrong: a card that said they were written, and lost power.
    let ingests = hand.containerd.root().join("io.containerd.content.v1.content/ingest");
    let layer = std::fs::metadata(image.blob_file(image.blobs().last().context("no layer")?))?.len();
    for ingest in std::fs::read_dir(ingests)? {
        std::fs::write(ingest?.path().join("data"), vec![0; usize::try_from(layer)?])?;
    }
    hand.pulls(&["--retries", "0", &reference]).await?;
    ensure!(hand.containerd.has_image(&reference).await?);
    Ok(())
}

#[tokio::test]
async fn a_busy_registry_is_asked_within_the_try() -> Result<()> {
    let hand = Hand::start().await?;
    let (_, reference) = hand.image("busy", &[MIB])?;
    hand.link.fail_next_on("/blobs/", 2, 429);
    let text = hand.pulls(&["--retries", "0", &reference]).await?;
    ensure!(text.contains("1 pulled"), "{text}");
    Ok(())
}

#[tokio::test]
async fn no_fallback_breaks_a_limit() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("left", &[MIB])?;
    let mut command = tokio::process::Command::new(prepull_e2e::parts::program_path("edgecore-prepull")?);
    command.args(["pull", "--fetch", "runtime", "--max-download-rate", "1MiB", "--retries", "0"]);
    command.args(["--runtime-endpoint", &hand.containerd.endpoint(), &reference]);
    let output = command.output().await?;
    let text = said(&output);
    ensure!(output.status.code() == Some(1) && text.contains("keeps no limit"), "{text}");
    assert_eq!(hand.bytes_of(&image), 0);
    Ok(())
}

#[tokio::test]
async fn the_status_names_each_downloader() -> Result<()> {
    let site = Site::start().await?;
    let _by_agent = site.add_node("edge-1").await?.await?;
    let _by_runtime = site.add_node("edge-2").await?.args(&["--fetch", "runtime"]).await?;
    let (_, reference) = site.seed_image("who", &[MIB])?;
    let job =
        |name: &str| site.job(name).images([&reference]).on(["edge-1", "edge-2"]).policy("IfNotPresent");
    let pulled = job("pulled").completes().await?;
    let there = job("there").completes().await?;
    for (node, by, why) in [("edge-1", PulledBy::Agent, ""), ("edge-2", PulledBy::Runtime, "--fetch=runtime")]
    {
        let image = pulled.image(node, &reference).context("no image")?;
        assert_eq!(
            (image.facts.pulled_by, image.facts.pulled_by_reason.as_str()),
            (Some(by), why),
            "{image:?}"
        );
        let image = there.image(node, &reference).context("no image")?;
        assert_eq!((image.facts.pulled_by, image.facts.pulled_by_reason.as_str()), (None, ""), "{image:?}");
    }
    // It keeps no limit of a site.
    let limited = job("limited").policy("Always").retries(0).spec(|spec| {
        let (share_within_site, max_site_rate) = (Some(true), Some("1Mi".to_owned()));
        spec.download = Some(DownloadSpec { share_within_site, max_site_rate, ..DownloadSpec::default() });
    });
    let limited = limited.fails().await?;
    let image = limited.image("edge-2", &reference).context("no image")?;
    ensure!(image.reason.contains("keeps no limit"), "{image:?}");
    Ok(())
}

#[tokio::test]
async fn a_manual_pull_shows_arriving_layers() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("shown", &[3 * MIB, 2 * MIB])?;
    hand.link.throttle(Some(2 * MIB));
    // `script` gives the program a terminal.
    let pull = hand.pull(&[&reference])?;
    let words = std::iter::once(pull.as_std().get_program()).chain(pull.as_std().get_args());
    let line = words.map(|word| format!("'{}'", word.to_string_lossy())).collect::<Vec<_>>().join(" ");
    let mut script = tokio::process::Command::new("script");
    script.args(["--quiet", "--return", "--command", &format!("stty cols 160; {line}"), "/dev/null"]);
    let output = script.env("TERM", "xterm").stdin(Stdio::null()).kill_on_drop(true).output().await?;
    let shown = said(&output);
    ensure!(output.status.success() && shown.contains("1 pulled"), "{shown}");
    let manifest = std::fs::read(image.blob_file(image.digest()))?;
    let manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
    for layer in manifest["layers"].as_array().context("no layers")? {
        let digest = layer["digest"].as_str().context("no digest")?;
        let of_layer = shown.lines().any(|line| line.contains(&digest[..19]) && line.contains("/s"));
        ensure!(of_layer, "{digest} is not shown: {shown}");
    }
    ensure!(shown.contains(" left"), "{shown}");
    Ok(())
}

#[tokio::test]
async fn the_last_layer_outlives_its_registry() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("gone", &[8 * MIB])?;
    hand.link.throttle(Some(4 * MIB));
    let pulling = hand.pull(&["--retries", "0", &reference])?.spawn()?;
    hand.has_fetched(&image, MIB).await?;
    // The layer arrives on the open connection, and no other one is possible.
    hand.link.refuse_more();
    let output = pulling.wait_with_output().await?;
    let text = said(&output);
    ensure!(output.status.success() && text.contains("1 pulled"), "{text}");
    ensure!(hand.containerd.has_image(&reference).await?, "{text}");
    Ok(())
}

#[tokio::test]
async fn a_manual_pull_respects_its_window() -> Result<()> {
    let hand = Hand::start().await?;
    let (image, reference) = hand.image("by-hand", &[MIB])?;
    let opens = jiff::Timestamp::now().checked_add(jiff::SignedDuration::from_hours(5))?;
    let window = format!("{}+1h UTC", opens.strftime("%H:%M"));
    // None of this time counts, since none of it is in the window.
    let mut pulling = hand
        .pull(&["--download-window", &window, "--timeout", "1s", "--disk-min-free", "0%", &reference])?
        .spawn()?;
    let mut lines = BufReader::new(pulling.stdout.take().context("no output")?).lines();
    let said = tokio::time::timeout(SOON, lines.next_line()).await??.context("it has ended")?;
    let expected =
        format!("nothing is downloaded: it waits for its window, opens at {} UTC", opens.strftime("%H:%M"));
    ensure!(said.starts_with(&expected), "{said}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    ensure!(pulling.try_wait()?.is_none(), "it has not waited");
    assert_eq!(hand.bytes_of(&image), 0);
    Ok(())
}
