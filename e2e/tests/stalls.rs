//! Downloads without progress, on the real containerd, and downloads that only wait for their turn: the transfer
//! service of containerd 2.1 has three places for the layers of all images together. Here the agent's patience is some
//! seconds instead of minutes.

use std::time::{Duration, Instant};

use edgecore_prepull::images::puller::cri::CriPuller;
use edgecore_prepull::images::puller::{ErrorClass, PullError, PullRequest, Pulled, Puller};
use prepull_api::failure::FailureCode;
use prepull_e2e::prelude::*;

/// Time without bytes before a download is given up, for each connection.
const PATIENCE: Duration = Duration::from_secs(3);

/// A runtime, and a registry behind a link.
struct Scene {
    containerd: Containerd,
    puller: CriPuller,
    registry: Registry,
    link: Proxy,
}

impl Scene {
    async fn start() -> Result<Self> {
        let (containerd, registry) =
            tokio::try_join!(Containerd::start("edge-1"), Registry::start().into_future())?;
        let link = Proxy::for_http(registry.addr())?;
        registry.route_through(&link)?;
        let puller = CriPuller::new(containerd.endpoint().parse()?).with_stall_limit(PATIENCE);
        Ok(Self { containerd, puller, registry, link })
    }

    async fn pull(&self, reference: &str) -> Result<Pulled, PullError> {
        self.puller.pull(PullRequest::new(reference), &|_| {}).await
    }

    async fn link_carries(&self, bytes: u64) -> Result<()> {
        eventually("the link carries bytes", SOON, async || {
            ensure!(self.link.bytes() >= bytes, "{} so far", self.link.bytes());
            Ok(())
        })
        .await
    }
}

#[tokio::test]
async fn a_silent_registry_is_given_up() -> Result<()> {
    let scene = Scene::start().await?;
    let image = Image::of_layers("silent", &[8 * MIB])?;
    let reference = scene.registry.seed(&image, "team/silent:v1")?;
    scene.link.throttle(Some(2 * MIB));
    let falls_silent = async {
        scene.link_carries(4 * MIB).await?;
        scene.link.freeze();
        Ok::<_, anyhow::Error>(Instant::now())
    };
    let (pulled, since) = tokio::join!(scene.pull(&reference), falls_silent);
    let took = since?.elapsed();
    let error = pulled.err().context("it pulled through a frozen link")?;
    assert_eq!((error.class, error.code), (ErrorClass::Transient, FailureCode::Unreachable), "{error}");
    ensure!(took >= PATIENCE, "after {took:?}");

    let before = scene.link.bytes();
    scene.link.thaw();
    scene.link.throttle(None);
    scene.pull(&reference).await?;
    ensure!(scene.containerd.has_image(&reference).await?);
    let again = scene.link.bytes() - before;
    ensure!(again < 6 * MIB, "{again} bytes of 8 MiB were fetched again");
    Ok(())
}

#[tokio::test]
async fn a_waiting_image_is_not_given_up() -> Result<()> {
    let scene = Scene::start().await?;
    let elsewhere = Registry::start().await?;
    let large = scene.registry.seed(&Image::of_layers("large", &[6 * MIB; 3])?, "team/large:v1")?;
    let small = elsewhere.seed(&Image::of_layers("waiting", &[MIB])?, "team/waiting:v1")?;
    // Longer than the patience for all possible connections.
    scene.link.throttle(Some(MIB));
    let begun = Instant::now();
    let waits = async {
        scene.link_carries(MIB).await?;
        scene.pull(&small).await.map_err(anyhow::Error::from)?;
        Ok::<_, anyhow::Error>(begun.elapsed())
    };
    let (large, waited) = tokio::join!(scene.pull(&large), waits);
    large?;
    eprintln!("the small image came after {:?}, both after {:?}", waited?, begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn a_waiting_image_follows_a_dead_one() -> Result<()> {
    let scene = Scene::start().await?;
    let elsewhere = Registry::start().await?;
    let dead = scene.registry.seed(&Image::of_layers("dead", &[8 * MIB; 3])?, "team/dead:v1")?;
    let small = elsewhere.seed(&Image::of_layers("waiting", &[MIB])?, "team/waiting:v1")?;
    scene.link.throttle(Some(2 * MIB));
    let waits = async {
        scene.link_carries(4 * MIB).await?;
        scene.link.freeze();
        scene.pull(&small).await.map_err(anyhow::Error::from)
    };
    let (dead, small) = tokio::join!(scene.pull(&dead), waits);
    assert_eq!(dead.err().context("it pulled through a frozen link")?.code, FailureCode::Unreachable);
    small?;
    Ok(())
}
