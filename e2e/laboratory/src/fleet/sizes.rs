//! Sizes of a job and its reports in the API server.

use anyhow::{Context, Result};
use kube::Client;
use prepull_api::crd::GROUP;
use serde_json::Value;

use super::figures::Reports;

/// Reads the size of a job as the API server sends it.
pub(super) async fn job(client: &Client, name: &str) -> Result<u64> {
    let text = get(client, &format!("/apis/{GROUP}/v1alpha2/imageprepulljobs/{name}")).await?;
    Ok(text.len() as u64)
}

/// Reads number and sizes of the reports of a job.
pub(super) async fn reports(client: &Client, uid: &str) -> Result<Reports> {
    let text = get(client, &format!("/apis/{GROUP}/v1alpha2/imageprepullreports")).await?;
    let list: Value = serde_json::from_str(&text).context("the list of reports is not JSON")?;
    let mut reports = Reports::default();
    for report in list["items"].as_array().into_iter().flatten() {
        let owners = report["metadata"]["ownerReferences"].as_array();
        if !owners.into_iter().flatten().any(|owner| owner["uid"] == uid) {
            continue;
        }
        let bytes = report.to_string().len() as u64;
        reports.count += 1;
        reports.sum += bytes;
        reports.largest = reports.largest.max(bytes);
    }
    Ok(reports)
}

async fn get(client: &Client, path: &str) -> Result<String> {
    let request = http::Request::get(path).body(Vec::new())?;
    client.request_text(request).await.with_context(|| format!("GET {path}"))
}
