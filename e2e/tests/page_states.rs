//! Every state of the page, at the widths of a phone, a laptop and a large screen, in light and in dark.

mod ended;

use futures::{StreamExt, TryStreamExt};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, PostParams};
use prepull_e2e::browser::Browser;
use prepull_e2e::cluster::NAMESPACE;
use prepull_e2e::prelude::*;
use serde_json::{Value, json};

use crate::page::{Page, made_up_job, picture};

/// Windows of a phone, a laptop and a large screen.
const SIZES: [(u32, u32); 3] = [(390, 844), (1280, 900), (2560, 1440)];
/// Longest page of any state, in screens.
const SCREENS: u32 = 3;

/// What doesn't fit, as lines: the page scrolls sideways or is too long, an element is cut off, or is too small to hit.
const FAULTS: &str = r"(() => {
  const faults = [];
  const root = document.documentElement;
  const isPhone = innerWidth <= 700;
  if (root.scrollWidth > innerWidth) faults.push(`the page is ${root.scrollWidth} wide`);
  if (root.scrollHeight > SCREENS * innerHeight) faults.push(`the page is ${root.scrollHeight} high`);
  for (const element of document.querySelectorAll('header *, #trouble *, main *')) {
    const at = element.getBoundingClientRect();
    if (!at.width || element.closest('svg, .visually-hidden') || (isPhone && element.closest('thead'))) continue;
    const name = `${element.tagName} ${element.className} ${element.textContent.slice(0, 40)}`;
    if (at.left < 0 || at.right > innerWidth + 1) faults.push(`cut off from ${at.left} to ${at.right}: ${name}`);
    const style = getComputedStyle(element);
    if (style.overflowX === 'hidden' && element.scrollWidth > element.clientWidth + 1) faults.push(`its text is cut off: ${name}`);
    // A link within a sentence is as high as its line.
    const isInline = element.tagName === 'A' && style.display === 'inline';
    if (element.matches('a, button, select, input') && !isInline && at.height < (isPhone ? 43.9 : 24)) faults.push(`only ${at.height} high: ${name}`);
  }
  return faults.slice(0, 8);
})()";

/// What axe-core finds by colours alone. The dark scheme has the elements of the light one in other colours.
const COLOURS: [&str; 2] = ["color-contrast", "link-in-text-block"];

/// Checks that what the browser shows fits at every size, and that axe-core finds nothing in either scheme. With
/// `PREPULL_PICTURES`, a picture of each is with the logs. Leaves the browser as a laptop, in light.
pub(crate) async fn fits(browser: &Browser, state: &str) -> Result<()> {
    let pictures = std::env::var_os("PREPULL_PICTURES").is_some();
    let logs = Place::here()?.logs().to_owned();
    for (scheme, rules) in [("dark", &COLOURS[..]), ("light", &[][..])] {
        browser.prefer(scheme).await?;
        for (width, height) in SIZES {
            browser.resize(width, height).await?;
            if pictures {
                browser.long_picture(&logs.join(format!("{state}-{width}-{scheme}.png"))).await?;
            }
            // A large screen has the elements of a laptop.
            if width < 2000 {
                let found = browser.axe(rules).await?;
                ensure!(found.is_empty(), "{state} at {width} in {scheme}: {found:#?}");
            }
        }
    }
    has_room(browser, state).await
}

/// Checks that what the browser shows fits at every size. Leaves the browser as a laptop.
pub(crate) async fn has_room(browser: &Browser, state: &str) -> Result<()> {
    for (width, height) in SIZES {
        browser.resize(width, height).await?;
        let faults: Vec<String> = browser.run(&FAULTS.replace("SCREENS", &SCREENS.to_string())).await?;
        ensure!(faults.is_empty(), "{state} at {width}: {faults:#?}");
    }
    browser.resize(SIZES[1].0, SIZES[1].1).await
}

/// Goes to a view by its address, and waits for a text.
async fn goes(browser: &Browser, address: &str, text: &str) -> Result<()> {
    browser.run::<Value>(&format!("location.hash = {address:?}, null")).await?;
    browser.says(text).await
}

/// Lets the page get these answers, by their paths, instead of its server's: statuses and bodies.
async fn answers(browser: &Browser, answers: &Value) -> Result<()> {
    let wrap = format!(
        "window.unwrapped ??= window.fetch; const answers = {answers}; window.fetch = (url, options) => {{ \
         const answer = answers[String(url).split('/').slice(2).join('/')]; \
         return answer ? Promise.resolve(new Response(typeof answer[1] === 'string' ? answer[1] : \
         JSON.stringify(answer[1]), {{ status: answer[0] }})) : window.unwrapped(url, options); }}; null"
    );
    browser.run::<Value>(&format!("(() => {{ {wrap} }})()")).await.map(drop)
}

/// Names of the elements that Tab reaches, until the first one comes again. Each must show that it has the focus.
async fn tab_order(browser: &Browser) -> Result<Vec<String>> {
    const FOCUSED: &str = "(() => { const at = document.activeElement; const style = getComputedStyle(at); \
        return at === document.body ? null : [at.getAttribute('aria-label') || at.textContent || at.tagName, \
        style.outlineStyle !== 'none' && style.outlineWidth !== '0px']; })()";
    const MOST: usize = 200;
    let mut names: Vec<String> = Vec::new();
    browser.run::<Value>("document.querySelector('.skip').focus(), null").await?;
    while names.len() < MOST {
        // None is beyond the last element.
        let Some((name, is_visible)) = browser.run::<Option<(String, bool)>>(FOCUSED).await? else {
            return Ok(names);
        };
        // A browser shows the focus that comes by a key.
        ensure!(is_visible || names.is_empty(), "the focus on {name:?} can't be seen");
        if names.first() == Some(&name) {
            return Ok(names);
        }
        names.push(name);
        browser.press("Tab").await?;
    }
    bail!("Tab doesn't come back to the first element: {names:?}")
}

#[tokio::test]
async fn every_job_state_fits() -> Result<()> {
    const JOBS: usize = 500;
    let cluster = Cluster::start().await?;
    let page = Page::serve(cluster.kubeconfig()).await?;
    let browser = page.opened().await?;
    browser.says("There is no job. Make one with kubectl prepull run IMAGE.").await?;
    fits(&browser, "jobs-empty").await?;

    let status = |phase: &str, reason: &str, summary: Value, valid: &str| {
        let valid = json!({ "type": "Valid", "status": valid, "reason": "Checked", "message": "",
            "lastTransitionTime": Timestamp::now() });
        json!({ "phase": phase, "reason": reason, "summary": summary, "observedGeneration": 1, "conditions": [valid],
            "startTime": Timestamp::now() })
    };
    let ended = status("Completed", "", json!({ "desired": 9, "successful": 9 }), "True");
    futures::stream::iter(0..JOBS - 4)
        .map(|number| format!("nightly-{number:03}"))
        .map(async |name| {
            let job = cluster.job(&name).images(["registry.invalid/shop/checkout:2026.11"]).on(["edge-1"]);
            job.apply().await?.set_status(&ended).await
        })
        .buffer_unordered(16)
        .try_collect::<()>()
        .await?;
    let images = ["registry.invalid/a:1"];
    let wrong = cluster.job("wrong").images(images).on(["edge-1"]).apply().await?;
    let reason = "spec.imagePrePullTemplate.images[0]: \"r.example/App:v1\" isn't an image reference: a repository is in \
                  lowercase letters";
    wrong.set_status(&status("Failure", reason, json!({}), "False")).await?;
    let later = cluster.job("later").images(images).on(["edge-1"]).spec(|spec| spec.suspend = true);
    later.apply().await?.set_status(&status("Init", "", json!({}), "True")).await?;
    cluster.job("new").images(images).on(["edge-1"]).apply().await?;
    made_up_job(&cluster, "running", 60).await?;

    // Those at work come first, and a filter is part of the address.
    browser.says("Jobs 1 to 25 of 500").await?;
    browser.says("496 completed").await?;
    fits(&browser, "jobs").await?;
    let first: String = browser.run("document.querySelector('tbody th').innerText").await?;
    ensure!(first.starts_with("running"), "{first}");
    browser.resize(SIZES[0].0, SIZES[0].1).await?;
    picture(&browser, "jobs-phone").await?;
    browser.resize(SIZES[1].0, SIZES[1].1).await?;
    browser.says("Jobs 1 to 25 of 500").await?;
    browser.click("Next").await?;
    browser.says("Jobs 26 to 50 of 500").await?;
    browser.click("1 failed or refused").await?;
    browser.says("Jobs 1 to 1 of 1").await?;
    assert_eq!(browser.run::<String>("location.hash").await?, "#/?only=failed");
    let shared = page.opened().await?;
    shared.open(&format!("{}#/?q=NIGHTLY&from=50", page.url())).await?;
    shared.says("Jobs 51 to 75 of 496").await?;
    goes(&browser, "#/?q=nothing", "No job fits the filter. Show all 500.").await?;
    fits(&browser, "jobs-none-fits").await?;

    ended::removal(&cluster, "removed", false).await?;
    ended::removal(&cluster, "would-remove", true).await?;
    ended::deltas(&cluster, "updated").await?;
    for (address, text, state) in [
        ("#/job/wrong", "No node has begun. Correct the field", "job-refused"),
        ("#/job/later", "Suspended before it began", "job-suspended-early"),
        ("#/job/new", "no cloudcore-prepull has looked at it yet", "job-new"),
        ("#/job/nowhere", "There is no job nowhere", "job-unknown"),
        ("#/job/running?phase=Failure", "Nodes 1 to 1 of 1", "job-running"),
        ("#/job/removed", "Freed", "job-removed"),
        ("#/job/removed?node=edge-0", "container checkout-7d9f of pod", "job-removed-node"),
        ("#/job/would-remove", "Would free", "job-removal-preview"),
        ("#/job/updated", "Deltas saved", "job-deltas"),
        ("#/job/updated?node=edge-0", "sha256:90d49bb14a4a", "job-deltas-node"),
    ] {
        goes(&browser, address, text).await?;
        fits(&browser, state).await?;
    }

    // By keyboard: a node is opened, Escape closes it, and the focus is where it was.
    goes(&browser, "#/job/running", "Nodes 1 to 25 of 60").await?;
    let order = tab_order(&browser).await?;
    for name in ["Skip to the content", "Jobs", "Group nodes", "Filter nodes", "failed", "Next"] {
        let is_it = |reached: &&String| {
            reached.contains(name) || name == "Group nodes" && reached.contains("by site")
        };
        ensure!(order.iter().any(|reached| is_it(&reached)), "{name} isn't reached: {order:?}");
    }
    browser.run::<Value>("document.querySelector('tbody button').focus(), null").await?;
    browser.press("Enter").await?;
    browser.says("Attempt 1").await?;
    let node: String =
        browser.run("document.querySelector('section[aria-label=Node] h3').textContent").await?;
    assert_eq!(browser.run::<String>("location.hash").await?, format!("#/job/running?node={node}"));
    fits(&browser, "job-node").await?;
    browser.press("Escape").await?;
    assert_eq!(browser.run::<String>("document.activeElement.textContent").await?, node);

    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "{complaints:#?}");

    // A deleted job stays until the person goes elsewhere.
    cluster.existing_job("running").delete().await?;
    browser.says("This job was deleted at").await?;
    browser.says("Nodes 1 to 25 of 60").await?;
    fits(&browser, "job-deleted").await?;

    no_leader(&cluster, &browser).await?;
    drop(page);
    goes(&browser, "#/", "kubectl prepull ui has not answered since").await?;
    fits(&browser, "ui-ended").await
}

/// The page shows since when no replica leads.
async fn no_leader(cluster: &Cluster, browser: &Browser) -> Result<()> {
    let ago = Timestamp::now() - SignedDuration::from_mins(3);
    let spec = json!({ "holderIdentity": "cloudcore-prepull-0", "leaseDurationSeconds": 15,
        "renewTime": ago.strftime("%Y-%m-%dT%H:%M:%S.000000Z").to_string() });
    let lease: Lease =
        serde_json::from_value(json!({ "metadata": { "name": "cloudcore-prepull" }, "spec": spec }))?;
    let namespaces: Api<Namespace> = Api::all(cluster.client());
    ensure!(namespaces.get_opt(NAMESPACE).await?.is_some(), "there is no namespace {NAMESPACE}");
    Api::<Lease>::namespaced(cluster.client(), NAMESPACE).create(&PostParams::default(), &lease).await?;
    browser.says("No cloudcore-prepull has led since").await?;
    goes(browser, "#/", "cloudcore-prepull-0 does not renew its Lease").await?;
    fits(browser, "no-leader").await
}

#[tokio::test]
async fn edges_and_sites_fit() -> Result<()> {
    const EDGES: usize = 10_000;
    const GIB: u64 = 1 << 30;
    let cluster = Cluster::start().await?;
    made_up_job(&cluster, "morning", 60).await?;
    let page = Page::serve(cluster.kubeconfig()).await?;
    let browser = page.opened().await?;
    let now = Timestamp::now();
    let in_days = |days: i64| now + SignedDuration::from_hours(24 * days);
    let edge = |number: usize| {
        let disk =
            json!({ "mountpoint": "/var/lib/containerd", "available": 20 * GIB, "capacity": 31 * GIB });
        json!({ "name": format!("edge-{number:05}"), "connected": true, "connectedSince": now, "ready": true,
            "site": format!("store-{}", number / 40), "version": "0.2.0", "os": "linux", "arch": "arm64",
            "runtime": "containerd 1.7.24", "disk": disk, "certificateUntil": in_days(20), "tasks": 1, "maxTasks": 2 })
    };
    let mut edges: Vec<Value> = (0..EDGES).map(edge).collect();
    edges[7]["revoked"] = true.into();
    edges[7]["connected"] = false.into();
    edges[8]["disk"]["available"] = json!(GIB);
    edges[9]["certificateUntil"] = json!(in_days(2));
    edges[10]["connected"] = false.into();
    edges[10]["lastSeen"] = json!(now);
    let site = |number: u64| {
        json!({ "name": format!("store-{number}"), "nodes": 40, "layers": 12, "waiting": 40 - number % 40, "carriers": 2,
            "uplinkBytesPerSecond": 900_000 + number, "bytesShared": 70 * GIB, "bytesCarried": 2 * GIB,
            "leasesLost": number % 3, "claimsRefused": 0, "holdersDelisted": 0 })
    };
    let list = |items: Vec<Value>| json!({ "items": items, "knownSince": now, "siteLabel": "topology.kubernetes.io/zone" });
    let mut one = site(3);
    let download = |node: &str, alone: Option<&str>| {
        json!({ "node": node, "digest": format!("sha256:{}", "0123456789abcdef".repeat(4)), "size": 80 * 1024 * 1024,
            "done": 30 * 1024 * 1024, "since": now, "bytesPerSecond": 450_000, "alone": alone })
    };
    one["downloads"] =
        json!([download("edge-00121", None), download("edge-00122", Some("no neighbour can reach it"))]);
    let shown = json!({
        "edges": [200, { "edges": edges }],
        "edges?edge=edge-00000": [200, { "edges": [edges[0]] }],
        "edges?edge=edge-00007": [200, { "edges": [edges[7]] }],
        "edges?edge=edge-00008": [200, { "edges": [edges[8]] }],
        "sites": [200, list((0..250).map(site).collect())],
        "sites?site=store-3": [200, list(vec![one])],
    });
    answers(&browser, &shown).await?;

    // Those that need a person come first, each with a mark and its figures.
    goes(&browser, "#/edges", "Edges 1 to 25 of 10,000").await?;
    let rows: Vec<String> = browser
        .run("[...document.querySelectorAll('tbody tr')].slice(0, 4).map((row) => row.innerText)")
        .await?;
    let marks = [
        ("edge-00007", "revoked"),
        ("edge-00008", "97 % full"),
        ("edge-00009", "ends soon"),
        ("edge-00010", "no, seen"),
    ];
    for (row, (name, mark)) in rows.iter().zip(marks) {
        ensure!(row.contains(name) && row.contains(mark), "{rows:?}");
    }
    ensure!(rows[1].contains("1.0 GiB of 31.0 GiB free"), "{rows:?}");
    fits(&browser, "edges").await?;
    browser.click("1 revoked").await?;
    browser.says("Edges 1 to 1 of 1").await?;
    assert_eq!(browser.run::<String>("location.hash").await?, "#/edges?only=revoked");

    goes(&browser, "#/edges/edge-00007", "It gets no session and no certificate.").await?;
    fits(&browser, "edge-revoked").await?;
    // An edge leads to its jobs, and a job to its node.
    browser.says("Jobs 1 to 1 of 1").await?;
    browser.click("morning").await?;
    browser.says("Attempt 1").await?;
    browser.click("This edge and its other jobs").await?;
    browser.says("It gets no session").await?;
    goes(&browser, "#/edges/edge-00008", "97 % full").await?;
    fits(&browser, "edge-full").await?;

    goes(&browser, "#/sites", "Sites 1 to 25 of 250").await?;
    fits(&browser, "sites").await?;
    goes(&browser, "#/sites/store-3", "Downloads over its uplink now").await?;
    browser.says("alone: no neighbour can reach it").await?;
    fits(&browser, "site").await?;

    // Nothing there, and no answer.
    let empty = json!({ "edges": [200, { "edges": [] }], "edges?edge=nowhere": [200, { "edges": [] }], "sites": [200, list(Vec::new())] });
    answers(&browser, &empty).await?;
    for (address, text, state) in [
        ("#/edges", "There is no edge. An edge is a Node", "edges-empty"),
        ("#/edges/nowhere", "The leader knows no edge nowhere", "edge-unknown"),
        ("#/sites", "No site shares layers now", "sites-empty"),
    ] {
        goes(&browser, address, text).await?;
        fits(&browser, state).await?;
    }
    let broken = "no cloudcore-prepull leads in namespace prepull-system: the Service cloudcore-prepull-edges has no pod behind it";
    answers(&browser, &json!({ "sites": [502, broken] })).await?;
    browser.says("The sites can't be shown: no cloudcore-prepull leads").await?;
    fits(&browser, "sites-leaderless").await?;
    let complaints = browser.complaints().await?;
    ensure!(complaints.is_empty(), "{complaints:#?}");
    Ok(())
}
