//! The power of the disk is cut: what is left of a pull is whole, and what was reported is there.

use prepull_e2e::prelude::*;
use tokio::process::Child;

use crate::fetch::Hand;

async fn hand_on(format: Format) -> Result<Hand> {
    let hand = Hand::start_with(Registry::start(), Containerd::start_on_disk("edge-1", format)).await;
    hand.with_context(|| format!("on {format:?}"))
}

/// Cuts the power, which ends a pull as well, and starts containerd on what is left.
async fn cut_power(hand: &mut Hand, pulling: Option<Child>) -> Result<()> {
    hand.containerd.cut_power()?;
    if let Some(mut pulling) = pulling {
        pulling.kill().await?;
    }
    hand.containerd.power_on().await
}

#[tokio::test]
async fn what_was_reported_survives_a_power_cut() -> Result<()> {
    for format in Format::all() {
        let mut hand = hand_on(format).await?;
        let (image, reference) = hand.image("reported", &[4 * MIB, 16 * MIB])?;
        hand.pulls(&[&reference]).await?;
        cut_power(&mut hand, None).await?;
        ensure!(hand.containerd.image_status(&reference).await?.is_some(), "{format:?}: it is gone");
        assert_eq!(hand.containerd.check_unpacked(&image).await?, 2, "{format:?}");
    }
    Ok(())
}
