//! Boxes of a site that share what they download.

use std::process::Command;
use std::time::{Duration, Instant};

use prepull_api::crd::download::DownloadSpec;
use prepull_api::credentials::ALLOW;
use prepull_api::sites::{BlobNews, BlobState, Blobs, From, PeerDoor};
use prepull_api::task::TaskId;
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use prepull_e2e::boxes::SERVING;
use prepull_e2e::images::delta::Delta;
use prepull_e2e::intruder::Wire;
use prepull_e2e::network::lan::Vlan;
use prepull_e2e::prelude::*;
use serde_json::json;

use crate::settings::Settings;

/// Limit for a job over a few boxes.
const LIMIT: Duration = Duration::from_secs(120);
/// Bits a second of an uplink that makes nobody wait for long.
const FAST: u64 = 100_000_000;

/// A site of so many boxes that share, and an image of a few MiB.
fn sharing(boxes: u8, rate: u64) -> Plan {
    Plan {
        boxes,
        uplink: Uplink::with_rate(rate),
        layers: vec![6 * MIB, 4 * MIB, 2 * MIB],
        agent: vec![SERVING.to_owned()],
        cloud: vec!["--share-within-site".to_owned()],
    }
}

#[tokio::test]
async fn the_uplink_carries_each_layer_once_for_all_boxes_of_a_site() -> Result<()> {
    let boxes = Boxes::start(&sharing(3, FAST)).await?;
    let run = Run::begin(&boxes, "shared", &boxes.names(3), LIMIT).await?;
    let (row, _) = run.finish(&boxes, "shared", None).await?;
    let image = boxes.image_bytes()?;
    ensure!(
        row.down < image + image / 2,
        "the uplink has carried {} bytes for an image of {image}",
        row.down
    );
    let reports = boxes.cluster.existing_job("shared").reports().await?;
    let nodes = reports.iter().flat_map(|report| &report.body.node_status);
    let images: Vec<_> = nodes.flat_map(|node| &node.image_status).collect();
    let from_peers: u64 = images.iter().filter_map(|image| image.bytes?.from_peers).sum();
    // Each layer was carried by one of three.
    ensure!((24 * MIB..25 * MIB).contains(&from_peers), "{from_peers} bytes are from neighbours: {images:?}");
    ensure!(images.iter().all(|image| image.facts.unshared_reason.is_empty()), "{images:?}");
    for node in boxes.all.iter().map(|found| &found.node) {
        ensure!(node.has_image(&boxes.reference).await?, "{} has no image", node.name());
    }
    Ok(())
}

#[tokio::test]
async fn a_delta_crosses_the_uplink_once() -> Result<()> {
    let boxes = Boxes::start(&sharing(4, FAST)).await?;
    let [first, second, third] =
        [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?, Image::version("app", 3, 1)?];
    let before = boxes.registry.seed(&first, "team/app:v1")?;
    let after = boxes.registry.seed(&second, "team/app:v2")?;
    let delta = Delta::between(&first, &second)?;
    boxes.registry.seed_delta("team/app", &delta)?;
    let pull = |name: &str, image: &str, on: Vec<String>| boxes.cluster.job(name).images([image]).on(on);
    pull("before", &before, boxes.names(4)).completes().await?;
    // One after the other: the second box comes when the first has unpacked what it rebuilt.
    for name in boxes.names(2) {
        let status = pull(&format!("after-{name}"), &after, vec![name.clone()]).completes().await?;
        let image = status.image(&name, &after).context("no status")?;
        ensure!(image.facts.delta_saved_bytes.is_some_and(|saved| saved > 11 * MIB), "{image:?}");
        // containerd collects what no image and no lease needs.
        boxes.get(&name)?.node.remove_image(&before).await?;
    }
    let fetches = |delta: &Delta| {
        let diff = delta.digests().next().context("no diff")?;
        let fetched = boxes.registry.requests().filter(|request| request.path.contains(diff));
        ensure!(fetched.len() == 1, "{fetched:?}");
        Ok(())
    };
    fetches(&delta)?;

    // Two boxes have the second version now, and two the first: all go to the third at once, each by the delta from its own.
    let newest = boxes.registry.seed(&third, "team/app:v3")?;
    let deltas = [Delta::between(&first, &third)?, Delta::between(&second, &third)?];
    for delta in &deltas {
        boxes.registry.seed_delta("team/app", delta)?;
    }
    let status = pull("newest", &newest, boxes.names(4)).completes().await?;
    for name in boxes.names(4) {
        let image = status.image(&name, &newest).context("no status")?;
        ensure!(image.facts.delta_saved_bytes.is_some_and(|saved| saved > 11 * MIB), "{name}: {image:?}");
    }
    deltas.iter().try_for_each(fetches)
}

#[tokio::test]
async fn the_cloud_caps_what_a_box_passes_on() -> Result<()> {
    const RATE: u64 = 2 * MIB;
    let boxes = Boxes::start(&sharing(2, FAST)).await?;
    boxes.cluster.job("first").images([&boxes.reference]).on(["edge-1"]).completes().await?;
    let settings = Settings::of(&boxes.cluster);
    settings.apply("uploads", json!({ "nodeNames": ["edge-1"], "peerMaxUploadRate": "2Mi" })).await?;
    settings.are_in_force("uploads").await?;
    let begun = Instant::now();
    let second = boxes.cluster.job("second").images([&boxes.reference]).on(["edge-2"]);
    second.apply().await?.within(LIMIT).completes().await?;
    let served =
        boxes.get("edge-1")?.node.metrics().await?.sum("edgecore_prepull_peer_served_bytes_total", &[]);
    let served = Duration::from_secs_f64(served / 2_097_152.0);
    ensure!(served > Duration::from_secs(1), "it has passed on next to nothing");
    ensure!(
        served < begun.elapsed().mul_f64(1.2),
        "{served:?} at {RATE} bytes a second, in {:?}",
        begun.elapsed()
    );
    Ok(())
}

#[tokio::test]
async fn the_limit_of_a_site_holds_on_its_uplink_however_many_boxes_download() -> Result<()> {
    const RATE: u64 = 2 * MIB;
    let boxes = Boxes::start(&sharing(3, FAST)).await?;
    let begun = Instant::now();
    let job = boxes.cluster.job("limited").images([&boxes.reference]).on(boxes.names(3)).spec(|spec| {
        spec.download =
            Some(DownloadSpec { max_site_rate: Some("2Mi".to_owned()), ..DownloadSpec::default() });
    });
    job.apply().await?.within(LIMIT).completes().await?;
    let least = Duration::from_millis(1000 * boxes.image_bytes()? / RATE);
    // What connections receive ahead crosses the uplink before the limit has let it.
    ensure!(begun.elapsed() > least.mul_f64(0.8), "{:?} for what takes {least:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn the_nodes_of_an_image_pull_job_share_as_well_and_only_by_tickets() -> Result<()> {
    let mut plan = sharing(2, FAST);
    plan.cloud.push("--enable-kruise-api".to_owned());
    let boxes = Boxes::start(&plan).await?;
    let (image, before) = (boxes.image_bytes()?, boxes.lan.carried_down().await?);
    boxes.cluster.pull_job("kruise", &boxes.reference).on_nodes(boxes.names(2)).completes().await?;
    let carried = boxes.lan.carried_down().await? - before;
    ensure!(carried < image + image / 2, "the uplink has carried {carried} bytes for an image of {image}");

    let (server, reader) = (boxes.get("edge-1")?, boxes.get("edge-2")?);
    let layer = boxes
        .image
        .blobs()
        .iter()
        .max_by_key(|blob| std::fs::metadata(boxes.image.blob_file(blob)).map_or(0, |file| file.len()));
    let url = format!("https://{}:10006/blobs/{}", server.outlet.address(), layer.context("no layers")?);
    let pki = reader.node.state_dir().join("pki");
    let ask = |certificate: bool, ticket: Option<&str>| {
        let mut command = Command::new("curl");
        command.args(["--silent", "--insecure", "--max-time", "20", "--output", "/dev/null"]);
        command.args(["--write-out", "%{http_code}"]).arg(&url);
        if certificate {
            command.arg("--cert").arg(pki.join("client.crt")).arg("--key").arg(pki.join("client.key"));
        }
        if let Some(ticket) = ticket {
            command.arg("--header").arg(format!("Authorization: Ticket {ticket}"));
        }
        let output = reader.outlet.space().wrap_command(&command).output()?;
        Ok::<_, anyhow::Error>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let forged = format!("99999999999.{}", "0b".repeat(64));
    assert_eq!(ask(true, None)?, "403", "the certificate of a node alone opens nothing");
    assert_eq!(ask(true, Some(&forged))?, "403");
    assert_eq!(ask(false, Some(&forged))?, "000", "no certificate, no session");
    Ok(())
}

#[tokio::test]
async fn a_running_job_is_throttled_at_once() -> Result<()> {
    const SITE_RATE: u64 = 100_000;
    /// Until then the uplink carries no more than that.
    const AT_ONCE: Duration = Duration::from_secs(5);
    const LOOK: Duration = Duration::from_secs(1);
    // They don't share until the job says so.
    let boxes = Boxes::start(&Plan { cloud: Vec::new(), ..sharing(4, FAST) }).await?;
    let job = boxes.cluster.job("throttled").images([&boxes.reference]).on(boxes.names(4));
    let job = job.concurrency(4).spec(|spec| {
        spec.download = Some(DownloadSpec { max_rate: Some("300k".to_owned()), ..DownloadSpec::default() });
    });
    let job = job.apply().await?.within(LIMIT);
    let bytes_in = async |time: Duration| {
        let before = boxes.lan.carried_down().await?;
        tokio::time::sleep(time).await;
        Ok(boxes.lan.carried_down().await? - before)
    };
    eventually("each box downloads by itself", LIMIT, async || {
        let bytes: Result<u64> = bytes_in(LOOK).await;
        let bytes = bytes?;
        ensure!(bytes > 8 * SITE_RATE, "{bytes} bytes in a second");
        Ok(())
    })
    .await?;
    job.patch_spec(json!({"download": {"shareWithinSite": true, "maxSiteRate": "100k"}})).await?;
    eventually("the uplink carries what the site may", AT_ONCE, async || {
        let bytes: Result<u64> = bytes_in(LOOK).await;
        let bytes = bytes?;
        ensure!(bytes < 2 * SITE_RATE, "{bytes} bytes in a second");
        Ok(())
    })
    .await?;
    let bytes: Result<u64> = bytes_in(AT_ONCE).await;
    let bytes = bytes?;
    // Headers, and what the tunnel says, beside it; and it goes on, after what connections had received ahead.
    let most = SITE_RATE * AT_ONCE.as_secs() * 3 / 2;
    ensure!((SITE_RATE..most).contains(&bytes), "{bytes} bytes in {AT_ONCE:?}");
    job.patch_spec(json!({"download": null})).await?;
    job.completes().await?;
    Ok(())
}

/// A node that speaks as an agent with an open port does. Returns its session and the task that it gets.
async fn speaker(cluster: &Cluster, cloud: &Cloud, name: &str) -> Result<(Wire, TaskId)> {
    let mut session = Intruder::of(cluster, cloud, name).await?.open_websocket().await?;
    let peer = Some(PeerDoor { addresses: vec!["127.0.0.1:9".to_owned()], streams: false });
    session.send_message(&EdgeMessage::Hello(Box::new(Hello { peer, ..Hello::default() }))).await?;
    loop {
        if let CloudMessage::Assign(assign) = session.receive().await? {
            return Ok((session, assign.task.id));
        }
    }
}

#[tokio::test]
async fn a_box_without_the_secret_reads_no_layer() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).requires_consent().arg("--share-within-site").await?;
    cluster.registry_secret("bank", "harbor", &[("registry.example", "alice", "secret")]).await?;
    cluster.annotate_secret("bank", "harbor", ALLOW, Some("release")).await?;
    for node in ["edge-1", "edge-2", "edge-3"] {
        cluster.node(node).edge().ready().label("topology.kubernetes.io/zone", "store-1").create().await?;
    }
    let job = |name: &str, nodes: &[&str]| {
        cluster.job(name).images(["registry.example/private:v1"]).secret("bank/harbor").on(nodes)
    };
    let _release = job("release", &["edge-1", "edge-2"]).concurrency(2).apply().await?;
    let _theft = job("theft", &["edge-3"]).apply().await?;
    let (mut holder, task) = speaker(&cluster, &cloud, "edge-1").await?;
    let news = |task: &TaskId, state| {
        let blob = BlobNews { digest: format!("sha256:{}", "0a".repeat(32)), size: MIB, state, done: 0 };
        let (task, blobs) = (task.clone(), vec![blob]);
        EdgeMessage::Blobs(Blobs { task, blobs, failures: Vec::new(), reads_streams: false })
    };
    holder.send_message(&news(&task, BlobState::Here)).await?;
    // It answers pings: a starting leader lets sites gather for 30 s, and would take it for gone by then.
    tokio::spawn(async move { while holder.receive().await.is_ok() {} });
    for (node, expected) in [("edge-3", None), ("edge-2", Some("edge-1"))] {
        let (mut reader, task) = speaker(&cluster, &cloud, node).await?;
        reader.send_message(&news(&task, BlobState::Wanted)).await?;
        let source = loop {
            let CloudMessage::Sources(sources) = reader.receive().await? else { continue };
            match sources.blobs.into_iter().next().map(|blob| blob.from) {
                Some(From::Peers { peers }) => {
                    break Some(peers.first().context("no peer")?.node.to_string());
                }
                Some(From::Registry { .. }) => break None,
                Some(From::Wait) | None => {}
            }
        };
        assert_eq!(source.as_deref(), expected, "the source of {node}");
    }
    Ok(())
}

#[tokio::test]
async fn an_image_elsewhere_opens_no_private_layer() -> Result<()> {
    let boxes = Boxes::start(&sharing(2, FAST)).await?;
    let pull = |name: &str, image: &str, on: &str| boxes.cluster.job(name).images([image]).on([on]);
    // The first box has the layers, and another repository lists them.
    pull("private", &boxes.reference, "edge-1").completes().await?;
    let elsewhere = boxes.registry.seed(&boxes.image, "mallory/app:v1")?;
    for node in ["edge-1", "edge-2"] {
        let status = pull(&format!("elsewhere-{node}"), &elsewhere, node).completes().await?;
        let image = status.image(node, &elsewhere).context("no status")?;
        assert_eq!(image.bytes.and_then(|bytes| bytes.from_peers), None, "{image:?}");
    }
    let metrics = boxes.get("edge-1")?.node.metrics().await?;
    let served = metrics.sum("edgecore_prepull_peer_served_bytes_total", &[]);
    ensure!(served < 1.0, "{served} bytes of another repository's layers were served");
    Ok(())
}

#[tokio::test]
async fn a_boxs_own_credential_shares_no_layer() -> Result<()> {
    let boxes = Boxes::start(&sharing(2, FAST)).await?;
    boxes.send_credential()?;
    for node in ["edge-1", "edge-2"] {
        let job = boxes.cluster.job(node).images([&boxes.reference]).on([node]);
        let status = job.completes().await?;
        let bytes = status.image(node, &boxes.reference).and_then(|image| image.bytes);
        assert_eq!(bytes.context("no bytes")?.from_peers, None, "{node}");
    }
    // maxSiteRate applies to it as well.
    boxes.get("edge-1")?.node.remove_image(&boxes.reference).await?;
    let begun = Instant::now();
    let limited = boxes.cluster.job("limited").images([&boxes.reference]).on(["edge-1"]).spec(|spec| {
        spec.download =
            Some(DownloadSpec { max_site_rate: Some("2Mi".to_owned()), ..DownloadSpec::default() });
    });
    limited.completes().await?;
    let least = Duration::from_millis(1000 * boxes.image_bytes()? / (2 * MIB));
    ensure!(begun.elapsed() > least.mul_f64(0.8), "{:?} for what takes {least:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn what_a_neighbour_has_sent_needs_no_room_again() -> Result<()> {
    const LAYER: u64 = 24 * MIB;
    let plan = Plan { layers: vec![LAYER], ..sharing(1, FAST) };
    let mut boxes = Boxes::start(&plan).await?;
    let reader = "edge-2";
    boxes.add(reader, Vlan::Office, |start, _| Ok(start.disk(256 * MIB))).await?;
    boxes.cluster.job("first").images([&boxes.reference]).on(["edge-1"]).completes().await?;
    let settings = Settings::of(&boxes.cluster);
    settings.apply("uploads", json!({ "nodeNames": ["edge-1"], "peerMaxUploadRate": "2Mi" })).await?;
    settings.are_in_force("uploads").await?;

    let job = boxes.cluster.job("second").images([&boxes.reference]).on([reader]).retries(0).apply().await?;
    eventually("most of it is there", SOON, async || {
        let metrics = boxes.get("edge-1")?.node.metrics().await?;
        let served = metrics.sum("edgecore_prepull_peer_served_bytes_total", &[]);
        ensure!(served > 16.0 * 1_048_576.0, "{served} bytes");
        Ok(())
    })
    .await?;
    let found = boxes.all.iter_mut().find(|found| found.node.name() == reader);
    let node = &mut found.context("no box")?.node;
    node.kill9_agent()?;
    ensure!(!node.has_image(&boxes.reference).await?, "it was over already");
    // The pull needs more than 111 MiB if none of the layer counts as there, and less than 104 if what has arrived does.
    node.containerd().fill_disk(107 * MIB)?;
    node.restart_agent()?;
    settings.apply("uploads", json!({ "nodeNames": ["edge-1"] })).await?;
    job.completes().await?;
    ensure!(boxes.get(reader)?.node.has_image(&boxes.reference).await?);
    Ok(())
}
