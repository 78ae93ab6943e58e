//! Nodes and people that reach the rest of the world through an HTTP proxy alone, Debian's tinyproxy.

use std::net::SocketAddr;
use std::path::PathBuf;

use prepull_e2e::prelude::*;
use serde_json::Value;

/// A store with a proxy that asks for a password, and a box that reaches no other machine.
struct Store {
    lan: Lan,
    proxy: HttpProxy,
    fenced: Outlet,
}

impl Store {
    async fn open() -> Result<Self> {
        let lan = Lan::new(Uplink::with_rate(200_000_000)).await?;
        let (proxy, fenced) = (HttpProxy::start(&lan).await?, lan.add_outlet().await?);
        fenced.fence().await?;
        Ok(Self { lan, proxy, fenced })
    }
}

#[tokio::test]
async fn a_fenced_box_joins_pulls_and_reports_through_a_proxy() -> Result<()> {
    let mut store = Store::open().await?;
    let registry = Registry::start().with_host("registry.example").user("alice", &password("alice"));
    let (cluster, registry) = tokio::try_join!(Cluster::start(), registry.into_future())?;
    let cloud = Cloud::start(&cluster).arg("--advertise").arg(&Lan::outside().to_string()).await?;
    let (tunnel, enroll) =
        (store.lan.open_door(cloud.tunnel_addr())?, store.lan.open_door(cloud.enroll_addr())?);
    let upstream = store.lan.open_door(registry.addr())?;
    registry.route_to(upstream)?;
    ensure!(store.fenced.try_connect(tunnel).is_err(), "the box reaches the cloud without a proxy");
    cluster.node("edge-1").edge().ready().create().await?;
    let start = |proxy: &str| {
        let start =
            EdgeNode::start(&cluster, &cloud, "edge-1").in_box(&store.fenced, tunnel).enrolls_at(enroll);
        start.environment("HTTPS_PROXY", proxy).environment("HTTP_PROXY", proxy).args(&["--fetch", "agent"])
    };

    // A wrong password: the error names the proxy and the remedy, and no password.
    let wrong = password("wrong");
    let error = match start(&store.proxy.url_of(&wrong)).await {
        Ok(_) => bail!("it joins with a wrong password"),
        Err(error) => format!("{error:#}"),
    };
    for word in [&*store.proxy.shown(), "set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"] {
        ensure!(error.contains(word), "{word:?} is not in {error}");
    }
    ensure!(!error.contains(&wrong), "the password is in {error}");

    let mut edge = start(&store.proxy.url()).await?;
    edge.is_connected().await?;
    store.proxy.has_connected(enroll)?;
    store.proxy.has_connected(tunnel)?;
    let image = registry.seed(&Image::small("proxied")?, "team/app:v1")?;
    cluster.registry_secret("default", "alice", &[registry.login("alice")?]).await?;
    cluster.job("proxied").on(["edge-1"]).images([&image]).secret("default/alice").completes().await?;
    ensure!(edge.has_image(&image).await?, "the image is not there");
    let through = format!("{tunnel} through {}", store.proxy.shown());
    let (_, said) = edge.status().await?;
    ensure!(said.contains(&through), "{through:?} is not in {said}");

    // The connection breaks: the way that worked is tried first, before a direct one takes its deadline.
    // The box stands still until the proxy listens again: otherwise it may find it gone, and try the direct way.
    edge.stop_agent()?;
    store.proxy.restart().await?;
    edge.cont_agent()?;
    eventually("the box notices", SOON, async || {
        ensure!(edge.agent_log().contains("disconnected from the cloud"), "it's still connected");
        Ok(())
    })
    .await?;
    edge.is_connected().await?;
    ensure!(!edge.agent_log().contains(&format!("next=\"{tunnel}\"")), "the direct way was tried first");
    edge.restart_agent()?;
    edge.is_connected().await
}

#[tokio::test]
async fn people_reach_the_api_server_through_a_proxy() -> Result<()> {
    let (store, cluster) = (Store::open().await?, Cluster::start().await?);
    let api = store.lan.open_door(api_server(&cluster)?)?;
    let kubeconfig = moved(&cluster, api, None)?;
    let person = |environment: &[(&str, &str)]| Person::new(&kubeconfig).at_box(&store.fenced, environment);
    let (url, place) = (store.proxy.url(), store.proxy.shown());
    cluster.job("seen").on(["nowhere"]).images(["registry.example/a:v1"]).apply().await?;

    person(&[]).runs("list --request-timeout 1s").await?.is(1, &["--request-timeout"])?;
    person(&[("HTTPS_PROXY", &url)]).runs("list").await?.is(0, &["seen"])?;
    store.proxy.has_connected(api)?;
    person(&[("https_proxy", &url), ("no_proxy", "10.77.0.0/16")]).runs("list").await?.is(0, &["seen"])?;
    // The API server is an exception: its address counts, and not the proxy's.
    let excepted = [("HTTPS_PROXY", &*url), ("NO_PROXY", "10.76.0.0/16")];
    person(&excepted).runs("list --request-timeout 1s").await?.is(1, &["--request-timeout"])?;
    let wrong = store.proxy.url_of("wrong");
    let said = person(&[("HTTPS_PROXY", &wrong)]).runs("list").await?;
    said.is(1, &["the proxy on the way to the API server", "USER:PASSWORD"])?;
    let unknown = place.replace("http:", "ftp:");
    person(&[("HTTPS_PROXY", &unknown)]).runs("list").await?.is(1, &["a proxy is http://"])?;

    // The kubeconfig has one of its own, which is the stronger.
    let kubeconfig = moved(&cluster, api, Some(&url))?;
    let person = Person::new(&kubeconfig).at_box(&store.fenced, &[("HTTPS_PROXY", "http://10.77.0.99:1")]);
    person.runs("list").await?.is(0, &["seen"])?;
    Ok(())
}

/// A kubeconfig with another address of the API server.
fn moved(cluster: &Cluster, api: SocketAddr, proxy: Option<&str>) -> Result<PathBuf> {
    let mut config: Value = serde_saphyr::from_str(&std::fs::read_to_string(cluster.kubeconfig())?)?;
    let entry = &mut config["clusters"][0]["cluster"];
    entry["server"] = format!("https://{api}").into();
    entry["tls-server-name"] = "127.0.0.1".into();
    if let Some(proxy) = proxy {
        entry["proxy-url"] = proxy.into();
    }
    let file = cluster.place().new_dir("kubeconfig")?.join("moved");
    std::fs::write(&file, config.to_string())?;
    Ok(file)
}

/// Address of the API server.
fn api_server(cluster: &Cluster) -> Result<SocketAddr> {
    let config: Value = serde_saphyr::from_str(&std::fs::read_to_string(cluster.kubeconfig())?)?;
    let server = config["clusters"][0]["cluster"]["server"].as_str().context("no server")?;
    Ok(server.trim_start_matches("https://").trim_end_matches('/').parse()?)
}
