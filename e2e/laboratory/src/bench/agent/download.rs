//! Benchmarks of the agent's own download: over a link, with images that share layers, and its processor time.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edgecore_prepull::images::puller::Puller;
use edgecore_prepull::images::puller::cri::CriPuller;
use prepull_api::wire::PullKey;
use prepull_e2e::certs::Authority;
use prepull_e2e::prelude::*;
use prepull_e2e::usage::Usage;

use super::overhead::LAYERS;
use super::pulls::{self, pull_directly, through_agent};
use super::{median, print_bar, ratios};

/// Number of rounds of each comparison.
const ROUNDS: usize = 3;
/// Links by their names, in bytes a second, each with the bar for the agent against the runtime.
const LINKS: [(&str, u64, f64); 2] = [("100 Mbit/s", 12_500_000, 1.05), ("1 Gbit/s", 125_000_000, 1.1)];
/// Delay of each piece, so that one connection carries a few MB/s and several carry more.
const DELAY: Duration = Duration::from_millis(8);
/// Images of a job, which share a base of two layers.
const IMAGES: usize = 5;
/// Size of the image for measuring processor time.
const LARGE: u64 = 64 * MIB;

pub(super) async fn measure() -> Result<()> {
    for (name, rate, limit) in LINKS {
        over_a_link(name, rate, limit).await?;
    }
    of_shared_layers().await?;
    processor_time().await
}

/// A registry behind a link, and a containerd on an ext4 with the same cost of flushes as on a box.
struct Behind {
    registry: Registry,
    link: Proxy,
    containerd: Containerd,
}

impl Behind {
    async fn start(name: &str) -> Result<Self> {
        let registry = Registry::start().await?;
        let link = Proxy::for_http(registry.addr())?;
        registry.route_through(&link)?;
        let containerd = Containerd::start_on_disk(name, Format::Ext4).await?;
        Ok(Self { registry, link, containerd })
    }

    /// Pulls images one after another by the runtime, and then others concurrently by the agent, several times.
    /// `images` creates the images for a way and a round.
    async fn compare(
        &self,
        at_once: usize,
        images: impl Fn(&str, usize) -> Result<Vec<String>>,
    ) -> Result<Comparison> {
        let fetching =
            pulls::fetching_executor(&self.containerd, NonZeroUsize::new(at_once).context("no image")?)?;
        let flusher = CriPuller::new(self.containerd.endpoint().parse()?);
        let (mut cri, key) = (self.containerd.cri().await?, Arc::new(PullKey::anonymous()));
        let mut comparison = Comparison::default();
        for round in 0..ROUNDS {
            let (by_runtime, by_agent) = (images("runtime", round)?, images("agent", round)?);
            let begun = Instant::now();
            for reference in &by_runtime {
                pull_directly(&mut cri, reference, None).await?;
            }
            flusher.flush().await?;
            comparison.other.push(begun.elapsed().as_secs_f64());
            comparison.agent.push(through_agent(&fetching, &by_agent, &key).await?.as_secs_f64());
            // The disk is small.
            for reference in by_runtime.iter().chain(&by_agent) {
                self.containerd.remove_image(reference).await?;
            }
            flusher.flush().await?;
        }
        Ok(comparison)
    }
}

/// Seconds of the agent and of another way, round by round.
#[derive(Default)]
struct Comparison {
    agent: Vec<f64>,
    other: Vec<f64>,
}

impl Comparison {
    fn print(mut self, what: &str, ways: &str, limit: f64) {
        let [ratio, least, most] = ratios(&self.agent, &self.other);
        println!("  {ways}   median {ratio:.3}, from {least:.3} to {most:.3}");
        println!("  {:.2} s against {:.2} s", median(&mut self.agent), median(&mut self.other));
        print_bar(what, ratio, limit, "");
    }
}

async fn over_a_link(name: &str, rate: u64, limit: f64) -> Result<()> {
    let size = LAYERS.iter().sum::<u64>() / MIB;
    println!("\nOne image of {size} MiB over a link of {name}, {ROUNDS} times");
    let behind = Behind::start("bench-link").await?;
    behind.link.throttle(Some(rate));
    let images = |way: &str, round| {
        let image = Image::of_layers(&format!("bench-link-{rate}-{way}-{round}"), &LAYERS)?;
        Ok(vec![behind.registry.seed(&image, &format!("link/{way}:{round}"))?])
    };
    let what = format!("fetched over {name} against PullImage and a flush");
    behind.compare(1, images).await?.print(&what, "agent's fetch / PullImage and a flush", limit);
    Ok(())
}

/// Images that share their base: one after another by the runtime, as a script would, and concurrently by the agent.
async fn of_shared_layers() -> Result<()> {
    println!("\n{IMAGES} images of 24 MiB that share 16 MiB, over slow connections, {ROUNDS} times");
    let behind = Behind::start("bench-shared").await?;
    behind.link.delay(DELAY);
    let images = |way: &str, round| {
        let base = format!("bench-shared-{way}-{round}");
        let image = |number| {
            let image = Image::on_base(&base, &[8 * MIB; 2], &format!("{base}-{number}"), 8 * MIB)?;
            behind.registry.seed(&image, &format!("shared/{way}-{round}:{number}"))
        };
        (0..IMAGES).map(image).collect()
    };
    let ways = "at once by the agent / one after another by PullImage";
    let compared = behind.compare(IMAGES, images).await?;
    compared.print("images that share layers, against one after another", ways, 0.7);
    Ok(())
}

/// The processor time of a download over TLS, against that of curl and sha256sum.
async fn processor_time() -> Result<()> {
    println!("\nProcessor time for {} MiB over TLS, {ROUNDS} times", LARGE / MIB);
    let authority = Authority::new("bench")?;
    let registry = Registry::start().tls(&authority).await?;
    let containerd = Containerd::start("bench-processor").await?;
    let fetching = pulls::fetching_executor(&containerd, NonZeroUsize::MIN)?;
    let key = Arc::new(PullKey::anonymous());
    let mut comparison = Comparison::default();
    for round in 0..ROUNDS {
        let image = Image::of_layers(&format!("bench-processor-{round}"), &[LARGE])?;
        let reference = registry.seed(&image, &format!("processor/image:{round}"))?;
        let before = Usage::of_this_process()?.cpu;
        through_agent(&fetching, &[reference], &key).await?;
        comparison.agent.push(Usage::of_this_process()?.cpu.saturating_sub(before).as_secs_f64());
        let layer = image.blobs().last().context("no layer")?;
        let url = format!("https://{}/v2/processor/image/blobs/{layer}", registry.addr());
        let ca = authority.file().display();
        let script = format!(
            "TIMEFORMAT='%U %S'; time (set -o pipefail; curl -sSf --cacert {ca} {url} | sha256sum >/dev/null)"
        );
        let output = tokio::process::Command::new("bash").args(["-c", &script]).output().await?;
        let times = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{times}");
        comparison.other.push(times.split_whitespace().map(str::parse::<f64>).sum::<Result<f64, _>>()?);
    }
    comparison.print(
        "processor time of a download against curl and sha256sum",
        "agent / curl and sha256sum",
        1.2,
    );
    Ok(())
}
