//! `kubectl prepull` against a real cluster: a first day, and a bad night.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kube::api::{Api, ObjectMeta, PostParams};
use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::report::{ImagePrePullReport, JOB_UID_LABEL, ReportBody};
use prepull_api::crd::status::{JobImageStatus, NodeStatus};
use prepull_api::failure::FailureCode;
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::parts::workspace;
use prepull_e2e::prelude::*;

/// Output of a kubectl-prepull about a job that has succeeded everywhere.
const COMPLETED: [&str; 2] = ["Completed", "2 of 2"];

#[tokio::test]
async fn a_first_day_with_the_plugin() -> Result<()> {
    let site = Site::start().await?;
    let _edges = (site.add_node("edge-1").await?.await?, site.add_node("edge-2").await?.await?);
    let me = Person::new(site.cluster.kubeconfig());
    let (_, web) = site.seed_image("web", &[MIB])?;

    // A job is created, followed line by line, and ends.
    let run = format!("run {web} --secret default/registry --concurrency 100% --wait=2m");
    let said = me.runs(&run).await?.is(0, &COMPLETED)?;
    eprintln!("{}", said.out);
    let name =
        said.out.split_once(" created").and_then(|(name, _)| name.rsplit_once('/')).context("no job")?.1;
    ensure!(name.starts_with("web-v1-"), "{name}");
    // A pipeline that runs it again follows the same job, and another spec needs another name.
    ensure!(said.out.contains("at a time; deleted 7d after its end"), "{}", said.out);
    me.runs(&run).await?.is(0, &[name, "is there already, with the same spec", "2 of 2"])?;
    let another = format!("there is a job {name} already, with another spec (spec.download.maxRate)");
    me.runs(&format!("{run} --rate 1Mi")).await?.is(1, &[&another, &format!("set {name}"), "--name"])?;
    me.runs(&format!("set {name} rate=2Mi")).await?.is(0, &["changed"])?;
    let changed = "is there already, with settings that were changed since (spec.download.maxRate)";
    me.runs(&run).await?.is(0, &[changed, "2 of 2"])?;
    me.runs(&format!("failures {name}")).await?.is(0, &[&format!("no node of job {name} has failed")])?;
    // On another node it is another job.
    let on_one = run.replace("--wait=2m", "--node edge-1 --wait=0 -o name");
    let on_one = me.runs(&on_one).await?.is(0, &["web-v1-"])?;
    ensure!(!on_one.out.contains(name), "{}", on_one.out);
    let on_one = on_one.out.trim().rsplit('/').next().context("no name")?;
    // Otherwise the node may be busy with it when the next job is given up.
    me.runs(&format!("status {on_one} --watch --timeout 2m")).await?.is(0, &["1 of 1"])?;

    // Another one has an image that hasn't been pushed yet.
    let missing = web.replace("web", "late");
    let run = format!(
        "run {web} {missing} --name spring --secret default/registry --retries 0 --concurrency 2 --wait=2m"
    );
    let said = me.runs(&run).await?.is(1, &["Failure", "NotFound", "kubectl prepull retry spring"])?;
    eprintln!("{}", said.out);
    let said = me.runs("failures spring").await?.is(0, &["NODE", "edge-1", "edge-2", "NotFound"])?;
    eprintln!("{}", said.out);
    let names = me.runs("failures spring --reason notfound -o name").await?.is(0, &[])?;
    assert_eq!(names.out, "node/edge-1\nnode/edge-2\n");
    me.runs("failures spring --reason NoSpace -o name")
        .await?
        .is(0, &[])
        .map(|said| assert_eq!(said.out, ""))?;
    let said = me.runs("events spring").await?.is(0, &["AGO", "imageprepulljob/spring"])?;
    eprintln!("{}", said.out);

    // Once it's there, the job is retried.
    site.seed_image("late", &[MIB])?;
    me.runs("retry spring")
        .await?
        .is(0, &["imageprepulljob.operations.kubeedge.io/spring is tried again, round 1"])?;
    let said = me.runs("status spring --watch --timeout 2m").await?.is(0, &COMPLETED)?;
    assert!(said.out.contains("retry 1"), "{}", said.out);
    eprintln!("{}", said.out);
    let json = me.runs("status spring -o json").await?.is(0, &[])?;
    let json: serde_json::Value = serde_json::from_str(&json.out)?;
    assert_eq!((&json["nodes"]["successful"], &json["failures"]), (&2.into(), &serde_json::json!([])));
    eprintln!("{}", me.runs("status spring -o wide").await?.is(0, &["Completed"])?.out);
    Ok(())
}

/// A Ready node with an offline edge: a job waits for it.
async fn cloud_with_a_waiting_node(cluster: &Cluster) -> Result<Cloud> {
    let cloud = Cloud::start(cluster).await?;
    cluster.edge_nodes(&["edge-1"]).await?;
    Ok(cloud)
}

#[tokio::test]
async fn a_bad_night_with_the_plugin() -> Result<()> {
    let cluster = Cluster::start().await?;
    let _cloud = cloud_with_a_waiting_node(&cluster).await?;
    let me = Person::new(cluster.kubeconfig());

    // The job continues without its author.
    let goes_on = "job night goes on: kubectl prepull status night --watch follows it again";
    let mut followed = me.follows("run nginx:1.25 --name night")?;
    followed.until("of 1 node").await?;
    followed.interrupted().await?.is(130, &[goes_on])?;
    me.runs("status night --watch --timeout 1s").await?.is(3, &["after 1s job night goes on"])?;
    me.runs("retry night").await?.is(1, &["job night has not ended"])?;

    // On a terminal the same page is redrawn repeatedly, in colours, and no line is longer than the terminal.
    let said =
        me.runs_on_a_terminal("status night --watch --timeout 4s").await?.is(3, &["job night goes on"])?;
    let frames: BTreeSet<_> =
        said.out.split("  for ").skip(1).filter_map(|frame| frame.split_whitespace().next()).collect();
    ensure!(frames.len() > 2, "it does not move: {}", said.out);
    ensure!(said.out.contains("\u{1b}[33m1 waiting\u{1b}[0m"), "{}", said.out);
    ensure!(said.out.contains("\u{1b}[2K"), "nothing is redrawn: {}", said.out);

    // kubectl completes its name, and that of the node.
    let dir = cluster.place().new_dir("completion")?;
    assert_eq!(me.completes(&["status", "ni"], &dir).await?, "night\n:4\n");
    assert_eq!(me.completes(&["run", "nginx", "--node", ""], &dir).await?, "edge-1\n:4\n");
    cluster.kubectl(&["-n", "default", "create", "secret", "generic", "harbor"]).await?;
    assert_eq!(me.completes(&["allow", "har"], &dir).await?, "harbor\n:4\n");
    assert_eq!(me.completes(&["set", "night", "rate=1Mi", "conc"], &dir).await?, "concurrency=\n:4\n");

    // Its settings change while it runs, and the jobs are listed.
    let words = ["rate from unset to 2Mi", "runs: it holds at once"];
    me.runs("set night rate=2Mi window=22:00+24h").await?.is(0, &words)?;
    let spec = cluster.existing_job("night").get().await?.spec;
    ensure!(spec.download.is_some_and(|download| download.max_rate.as_deref() == Some("2Mi")));
    ensure!(spec.windows.len() == 1);
    me.runs("set night window=").await?.is(0, &["to unset"])?;
    me.runs("set night rate=fast").await?.is(2, &["spec.download.maxRate"])?;
    me.runs("list").await?.is(0, &["NAME", "night", "InProgress", "0 of 1"])?;
    let json = me.runs("status night -o json").await?.is(0, &[])?;
    let json: serde_json::Value = serde_json::from_str(&json.out)?;
    assert_eq!(json["nodeStatus"][0]["nodeName"], "edge-1");

    // The owner of a secret allows its use, and others keep theirs.
    cluster.registry_secret("shop", "harbor", &[("harbor.example", "alice", &password("alice"))]).await?;
    cluster
        .kubectl(&[
            "-n",
            "shop",
            "annotate",
            "--overwrite",
            "secret",
            "harbor",
            "prepull.kubeedge.io/allow=a",
        ])
        .await?;
    me.runs("allow shop/harbor night").await?.is(0, &["now allows a,night"])?;
    me.runs("allow harbor night -n shop").await?.is(0, &["allows night already"])?;

    // A program that follows gets a document for each change, and none for the time that passes. The reports come with the
    // second one.
    let said = me.runs("status night --watch -o yaml --timeout 4s").await?.is(3, &[])?;
    ensure!(said.out.matches("job: night\n").count() <= 2, "{}", said.out);
    let mut followed = me.follows("status night --watch -o yaml")?;
    followed.until("suspended: false").await?;
    me.runs("suspend night").await?.is(0, &["night suspended"])?;
    let documents = followed.until("suspended: true").await?.split("---\n");
    let heads: Vec<_> = documents.map(|document| document.matches("job: night\n").count()).collect();
    ensure!(heads.len() > 1 && heads.iter().all(|count| *count == 1), "{heads:?}");
    let job = cluster.existing_job("night");
    job.until("is suspended", |status| {
        status.conditions.iter().any(|c| c.type_ == "Suspended" && c.status == "True")
    })
    .await?;
    me.runs("status night").await?.is(0, &["Suspended", "kubectl prepull resume night lets it go on"])?;
    // Its reader has what it wants, and the job has not ended.
    let unread = tokio::spawn(followed.unread());
    me.runs("resume night").await?.is(0, &["night resumed"])?;
    unread.await??.is(130, &[goes_on])?;
    me.runs("resume night -o name").await?.is(0, &["imageprepulljob.operations.kubeedge.io/night\n"])?;

    // A cancelled job keeps its record, and isn't resumed.
    me.runs("cancel night").await?.is(0, &["night cancelled"])?;
    me.runs("status night -w --timeout 1m")
        .await?
        .is(1, &["Cancelled", "cancelled; 0 nodes did not end, 1 not started"])?;
    me.runs("cancel night").await?.is(1, &["job night has ended already"])?;
    me.runs("suspend night").await?.is(1, &["there is nothing to suspend"])?;
    for command in ["retry night", "resume night"] {
        me.runs(command)
            .await?
            .is(1, &["job night was cancelled, which is for good", "kubectl prepull run"])?;
    }
    me.runs("why edge-1 night").await?.is(1, &["job night was cancelled, and has not started it"])?;

    // A senseless job isn't made, also not as a file. One that was made otherwise is reported immediately.
    for (flags, words) in [
        ("--tolerate 2 --wait=1m", "spec.imagePrePullTemplate.failureTolerate"),
        ("--rate fast --dry-run", "spec.download.maxRate"),
        ("--wave 5,3 --dry-run", "spec.rollout.steps[1]"),
        ("--name Spring_Release --dry-run", "--name Spring_Release"),
        ("--wait 2m", "looks like the value of a flag"),
    ] {
        me.runs(&format!("run nginx {flags}")).await?.is(2, &[words])?;
    }
    cluster.job("odd").images(["nginx"]).on(["edge-1"]).tolerate("2").apply().await?;
    me.runs("status odd --watch --timeout 1m").await?.is(1, &["failureTolerate", "kubectl edit ippj odd"])?;
    me.runs("retry odd").await?.is(1, &["job odd was refused", "failureTolerate"])?;
    me.runs("status other").await?.is(1, &["there is no ImagePrePullJob other", "kubectl prepull list"])?;
    Ok(())
}

#[tokio::test]
async fn a_pause_frees_the_uplink_and_keeps_bytes() -> Result<()> {
    const SIZE: u64 = 24 * MIB;
    let site = Site::start().await?;
    let mut node = site.add_node("edge-1").await?.await?;
    let me = Person::new(site.cluster.kubeconfig());
    let (image, reference) = site.seed_image("paused", &[SIZE])?;
    let layer = image.blobs().last().context("no layer")?;
    site.link.throttle(Some(2 * MIB));
    // The time of the node would be over during the pause.
    let job = site.job("paused").images([&reference]).on(["edge-1"]).timeout_seconds(20).apply().await?;
    eventually("it downloads", SOON, async || {
        let fetched = site.link.bytes_of(layer);
        ensure!(fetched > MIB, "{fetched} bytes");
        Ok(())
    })
    .await?;
    me.runs("pause paused").await?.is(0, &["paused paused: its downloads stop"])?;
    job.until("the node has stopped", |status| {
        let waits = status.node("edge-1").is_some_and(|node| node.reason == "waits: its job is paused");
        waits && status.reason.starts_with("paused since 20")
    })
    .await?;
    me.runs("status paused")
        .await?
        .is(0, &["Paused", "1 node at work keep", "kubectl prepull resume paused"])?;
    me.runs("why edge-1 paused").await?.is(1, &["✗ job paused is paused: nothing of it is downloaded"])?;
    me.runs("pause paused").await?.is(0, &["is paused already"])?;
    let before = site.link.bytes_of(layer);
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(site.link.bytes_of(layer), before, "the uplink is not free");
    let (status, said) = node.status().await?;
    let words =
        ["✓ node edge-1", "✓ connected to ", "✓ containerd ", "paused: 0 of 1 images", "its job is paused"];
    ensure!(status == 0 && words.iter().all(|word| said.contains(word)), "{status}: {said}");
    eprintln!("{said}");
    node.terminate_agent().await?;
    let (status, said) = node.status().await?;
    let words =
        ["✓ node edge-1", "✗ the agent: it does not answer", "✓ containerd ", "paused: 0 of 1 images"];
    ensure!(status == 1 && words.iter().all(|word| said.contains(word)), "{status}: {said}");
    // It comes back to a job that is still paused.
    node.restart_agent()?;
    node.is_connected().await?;
    assert_eq!(site.link.bytes_of(layer), before);
    // A slow machine would need all of the 20 s for the rest.
    site.link.throttle(None);
    me.runs("resume paused").await?.is(0, &["paused resumed"])?;
    let status = job.completes().await?;
    let record = status.image("edge-1", &reference).context("no image")?;
    assert_eq!(record.attempts, 1, "{record:?}");
    let fetched = site.link.bytes_of(layer);
    ensure!(fetched <= SIZE + SIZE / 4, "{fetched} bytes of {SIZE}: it began again");
    me.runs("pause paused").await?.is(1, &["there is nothing to pause"])?;
    Ok(())
}

#[tokio::test]
async fn a_plan_needs_no_job_and_no_right_to_secrets() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    cluster.edge_nodes(&["edge-1", "edge-2"]).await?;
    cluster.registry_secret("shop", "harbor", &[("harbor.example", "alice", &password("alice"))]).await?;
    cluster.apply_file(&workspace().join("manifests/kubectl-prepull/rbac.yaml")).await?;
    let role = "--clusterrole=prepull-viewer";
    cluster.kubectl(&["create", "clusterrolebinding", "view", role, "--user=view"]).await?;
    let (me, viewer) = (Person::new(cluster.kubeconfig()), Person::new(&cluster.kubeconfig_as("view")?));
    let image = "harbor.example/shop/web:v2";
    let run = format!("run {image} --name planned --secret shop/harbor --dry-run");
    let file = cluster.place().new_dir("plan")?.join("job.yaml");
    std::fs::write(&file, me.runs(&run).await?.is(0, &[])?.out)?;
    let plan = format!("plan -f {}", file.display());
    let allow = "kubectl prepull allow shop/harbor planned";
    me.runs(&plan).await?.is(1, &["edge-1,edge-2", image, "shop/harbor", allow, "no usable credentials"])?;
    me.runs("allow shop/harbor planned").await?.is(0, &["now allows planned"])?;
    me.runs(&plan).await?.is(0, &["edge-1,edge-2", image])?;
    assert_eq!(me.runs(&format!("{plan} -o name")).await?.is(0, &[])?.out, "node/edge-1\nnode/edge-2\n");
    let unread = "you lack the right to read secret shop/harbor";
    viewer.runs(&plan).await?.is(0, &["edge-1,edge-2", image, unread])?;
    me.runs("plan planned").await?.is(1, &["there is no ImagePrePullJob planned"])?;
    std::fs::write(&file, std::fs::read_to_string(&file)?.replace("retryTimes", "retrytimes"))?;
    me.runs(&plan).await?.is(1, &["retrytimes: unknown field: did you mean retryTimes?"])?;
    Ok(())
}

#[tokio::test]
async fn each_missing_right_is_named() -> Result<()> {
    let cluster = Cluster::own().await?; // without Kruise's definitions
    let _cloud = cloud_with_a_waiting_node(&cluster).await?;
    let _job = cluster.job("night").images(["nginx:1.25"]).on(["edge-1"]).apply().await?;
    let ann = Person::new(&cluster.kubeconfig_as("ann")?);
    let kind = "imageprepulljobs.operations.kubeedge.io in the whole cluster";
    ann.runs("status night").await?.is(1, &["user ann lacks a right: to get", kind, "rbac.yaml"])?;
    ann.runs("run nginx --wait=0").await?.is(1, &["user ann lacks a right: to create", kind])?;

    cluster.apply_file(&workspace().join("manifests/kubectl-prepull/rbac.yaml")).await?;
    for (user, role) in [("view", "prepull-viewer"), ("operate", "prepull-operator")] {
        let role = format!("--clusterrole={role}");
        cluster.kubectl(&["create", "clusterrolebinding", user, &role, &format!("--user={user}")]).await?;
    }
    let [viewer, operator] = ["view", "operate"].map(|user| cluster.kubeconfig_as(user));
    let (viewer, operator) = (Person::new(&viewer?), Person::new(&operator?));
    for looks in ["status night", "failures night", "events night"] {
        viewer.runs(looks).await?.is(0, &[])?;
    }
    viewer.runs("status night -w --timeout 1s").await?.is(3, &[])?;
    for (changes, verb) in [("suspend night", "patch"), ("run nginx --wait=0", "create")] {
        viewer.runs(changes).await?.is(1, &[&format!("user view lacks a right: to {verb} {kind}")])?;
    }
    for changes in ["suspend night", "resume night", "cancel night", "run nginx --concurrency 10% --wait=0"] {
        operator.runs(changes).await?.is(0, &[])?;
    }
    let list = operator.runs("list -o name").await?.is(0, &["/nginx-"])?;
    let name =
        list.out.lines().find_map(|name| name.strip_prefix("imageprepulljob.operations.kubeedge.io/nginx-"));
    let name = name.context("it isn't listed")?;
    operator.runs(&format!("status nginx-{name} -w --timeout 1s")).await?.is(3, &[])?;

    let app = cluster.place().new_dir("app")?.join("app.yaml");
    std::fs::write(&app, APP)?;
    let from = format!("from -f {} --dry-run", app.display());
    operator.runs(&from).await?.is(0, &["harbor.example/shop/web:v2"])?;
    for workload in ["deploy/a", "sts/a", "ds/a", "rs/a", "cj/a", "job/a", "pod/a", "rc/a"] {
        operator
            .runs(&format!("from {workload}"))
            .await?
            .is(1, &[&format!("there is no {workload} in namespace")])?;
    }
    let pod = "kind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: a, image: 'a:1'}]}";
    std::fs::write(&app, pod)?;
    operator.runs(&from).await?.is(0, &["a:1"])?;
    viewer
        .runs(&from)
        .await?
        .is(1, &["user view lacks a right: to get serviceaccounts in namespace default"])?;

    // OpenKruise's jobs, in a cluster without its definitions, and in one with them.
    let warm = |command: &str| format!("{command} imagepulljob/warm -n default");
    viewer.runs(&warm("status")).await?.is(1, &["the cluster does not know OpenKruise's kinds"])?;
    cluster.install_kruise().await?;
    cluster.pull_job("warm", "nginx:1.25").apply().await?;
    ann.runs(&warm("status"))
        .await?
        .is(1, &["user ann lacks a right: to get imagepulljobs.apps.kruise.io in namespace default"])?;
    for command in ["status", "failures", "events"] {
        viewer.runs(&warm(command)).await?.is(0, &[])?;
    }
    viewer.runs(&warm("why edge-1")).await?.is(1, &["cannot ask for anything on it"])?;
    viewer.runs("list -A").await?.is(0, &["imagepulljob/warm", "default"])?;
    ann.runs("list").await?.is(1, &["user ann lacks a right: to list", kind])?;
    viewer.runs("status warm").await?.is(1, &["name it imagepulljob/warm -n default"])?;
    operator.runs(&warm("suspend")).await?.is(2, &["kubectl edit imagepulljob/warm"])?;

    // A user without any rights, and a cluster without our definitions.
    let text = std::fs::read_to_string(cluster.kubeconfig())?;
    let mut config: serde_json::Value = serde_saphyr::from_str(&text)?;
    config["users"][0]["user"]["token"] = "expired".into();
    let file = cluster.place().new_dir("expired")?.join("kubeconfig");
    std::fs::write(&file, config.to_string())?;
    let stranger = Person::new(&file);
    stranger.runs("status night").await?.is(1, &["does not accept the credentials", "log in again"])?;
    let definition = "customresourcedefinition/imageprepulljobs.operations.kubeedge.io";
    cluster.kubectl(&["delete", definition, "--wait=true"]).await?;
    let me = Person::new(cluster.kubeconfig());
    eventually("the definitions are gone", SOON, async || {
        let said = me.runs("status night").await?;
        said.is(1, &["their definitions are not installed (kubectl apply -f manifests/crds)"])
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn failures_come_from_a_jobs_reports() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    // More nodes than a status lists, and more than a report holds.
    let behaviour = Behaviour { fail_rate: 1.0, ..Behaviour::default() };
    let fleet = Fleet::start(&cluster, &cloud, 260).behaves(behaviour).await?;
    let unlimited = |spec: &mut ImagePrePullJobSpec| spec.image_pre_pull_template.concurrency = 260;
    cluster
        .job("large")
        .images(["harbor.example/a:v1"])
        .on(fleet.names())
        .tolerate("1")
        .spec(unlimited)
        .completes()
        .await?;
    let me = Person::new(cluster.kubeconfig());
    let names = me.runs("failures large -o name").await?.is(0, &[])?;
    assert_eq!(names.out.lines().count(), 260);
    let said =
        me.runs("status large").await?.is(0, &["Completed with failures", "260 failed", "and 257 more"])?;
    eprintln!("{}", said.out);
    fleet.stop().await;
    Ok(())
}

#[tokio::test]
async fn each_role_does_what_it_says() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let _cloud = cloud_with_a_waiting_node(&cluster).await?;
    cluster.apply_file(&workspace().join("manifests/kubectl-prepull/rbac.yaml")).await?;
    for (kind, role) in [
        ("clusterrole", "prepull-viewer"),
        ("clusterrole", "prepull-operator"),
        ("role", "prepull-token-admin"),
        ("role", "prepull-node-admin"),
    ] {
        let (binding, role_of, user) =
            (format!("{kind}binding"), format!("--{kind}={role}"), format!("--user={role}"));
        let mut line = vec!["create", &binding, role, &role_of, &user];
        line.extend((kind == "role").then_some(["-n", NAMESPACE]).into_iter().flatten());
        cluster.kubectl(&line).await?;
    }
    let person = |role: &str| cluster.kubeconfig_as(role).map(|file| Person::new(&file));
    let (viewer, operator) = (person("prepull-viewer")?, person("prepull-operator")?);
    let (tokens, nodes) = (person("prepull-token-admin")?, person("prepull-node-admin")?);

    operator.runs("run nginx --name night --node edge-1 --wait=0").await?.is(0, &["night created"])?;
    for looks in ["list", "status night", "failures night", "events night"] {
        viewer.runs(looks).await?.is(0, &[])?;
    }
    // The right is there, and no Service in this cluster.
    viewer.runs("nodes").await?.is(1, &["there is no cloudcore-prepull in namespace"])?;
    viewer.runs("set night rate=1Mi").await?.is(1, &["lacks a right: to patch"])?;
    operator.runs("set night rate=1Mi").await?.is(0, &["night changed"])?;
    viewer.runs("tokens create --node edge-1").await?.is(1, &["lacks a right: to create secrets"])?;
    tokens.runs("tokens create --node edge-1").await?.is(0, &[])?;
    tokens.runs("node revoke edge-1").await?.is(1, &["lacks a right"])?;
    nodes.runs("node revoke edge-1 --unknown").await?.is(0, &["node edge-1 revoked"])?;
    nodes.runs("node allow edge-1").await?.is(0, &["node edge-1 allowed"])?;
    nodes.runs("tokens create --node edge-1").await?.is(1, &["lacks a right: to get configmaps"])?;

    // What a role may not do or read is no fault of the installation.
    for person in [viewer, operator, tokens, nodes] {
        let said = person.runs("check").await?;
        // This cluster has no Lease and no Service.
        let wrong = said.out.lines().filter(|line| line.starts_with("✗"));
        let is_known =
            |line: &str| line.contains("no replica leads") || line.contains("edges are not listed");
        ensure!(wrong.into_iter().all(is_known), "{}", said.out);
    }
    Ok(())
}

const APP: &str = "
apiVersion: v1
kind: ServiceAccount
metadata: {name: web, namespace: shop}
imagePullSecrets: [{name: harbor}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      serviceAccountName: web
      initContainers: [{name: init, image: 'harbor.example/shop/init:v1'}]
      containers: [{name: web, image: 'harbor.example/shop/web:v2'}]
";

#[tokio::test]
async fn a_workload_is_pulled_then_rolled_out() -> Result<()> {
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).await?;
    let fleet = Fleet::start(&cluster, &cloud, 3).await?;
    cluster.kubectl(&["taint", "node", "sim-2", "gpu=a:NoSchedule"]).await?;
    cluster.registry_secret("shop", "harbor", &[("harbor.example", "alice", &password("alice"))]).await?;
    let dir = cluster.place().new_dir("app")?;
    let app = dir.join("app.yaml");
    std::fs::write(&app, APP)?;
    let from = format!("from -f {}", app.display());
    let me = Person::new(cluster.kubeconfig());

    let said = me
        .runs(&format!("{from} --dry-run -o json"))
        .await?
        .is(0, &["left out", "sim-2 (gpu=a:NoSchedule)"])?;
    let job: serde_json::Value = serde_json::from_str(&said.out)?;
    let template = &job["spec"]["imagePrePullTemplate"];
    let name = job["metadata"]["name"].as_str().unwrap_or_default();
    ensure!(name.starts_with("shop-web-v1-"), "{name}");
    assert_eq!(
        template["images"],
        serde_json::json!(["harbor.example/shop/init:v1", "harbor.example/shop/web:v2"])
    );
    assert_eq!(template["nodeNames"], serde_json::json!(["sim-0", "sim-1"]));
    let login = serde_json::json!([{"registry": "harbor.example", "imageSecret": "shop/harbor"}]);
    assert_eq!(template["registrySecrets"], login);

    // The job also pulls images that pods pull at each start.
    let moving = dir.join("moving.yaml");
    let always = "'harbor.example/shop/web:stable', imagePullPolicy: Always";
    std::fs::write(&moving, APP.replace("'harbor.example/shop/web:v2'", always))?;
    let note = "ask the registry at each start for harbor.example/shop/web:stable";
    let said = me.runs(&format!("from -f {} --dry-run -o json", moving.display())).await?.is(0, &[note])?;
    let job: serde_json::Value = serde_json::from_str(&said.out)?;
    let template = &job["spec"]["imagePrePullTemplate"];
    assert_eq!(template["images"], serde_json::json!(["harbor.example/shop/init:v1"]));
    let source = &template["imageSources"][0];
    assert_eq!((&source["tag"], &source["imagePullPolicy"]), (&"stable".into(), &"Always".into()));

    // An image that hasn't arrived isn't rolled out.
    let bad = format!("{from} --name bad --node sim-0 --node nowhere --apply-then --wait=1m");
    me.runs(&bad).await?.is(1, &["NodeNotFound", "app.yaml is not applied"])?;
    me.runs("from deployment/web -n shop").await?.is(1, &["there is no deployment/web in namespace shop"])?;
    me.runs(&format!("{from} --apply-then --wait=0")).await?.is(2, &["--apply-then waits for the job"])?;

    let said =
        me.runs(&format!("{from} --apply-then --concurrency 100% --wait=1m")).await?.is(0, &COMPLETED)?;
    assert!(said.out.ends_with("deployment.apps/web created\n"), "{}", said.out);
    // Now by name, with the secrets of the ServiceAccount in the cluster.
    let said = me.runs("from deployment/web -n shop --name again --wait=1m").await?.is(0, &COMPLETED)?;
    eprintln!("{}", said.out);
    let again = cluster.existing_job("again").get().await?.spec.image_pre_pull_template;
    assert_eq!(again.registry_secrets[0].image_secret, "shop/harbor");
    fleet.stop().await;
    Ok(())
}

/// A job of 10,000 failed nodes, in the form that cloudcore-prepull writes.
async fn failed_job_of_10_000_nodes(cluster: &Cluster) -> Result<()> {
    let job = cluster.job("huge").images(["r.io/a:v1"]).on(["edge-0"]).apply().await?;
    let summary = serde_json::json!({"desired": 10_000, "failure": 10_000});
    job.set_status(&serde_json::json!({"phase": "Failure", "observedGeneration": 1, "summary": summary}))
        .await?;
    let uid = job.uid().await?;
    let image = |name: &str| JobImageStatus {
        image: format!("harbor.example/shop/{name}:v2026.11.22-rc1"),
        pulled_image: format!("harbor.example/shop/{name}:v2026.11.22-rc1"),
        status: Tristate::False,
        reason: "the registry has no such image: 404 from https://harbor.example/v2/shop/manifests"
            .to_owned(),
        code: Some(FailureCode::NotFound),
        attempts: 4,
        ..JobImageStatus::default()
    };
    let images = ["web", "api", "worker"].map(image);
    let reports: Api<ImagePrePullReport> = Api::all(cluster.client());
    for index in 0..40 {
        let node = |n: u32| NodeStatus {
            node_name: format!("edge-{}", index * 250 + n),
            phase: NodePhase::Failure,
            code: Some(FailureCode::NotFound),
            attempt: 1,
            image_status: images.to_vec(),
            ..NodeStatus::default()
        };
        let body = ReportBody {
            job_name: "huge".to_owned(),
            index,
            node_status: (0..250).map(node).collect(),
            ..ReportBody::default()
        };
        let metadata = ObjectMeta {
            name: Some(format!("huge-{index}")),
            labels: Some([(JOB_UID_LABEL.to_owned(), uid.clone())].into()),
            ..ObjectMeta::default()
        };
        let report = ImagePrePullReport { types: Some(ImagePrePullReport::type_meta()), metadata, body };
        reports.create(&PostParams::default(), &report).await?;
    }
    Ok(())
}

#[tokio::test]
async fn ten_thousand_failures_fit_100_mib() -> Result<()> {
    let cluster = Cluster::start().await?;
    failed_job_of_10_000_nodes(&cluster).await?;
    let me = Person::new(cluster.kubeconfig());
    for (line, lines) in [("failures huge", 10_001), ("failures huge -o name", 10_000)] {
        let began = Instant::now();
        let said = me.runs_within(line, 100 * 1024).await?.is(0, &["edge-9999"])?;
        assert_eq!(said.out.lines().count(), lines);
        eprintln!("{line}: {:?}", began.elapsed());
    }
    let began = Instant::now();
    me.runs_within("status huge", 100 * 1024).await?.is(0, &["10000 failed", "and 9997 more"])?;
    eprintln!("status: {:?}", began.elapsed());
    me.runs_within("status huge -w", 100 * 1024).await?.is(1, &["10000 failed"])?;
    Ok(())
}
