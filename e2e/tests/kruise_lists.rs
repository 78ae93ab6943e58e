//! ImageListPullJobs: an ImagePullJob for each image, and the status of all of them.

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
