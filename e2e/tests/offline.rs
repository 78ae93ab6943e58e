//! The promise: an image is pulled ahead, its registry goes off, and a pod starts from it. What the kubelet makes of that
//! depends on its policy and on its own records of pulls.

use std::time::{Duration, Instant};

use prepull_api::task::KubeletRecord;
use prepull_e2e::kubernetes::Installation;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

/// The namespace of the pods.
const PODS: &str = "default";
/// The kubelet's records of pulls that have begun, on a worker.
const INTENTS: &str = "/var/lib/kubelet/image_manager/pulling";

/// What becomes of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Runs,
    /// The kubelet wants the image from the registry.
    Asks,
}
use Fate::{Asks, Runs};

/// A pod on the edge, from an image that sleeps. With a secret it may pull.
fn pod(name: &str, image: &str, secret: bool) -> Value {
    let secrets = if secret { json!([{"name": "shop"}]) } else { json!([]) };
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": PODS},
        "spec": {
            "nodeName": "edge-1", "imagePullSecrets": secrets, "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "app", "image": image, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sleep", "1000000"],
            }],
        },
    })
}

/// Creates a pod, waits for what becomes of it, and deletes it.
async fn fate(cluster: &Cluster, pod: &Value) -> Result<Fate> {
    let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
    cluster.apply(&pod.to_string()).await?;
    let what = format!("the fate of pod {name}");
    let fate = eventually(&what, Duration::from_secs(60), async || {
        let status = cluster.kubectl(&["get", "pod", name, "--output=jsonpath={.status}"]).await?;
        let status: Value = serde_json::from_str(&status)?;
        let container = &status["containerStatuses"][0]["state"];
        match (status["phase"].as_str(), container["waiting"]["reason"].as_str()) {
            (Some("Running"), _) => Ok(Runs),
            (_, Some("ErrImagePull" | "ImagePullBackOff")) => Ok(Asks),
            other => bail!("{other:?}"),
        }
    });
    let fate = fate.await?;
    cluster.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]).await?;
    Ok(fate)
}

#[tokio::test]
async fn pods_start_while_the_registry_is_off() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let cluster = kubernetes.cluster();
    let (_server, mut edge) = tokio::try_join!(kubernetes.worker("server-1"), kubernetes.worker("edge-1"))?;
    cluster.label_node("edge-1", "node-role.kubernetes.io/edge", Some("")).await?;
    let _installation = Installation::on(&kubernetes).await?;

    let mut shop = Registry::start().user("alice", &password("alice")).await?;
    edge.reaches(&shop)?;
    cluster.registry_secret(PODS, "shop", &[shop.login("alice")?]).await?;
    cluster.annotate_secret(PODS, "shop", "prepull.kubeedge.io/allow", Some("*")).await?;
    let ahead = |name: &str, image: &str| {
        cluster.job(name).images([image]).on(["edge-1"]).secret("default/shop").retries(3)
    };

    // Pulled by nobody but the agent.
    let plain = shop.seed(&Image::small("plain")?, "team/plain:v1")?;
    ahead("plain", &plain).completes().await?;
    // Pulled by the kubelet before, under another name.
    let recorded = Image::small("recorded")?;
    let elsewhere = shop.seed(&recorded, "old/recorded:v1")?;
    let recorded = shop.seed(&recorded, "team/recorded:v1")?;
    assert_eq!(fate(cluster, &pod("elsewhere", &elsewhere, true)).await?, Runs);
    let status = ahead("recorded", &recorded).completes().await?;
    let image = status.image("edge-1", &recorded).context("no status")?;
    assert_eq!(image.kubelet_record, Some(KubeletRecord::OtherRepository), "{image:?}");
    // Pulled by the agent, after the kubelet had begun and died.
    let begun = shop.seed(&Image::of_layers("begun", &[4 * MIB])?, "team/begun:v1")?;
    shop.pause()?;
    cluster.apply(&pod("begun", &begun, true).to_string()).await?;
    let intents = edge.path(INTENTS);
    eventually("the kubelet pulls", Duration::from_secs(60), async || {
        ensure!(std::fs::read_dir(&intents)?.next().is_some(), "no intent in {}", intents.display());
        Ok(())
    })
    .await?;
    edge.kill_kubelet()?;
    cluster.kubectl(&["delete", "pod", "begun", "--force", "--grace-period=0"]).await?;
    shop.resume()?;
    ahead("begun", &begun).completes().await?;
    edge.restart_kubelet(&json!({})).await?;
    let status = ahead("begun-again", &begun).completes().await?;
    let image = status.image("edge-1", &begun).context("no status")?;
    assert_eq!(image.kubelet_record, Some(KubeletRecord::NoCredentials), "{image:?}");

    // `why` warns before it bites.
    let why = Person::new(cluster.kubeconfig()).runs("why edge-1 recorded").await?;
    why.is(0, &["a record of it from another repository"])?;

    shop.stop()?;
    let table = [
        ("NeverVerifyPreloadedImages", &plain, false, Runs),
        ("NeverVerifyPreloadedImages", &plain, true, Runs),
        ("NeverVerifyPreloadedImages", &recorded, false, Asks),
        ("NeverVerifyPreloadedImages", &recorded, true, Asks),
        ("NeverVerifyPreloadedImages", &begun, true, Asks),
        ("NeverVerify", &recorded, false, Runs),
        ("NeverVerify", &begun, false, Runs),
        ("NeverVerifyAllowlistedImages", &recorded, false, Runs),
        ("NeverVerifyAllowlistedImages", &begun, false, Runs),
        ("NeverVerifyAllowlistedImages", &elsewhere, false, Asks),
        ("AlwaysVerify", &plain, false, Asks),
        ("AlwaysVerify", &plain, true, Asks),
    ];
    let mut policy = "NeverVerifyPreloadedImages";
    let mut wrong = Vec::new();
    for (number, (wanted, image, secret, expected)) in table.into_iter().enumerate() {
        if wanted != policy {
            let host = shop.host();
            let listed = if wanted == "NeverVerifyAllowlistedImages" {
                json!([format!("{host}/team/*")])
            } else {
                json!([])
            };
            let settings = json!({
                "imagePullCredentialsVerificationPolicy": wanted,
                "preloadedImagesVerificationAllowlist": listed,
            });
            edge.restart_kubelet(&settings).await?;
            policy = wanted;
        }
        let began = Instant::now();
        let fate = fate(cluster, &pod(&format!("row-{number}"), image, secret)).await?;
        println!("{wanted:28} {image:40} secret {secret:5} {fate:?} after {:?}", began.elapsed());
        if fate != expected {
            wrong.push((wanted, image, secret, fate));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");

    // A pod that has shown its secret once starts again without the registry; one that always asks never does.
    shop.restart().await?;
    assert_eq!(fate(cluster, &pod("shown", &plain, true)).await?, Runs);
    shop.stop()?;
    assert_eq!(fate(cluster, &pod("shown-again", &plain, true)).await?, Runs);
    let mut always = pod("always", &plain, true);
    always["spec"]["containers"][0]["imagePullPolicy"] = "Always".into();
    assert_eq!(fate(cluster, &always).await?, Asks);
    Ok(())
}
