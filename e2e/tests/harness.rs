//! What the harness itself promises, on real parts.
#![allow(clippy::unwrap_used)]

use anyhow::Result;
use prepull_e2e::cluster::Cluster;

#[tokio::test]
async fn a_cluster_starts() -> Result<()> {
    let t = std::time::Instant::now();
    let cluster = Cluster::start_empty().await?;
    eprintln!("ready after {:?}", t.elapsed());
    cluster.edge_nodes(&["edge-1"]).await?;
    eprintln!("{}", cluster.kubectl(&["get", "nodes", "-o", "wide"]).await?);
    cluster.stop_api()?;
    let t = std::time::Instant::now();
    cluster.start_api().await?;
    eprintln!("ready after {:?}", t.elapsed());
    eprintln!("{}", cluster.kubectl(&["get", "nodes", "-o", "wide"]).await?);
    Ok(())
}
