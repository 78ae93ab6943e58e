//! Nodes and their keys: list, revoke and allow.

use std::collections::BTreeMap;
use std::time::SystemTime;

use anyhow::{Context, bail, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::ListParams;
use prepull_api::task::NodeName;
use prepull_program::table::align_columns;

use crate::records::Records;
use crate::records::record::{NodeRecord, RecordChange};

/// The installation that a command is about.
#[derive(Clone)]
pub struct Installation {
    /// The cluster, with the rights of the command's user.
    pub client: kube::Client,
    /// The namespace of cloudcore-prepull.
    pub namespace: String,
    /// The prefix of the token commands, for messages.
    pub tokens: &'static str,
    /// The command that lists nodes, for messages.
    pub nodes: &'static str,
}

/// The arguments of `revoke`.
#[derive(Debug, Args)]
pub struct RevokeNodeArgs {
    /// The name of the Node.
    #[arg(value_name = "NAME", value_parser = parse_node)]
    pub node: NodeName,
    /// Revoke a node even if it is in no record and the cluster has no Node of this name: one that has not connected
    /// since the record is kept.
    #[arg(long)]
    pub unknown: bool,
}

/// The arguments of `allow`.
#[derive(Debug, Args)]
pub struct AllowNodeArgs {
    /// The name of the Node.
    #[arg(value_name = "NAME", value_parser = parse_node)]
    pub node: NodeName,
    /// Also after the node has joined again: its keys of before are let in again, too.
    #[arg(long)]
    pub old_keys: bool,
}

pub(super) fn parse_node(text: &str) -> Result<NodeName, String> {
    let node = Some(NodeName::from(text)).filter(NodeName::is_valid);
    node.ok_or_else(|| "lower-case letters, digits, '-' and '.', as in `kubectl get nodes`".to_owned())
}

/// The records of all nodes, as a table.
pub async fn list(at: &Installation) -> anyhow::Result<String> {
    let listed = records(at).list().await.context("list the records of nodes, ConfigMaps prepull-nodes-*")?;
    Ok(render_table(&listed))
}

/// Revokes a node. Returns a sentence that says so.
pub async fn revoke(args: RevokeNodeArgs, at: &Installation) -> anyhow::Result<String> {
    let (RevokeNodeArgs { node, unknown }, records) = (args, records(at));
    ensure!(
        unknown || !records.get(&node).await?.is_empty() || node_exists(at.client.clone(), &node).await?,
        "no edge of the name {node} is in the record, and the cluster has no Node of this name: see \
         `{}`. With --unknown it is revoked anyway",
        at.nodes
    );
    let now = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
    let (before, _) = records.change(&node, &RecordChange::Revoke { at: now }).await?;
    Ok(match before.revoked {
        Some(old) if !old.rejoined => format!("node {node} has been revoked before ({})", old.at),
        _ => {
            format!("node {node} revoked: its session ends within seconds, and its certificates are refused")
        }
    })
}

/// Takes a revocation back. Returns a sentence that says so.
pub async fn allow(args: AllowNodeArgs, at: &Installation) -> anyhow::Result<String> {
    let AllowNodeArgs { node, old_keys } = args;
    let (before, _) = records(at).change(&node, &RecordChange::Allow { old_keys }).await?;
    let Some(revoked) = before.revoked else { bail!("node {node} is not revoked") };
    Ok(format!("node {node} allowed: the revocation of {} is taken back", revoked.at))
}

fn records(at: &Installation) -> Records {
    Records::in_cluster(at.client.clone(), &at.namespace)
}

pub(super) async fn node_exists(client: kube::Client, node: &NodeName) -> anyhow::Result<bool> {
    let named = ListParams::default().fields(&format!("metadata.name={node}")).limit(1);
    let nodes = Api::<Node>::all(client).list_metadata(&named).await.context("look for the Node")?;
    Ok(!nodes.items.is_empty())
}

fn render_table(records: &BTreeMap<NodeName, NodeRecord>) -> String {
    let head = ["NODE", "CERTIFICATE UNTIL", "KEY", "CA", "SUBJECT", "REVOKED"];
    let mut rows = vec![head.map(str::to_owned)];
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    rows.extend(records.iter().map(|(node, record)| {
        let (until, NodeRecord { key, revoked, .. }) = (record.for_display().certificate_until, record);
        [
            node.to_string(),
            known(until.map(|end| humantime::format_rfc3339_seconds(end).to_string())),
            known(key.map(|held| held.sha256.to_string())),
            known(key.and_then(|held| held.ca).map(|ca| ca.to_string())),
            known(key.map(|held| if held.old_subject { "old" } else { "own" }.to_owned())),
            match revoked {
                None => "-".to_owned(),
                Some(revoked) if revoked.rejoined => format!("{}, joined again", revoked.at),
                Some(revoked) => revoked.at.clone(),
            },
        ]
    }));
    align_columns(&rows, 2)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use prepull_api::enroll::SubjectForm;

    use super::*;
    use crate::KeyHash;
    use crate::records::record::{HeldKey, Revocation};

    #[test]
    fn the_table_shows_each_nodes_admission() {
        let end = |days: u64| UNIX_EPOCH + Duration::from_secs(1_800_000_000 + days * 86_400);
        let certified = |byte, days, form| {
            HeldKey::new(KeyHash::new([byte; 32]), end(days)).with_certificate(Some([byte; 32].into()), form)
        };
        let held = |byte, days| certified(byte, days, SubjectForm::Own);
        let at = "2026-11-22T04:00:00.000001Z".to_owned();
        let revoked = |key, rejoined| NodeRecord {
            key,
            next: None,
            revoked: Some(Revocation { at: at.clone(), rejoined }),
        };
        let records = [
            ("edge-1", NodeRecord { key: Some(held(0xab, 0)), next: Some(held(2, 1)), revoked: None }),
            ("edge-10", revoked(Some(held(0xcd, 0)), true)),
            ("edge-2", revoked(None, false)),
            (
                "edge-3",
                NodeRecord { key: Some(certified(0x12, 0, SubjectForm::Kubelet)), next: None, revoked: None },
            ),
        ];
        let records = records.into_iter().map(|(node, record)| (node.into(), record)).collect();
        let expected = "\
NODE     CERTIFICATE UNTIL     KEY               CA                SUBJECT  REVOKED
edge-1   2027-01-16T08:00:00Z  abababababababab  abababababababab  own      -
edge-10  2027-01-15T08:00:00Z  cdcdcdcdcdcdcdcd  cdcdcdcdcdcdcdcd  own      2026-11-22T04:00:00.000001Z, joined again
edge-2   -                     -                 -                 -        2026-11-22T04:00:00.000001Z
edge-3   2027-01-15T08:00:00Z  1212121212121212  1212121212121212  old      -
";
        assert_eq!(render_table(&records), expected);
    }
}
