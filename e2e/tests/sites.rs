//! Sites: boxes at a switch behind one uplink.

use std::net::TcpListener;
use std::time::Duration;

use prepull_e2e::network::lan::Vlan;
use prepull_e2e::prelude::*;

/// Limit for a job over a few boxes.
const LIMIT: Duration = Duration::from_secs(120);
/// Bits a second of an uplink that makes nobody wait.
const FAST: u64 = 200_000_000;

/// A site of so many boxes and an image of a few MiB.
fn plan(boxes: u8, rate: u64) -> Plan {
    Plan {
        boxes,
        uplink: Uplink::with_rate(rate),
        layers: vec![3 * MIB, 2 * MIB, MIB],
        agent: Vec::new(),
        cloud: Vec::new(),
    }
}

/// Whether so many bytes are those of the image `times` times, with the headers of packets and what else is said.
fn is_image(boxes: &Boxes, carried: u64, times: u64) -> Result<()> {
    let least = times * boxes.image_bytes()?;
    ensure!(carried >= least, "the uplink has carried {carried} bytes, less than {least}");
    ensure!(
        carried <= least + least * 15 / 100,
        "the uplink has carried {carried} bytes, {least} are enough"
    );
    Ok(())
}

#[tokio::test]
async fn the_uplink_carries_an_image_for_every_box_that_pulls_by_itself() -> Result<()> {
    const RATE: u64 = 40_000_000;
    let boxes = Boxes::start(&plan(2, RATE)).await?;
    let one = Run::begin(&boxes, "one", &boxes.names(1), LIMIT).await?;
    let (one, _) = one.finish(&boxes, "one", None).await?;
    is_image(&boxes, one.down, 1)?;
    boxes.forget_image().await?;

    let two = Run::begin(&boxes, "two", &boxes.names(2), LIMIT).await?;
    let (two, _) = two.finish(&boxes, "two", None).await?;
    is_image(&boxes, two.down, 2)?;
    // No machine is so fast that the uplink would be faster than it was ordered.
    let bits = Duration::from_millis(two.down * 8 * 1000 / RATE).as_secs_f64();
    ensure!(two.seconds > bits * 0.9, "{} bytes in {} s, at {RATE} bits a second", two.down, two.seconds);
    Ok(())
}

#[tokio::test]
async fn plugs_walls_and_the_uplink_keep_boxes_apart() -> Result<()> {
    const PORT: u16 = 7000;
    let lan = Lan::new(Uplink::with_rate(FAST)).await?;
    let server = TcpListener::bind("127.0.0.1:0")?;
    let outside = lan.open_door(server.local_addr()?)?;
    let (first, second) = (lan.add_outlet().await?, lan.add_outlet().await?);
    let guest = lan.outlet_in(Vlan::Guests).await?;
    let (_first, _guest) = (first.listen(PORT)?, guest.listen(PORT)?);
    let (of_first, of_guest) = ((first.address(), PORT).into(), (guest.address(), PORT).into());

    let before = lan.carried_down().await?;
    second.try_connect(of_first)?;
    assert_eq!(lan.carried_down().await?, before, "what boxes say to each other stays in the site");
    for outlet in [&first, &second, &guest] {
        outlet.try_connect(outside)?;
    }
    ensure!(lan.carried_down().await? > before, "the uplink counts");
    ensure!(second.try_connect(of_guest).is_err(), "another VLAN can be reached");
    ensure!(guest.try_connect(of_first).is_err(), "another VLAN can be reached");

    second.unplug().await?;
    ensure!(second.try_connect(of_first).is_err(), "the plug is pulled");
    second.plug().await?;
    second.try_connect(of_first)?;

    lan.cut().await?;
    ensure!(first.try_connect(outside).is_err(), "the uplink is cut");
    second.try_connect(of_first)?;
    lan.mend().await?;
    first.try_connect(outside)?;

    second.isolate(true).await?;
    second.try_connect(of_first).context("only one of the two is isolated")?;
    first.isolate(true).await?;
    ensure!(second.try_connect(of_first).is_err(), "both are isolated");
    second.try_connect(outside)?;
    second.isolate(false).await?;
    second.try_connect(of_first)?;
    Ok(())
}
