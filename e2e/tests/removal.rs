//! Jobs that remove images: what goes, what stays, and what a kill in the middle leaves.

use prepull_api::crd::job::RolloutStrategy;
use prepull_api::crd::remove::RemoveSpec;
use prepull_api::failure::FailureCode;
use prepull_api::task::{ImageRemoval, KeepCode, RemovalOutcome, RemovalResult};
use prepull_e2e::prelude::*;

/// Seeds an image with a layer of its own, has containerd pull it, and returns its reference.
async fn held(registry: &Registry, node: &EdgeNode, name: &str) -> Result<String> {
    let (repository, _) = name.split_once(':').context("no tag")?;
    let image = Image::of_layers(&name.replace(':', "-"), &[MIB])?;
    let reference = registry.seed(&image, &format!("team/{repository}:{}", &name[repository.len() + 1..]))?;
    node.containerd().pull(&reference, None).await?;
    Ok(reference)
}

fn of_images(images: &[&String]) -> RemoveSpec {
    RemoveSpec { images: images.iter().map(ToString::to_string).collect(), ..RemoveSpec::default() }
}

/// A job that removes this from a node, with the result of the node.
async fn removes(stage: &Stage, name: &str, spec: RemoveSpec) -> Result<(RemovalResult, String)> {
    let job = stage.cluster.job(name).on(["edge-1"]);
    let status = job.spec(|job| job.image_pre_pull_template.remove = Some(spec)).completes().await?;
    let node = status.node_status.first().context("no node")?;
    Ok((node.removal.clone().context("no result")?, status.reason))
}

fn of<'a>(result: &'a RemovalResult, image: &str) -> Result<&'a ImageRemoval> {
    result.images.iter().find(|found| found.image == image).with_context(|| format!("{image}: {result:?}"))
}

#[tokio::test]
async fn only_what_nothing_needs_goes() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let node = stage.edge("edge-1")?;
    let old = held(&registry, node, "old:v1").await?;
    let pinned = held(&registry, node, "pinned:v1").await?;
    let foreign = held(&registry, node, "foreign:v1").await?;
    let twice = Image::of_layers("twice", &[MIB])?;
    let [first, second] = ["v1", "stable"].map(|tag| registry.seed(&twice, &format!("team/twice:{tag}")));
    let (first, second) = (first?, second?);
    for reference in [&first, &second] {
        node.containerd().pull(reference, None).await?;
    }
    let used_image = Image::of_layers("used", &[MIB])?;
    let used = registry.seed(&used_image, "team/used:v1")?;
    node.containerd().pull(&used, None).await?;
    node.containerd().hold_image(&used_image).await?;
    node.containerd().set_label(&foreign, "io.cri-containerd.pinned", "pinned").await?;
    stage
        .cluster
        .job("pins")
        .on(["edge-1"])
        .images([&pinned])
        .spec(|spec| spec.pin = true)
        .completes()
        .await?;

    let absent = old.replace("old", "never");
    let spec = of_images(&[&old, &pinned, &foreign, &first, &used, &absent]);
    let (preview, said) = removes(&stage, "preview", RemoveSpec { dry_run: true, ..spec.clone() }).await?;
    assert_eq!(of(&preview, &old)?.outcome, RemovalOutcome::Removable);
    ensure!(preview.freed_bytes > 2 * MIB, "{preview:?}");
    ensure!(said.starts_with("removing 1 image would free "), "{said}");
    ensure!(node.has_image(&old).await?, "a dry run removes nothing");

    let (result, said) = removes(&stage, "real", spec).await?;
    assert_eq!((result.removed, result.kept), (1, 5), "{result:?}");
    for (image, code) in [
        (&pinned, KeepCode::PinnedByJob),
        (&foreign, KeepCode::PinnedByRuntime),
        (&first, KeepCode::OtherName),
        (&used, KeepCode::InUse),
        (&absent, KeepCode::NotPresent),
    ] {
        assert_eq!(of(&result, image)?.code, Some(code), "{image}");
    }
    assert_eq!(result.freed_bytes, preview.freed_bytes, "the preview has told the truth");
    ensure!(said.starts_with("removed 1 image, which freed "), "{said}");
    assert_eq!(node.containerd().images().await?.keys().filter(|name| **name == old).count(), 0);
    for image in [&pinned, &foreign, &first, &second, &used] {
        ensure!(node.has_image(image).await?, "{image} is gone");
    }
    // With both of its names it goes.
    let (result, _) = removes(&stage, "both", of_images(&[&first, &second])).await?;
    assert_eq!(result.removed, 1, "{result:?}");
    assert_eq!(node.containerd().names_of(twice.digest()).await?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn the_last_images_of_a_repository_stay() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let node = stage.edge("edge-1")?;
    let mut versions = Vec::new();
    for version in ["app:v1", "app:v2", "app:v3"] {
        versions.push(held(&registry, node, version).await?);
    }
    let other = held(&registry, node, "apple:v1").await?;
    let (repository, _) = versions[0].rsplit_once(':').context("no tag")?;
    let spec = RemoveSpec { repositories: vec![repository.to_owned()], ..RemoveSpec::default() };

    let young = RemoveSpec { older_than: Some("1h".to_owned()), ..spec.clone() };
    let (result, said) = removes(&stage, "young", young).await?;
    ensure!(result.images.iter().all(|image| image.code == Some(KeepCode::TooYoung)), "{result:?}");
    assert_eq!((result.kept, said.as_str()), (3, "nothing was removed; 3 kept"));

    let (result, _) = removes(&stage, "last", RemoveSpec { keep_last: Some(1), ..spec }).await?;
    assert_eq!((result.removed, result.kept), (2, 1), "{result:?}");
    assert_eq!(of(&result, &versions[2])?.code, Some(KeepCode::KeepLast));
    for (image, stays) in [(&versions[0], false), (&versions[1], false), (&versions[2], true), (&other, true)]
    {
        assert_eq!(node.has_image(image).await?, stays, "{image}");
    }
    Ok(())
}

#[tokio::test]
async fn a_killed_agent_ends_its_removal() -> Result<()> {
    let registry = Registry::start().await?;
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let mut node = EdgeNode::start(&cluster, &cloud, "edge-1").await?;
    let mut images = Vec::new();
    for n in 0..8 {
        images.push(held(&registry, &node, &format!("killed{n}:v1")).await?);
    }
    let job = cluster.job("killed").on(["edge-1"]);
    let names: Vec<&String> = images.iter().collect();
    let spec = of_images(&names);
    let job = job.spec(|job| job.image_pre_pull_template.remove = Some(spec)).apply().await?;
    eventually("an image is gone", SOON, async || {
        let there = node.containerd().images().await?;
        ensure!(images.iter().any(|image| !there.contains_key(image)), "not yet");
        Ok(())
    })
    .await?;
    node.kill9_agent()?;
    node.restart_agent()?;
    let status = job.completes().await?;
    let result = status.removal.context("no sum")?;
    assert_eq!((result.removed, result.kept, result.nodes), (8, 0, 1), "{result:?}");
    ensure!(result.freed_bytes > 8 * MIB, "{result:?}");
    let there = node.containerd().images().await?;
    ensure!(!images.iter().any(|image| there.contains_key(image)), "{there:?}");
    node.forgets_all_tasks().await
}

#[tokio::test]
async fn what_is_needed_since_the_choice_stays() -> Result<()> {
    let registry = Registry::start().await?;
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let mut node = EdgeNode::start(&cluster, &cloud, "edge-1").await?;
    let mut images = Vec::new();
    for n in 0..24 {
        images.push(held(&registry, &node, &format!("since{n}:v1")).await?);
    }
    let spec = of_images(&images.iter().collect::<Vec<_>>());
    let job = cluster.job("since").on(["edge-1"]);
    let job = job.spec(|job| job.image_pre_pull_template.remove = Some(spec)).apply().await?;
    eventually("an image is gone", SOON, async || {
        let there = node.containerd().images().await?;
        ensure!(images.iter().any(|image| !there.contains_key(image)), "not yet");
        Ok(())
    })
    .await?;
    node.kill9_agent()?;

    // All are chosen. One gets another name, and one a container.
    let there = node.containerd().images().await?;
    let mut left = (0..24).rev().filter(|n| there.contains_key(&images[*n]));
    let (named, used) = left.next().zip(left.next()).context("too few images are left")?;
    let image_of = |n: usize| Image::of_layers(&format!("since{n}-v1"), &[MIB]);
    let other = registry.seed(&image_of(named)?, "team/since:stable")?;
    node.containerd().pull(&other, None).await?;
    node.containerd().hold_image(&image_of(used)?).await?;
    node.restart_agent()?;
    let status = job.completes().await?;
    let result = status.node_status.first().and_then(|node| node.removal.clone()).context("no result")?;
    assert_eq!((result.removed, result.kept), (22, 2), "{result:?}");
    assert_eq!(of(&result, &images[named])?.code, Some(KeepCode::OtherName));
    assert_eq!(of(&result, &images[used])?.code, Some(KeepCode::InUse));
    for image in [&images[named], &images[used], &other] {
        ensure!(node.has_image(image).await?, "{image} is gone");
    }
    Ok(())
}

#[tokio::test]
async fn a_pull_at_the_same_moment_is_whole() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let node = stage.edge("edge-1")?;
    let image = Image::of_layers("raced", &[MIB, 2 * MIB])?;
    let reference = registry.seed(&image, "team/raced:v1")?;
    for round in 0..4 {
        node.containerd().pull(&reference, None).await?;
        // As the kubelet pulls.
        let pulls = async {
            for _ in 0..10 {
                // containerd 2 looks the image up once more at the end of a pull. The kubelet tries again.
                if let Err(error) = node.containerd().pull(&reference, None).await {
                    ensure!(format!("{error:#}").contains("not found"), "{error:#}");
                }
            }
            anyhow::Ok(())
        };
        let name = format!("raced-{round}");
        let removal = removes(&stage, &name, of_images(&[&reference]));
        let (pulled, removed) = tokio::join!(pulls, removal);
        pulled?;
        let (result, _) = removed?;
        if node.has_image(&reference).await? {
            assert_eq!(node.containerd().check_unpacked(&image).await?, 2, "{result:?}");
        } else {
            assert_eq!(node.containerd().names_of(image.digest()).await?, Vec::<String>::new());
        }
    }
    node.containerd().pull(&reference, None).await?;
    assert_eq!(node.containerd().check_unpacked(&image).await?, 2);
    Ok(())
}

#[tokio::test]
async fn a_failed_wave_keeps_the_next_nodes_images() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_edges(&["edge-1", "edge-2"]).await?;
    let (first, second) = (stage.edge("edge-1")?, stage.edge("edge-2")?);
    let image = held(&registry, first, "waved:v1").await?;
    second.containerd().pull(&image, None).await?;
    let job = |name: &str| {
        let steps = vec!["1".to_owned(), "100%".to_owned()];
        let (spec, rollout) = (of_images(&[&image]), RolloutStrategy { steps, pause_seconds: 0 });
        let job = stage.cluster.job(name).on(["edge-1", "edge-2"]).concurrency(2).timeout_seconds(4);
        job.spec(move |job| {
            job.image_pre_pull_template.remove = Some(spec);
            job.image_pre_pull_template.failure_tolerate = "0".to_owned();
            job.rollout = Some(rollout);
        })
    };
    // The runtime of the first wave's node hangs.
    first.containerd().pause()?;
    let status = job("hangs").fails().await?;
    first.containerd().resume()?;
    let node = status.node("edge-1").context("no edge-1")?;
    assert_eq!((node.phase, node.code), (NodePhase::Failure, Some(FailureCode::Timeout)), "{node:?}");
    assert_eq!((status.summary.failure, status.summary.successful), (1, 0), "{status:?}");
    ensure!(second.has_image(&image).await?, "the second wave has begun");

    let status = job("again").completes().await?;
    assert_eq!(status.summary.successful, 2, "{status:?}");
    for node in [first, second] {
        ensure!(!node.has_image(&image).await?, "it is still on {}", node.name());
    }
    Ok(())
}
