//! Updates that download what has changed: layers rebuilt from the image before and a delta.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prepull_api::crd::download::DownloadSpec;
use prepull_api::failure::FailureCode;
use prepull_api::task::NoDelta;
use prepull_e2e::images::delta::{Delta, diff_of};
use prepull_e2e::prelude::*;
use prepull_e2e::signing::{SignatureForm, Signer};
use serde_json::json;

use crate::fetch::Hand;

/// Repository of the versions of an application.
const REPOSITORY: &str = "team/app";

/// Seeds a version of an application, and returns its reference.
fn seed(registry: &Registry, image: &Image, tag: &str) -> Result<String> {
    registry.seed(image, &format!("{REPOSITORY}:{tag}"))
}

/// Bytes of a delta's diffs that have crossed the link.
fn delta_bytes(hand: &Hand, delta: &Delta) -> u64 {
    delta.digests().map(|digest| hand.link.bytes_of(digest)).sum()
}

/// Exports an image, as people do who carry it on to another machine.
async fn export(hand: &Hand, image: &str) -> Result<String> {
    let mut ctr = std::process::Command::new("ctr");
    ctr.arg("--address").arg(hand.containerd.socket()).args(["--namespace", "k8s.io", "images", "export"]);
    ctr.arg(Place::here()?.new_dir("export")?.join("image.tar")).arg(image);
    prepull_e2e::parts::run_command(ctr).await
}

#[tokio::test]
async fn an_update_costs_what_changed() -> Result<()> {
    let mut hand = Hand::start().await?;
    let other = Containerd::start("edge-2").await?;
    let [first, second] = [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?];
    let v1 = seed(&hand.registry, &first, "v1")?;
    let v2 = seed(&hand.registry, &second, "v2")?;
    hand.pulls(&[&v1]).await?;
    let delta = Delta::between(&first, &second)?;
    hand.registry.seed_delta(REPOSITORY, &delta)?;

    let before = hand.bytes_of(&second);
    let summary = hand.pulls(&[&v2]).await?;
    ensure!(summary.contains("1 pulled"), "{summary}");
    // The configuration, and the layer of some hundred bytes: its delta would be no smaller.
    let whole = hand.bytes_of(&second) - before;
    let by_delta = delta_bytes(&hand, &delta);
    ensure!(
        whole < 8 * 1024 && by_delta > 64 * 1024 && by_delta < 160 * 1024,
        "{whole} and {by_delta} bytes"
    );

    // The image is the one that the runtime would have pulled.
    other.pull(&v1, None).await?;
    other.pull(&v2, None).await?;
    assert_eq!(hand.containerd.image_status(&v2).await?, other.image_status(&v2).await?);
    assert_eq!(hand.containerd.snapshots().await?, other.snapshots().await?);
    assert_eq!(hand.containerd.leases().await?, other.leases().await?, "nothing is held on to");
    assert_eq!(hand.containerd.ingests().await?, other.ingests().await?);
    assert_eq!(hand.containerd.check_unpacked(&second).await?, other.check_unpacked(&second).await?);
    eventually("the tar and the delta are collected", SOON, async || {
        let labels = hand.containerd.content_labels().await?;
        let surplus: Vec<_> = delta.digests().filter(|digest| labels.contains_key(*digest)).collect();
        ensure!(surplus.is_empty(), "{surplus:?}");
        Ok(())
    })
    .await?;

    // A pull with the policy Always downloads nothing, by the runtime and by the agent, also after a restart.
    hand.containerd.restart().await?;
    let before = hand.bytes_of(&second);
    hand.containerd.pull(&v2, None).await?;
    ensure!(hand.pulls(&[&v2]).await?.contains("1 already there"), "it was there");
    assert_eq!(hand.bytes_of(&second), before);

    // The next update shares the rebuilt layer, which has no blob, and comes by a delta from it.
    let [edition, third] = [Image::version("app", 2, 2)?, Image::version("app", 3, 1)?];
    let next = seed(&hand.registry, &edition, "v2.2")?;
    hand.pulls(&[&next]).await?;
    let whole = hand.bytes_of(&edition) - hand.bytes_of(&second);
    ensure!(whole < 8 * 1024, "{whole} bytes, although only the notes have changed");
    let v3 = seed(&hand.registry, &third, "v3")?;
    let delta = Delta::between(&second, &third)?;
    hand.registry.seed_delta(REPOSITORY, &delta)?;
    hand.pulls(&[&v3]).await?;
    let by_delta = delta_bytes(&hand, &delta);
    ensure!(by_delta > 64 * 1024 && by_delta < 300 * 1024, "{by_delta} bytes");
    hand.containerd.check_unpacked(&third).await?;

    // What has no blobs can't be exported, until it's fetched whole.
    let before = hand.bytes_of(&third);
    let refused = export(&hand, &v3).await.err().context("it was exported without its layer")?;
    ensure!(refused.to_string().contains("not found"), "{refused:#}");
    hand.pulls(&["--whole", &v3]).await?;
    ensure!(hand.bytes_of(&third) - before > 8 * MIB, "the layer is fetched");
    export(&hand, &v3).await?;
    Ok(())
}

#[tokio::test]
async fn the_plugins_delta_updates_a_node() -> Result<()> {
    let hand = Hand::start_on(Registry::start().user("alice", &password("alice")), None).await?;
    let [first, second] = [Image::version("made", 1, 1)?, Image::version("made", 2, 1)?];
    let v1 = seed(&hand.registry, &first, "v1")?;
    let v2 = seed(&hand.registry, &second, "v2")?;
    let (host, user, secret) = hand.registry.login("alice")?;
    let auth = STANDARD.encode(format!("{user}:{secret}"));
    let file = Place::here()?.new_dir("docker")?.join("config.json");
    std::fs::write(&file, json!({ "auths": { host: { "auth": auth } } }).to_string())?;
    let (config, file) = ("--docker-config", file.display().to_string());
    hand.pulls(&["--docker-config", &file, &v1]).await?;

    // It needs no cluster, and pushes only with a login.
    let me = Person::new(Path::new("/there/is/none"));
    me.runs(&format!("delta {v1} {v2}")).await?.is(1, &["401"])?;
    me.runs(&format!("delta {v1} {v2} {config} {file} --dry-run")).await?.is(0, &["--dry-run"])?;
    me.runs(&format!("delta {v1} {v2} {config} {file}")).await?.is(0, &["as differences"])?;

    let before = hand.bytes_of(&second);
    hand.pulls(&["--docker-config", &file, &v2]).await?;
    let whole = hand.bytes_of(&second) - before;
    ensure!(whole < 8 * 1024, "{whole} bytes of the layers, although there is a delta");
    assert_eq!(hand.containerd.check_unpacked(&second).await?, 3);

    // The base gets an update. The program above it is the same, but its layer has no blob here and must be unpacked again.
    let third = Image::version_on("made", 2, "security")?;
    let v3 = seed(&hand.registry, &third, "v3")?;
    me.runs(&format!("delta {v2} {v3} {config} {file}")).await?.is(0, &[])?;
    let before = hand.bytes_of(&third);
    hand.pulls(&["--docker-config", &file, &v3]).await?;
    let whole = hand.bytes_of(&third) - before;
    ensure!(whole < 8 * 1024, "{whole} bytes of layers, although a delta copies the program's");
    assert_eq!(hand.containerd.check_unpacked(&third).await?, 4);
    Ok(())
}

#[tokio::test]
async fn a_useless_delta_costs_the_layer_once() -> Result<()> {
    let hand = Hand::start().await?;
    let first = Image::version("lies", 0, 1)?;
    let v1 = seed(&hand.registry, &first, "v1")?;
    hand.pulls(&[&v1]).await?;
    let lies: [(&str, Vec<u8>); 3] = [
        ("another layer", diff_of(&[(0, b"not the tar of any layer")])?),
        ("no diff", b"garbage".to_vec()),
        ("a link", diff_of(&[(1, b"app"), (0, b"x")])?),
    ];
    for (version, (lie, diff)) in (1..).zip(&lies) {
        let image = Image::version("lies", version, 1)?;
        let reference = seed(&hand.registry, &image, &format!("v{}", version + 1))?;
        let delta = Delta::lying(&first, &image, diff)?;
        hand.registry.seed_delta(REPOSITORY, &delta)?;
        let before = hand.bytes_of(&image);
        hand.pulls(&[&reference]).await.with_context(|| (*lie).to_owned())?;
        let whole = hand.bytes_of(&image) - before;
        ensure!(delta_bytes(&hand, &delta) > 0, "{lie}: the delta wasn't tried");
        ensure!((12 * MIB..13 * MIB).contains(&whole), "{lie}: {whole} bytes for a layer of 12 MiB");
        hand.containerd.check_unpacked(&image).await.with_context(|| (*lie).to_owned())?;
        ensure!(hand.containerd.has_image(&reference).await?, "{lie}");
        let left = hand.containerd.ingests().await?;
        ensure!(left.is_empty(), "{lie}: {left:?}");
    }
    Ok(())
}

/// A machine with the first version of an image, both versions, and the reference of the second.
async fn next_version() -> Result<(Hand, [Image; 2], String)> {
    let hand = Hand::start().await?;
    let versions = [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?];
    hand.pulls(&[&seed(&hand.registry, &versions[0], "v1")?]).await?;
    let reference = seed(&hand.registry, &versions[1], "v2")?;
    Ok((hand, versions, reference))
}

#[tokio::test]
async fn deltas_keep_to_their_room() -> Result<()> {
    let (hand, [first, second], reference) = next_version().await?;
    // More than six times the layer of 12 MiB, which is what the agent counts with.
    let zeros = diff_of(&[(0, &vec![0; 96 << 20])])?;
    hand.registry.seed_delta(REPOSITORY, &Delta::lying(&first, &second, &zeros)?.without_sizes()?)?;
    let said = hand.pulls(&[&reference]).await?;
    ensure!(said.contains("the diff makes more than the 75"), "{said}");
    hand.containerd.check_unpacked(&second).await?;
    Ok(())
}

#[tokio::test]
async fn a_registry_without_the_delta_costs_the_layer() -> Result<()> {
    let (hand, [first, second], reference) = next_version().await?;
    let delta = Delta::between(&first, &second)?;
    hand.registry.seed_delta(REPOSITORY, &delta)?;
    for (part, status, code) in [
        ("list", 500, "Unlisted"),
        ("manifest", 404, "Unlisted"),
        ("diff", 404, "Undelivered"),
        ("diff", 200, "Undelivered"),
    ] {
        let on = match part {
            "list" => "/manifests/sha256-".to_owned(),
            "manifest" => delta.manifest_digest(),
            _ => delta.digests().next().context("no diff")?.to_owned(),
        };
        if status == 200 {
            hand.link.damage(&on);
        } else {
            hand.link.fail_next_on(&on, 100, status);
        }
        let before = hand.bytes_of(&second);
        let said = hand.pulls(&["--retries", "0", &reference]).await;
        let said = said.with_context(|| format!("{part} {status}"))?;
        ensure!(said.contains(&format!("no delta ({code})")), "{part} {status}: {said}");
        let whole = hand.bytes_of(&second) - before;
        ensure!(
            (12 * MIB..13 * MIB).contains(&whole),
            "{part} {status}: {whole} bytes for a layer of 12 MiB"
        );
        hand.containerd.check_unpacked(&second).await.with_context(|| format!("{part} {status}"))?;
        hand.link.stop_failing();
        hand.containerd.remove_image(&reference).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_delta_above_the_layer_stays_there() -> Result<()> {
    let (hand, [first, second], reference) = next_version().await?;
    let delta = Delta::lying(&first, &second, &vec![0; usize::try_from(13 * MIB)?])?;
    hand.registry.seed_delta(REPOSITORY, &delta)?;
    let said = hand.pulls(&[&reference]).await?;
    ensure!(said.contains("no delta (TooLarge)"), "{said}");
    assert_eq!(delta_bytes(&hand, &delta), 0);
    Ok(())
}

#[tokio::test]
async fn a_full_disk_takes_the_layer_rather_than_its_tar() -> Result<()> {
    // The first version takes 66 MiB, the layers of the second 64, and its rebuilt layer 104 until it's unpacked.
    let hand = Hand::start_on(Registry::start(), Some(160 * MIB)).await?;
    let [first, second] =
        [Image::version_with_zeros("full", 1, 40 * MIB)?, Image::version_with_zeros("full", 2, 40 * MIB)?];
    let v1 = seed(&hand.registry, &first, "v1")?;
    let v2 = seed(&hand.registry, &second, "v2")?;
    hand.pulls(&[&v1]).await?;
    let delta = Delta::between(&first, &second)?;
    hand.registry.seed_delta(REPOSITORY, &delta)?;
    let said = hand.pulls(&["--retries", "0", &v2]).await?;
    ensure!(said.contains("no delta (NoRoom)"), "{said}");
    assert_eq!(delta_bytes(&hand, &delta), 0);
    hand.containerd.check_unpacked(&second).await?;
    Ok(())
}

#[tokio::test]
async fn signature_and_delta_are_in_one_list() -> Result<()> {
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let (registry, signer) = (Registry::start().await?, Signer::ecdsa().await?);
    let [first, second] = [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?];
    let (v1, v2) = (seed(&registry, &first, "v1")?, seed(&registry, &second, "v2")?);
    signer.sign(&registry, REPOSITORY, second.digest(), SignatureForm::Bundle).await?;
    registry.seed_delta(REPOSITORY, &Delta::between(&first, &second)?)?;
    stage
        .cluster
        .secret("keys", "cosign", "Opaque", &[("cosign.pub", signer.public_key()?.as_bytes())])
        .await?;
    stage.cluster.job("before").images([&v1]).on(["edge-1"]).completes().await?;
    let update = stage.cluster.job("update").images([&v2]).on(["edge-1"]).spec(|spec| {
        let deltas = Some("Require".to_owned());
        spec.download = Some(DownloadSpec { deltas, ..DownloadSpec::default() });
        spec.verify =
            serde_json::from_value(json!({"keys": [{"secretRef": "keys/cosign"}], "mode": "Enforce"})).ok();
    });
    let status = update.completes().await?;
    let image = status.image("edge-1", &v2).context("no status")?;
    ensure!(image.facts.signed_by.is_some() && image.facts.delta_saved_bytes > Some(11 * MIB), "{image:?}");
    let list = format!("/manifests/{}", second.digest().replace(':', "-"));
    let asked =
        registry.requests().filter(|request| request.method == "HEAD" && request.path.ends_with(&list));
    assert_eq!(asked.len(), 1, "{asked:?}");
    Ok(())
}

#[tokio::test]
async fn a_job_shows_what_deltas_saved() -> Result<()> {
    let stage = Stage::with_kruise(&["edge-1"]).await?;
    let registry = Registry::start().await?;
    let [first, second, third] =
        [Image::version("app", 1, 1)?, Image::version("app", 2, 1)?, Image::version("app", 3, 1)?];
    let [v1, v2, v3] =
        [(&first, "v1"), (&second, "v2"), (&third, "v3")].map(|(image, tag)| seed(&registry, image, tag));
    let (v1, v2, v3) = (v1?, v2?, v3?);
    let delta = Delta::between(&first, &second)?;
    registry.seed_delta(REPOSITORY, &delta)?;
    let job = |name: &str, image: &str, deltas: &str| {
        let deltas = Some(deltas.to_owned());
        stage.cluster.job(name).images([image]).on(["edge-1"]).spec(|spec| {
            spec.download = Some(DownloadSpec { deltas, ..DownloadSpec::default() });
            spec.image_pre_pull_template.retry_times = 0;
        })
    };
    job("first", &v1, "Auto").apply().await?.completes().await?;
    let file = stage.cluster.place().dir().join("second.json");
    std::fs::write(&file, serde_json::to_vec(&job("second", &v2, "Require").build())?)?;
    let (file, hosts) = (file.display().to_string(), stage.cluster.place().registry_hosts());
    let hosts = hosts.display().to_string();
    let plan = ["--job", &file, "--sizes", "--registry-config-path", &hosts, "-o", "json"];
    let planned = async || {
        let report: serde_json::Value = serde_json::from_str(&stage.cloud.plan(&plan).await?)?;
        anyhow::Ok(report["nodes"][0]["size"].clone())
    };
    ensure!(planned().await?["deltaBytes"].is_null(), "no kubelet lists an image that a delta is from");
    let by_digest = v1.replace(":v1", &format!("@{}", first.digest()));
    stage.cluster.list_image("edge-1", &[&by_digest, &v1]).await?;
    let planned = planned().await?;
    let [whole, by_delta] = ["downloadBytes", "deltaBytes"].map(|field| planned[field].as_u64());
    let (whole, by_delta) = (whole.context("no size")?, by_delta.context("no size by delta")?);
    let updated = job("second", &v2, "Require").apply().await?;
    updated.completes().await?;
    let image = &updated.node_status("edge-1").await?.image_status[0];
    let saved = image.facts.delta_saved_bytes.context("nothing is said about the delta")?;
    ensure!(saved > 11 * MIB && saved < second.size(), "{saved}: {image:?}");
    assert_eq!(saved, whole - by_delta, "as planned: {planned}");

    let refused = job("third", &v3, "Require").apply().await?;
    refused.fails().await?;
    let image = &refused.node_status("edge-1").await?.image_status[0];
    ensure!(image.code == Some(FailureCode::NoDelta), "{image:?}");
    ensure!(image.reason.contains("no delta"), "{image:?}");

    // With Auto it comes whole, and the status has the reason.
    registry.seed_delta(REPOSITORY, &Delta::lying(&second, &third, b"garbage")?)?;
    let whole = job("fourth", &v3, "Auto").apply().await?;
    whole.completes().await?;
    let image = &whole.node_status("edge-1").await?.image_status[0];
    let facts = &image.facts;
    ensure!(facts.no_delta_reason.contains("cannot read the diff"), "{image:?}");
    assert_eq!((facts.no_delta, facts.delta_saved_bytes), (Some(NoDelta::WrongLayer), Some(0)), "{image:?}");

    // A delta from an image that the node doesn't have.
    let (elsewhere, next) = (Image::version("elsewhere", 1, 1)?, Image::version("app", 5, 1)?);
    let v5 = seed(&registry, &next, "v5")?;
    registry.seed_delta(REPOSITORY, &Delta::lying(&elsewhere, &next, b"never read")?)?;
    let whole = job("fifth", &v5, "Auto").apply().await?;
    whole.completes().await?;
    let image = &whole.node_status("edge-1").await?.image_status[0];
    assert_eq!(image.facts.no_delta, Some(NoDelta::OtherSource), "{image:?}");

    // A job of Kruise comes by deltas as well, which its API has no word for.
    let fourth = Image::version("app", 4, 1)?;
    let v4 = seed(&registry, &fourth, "v4")?;
    registry.seed_delta(REPOSITORY, &Delta::between(&third, &fourth)?)?;
    let node = stage.edge("edge-1")?;
    let saved = async || {
        Ok::<_, anyhow::Error>(node.metrics().await?.sum("edgecore_prepull_delta_saved_bytes_total", &[]))
    };
    let before = saved().await?;
    stage.cluster.pull_job("fourth", &v4).on_nodes(["edge-1"]).completes().await?;
    let saved = saved().await? - before;
    ensure!(saved > 11e6, "{saved} bytes are saved");
    node.containerd().check_unpacked(&fourth).await?;
    Ok(())
}
