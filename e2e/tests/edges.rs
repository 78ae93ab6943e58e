//! The list of the edges, as people read it: through the API server's proxy, with only the right to read it.

use std::time::Duration;

use http::Request;
use kube::Client;
use prepull_api::crd::download::DownloadSpec;
use prepull_api::edges::{EdgeList, EdgeQuery, ListedEdge, SERVICE};
use prepull_api::selector::Selector;
use prepull_api::sites::{BlobNews, BlobState, Blobs};
use prepull_api::task::{ByteProgress, ImagePhase, ImageProgress, TaskId};
use prepull_api::wire::{CloudMessage, EdgeMessage, TaskProgress};
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::prelude::*;
use prepull_e2e::services::{apply_edges, make_pod, serve_by};

use crate::page::{Page, picture};

async fn list(person: &Client, query: &EdgeQuery) -> Result<EdgeList> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/services/{SERVICE}/proxy{}", query.to_path());
    Ok(person.request(Request::get(path).body(Vec::new())?).await?)
}

async fn one(person: &Client, name: &str) -> Result<ListedEdge> {
    let query = EdgeQuery { names: vec![name.into()], ..EdgeQuery::default() };
    list(person, &query).await?.items.pop().with_context(|| format!("{name} is not listed"))
}

#[tokio::test]
#[allow(clippy::too_many_lines, reason = "one story, of one cluster")]
async fn only_readers_of_edges_see_them() -> Result<()> {
    let cluster = Cluster::for_changes().await?;
    let (first_network, second_network) = (Network::new().await?, Network::new().await?);
    let (first_address, second_address) = (first_network.uplink().await?, second_network.uplink().await?);
    let mut first = Cloud::start(&cluster).within(&first_network).standby().await?;
    first.leads(SOON).await?;
    let second =
        Cloud::start(&cluster).within(&second_network).named("cloudcore-prepull-2").standby().await?;
    let front = Front::of(&[first.backend(), second.backend()])?;
    first.behind(&front);

    cluster.node("edge-away").edge().ready().label("topology.kubernetes.io/zone", "north").create().await?;
    let fleet = Fleet::start(&cluster, &first, 2).await?;
    cluster.edge_nodes(&["edge-real"]).await?;
    let node = EdgeNode::start(&cluster, &first, "edge-real").await?;
    node.is_connected().await?;
    apply_edges(&cluster).await?;
    make_pod(&cluster, "a", first_address).await?;
    make_pod(&cluster, "b", second_address).await?;
    serve_by(&cluster, SERVICE, "a", first_address, &first).await?;

    let reader = Cluster::client_of(
        &cluster.kubeconfig_as("system:serviceaccount:prepull-system:prepull-edges-reader")?,
    )
    .await?;
    let somebody = Cluster::client_of(&cluster.kubeconfig_as("somebody")?).await?;
    let all = EdgeQuery::default();
    let before = eventually("all edges are connected", SOON, async || {
        let listed = list(&reader, &all).await?;
        ensure!((listed.total, listed.connected) == (4, 3), "{listed:?}");
        Ok(listed)
    })
    .await?;
    let real = one(&reader, "edge-real").await?;
    ensure!(real.connected && real.connected_since.is_some() && real.last_seen.is_none(), "{real:?}");
    ensure!(real.runtime.as_deref().is_some_and(|runtime| runtime.starts_with("containerd ")), "{real:?}");
    ensure!(
        real.disk.as_ref().is_some_and(|disk| disk.available > 0 && disk.capacity > disk.available),
        "{real:?}"
    );
    ensure!(real.version.as_deref() == Some(env!("CARGO_PKG_VERSION")), "{real:?}");
    ensure!(
        real.certificate_until.is_some() && real.tasks == Some(0) && real.max_tasks == Some(1),
        "{real:?}"
    );
    let north = EdgeQuery { selector: Selector::parse("topology.kubernetes.io/zone=north")?, ..all.clone() };
    let north = list(&reader, &north).await?;
    let away = north.items.first().context("the north is empty")?;
    assert_eq!((north.total, away.name.as_str(), away.site.as_deref()), (1, "edge-away", Some("north")));
    ensure!(!away.connected && away.ready && away.last_seen.is_none() && away.version.is_none(), "{away:?}");

    let page = Page::serve(cluster.kubeconfig()).await?;
    let browser = page.opened().await?;
    browser.click("Edges").await?;
    browser.says("Edges 1 to 4 of 4").await?;
    browser.click("not connected").await?;
    browser.says("Edges 1 to 1 of 1").await?;
    let shown = browser.text().await?;
    ensure!(shown.contains("edge-away") && !shown.contains("edge-real"), "{shown}");
    browser.click("not connected").await?;
    browser.says("edge-real").await?;
    picture(&browser, "edges").await?;
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "{complaints:#?}");

    // A job that continues over the failover.
    let images = ["registry.invalid/a:1"];
    let _job = cluster.job("waits").images(images).on(["edge-away", "sim-0"]).apply().await?;
    browser.click("Jobs").await?;
    browser.click("waits").await?;
    browser.says("Nodes that have ended").await?;
    let marks = async || {
        browser
            .run::<Vec<String>>("[...document.querySelectorAll('.marks li')].map((mark) => mark.textContent)")
            .await
    };
    ensure!(!marks().await?.iter().any(|mark| mark.contains("Failover")), "there was no failover yet");

    let error =
        format!("{:#}", list(&somebody, &all).await.err().context("an unauthorised user reads the edges")?);
    ensure!(error.contains("services/proxy") && error.contains("orbidden"), "{error}");

    // A standby names the leader, while the Service still has the standby.
    serve_by(&cluster, SERVICE, "b", second_address, &second).await?;
    let error = format!("{:#}", list(&reader, &all).await.err().context("a standby lists edges")?);
    ensure!(error.contains("not the leader: "), "{error}");

    // The next leader knows the edges that have come back, and lists the others by their Nodes.
    node.stop_agent()?;
    first.kill9()?;
    second.leads(SOON).await?;
    let after = eventually("the edges of the fleet are back", SOON, async || {
        let listed = list(&reader, &all).await?;
        ensure!(listed.total == 4, "{listed:?}");
        ensure!(listed.connected == 2, "{listed:?}");
        Ok(listed)
    })
    .await?;
    ensure!(after.known_since.0 > before.known_since.0, "{after:?}");
    eventually("the failover is marked on the line of the job", SOON, async || {
        let marks = marks().await?;
        ensure!(marks.iter().any(|mark| mark.contains("Failover")), "{marks:?}");
        Ok(())
    })
    .await?;
    let silent = one(&reader, "edge-real").await?;
    ensure!(!silent.connected && silent.last_seen.is_none() && silent.runtime.is_none(), "{silent:?}");
    assert_eq!(silent.certificate_until, real.certificate_until);
    node.cont_agent()?;
    eventually("it is back", SOON, async || {
        let real = one(&reader, "edge-real").await?;
        ensure!(real.connected && real.runtime.is_some(), "{real:?}");
        Ok(())
    })
    .await?;

    // An edge that was connected in this term stays in the list after it has gone.
    fleet.stop().await;
    eventually("two edges were last seen", SOON, async || {
        let gone = list(&reader, &EdgeQuery { connected: Some(false), ..all.clone() }).await?;
        let seen: Vec<_> = gone.items.iter().filter(|edge| edge.last_seen.is_some()).collect();
        ensure!(seen.len() == 2 && seen.iter().all(|edge| edge.version.is_some()), "{gone:?}");
        Ok(())
    })
    .await?;
    // A revoked box looks revoked.
    second.command(&["node", "revoke", "edge-real"]).await?;
    browser.click("Edges").await?;
    browser.says("revoked, kept out").await?;
    browser.click("edge-real").await?;
    browser.says("It gets no session and no certificate.").await?;
    a_site_is_shown(&cluster, &second, &page).await
}

/// A node that downloads a layer for its site is on the page, also of a phone, and in the terminal.
async fn a_site_is_shown(cluster: &Cluster, leader: &Cloud, page: &Page) -> Result<()> {
    const PHONE: (u32, u32) = (390, 844);
    let browser = page.opened_at(PHONE.0, PHONE.1).await?;
    browser.click("Sites").await?;
    browser
        .says("No site shares layers now. The site of a Node is its label topology.kubernetes.io/zone")
        .await?;
    cluster
        .node("edge-shop")
        .edge()
        .ready()
        .label("topology.kubernetes.io/zone", "store-17")
        .create()
        .await?;
    let mut edge = Intruder::of(cluster, leader, "edge-shop").await?.open_session().await?;
    let job = cluster.job("shared").images(["registry.invalid/a:1"]).on(["edge-shop"]).spec(|spec| {
        spec.download = Some(DownloadSpec { share_within_site: Some(true), ..DownloadSpec::default() });
    });
    let _job = job.apply().await?;
    let task = loop {
        if let CloudMessage::Assign(assign) = edge.receive().await? {
            break assign.task.id;
        }
    };
    let says = |state, done| {
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        let blobs = vec![BlobNews { digest, size: 10 * MIB, state, done }];
        EdgeMessage::Blobs(Blobs { task: task.clone(), blobs, failures: Vec::new(), reads_streams: true })
    };
    edge.send_message(&says(BlobState::Wanted, 0)).await?;
    while !matches!(edge.receive().await?, CloudMessage::Sources(_)) {}
    edge.send_message(&says(BlobState::Carrying, 3 * MIB)).await?;
    browser.click("store-17").await?;
    for text in ["Downloads over its uplink now", "edge-shop", "3.0 MiB of 10.0 MiB", "for its site"] {
        browser.says(text).await?;
    }
    let width: u32 = browser.run("document.documentElement.scrollWidth").await?;
    ensure!(width <= PHONE.0, "the page is {width} pixels wide");
    picture(&browser, "site-phone").await?;
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "{complaints:#?}");
    let person = Person::new(cluster.kubeconfig());
    rates_name_node_and_job(&mut edge, &person, &task).await?;
    person.runs("sites store-17 --watch --timeout 3s").await?.is(3, &["store-17", "edge-shop"])?;
    Ok(())
}

/// A node's progress is the rate of its site, its job and itself.
async fn rates_name_node_and_job(edge: &mut Wire, person: &Person, task: &TaskId) -> Result<()> {
    for done in [0, 30 * MIB] {
        let bytes = Some(ByteProgress { done, total: 90 * MIB });
        let image = ImageProgress { bytes, attempts: 1, ..ImageProgress::new(0, ImagePhase::Pulling) };
        let progress = TaskProgress { task: task.clone(), images: vec![image], waits: String::new() };
        edge.send_message(&EdgeMessage::Progress(progress)).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let words = ["store-17", "edge-shop", "shared", "MiB/s, with neighbours", "kubectl prepull set JOB"];
    person.runs("rates").await?.is(0, &words)?;
    person.runs("rates elsewhere").await?.is(1, &["no connected edge is in site elsewhere"])?;
    Ok(())
}
