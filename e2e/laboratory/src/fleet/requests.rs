//! Writes to the API server, by its own metrics.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use kube::Client;

/// Verbs of `apiserver_request_total` that change something.
const WRITES: [&str; 6] = ["POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"];
/// Resources that cloudcore writes for a job. All others are counted together.
const NAMED: [&str; 7] = [
    "imageprepulljobs",
    "imageprepullreports",
    "imagepulljobs",
    "imagelistpulljobs",
    "nodeimages",
    "leases",
    "events",
];

/// Writes so far, by `resource[/subresource] VERB`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WriteCounts(BTreeMap<String, u64>);

impl WriteCounts {
    /// Reads the current counts.
    pub(super) async fn read_current(client: &Client) -> Result<Self> {
        let request = http::Request::get("/metrics").body(Vec::new())?;
        let text = client.request_text(request).await.context("cannot read the API server's /metrics")?;
        Ok(Self::parse(&text))
    }

    fn parse(metrics: &str) -> Self {
        let mut counts = BTreeMap::new();
        for line in metrics.lines() {
            let Some(rest) = line.strip_prefix("apiserver_request_total{") else { continue };
            let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
            let label = |name: &str| {
                let found = labels.split(',').find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""));
                found.map_or("", |value| value.trim_end_matches('"'))
            };
            let (resource, verb) = (label("resource"), label("verb"));
            if !WRITES.contains(&verb) {
                continue;
            }
            let key = match label("subresource") {
                _ if !NAMED.contains(&resource) => format!("others {verb}"),
                "" => format!("{resource} {verb}"),
                subresource => format!("{resource}/{subresource} {verb}"),
            };
            // Prometheus writes a float, such as 1e+06; the value is far below the limit of a u64.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let value = value.parse::<f64>().unwrap_or(0.0) as u64;
            *counts.entry(key).or_default() += value;
        }
        Self(counts)
    }

    /// The writes that were added since `before`.
    pub(super) fn added_since(&self, before: &Self) -> BTreeMap<String, u64> {
        let more = |(key, count): (&String, &u64)| {
            let more = count.saturating_sub(before.0.get(key).copied().unwrap_or(0));
            (more > 0).then(|| (key.clone(), more))
        };
        self.0.iter().filter_map(more).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_counted_by_resource_and_verb() {
        let line = |resource: &str, subresource: &str, verb: &str, code: u16, value: &str| {
            format!(
                "apiserver_request_total{{code=\"{code}\",group=\"g\",resource=\"{resource}\",subresource=\"{subresource}\",verb=\"{verb}\",version=\"v1\"}} {value}\n"
            )
        };
        let before = line("imageprepulljobs", "status", "PATCH", 200, "5");
        let after = [
            "# TYPE apiserver_request_total counter\n".to_owned(),
            line("imageprepulljobs", "status", "PATCH", 200, "7"),
            line("imageprepulljobs", "status", "PATCH", 409, "1"),
            line("imageprepulljobs", "", "POST", 201, "1"),
            line("nodes", "", "POST", 201, "1e+04"),
            line("nodes", "", "WATCH", 200, "9"),
        ];
        let more = WriteCounts::parse(&after.concat()).added_since(&WriteCounts::parse(&before));
        let expected =
            [("imageprepulljobs POST", 1), ("imageprepulljobs/status PATCH", 3), ("others POST", 10_000)];
        assert_eq!(more, expected.map(|(key, count)| (key.to_owned(), count)).into());
    }
}
