//! Overriders: another registry, tag or secret for a group of nodes, and no change for the others.

use std::collections::BTreeSet;

use prepull_e2e::parts;
use prepull_e2e::prelude::*;

/// Users that were authenticated for a repository.
fn users(registry: &Registry, repository: &str) -> BTreeSet<String> {
    registry.requests().for_repository(repository).users().into_iter().map(str::to_owned).collect()
}

fn only(user: &str) -> BTreeSet<String> {
    BTreeSet::from([user.to_owned()])
}

#[tokio::test]
async fn kubeedges_sample_works() -> Result<()> {
    let harbor = Registry::start().with_host("harbor.docker.hub").user("jili", &password("jili")).await?;
    let hangzhou = Registry::start().with_host("hangzhou.registry.io").user("hz", &password("hz")).await?;
    let stage = Stage::with_edges(&["node1", "node2"]).await?;
    stage.cluster.label_node("node2", "labelexample", Some("")).await?;
    stage.cluster.registry_secret("default", "secret", &[harbor.login("jili")?]).await?;
    stage.cluster.registry_secret("default", "hangzhou-secret", &[hangzhou.login("hz")?]).await?;
    let image = Image::small("example")?;
    harbor.seed(&image, "jili/example:v1.0.0")?;
    hangzhou.seed(&image, "jili/example:v1.0.0")?;

    let sample = parts::workspace().join("manifests/samples/image-prepull-example.yaml");
    stage.cluster.kubectl(&["apply", "-f", sample.to_str().context("not UTF-8")?]).await?;
    stage.cluster.existing_job("imageprepullexample").completes().await?;

    for (node, pulled) in [
        ("node1", "harbor.docker.hub/jili/example:v1.0.0"),
        ("node2", "hangzhou.registry.io/jili/example:v1.0.0"),
    ] {
        let there: Vec<_> = stage.edge(node)?.images().await?.into_keys().collect();
        assert_eq!(there, [pulled]);
    }
    assert_eq!(users(&harbor, "jili/example"), only("jili"));
    assert_eq!(users(&hangzhou, "jili/example"), only("hz"));
    Ok(())
}

#[tokio::test]
async fn the_plan_predicts_the_rules() -> Result<()> {
    let private = Registry::start().user("alice", &password("alice")).await?;
    let open = Registry::start().with_host("mirror.local").await?;
    let stage = Stage::with_edges(&["edge-1", "edge-2"]).await?;
    stage.cluster.label_node("edge-2", "machine", Some("jetson")).await?;
    stage.cluster.registry_secret("default", "alice", &[private.login("alice")?]).await?;
    let (image, arm) = (Image::small("rules")?, Image::small("rules-arm")?);
    let written = private.seed(&image, "team/app:v1")?;
    open.seed(&arm, "cache/team/app:v1-arm")?;

    // All matching entries apply, each rule to the result of the previous one; the last entry matches no node.
    let job = stage
        .cluster
        .job("rules")
        .images([&written])
        .secret("default/alice")
        .on(["edge-1", "edge-2"])
        .overrider(
            "machine in (jetson, pi)",
            &[("Registry", "replace", "mirror.local"), ("Tag", "add", "-arm")],
        )
        .overrider(
            "machine,!nothing",
            &[
                ("Registry", "add", "/cache"),
                ("SecretName", "replace", "not-there"),
                ("SecretName", "remove", ""),
            ],
        )
        .overrider("machine=other", &[("Repository", "replace", "wrong")])
        .build();
    let file = stage.cluster.place().dir().join("rules.json");
    std::fs::write(&file, serde_json::to_vec(&job)?)?;
    let file = file.to_str().context("not UTF-8")?;
    let plan = stage.cloud.plan(&["--job", file, "-o", "json"]).await?;
    stage.cluster.kubectl(&["apply", "-f", file]).await?;
    let status = stage.cluster.existing_job("rules").completes().await?;

    let pulled =
        [("edge-1", written.as_str(), &image), ("edge-2", "mirror.local/cache/team/app:v1-arm", &arm)];
    for (node, reference, image) in pulled {
        let of_image = status.image(node, &written).context("not in the status")?;
        assert_eq!(of_image.pulled_image, reference);
        assert_eq!(of_image.digest.as_deref(), Some(image.digest()));
    }
    assert_eq!(users(&private, "team/app"), only("alice"));
    ensure!(open.requests().0.iter().all(|request| request.user.is_empty()), "it resolves no name");

    let plan: serde_json::Value = serde_json::from_str(&plan)?;
    let planned: Vec<_> = plan["nodes"].as_array().context("no nodes")?.iter().collect();
    assert_eq!(planned.len(), 2, "{plan}");
    for (node, (name, reference, _)) in planned.iter().zip(pulled) {
        assert_eq!((&node["name"], &node["images"][0]["pull"]), (&name.into(), &reference.into()), "{plan}");
        assert_eq!(node["images"][0]["error"], serde_json::Value::Null, "{plan}");
    }
    assert_eq!(planned[0]["images"][0]["secrets"], serde_json::json!(["default/alice"]));
    assert_eq!(planned[1]["images"][0]["secrets"], serde_json::json!([]));
    ensure!(!plan.to_string().contains(CANARY), "{plan}");
    Ok(())
}

#[tokio::test]
async fn an_added_secret_is_tried_second() -> Result<()> {
    let registry = Registry::start().user("second", &password("second")).await?;
    let stage = Stage::with_edges(&["edge-1"]).await?;
    let wrong = (registry.host(), "first", &*password("first"));
    stage.cluster.registry_secret("default", "first", &[wrong]).await?;
    stage.cluster.registry_secret("edge", "second", &[registry.login("second")?]).await?;
    let reference = registry.seed(&Image::small("added")?, "team/added:v1")?;
    let status = stage
        .cluster
        .job("added")
        .images([&reference])
        .secret("default/first")
        .on(["edge-1"])
        .overrider("node-role.kubernetes.io/edge", &[("SecretName", "add", "edge/second")])
        .completes()
        .await?;
    let image = status.image("edge-1", &reference).context("not in the status")?;
    assert_eq!((image.status, image.reason.as_str()), (Tristate::True, ""));
    assert_eq!(users(&registry, "team/added"), only("second"));
    Ok(())
}

#[tokio::test]
async fn the_plan_shows_each_nodes_downloads() -> Result<()> {
    let private = Registry::start().user("alice", &password("alice")).await?;
    let open = Registry::start().with_host("mirror.local").await?;
    let stage = Stage::with_edges(&["edge-1", "edge-2"]).await?;
    let here = if std::env::consts::ARCH == "aarch64" { "arm64" } else { "amd64" };
    for node in ["edge-1", "edge-2"] {
        stage.cluster.label_node(node, "kubernetes.io/arch", Some(here)).await?;
    }
    stage.cluster.label_node("edge-2", "region", Some("hangzhou")).await?;
    stage.cluster.registry_secret("default", "alice", &[private.login("alice")?]).await?;
    // The two share a layer, and the index has another platform as well.
    let (index, small) = (Image::multi_arch("sizes")?, Image::small("sizes")?);
    let mut images = Vec::new();
    for (image, path) in [(&index, "team/index:v1"), (&small, "team/small:v1")] {
        images.push(private.seed(image, path)?);
        open.seed(image, path)?;
    }
    let job = |name: &str, images: &[String]| {
        stage.cluster.job(name).images(images).secret("default/alice").on(["edge-1", "edge-2"]).overrider(
            "region=hangzhou",
            &[("Registry", "replace", "mirror.local"), ("SecretName", "remove", "")],
        )
    };
    let unmirrored = private.seed(&small, "team/unmirrored:v1")?;
    let file = stage.cluster.place().dir().join("sizes.json");
    let planned = job("sizes", &[images.as_slice(), &[unmirrored]].concat()).build();
    std::fs::write(&file, serde_json::to_vec(&planned)?)?;
    let (file, hosts) = (file.to_string_lossy(), stage.cluster.place().registry_hosts());
    let hosts = hosts.to_string_lossy();
    let arguments = ["--job", &*file, "--sizes", "--registry-config-path", &*hosts];
    let asked = users(&private, "team/index");
    ensure!(asked.is_empty(), "an earlier request: {asked:?}");
    // It succeeds, although one size is not known.
    let plan = stage.cloud.plan(&[&arguments[..], &["-o", "json"]].concat()).await?;
    assert_eq!(users(&private, "team/index"), only("alice"));
    let table = stage.cloud.plan(&arguments).await?;
    ensure!(table.contains("DOWNLOAD OF EACH"), "{table}");
    ensure!(!plan.contains(CANARY) && !table.contains(CANARY), "{plan}{table}");

    let status = job("pulled", &images).completes().await?;
    let plan: serde_json::Value = serde_json::from_str(&plan)?;
    for (node, name) in ["edge-1", "edge-2"].into_iter().enumerate() {
        let node = &plan["nodes"][node];
        let mut sum = 0;
        for (index, image) in images.iter().enumerate() {
            let size = &node["images"][index]["size"];
            let pulled = status.image(name, image).and_then(|image| image.bytes).context("no bytes")?;
            assert_eq!(size["downloadBytes"], pulled.total, "as it was then pulled: {plan}");
            ensure!(size["unpackedBytes"].as_u64() > Some(pulled.total), "{plan}");
            sum += pulled.total;
        }
        let together = node["size"]["downloadBytes"].as_u64().context("no size")?;
        ensure!(together < sum, "the shared layer counts once: {plan}");
        ensure!(node["size"]["diskBytes"].as_u64() > Some(together), "{plan}");
    }
    assert_eq!(plan["nodes"][0]["images"][2]["sizeError"], serde_json::Value::Null, "{plan}");
    let error = plan["nodes"][1]["images"][2]["sizeError"].as_str().unwrap_or_default();
    ensure!(error.starts_with("not found"), "{plan}");
    assert_eq!(plan["nodes"][1]["size"]["unknownImages"], 1, "{plan}");
    Ok(())
}
