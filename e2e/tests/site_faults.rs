//! Faults of a site while its boxes share what they download: all boxes get the image, and the uplink carries it no more
//! often than needed.

use std::time::Duration;

use prepull_e2e::boxes::{Fault, SERVING, Strike, Struck, strike};
use prepull_e2e::prelude::*;

/// Limit for a job over a few boxes.
const LIMIT: Duration = Duration::from_secs(150);
/// How long what breaks in the middle stays broken.
const BROKEN: Duration = Duration::from_secs(4);
/// Bits a second: one box alone takes some two seconds.
const RATE: u64 = 24_000_000;
/// Boxes of a site.
const BOXES: u8 = 3;

/// A site whose boxes share.
async fn site() -> Result<Boxes> {
    let plan = Plan {
        boxes: BOXES,
        uplink: Uplink::with_rate(RATE),
        layers: vec![3 * MIB, 2 * MIB, MIB, MIB],
        agent: vec![SERVING.to_owned()],
        cloud: vec!["--heartbeat=1s".to_owned()],
    };
    Boxes::start(&plan).await
}

/// Strikes a site, and checks that the uplink has carried the image at most so many times, in percent, with all headers.
async fn struck(boxes: &mut Boxes, fault: Fault, percent: u64) -> Result<Struck> {
    let how = Strike { fault, share: true, boxes: BOXES.into(), broken: BROKEN, limit: LIMIT };
    let struck = strike(boxes, how, None).await?;
    let (down, image) = (struck.row.down, boxes.image_bytes()?);
    ensure!(
        down * 100 <= image * percent,
        "{fault:?}: the uplink has carried {down} bytes, the image has {image}"
    );
    Ok(struck)
}

#[tokio::test]
async fn half_of_a_site_that_is_cut_off_gets_the_image_all_the_same() -> Result<()> {
    struck(&mut site().await?, Fault::Split, 150).await?;
    Ok(())
}

#[tokio::test]
async fn boxes_go_on_while_the_cloud_is_away() -> Result<()> {
    struck(&mut site().await?, Fault::CloudAway, 150).await?;
    Ok(())
}

#[tokio::test]
async fn boxes_that_cannot_reach_each_other_download_by_themselves() -> Result<()> {
    let mut boxes = site().await?;
    let image = boxes.image_bytes()?;
    let odd = struck(&mut boxes, Fault::Vlan, 250).await?;
    ensure!(odd.row.down >= 2 * image, "{} bytes: who brought it into the other VLAN?", odd.row.down);
    boxes.forget_image().await?;
    let all = struck(&mut boxes, Fault::Isolated, 350).await?;
    ensure!(all.row.down >= 3 * image, "{} bytes: the walls have holes", all.row.down);
    Ok(())
}

#[tokio::test]
async fn one_box_with_a_full_disk_or_a_wrong_clock_holds_up_no_other() -> Result<()> {
    let mut boxes = site().await?;
    struck(&mut boxes, Fault::Clock, 150).await?;
    boxes.forget_image().await?;
    let disk = struck(&mut boxes, Fault::FullDisk, 200).await?;
    assert_eq!(disk.row.have, usize::from(BOXES), "{:?}", disk.status.summary);
    Ok(())
}
