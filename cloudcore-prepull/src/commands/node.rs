//! The commands `cloudcore-prepull node list`, `revoke` and `allow`.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::SystemTime;

use anyhow::{Context, bail, ensure};
use clap::Subcommand;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::ListParams;
use prepull_api::task::NodeName;

use crate::edges::roster::{Change, NodeRecord, Records};
use prepull_program::table::align;

/// The commands about nodes and their keys.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// List the nodes whose edges have joined, with the end of their certificates, their keys and revocations.
    ///
    /// CERTIFICATE UNTIL is the end of the newest certificate. KEY is the start of the SHA-256 of the key in use, CA that of
    /// the CA that has signed its certificate, as `ca show` shows it, and SUBJECT says whether the certificate has the
    /// subject of release 0.1 (old) or that of newer ones (own).
    /// An edge that joined before its cloudcore-prepull kept this record is in it from its next connection on.
    #[command(after_help = "Example:\n  cloudcore-prepull node list")]
    List,
    /// Keep a node out: end its session within seconds, and refuse every certificate that it has, for ever.
    ///
    /// The same machine, or a new one in its place, is let in again by a join with a token that is made afterwards
    /// (`token create --node NAME`). The certificates of before stay refused.
    #[command(after_help = "Examples:\n  cloudcore-prepull node revoke edge-1\n  \
                            cloudcore-prepull node revoke edge-1 && cloudcore-prepull token create --node edge-1   # a new machine")]
    Revoke {
        /// The name of the Node.
        #[arg(value_name = "NAME", value_parser = parse_node)]
        node: NodeName,
        /// Revoke a node even if it is in no record and the cluster has no Node of this name: one that has not connected
        /// since the record is kept.
        #[arg(long)]
        unknown: bool,
    },
    /// Take a revocation back, after a false alarm: every certificate that has not expired is good again.
    ///
    /// It is refused after the node has joined again: then the revocation keeps out nothing but the keys of before.
    #[command(after_help = "Example:\n  cloudcore-prepull node allow edge-1")]
    Allow {
        /// The name of the Node.
        #[arg(value_name = "NAME", value_parser = parse_node)]
        node: NodeName,
        /// Also after the node has joined again: its keys of before are let in again, too.
        #[arg(long)]
        old_keys: bool,
    },
}

pub(super) fn parse_node(text: &str) -> Result<NodeName, String> {
    let node = Some(NodeName::from(text)).filter(NodeName::is_valid);
    node.ok_or_else(|| "lower-case letters, digits, '-' and '.', as in `kubectl get nodes`".to_owned())
}

/// Runs the command in `namespace`, and writes its output to `out`.
pub(crate) async fn run(
    command: NodeCommand,
    client: kube::Client,
    namespace: &str,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let records = Records::in_cluster(client.clone(), namespace);
    match command {
        NodeCommand::List => {
            let listed =
                records.list().await.context("list the records of nodes, ConfigMaps prepull-nodes-*")?;
            write!(out, "{}", render_table(&listed))?;
        }
        NodeCommand::Revoke { node, unknown } => {
            ensure!(
                unknown || !records.get(&node).await?.is_empty() || exists(client, &node).await?,
                "no edge of the name {node} is in the record, and the cluster has no Node of this name: see \
                 `cloudcore-prepull node list`. With --unknown it is revoked all the same"
            );
            let at = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
            let (before, _) = records.change(&node, &Change::Revoke { at }).await?;
            match before.revoked {
                Some(old) if !old.rejoined => {
                    writeln!(out, "node {node} has been revoked before ({})", old.at)?;
                }
                _ => writeln!(
                    out,
                    "node {node} revoked: its session ends within seconds, and its certificates are refused"
                )?,
            }
        }
        NodeCommand::Allow { node, old_keys } => {
            let (before, _) = records.change(&node, &Change::Allow { old_keys }).await?;
            let Some(revoked) = before.revoked else { bail!("node {node} is not revoked") };
            let at = revoked.at;
            writeln!(out, "node {node} allowed: the revocation of {at} is taken back")?;
        }
    }
    Ok(())
}

async fn exists(client: kube::Client, node: &NodeName) -> anyhow::Result<bool> {
    let named = ListParams::default().fields(&format!("metadata.name={node}")).limit(1);
    let nodes = Api::<Node>::all(client).list_metadata(&named).await.context("look for the Node")?;
    Ok(!nodes.items.is_empty())
}

fn render_table(records: &BTreeMap<NodeName, NodeRecord>) -> String {
    let head = ["NODE", "CERTIFICATE UNTIL", "KEY", "CA", "SUBJECT", "REVOKED"];
    let mut rows = vec![head.map(str::to_owned)];
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    rows.extend(records.iter().map(|(node, record)| {
        let (until, NodeRecord { key, revoked, .. }) = (record.shown().certificate_until, record);
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
    align(&rows, 2)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use prepull_api::enroll::SubjectForm;

    use super::*;
    use crate::edges::pki::KeyHash;
    use crate::edges::roster::HeldKey;

    #[test]
    fn the_table_shows_certificate_key_and_revocation_of_each_node() {
        let end = |days: u64| UNIX_EPOCH + Duration::from_secs(1_800_000_000 + days * 86_400);
        let certified = |byte, days, form| {
            HeldKey::new(KeyHash::new([byte; 32]), end(days)).certified(Some([byte; 32].into()), form)
        };
        let held = |byte, days| certified(byte, days, SubjectForm::Own);
        let at = "2026-11-22T04:00:00.000001Z".to_owned();
        let revoked = |key, rejoined| NodeRecord {
            key,
            next: None,
            revoked: Some(crate::edges::roster::Revocation { at: at.clone(), rejoined }),
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
