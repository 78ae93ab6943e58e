//! Layers that are passed on while they arrive.

use std::net::SocketAddr;
use std::time::Duration;

use prepull_e2e::boxes::{Order, Row, SERVING};
use prepull_e2e::network::lan::Vlan;
use prepull_e2e::prelude::*;

/// Limit for a job over a few boxes.
const LIMIT: Duration = Duration::from_secs(150);
/// Bits a second of the uplink: one box alone takes some ten seconds.
const RATE: u64 = 24_000_000;
/// Bytes of the only layer.
const LAYER: u64 = 28 * MIB;
/// Time after which another box carries on for one that is gone, and some.
const GONE: Duration = Duration::from_secs(60);

/// A site of so many boxes, and an image of one layer.
async fn site(boxes: u8) -> Result<Boxes> {
    let plan = Plan {
        boxes,
        uplink: Uplink::with_rate(RATE),
        layers: vec![LAYER],
        agent: vec![SERVING.to_owned()],
        cloud: vec!["--heartbeat=1s".to_owned()],
    };
    Boxes::start(&plan).await
}

/// What one box alone needs. Afterwards no box has anything of the image.
async fn alone(boxes: &Boxes) -> Result<Row> {
    let run = Run::begin(boxes, "alone", &boxes.names(1), LIMIT).await?;
    let (row, _) = run.finish(boxes, "alone", None).await?;
    // No machine is so fast that the uplink would be faster than it was ordered.
    let bits = Duration::from_millis(row.down * 8 * 1000 / RATE).as_secs_f64();
    ensure!(row.seconds > bits * 0.9, "{} bytes in {} s, at {RATE} bits a second", row.down, row.seconds);
    boxes.forget_image().await?;
    Ok(row)
}

/// A job over these boxes, which share.
async fn shared(boxes: &Boxes, name: &str, on: Vec<String>) -> Result<Run> {
    Run::of(boxes, &Order { share: true, ..Order::new(name, on, LIMIT) }).await
}

/// Whether the uplink has carried at most so many percent of what it carries for one box.
fn is_within(row: &Row, alone: &Row, percent: u64) -> Result<()> {
    let (down, one) = (row.down, alone.down);
    ensure!(down * 100 <= one * percent, "the uplink has carried {down} bytes, and {one} for one box");
    Ok(())
}

#[tokio::test]
async fn a_layer_is_passed_on_while_it_arrives() -> Result<()> {
    let boxes = site(3).await?;
    let alone = alone(&boxes).await?;
    let (row, _) = shared(&boxes, "shared", boxes.names(3)).await?.finish(&boxes, "shared", None).await?;
    println!(
        "alone {:.1} s, three {:.1} s, {} and {} bytes",
        alone.seconds, row.seconds, alone.down, row.down
    );
    is_within(&row, &alone, 106)?;
    ensure!(row.seconds <= alone.seconds * 1.3, "{} s, and {} s for one box", row.seconds, alone.seconds);
    Ok(())
}

#[tokio::test]
async fn readers_go_on_for_a_dead_carrier() -> Result<()> {
    let mut boxes = site(3).await?;
    let alone = alone(&boxes).await?;
    let run = shared(&boxes, "killed", boxes.names(3)).await?;
    run.reaches(&boxes, 60).await?;
    let carrier = run.carrier(&boxes).await?;
    boxes.all[carrier].node.kill9_agent()?;
    let (job, reference) = (boxes.cluster.existing_job("killed"), boxes.reference.clone());
    eventually("the others have the image", LIMIT, async || {
        for (index, found) in boxes.all.iter().enumerate() {
            let has = index == carrier || found.node.has_image(&reference).await?;
            ensure!(has, "{} has no image: {:?}", found.node.name(), job.status().await?.summary);
        }
        Ok(())
    })
    .await?;
    boxes.all[carrier].node.restart_agent()?;
    let (row, _) = run.finish(&boxes, "killed", None).await?;
    println!(
        "alone {:.1} s, killed {:.1} s, {} and {} bytes",
        alone.seconds, row.seconds, alone.down, row.down
    );
    is_within(&row, &alone, 115)?;
    ensure!(row.seconds < (alone.seconds * 1.3 + GONE.as_secs_f64()), "{} s", row.seconds);
    Ok(())
}

#[tokio::test]
async fn a_slow_reader_holds_up_no_other() -> Result<()> {
    const SLOW: &str = "slow";
    let mut boxes = site(3).await?;
    let alone = alone(&boxes).await?;
    boxes.add(SLOW, Vlan::Office, |start, _| Ok(start.args(&["--max-download-rate=40KiB"]))).await?;
    let others = shared(&boxes, "others", boxes.names(3)).await?;
    // So that it reads, and carries nothing.
    others.reaches(&boxes, 10).await?;
    let _slow = shared(&boxes, "slow", vec![SLOW.to_owned()]).await?;
    let (row, _) = others.finish(&boxes, "others", None).await?;
    println!("alone {:.1} s, with a slow one {:.1} s", alone.seconds, row.seconds);
    ensure!(row.seconds < alone.seconds * 1.5, "{} s, and {} s for one box", row.seconds, alone.seconds);
    Ok(())
}

#[tokio::test]
async fn silent_connections_stop_no_sharing() -> Result<()> {
    let boxes = site(3).await?;
    let alone = alone(&boxes).await?;
    let (silent, mut open) = (&boxes.get("edge-3")?.outlet, Vec::new());
    for server in ["edge-1", "edge-2"] {
        let door = SocketAddr::from((boxes.get(server)?.outlet.address(), 10_006));
        for _ in 0..40 {
            open.push(silent.open(door)?);
        }
    }
    let (row, _) = shared(&boxes, "silent", boxes.names(2)).await?.finish(&boxes, "silent", None).await?;
    is_within(&row, &alone, 106)?;
    drop(open);
    Ok(())
}
