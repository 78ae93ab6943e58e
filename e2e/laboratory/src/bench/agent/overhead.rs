//! The cost of a pull through the agent, against the same pull by the runtime alone.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use edgecore_prepull::config::CheckLimits;
use edgecore_prepull::images::puller::Puller;
use edgecore_prepull::images::puller::cri::CriPuller;
use edgecore_prepull::tasks::executor::Executor;
use prepull_e2e::prelude::*;

use super::pulls::{self, pull_directly, through_agent};
use super::{median, print_bar, ratios};

/// Number of rounds of pulls. The median of their ratios ignores rounds that the machine disturbed.
const ROUNDS: usize = 10;
/// The ways to pull an image in each round.
const WAYS: usize = 4;
const DIRECTLY: usize = 0;
const AND_FLUSHED: usize = 1;
const AGENT: usize = 2;
const FETCHED: usize = 3;
/// Sizes of the layers of each image, as in a small application.
pub(super) const LAYERS: [u64; 3] = [16 * MIB; 3];

/// Compares pulls through the agent's executor with direct CRI calls. `PullImage` leaves its files in memory, and the
/// agent doesn't report an image before it's on disk. So the bar is for the same call with the same flush, and the cost
/// of the flush is shown separately.
pub(super) async fn measure() -> Result<()> {
    println!(
        "\nOne image of {} MiB, {ROUNDS} times: PullImage, PullImage and a flush, and through the agent",
        LAYERS.iter().sum::<u64>() / MIB
    );
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let containerd = Containerd::start("bench").await?;
    let puller = Arc::new(CriPuller::new(containerd.endpoint().parse()?));
    let executor = Executor::new(puller.clone(), NonZeroUsize::MIN, CheckLimits::default());
    let fetching = pulls::fetching_executor(&containerd, NonZeroUsize::MIN)?;
    let (_, user, secret) = registry.login("alice")?;
    let (login, key) = (Some((user, secret)), pulls::key(user, secret));
    // Every pull needs new content, which is generated before the first pull. Both sides connect before the measurement.
    let mut references = Vec::new();
    for number in 0..WAYS * ROUNDS + 3 {
        let image = Image::of_layers(&format!("bench-{number}"), &LAYERS)?;
        references.push(registry.seed(&image, &format!("bench/image:{number}"))?);
    }
    let mut references = references.into_iter();
    let mut cri = containerd.cri().await?;
    pull_directly(&mut cri, &references.next().context("no image")?, login).await?;
    through_agent(&executor, &[references.next().context("no image")?], &key).await?;
    through_agent(&fetching, &[references.next().context("no image")?], &key).await?;
    puller.flush().await?;
    let mut times = [(); WAYS].map(|()| Vec::new());
    for round in 0..ROUNDS {
        // The first pull of a round has the quieter disk, so each way is first in turn. No way pays for another one's
        // data in memory.
        for way in (0..WAYS).map(|way| (round + way) % WAYS) {
            let reference = references.next().context("no image")?;
            let took = match way {
                DIRECTLY => pull_directly(&mut cri, &reference, login).await?,
                AND_FLUSHED => {
                    let begun = Instant::now();
                    pull_directly(&mut cri, &reference, login).await?;
                    puller.flush().await?;
                    begun.elapsed()
                }
                AGENT => through_agent(&executor, &[reference], &key).await?,
                _ => through_agent(&fetching, &[reference], &key).await?,
            };
            times[way].push(took.as_secs_f64());
            puller.flush().await?;
        }
    }
    let [ratio, least, most] = ratios(&times[AGENT], &times[AND_FLUSHED]);
    println!("  agent / PullImage and a flush   median {ratio:.3}, from {least:.3} to {most:.3}");
    let [durable, least, most] = ratios(&times[AND_FLUSHED], &times[DIRECTLY]);
    println!("  PullImage and a flush / without median {durable:.3}, from {least:.3} to {most:.3}");
    let [fetched, least, most] = ratios(&times[FETCHED], &times[AND_FLUSHED]);
    println!("  agent's fetch / PullImage and a flush median {fetched:.3}, from {least:.3} to {most:.3}");
    let names = ["PullImage", "PullImage and a flush", "through the agent", "fetched by the agent"];
    for (name, times) in names.iter().zip(&mut times) {
        println!("  {name:<31} median {:.3} s", median(times));
    }
    print_bar("through the agent against PullImage and a flush", ratio, 1.05, "");
    print_bar("fetched by the agent against PullImage and a flush", fetched, 1.05, "");
    Ok(())
}
