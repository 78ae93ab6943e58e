//! The memory of both programs with real nodes, idle and busy, and the duration of a job.

use std::time::{Duration, Instant};

use prepull_e2e::prelude::*;
use prepull_e2e::usage::Usage;

use super::overhead::LAYERS;
use super::print_bar;

/// Measures the memory of both programs with real nodes, idle and busy, and the duration of a job.
pub(super) async fn measure() -> Result<()> {
    println!("\nThree real nodes, one job of four images");
    let registry = Registry::start().user("alice", &password("alice")).await?;
    let cluster = Cluster::own().await?;
    cluster.registry_secret("default", "alice", &[registry.login("alice")?]).await?;
    let names = ["edge-1", "edge-2", "edge-3"];
    cluster.edge_nodes(&names).await?;
    let cloud = Cloud::start(&cluster).await?;
    let mut nodes = Vec::new();
    for name in names {
        nodes.push(EdgeNode::start(&cluster, &cloud, name).await?);
    }
    for node in &nodes {
        node.is_connected().await?;
    }
    let idle = nodes.iter().map(|node| resident(node.agent()?.pid())).collect::<Result<Vec<_>>>()?;
    print_bar("agent, idle", largest(&idle), 12.0, " MiB");
    println!("  cloudcore, idle: {:.1} MiB", resident(cloud.process()?.pid())?);

    let images = (0..4)
        .map(|number| {
            registry
                .seed(&Image::of_layers(&format!("bench-{number}"), &LAYERS)?, &format!("job/image:{number}"))
        })
        .collect::<Result<Vec<_>>>()?;
    let begun = Instant::now();
    let job =
        cluster.job("bench").images(&images).on(names).secret("default/alice").concurrency(3).apply().await?;
    let done = job.completes();
    tokio::pin!(done);
    let mut busy = idle;
    let status = loop {
        tokio::select! {
            status = &mut done => break status?,
            () = tokio::time::sleep(Duration::from_millis(20)) => {
                for node in &nodes {
                    busy.push(resident(node.agent()?.pid())?);
                }
            }
        }
    };
    ensure!(status.summary.successful == 3, "{:?}", status.summary);
    print_bar("agent, pulling", largest(&busy), 20.0, " MiB");
    println!("  cloudcore, after the job: {:.1} MiB", resident(cloud.process()?.pid())?);
    println!(
        "  from kubectl apply to Completed: {:.2} s (3 nodes x 4 images x 48 MiB, one machine)",
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Resident memory of a process in MiB.
fn resident(pid: u32) -> Result<f64> {
    // Far below the integers that a float represents exactly.
    #[allow(clippy::cast_precision_loss)]
    let bytes = Usage::of_process(pid)?.rss as f64;
    Ok(bytes / 1024.0 / 1024.0)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}
