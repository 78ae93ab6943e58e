//! ImageListPullJobs: an ImagePullJob for each image, and one limit of parallelism for all of them.

use std::time::Duration;

use prepull_e2e::prelude::*;
use serde_json::json;

#[tokio::test]
async fn a_list_has_a_child_per_image() -> Result<()> {
    let registry = Registry::start().await?;
    let stage = Stage::with_kruise(&["edge-1", "edge-2"]).await?;
    let good = registry.seed(&Image::small("listed")?, "team/listed:v1")?;
    let bad = registry.image("team/missing:v1");
    let list = stage
        .cluster
        .list_job("release", [&good, &bad])
        .on_nodes(["edge-1", "edge-2"])
        .parallelism(2)
        .limits(30, 0)
        .deadline(60)
        .apply()
        .await?;
    let status = list.completes().await?;
    let counts = (status.desired, status.active, status.completed, status.succeeded);
    assert_eq!(counts, (2, 0, 2, 1), "{status:?}");
    assert_eq!(status.failed_image_statuses.len(), 1, "{status:?}");
    let failed = &status.failed_image_statuses[0];
    assert_eq!(failed.name, bad);

    let children = list.children().await?;
    assert_eq!(children.len(), 2);
    for child in &children {
        let owner = &child.metadata.owner_references.as_deref().unwrap_or_default()[0];
        assert_eq!((owner.kind.as_str(), owner.name.as_str()), ("ImageListPullJob", "release"));
        assert_eq!(
            (owner.api_version.split('/').next(), owner.controller),
            (Some("apps.kruise.io"), Some(true))
        );
        // Only the list has a time to live, which applies to all of it.
        let policy = &child.spec.template.completion_policy;
        assert_eq!((policy.active_deadline_seconds, policy.ttl_seconds_after_finished), (Some(60), None));
        let status = child.status.clone().unwrap_or_default();
        assert_eq!((status.desired, status.message.as_str()), (2, "job has completed"));
        if child.spec.image == bad {
            assert_eq!(child.metadata.name.as_ref(), Some(&failed.image_pull_job));
            assert_eq!(status.failed_nodes, ["edge-1", "edge-2"]);
        }
    }
    ensure!(failed.message.contains(&failed.image_pull_job), "{failed:?}");
    the_plugin_shows_it(&stage.cluster, &bad, &failed.image_pull_job).await?;
    // The time to live may be set after the end.
    list.patch_spec(json!({"completionPolicy": {"ttlSecondsAfterFinished": 0}})).await?;
    list.is_gone().await
}

/// The output of `kubectl prepull` about the list above, and about its failed job.
async fn the_plugin_shows_it(cluster: &Cluster, bad: &str, failed: &str) -> Result<()> {
    let me = Person::new(cluster.kubeconfig());
    let list = "imagelistpulljob/release -n default";
    let said = me
        .runs(&format!("status {list} -w"))
        .await?
        .is(1, &["Failure", "4 of 4", "2 successful, 2 failed", "edge-1, edge-2"])?;
    eprintln!("{}", said.out);
    let json = me.runs(&format!("status {list} -o json")).await?.is(0, &[])?;
    let json: serde_json::Value = serde_json::from_str(&json.out)?;
    let phases: Vec<_> = json["parts"].as_array().into_iter().flatten().map(|part| &part["phase"]).collect();
    assert_eq!(phases, ["Completed", "Failure"]);
    let names = me.runs(&format!("failures imagepulljob/{failed} -n default -o name")).await?.is(0, &[])?;
    assert_eq!(names.out, "node/edge-1\nnode/edge-2\n");
    let said = me.runs(&format!("failures {list} -o wide")).await?.is(0, &["edge-1", bad, "not found"])?;
    eprintln!("{}", said.out);
    let why = me
        .runs(&format!("why edge-1 {list}"))
        .await?
        .is(1, &["has succeeded on it", "has failed on it", "delete the job and apply it again"])?;
    eprintln!("{}", why.out);
    let events = [
        "imagelistpulljob/release",
        &format!("imagepulljob/{failed}"),
        "nodeimage/edge-1",
        "PullImageFailed",
    ];
    let said = me.runs(&format!("events {list}")).await?.is(0, &events)?;
    eprintln!("{}", said.out);
    Ok(())
}

#[tokio::test]
async fn parallelism_spans_the_images_of_a_list() -> Result<()> {
    const EDGES: usize = 8;
    let cluster = Cluster::with_kruise().await?;
    let cloud = Cloud::with_kruise(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, EDGES).pulls_take(Duration::from_millis(100)).await?;
    cluster.node_image("sim-7").exists().await?;
    let at_work = cluster.nodes_at_work();
    let images = (0..4).map(|number| format!("registry.example/listed:v{number}"));
    let list = cluster.list_job("bounded", images).parallelism(3).apply().await?;
    let status = list.completes().await?;
    assert_eq!((status.desired, status.succeeded), (4, 4), "{status:?}");
    assert_eq!(fleet.pulls(), 4 * u64::try_from(EDGES)?);
    assert_eq!(fleet.pulled_twice(), 0);
    assert_eq!(at_work.most_nodes(), 3, "nodes at the same time");
    ensure!(fleet.most_at_once() <= 3, "{}", fleet.most_at_once());
    fleet.stop().await;
    Ok(())
}

#[tokio::test]
async fn changes_of_the_list_reach_its_children() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    let cloud = Cloud::with_kruise(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 2).await?;
    let image = |tag: &str| format!("registry.example/followed:{tag}");
    let list = cluster.list_job("followed", [image("v1"), image("v2")]).never_ends().apply().await?;
    let both = |wanted: i32| {
        move |list: &prepull_api::crd::kruise::ImageListPullJob| {
            list.status.as_ref().is_some_and(|s| (s.desired, s.succeeded) == (wanted, wanted))
        }
    };
    list.until_met("has both", both(2)).await?;
    let before = list.children().await?;

    list.patch_spec(json!({"images": [image("v2"), image("v3"), image("v4")]})).await?;
    let now = list.until_met("has all three", both(3)).await?;
    ensure!(now.status.is_some_and(|status| status.completion_time.is_none()), "it is never over");
    let after = list.children().await?;
    let images: Vec<_> = after.iter().map(|child| child.spec.image.clone()).collect();
    assert_eq!(images, ["v2", "v3", "v4"].map(image));
    assert_eq!(after[0].metadata.uid, before[1].metadata.uid, "v2 is as it was");
    assert_eq!(fleet.pulls(), 2 * 4);

    // A deleted child is created again.
    let child: KruisePullJob =
        cluster.applied_job("default", after[2].metadata.name.as_deref().unwrap_or_default());
    child.delete().await?;
    prepull_e2e::cleanup::eventually("it is there again", SOON, async || {
        let children = list.children().await?;
        ensure!(children.len() == 3 && children[2].metadata.uid != after[2].metadata.uid, "it is not");
        Ok(())
    })
    .await?;
    fleet.stop().await;
    Ok(())
}

#[tokio::test]
async fn an_invalid_list_is_refused_with_its_reason() -> Result<()> {
    let cluster = Cluster::with_kruise().await?;
    let _cloud = Cloud::with_kruise(&cluster).await?;
    let image = |number: usize| format!("registry.example/many:v{number}");
    for (name, images, words) in [
        ("none", vec![], "image can not be empty"),
        ("twice", vec![image(1), image(1)], "images cannot have duplicate values"),
        ("many", (0..256).map(image).collect(), "the maximum number of images cannot > 255"),
        ("wrong", vec![image(1), "Not An Image".to_owned()], "invalid image Not An Image"),
    ] {
        match cluster.list_job(name, images).apply().await {
            Ok(list) => {
                list.message_contains(words).await?;
                assert_eq!(list.children().await?.len(), 0, "{name}");
                let (kind, note) = list.wait_for_event("Invalid").await?;
                assert_eq!(kind, "Warning");
                ensure!(note.contains(words), "{note}");
            }
            // Since Kubernetes 1.25, the API server refuses it.
            Err(error) => ensure!(format!("{error:#}").contains(words), "{error:#}"),
        }
    }
    Ok(())
}
