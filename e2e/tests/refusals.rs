//! `kubectl prepull` beside a real API server that refuses, is silent, or asks a webhook that is away.

use std::sync::atomic::{AtomicU32, Ordering};

use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, Patch, PatchParams};
use prepull_e2e::prelude::*;
use serde_json::json;

#[tokio::test]
async fn refusals_of_the_api_server_are_one_sentence() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let _cloud = Cloud::start(&cluster).await?;
    let me = Person::new(cluster.kubeconfig());

    // A quota for Secrets, which tokens are.
    cluster.kubectl(&["-n", "prepull-system", "create", "quota", "none", "--hard=count/secrets=0"]).await?;
    let counted = r#"{"status":{"hard":{"count/secrets":"0"},"used":{"count/secrets":"0"}}}"#;
    let status = ["patch", "quota", "none", "--subresource=status", "--type=merge", "-p", counted];
    cluster.kubectl(&[&["-n", "prepull-system"], &status[..]].concat()).await?;
    eventually("the quota counts", SOON, async || {
        let said = me.runs("tokens create --node edge-9").await?.is(1, &["the quota is used up: none"])?;
        assert_eq!(said.err.matches("count/secrets").count(), 3, "{}", said.err);
        Ok(())
    })
    .await?;

    // A webhook that every job needs, and that is away.
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": "jobs.example" },
        "webhooks": [{
            "name": "jobs.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "failurePolicy": "Fail", "timeoutSeconds": 2, "clientConfig": { "url": "https://127.0.0.1:1/jobs" },
            "rules": [{ "apiGroups": ["operations.kubeedge.io"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["imageprepulljobs"] }],
        }],
    });
    cluster.apply(&webhook.to_string()).await?;
    let words = [
        "the admission webhook jobs.example.com does not answer",
        "kubectl get validatingwebhookconfigurations",
    ];
    eventually("the webhook counts", SOON, async || {
        me.runs("run nginx:1.25 --name hooked --node edge-1 --wait=0").await?.is(1, &words)?;
        Ok(())
    })
    .await?;
    cluster.kubectl(&["delete", "validatingwebhookconfiguration", "jobs.example"]).await?;

    // A rule of the definition that isn't one of ours: an object that is there twice.
    eventually("no webhook counts", SOON, async || {
        me.runs("run nginx:1.25 --name twice --node edge-1 --wait=0").await?.is(0, &["created"])?;
        Ok(())
    })
    .await?;
    me.runs("run nginx:1.26 --name twice --node edge-1 --wait=0").await?.is(1, &["another spec"])?;
    Ok(())
}

#[tokio::test]
async fn a_conflict_and_an_old_login_are_named() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    cluster.kubectl(&["-n", "default", "create", "secret", "generic", "harbor"]).await?;
    let me = Person::new(cluster.kubeconfig());
    let secrets: Api<Secret> = Api::namespaced(cluster.client(), "default");
    let writes = async {
        for number in 0_u64.. {
            let label = json!({"metadata": {"labels": {"number": number.to_string()}}});
            secrets.patch_metadata("harbor", &PatchParams::default(), &Patch::Merge(label)).await?;
        }
        Ok::<(), anyhow::Error>(())
    };
    let jobs = AtomicU32::new(0);
    let is_refused = eventually("a write comes in between", SOON, async || {
        let job = jobs.fetch_add(1, Ordering::Relaxed);
        let said = me.runs(&format!("allow default/harbor job-{job}")).await?;
        said.is(
            1,
            &["secret default/harbor cannot be changed: it was changed by another writer", "try again"],
        )
    });
    let said = tokio::select! {
        said = is_refused => said?,
        ended = writes => return ended,
    };
    assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    me.runs("allow default/harbor spring").await?.is(0, &["spring"])?;

    // A token that isn't valid any more.
    let mut config: serde_json::Value =
        serde_saphyr::from_str(&std::fs::read_to_string(cluster.kubeconfig())?)?;
    config["users"][0]["user"] = json!({"token": "of-yesterday"});
    let file = cluster.place().new_dir("expired")?.join("kubeconfig");
    std::fs::write(&file, config.to_string())?;
    let expired = Person::new(&file);
    for line in ["list", "nodes", "allow default/harbor web", "tokens create --node edge-1", "why edge-1"] {
        let said = expired.runs(line).await?;
        let said = said.is(1, &["does not accept the credentials of the kubeconfig"])?;
        ensure!(!said.err.contains("of-yesterday"), "{}", said.err);
    }
    Ok(())
}

#[tokio::test]
async fn a_silent_api_server_is_noticed_while_following() -> Result<()> {
    let cluster = Cluster::own().await?;
    let _cloud = Cloud::start(&cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    let job = cluster.job("night").images(["nginx:1.25"]).on(["edge-1"]).apply().await?;
    job.until("the job waits for its node", |status| status.summary.desired == 1).await?;
    let me = Person::new(cluster.kubeconfig());
    // It accepts connections, and answers nothing from the third second on.
    let follows = me.runs("status night --watch --timeout 40s --request-timeout 5s");
    let falls_silent = async {
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        cluster.pause_api()
    };
    let (said, paused) = tokio::join!(follows, falls_silent);
    paused?;
    let said = said?.is(3, &["nothing was heard since", "has not answered in time", "job night goes on"]);
    let other = me.runs("list --request-timeout 2s").await?.is(1, &["has not answered for 2s"]);
    cluster.resume_api()?;
    said?;
    other?;
    me.runs("list").await?.is(0, &["night"])?;
    Ok(())
}
