//! `kubectl prepull verify`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use futures::TryStreamExt;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::{NodePhase, NodeStatus, RecheckStatus, Tristate};
use serde::Serialize;
use serde_json::json;

use super::cancel;
use crate::amounts::format_duration;
use crate::cluster::Cluster;
use crate::name::OwnJob;
use crate::screen::{Screen, sanitize_line};
use crate::session::{CommandOutcome, Session};
use crate::table::with_text;
use crate::{jobs, problem};

/// The wait after a read that failed.
const RETRY: Duration = Duration::from_secs(5);
/// How often the job is asked for: a re-check of few nodes takes about a second.
const POLL: Duration = Duration::from_millis(500);
/// How long cloudcore-prepull may take to begin, also right after a change of leaders.
const BEGIN: Duration = Duration::from_secs(60);

/// The arguments of `verify`.
#[derive(Debug, Args)]
#[command(after_help = "\
Asks the nodes that succeeded whether their images are still there, with the digest that was pulled; nothing is downloaded.
For a job with spec.verify, the table of keys shows by which key each image was signed when it was pulled, as the SHA-256 of
the public key in DER: openssl pkey -pubin -in cosign.pub -outform DER | sha256sum. It is - where the image was there
already, and from an older edgecore-prepull.

A node that lacks one becomes a Failure with the code Removed, and `retry` brings back what is missing. A re-check takes two
minutes at most: a node that has not answered by then keeps its result, and is counted as not checked. -o name prints the
nodes that lack an image.

Examples:
  kubectl prepull verify spring-release
  kubectl prepull verify spring-release && kubectl apply -f app.yaml
  kubectl prepull verify spring-release -o json | jq .missing

Exit status: 0 if every node that succeeded still has its images, 1 if one is missing, 3 if a node was not checked, or after
--timeout.")]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    own: OwnJob,
    /// Wait for the answers for at most this time.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "3m")]
    timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct RecheckResult {
    job: String,
    /// How many nodes still have every image.
    present: u32,
    missing: u32,
    not_checked: u32,
    /// Those of both kinds.
    nodes: Vec<FoundNode>,
    /// Only for a job with `spec.verify`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    keys: Vec<FoundKey>,
}

/// The nodes that have an image by the same key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct FoundKey {
    image: String,
    /// Fingerprint of the key. None if the node has not verified a signature.
    signed_by: Option<String>,
    nodes: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct FoundNode {
    node: String,
    is_missing: bool,
    reason: String,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &VerifyArgs,
) -> anyhow::Result<CommandOutcome> {
    let job = jobs::get(cluster, &args.own.job).await?;
    let number = next_number(&job)?;
    jobs::patch(cluster, &args.own.job, &json!({"spec": {"recheck": number}})).await?;
    let Some(job) = wait_for_recheck(cluster, &args.own.job, number, args.timeout).await? else {
        let limit = format_duration(args.timeout.as_secs());
        let goes_on = "the re-check goes on, and `kubectl prepull status` shows how it ends";
        problem::print_note(&format!(
            "after {limit} not every node of job {} has answered: {goes_on}",
            args.own.job
        ));
        return Ok(CommandOutcome::TimedOut);
    };
    let found = read_result(cluster, &job).await?;
    let missing = found.nodes.iter().filter(|node| node.is_missing);
    let names = missing.map(|node| format!("node/{}", node.node));
    // What reads the exit status may be another than what reads the text: `verify … | head && …`.
    problem::unless_unread(session.print(&found, names, |_| render(&found, session.screen)))?;
    Ok(outcome(&found))
}

/// A gate stays closed until every node that succeeded was checked.
fn outcome(found: &RecheckResult) -> CommandOutcome {
    match (found.missing, found.not_checked) {
        (0, 0) => CommandOutcome::Done,
        (0, _) => CommandOutcome::TimedOut,
        _ => CommandOutcome::Failed,
    }
}

fn next_number(job: &ImagePrePullJob) -> anyhow::Result<i64> {
    let name = job.name_any();
    if !jobs::is_over(job) {
        bail!(
            "job {name} has not ended: verify is for jobs that have. `kubectl prepull status {name} --watch` follows it"
        );
    }
    cancel::refuse_cancelled(job, "its nodes aren't asked any more")?;
    let status = job.status.as_ref();
    if status.is_none_or(|status| status.summary.successful == 0) {
        bail!("no node of job {name} has succeeded: there is nothing to look for");
    }
    Ok(job.spec.recheck.max(rounds(job)) + 1)
}

fn recheck(job: &ImagePrePullJob) -> Option<&RecheckStatus> {
    job.status.as_ref()?.recheck.as_ref()
}

fn rounds(job: &ImagePrePullJob) -> i64 {
    recheck(job).map_or(0, |recheck| recheck.rounds.into())
}

/// The job once this re-check has ended; none if that takes too long.
async fn wait_for_recheck(
    cluster: &Cluster,
    name: &str,
    number: i64,
    limit: Duration,
) -> anyhow::Result<Option<ImagePrePullJob>> {
    let begun = Instant::now();
    loop {
        let job = match jobs::get(cluster, name).await {
            // The re-check goes on meanwhile. A refusal too, since the job was read before: see [`problem::is_lasting`].
            Err(error) if !error.is::<jobs::NoSuchJob>() && begun.elapsed() < limit => {
                problem::print_note(&format!("trying again: {}", problem::error_text(&error)));
                tokio::time::sleep(RETRY).await;
                continue;
            }
            job => job?,
        };
        let has_begun = rounds(&job) >= number;
        if job.spec.recheck < number {
            bail!(
                "the cluster does not know spec.recheck, or job {name} was changed by another person: apply the definitions of \
                 this version, manifests/crds"
            );
        }
        if has_begun && recheck(&job).is_some_and(|recheck| recheck.completion_time.is_some()) {
            return Ok(Some(job));
        }
        if !has_begun && jobs::is_over(&job) {
            bail!(
                "nothing was begun: none of the nodes that succeeded is in the cluster any more, the spec of job {name} was \
                 edited in a way that it cannot follow, or cloudcore-prepull is of an older version"
            );
        }
        if !has_begun && begun.elapsed() >= BEGIN {
            bail!("cloudcore-prepull has not begun within {} s: kubectl prepull check", BEGIN.as_secs());
        }
        if begun.elapsed() >= limit {
            return Ok(None);
        }
        tokio::time::sleep(POLL).await;
    }
}

async fn read_result(cluster: &Cluster, job: &ImagePrePullJob) -> anyhow::Result<RecheckResult> {
    let (mut nodes, mut keys) = (Vec::new(), KeyCounts::new());
    let mut pages = std::pin::pin!(jobs::reports(cluster, job));
    while let Some(page) = pages.try_next().await? {
        let records = || page.iter().flat_map(|report| &report.body.node_status);
        nodes.extend(records().filter_map(found_node));
        if job.spec.verify.is_some() {
            records().for_each(|record| count_keys(&mut keys, record));
        }
    }
    let keys =
        keys.into_iter().map(|((image, signed_by), nodes)| FoundKey { image, signed_by, nodes }).collect();
    let RecheckStatus { present, missing, not_checked, .. } = recheck(job).cloned().unwrap_or_default();
    Ok(RecheckResult { job: job.name_any(), present, missing, not_checked, nodes, keys })
}

/// How many nodes have each image by each key.
type KeyCounts = BTreeMap<(String, Option<String>), u32>;

fn count_keys(keys: &mut KeyCounts, record: &NodeStatus) {
    for image in record.image_status.iter().filter(|image| image.status == Tristate::True) {
        let signed_by = image.facts.signed_by.as_deref().map(sanitize_line);
        *keys.entry((image.image.clone(), signed_by)).or_default() += 1;
    }
}

fn found_node(record: &NodeStatus) -> Option<FoundNode> {
    let recheck = record.recheck.as_ref()?;
    let (is_missing, reason) = match record.phase {
        NodePhase::Failure => (true, &record.reason),
        _ if !recheck.not_checked_reason.is_empty() => (false, &recheck.not_checked_reason),
        _ => return None,
    };
    Some(FoundNode { node: record.node_name.clone(), is_missing, reason: sanitize_line(reason) })
}

fn render(found: &RecheckResult, screen: Screen) -> String {
    let RecheckResult { job, present, missing, not_checked, nodes, keys } = found;
    let all = present + missing + not_checked;
    let mut text = format!("job {job}: {present} of {all} nodes still have every image");
    if *missing > 0 {
        text = format!("{text}, missing on {missing}");
    }
    if *not_checked > 0 {
        text = format!("{text}, {not_checked} not checked");
    }
    text.push('\n');
    if !nodes.is_empty() {
        let mut rows = vec![["NODE", "FOUND", "REASON"].map(str::to_owned).to_vec()];
        rows.extend(nodes.iter().map(|node| {
            let state = if node.is_missing { "missing" } else { "not checked" };
            vec![node.node.clone(), state.to_owned(), node.reason.clone()]
        }));
        text = format!("{text}{}", with_text(&rows, screen.width));
    }
    if !keys.is_empty() {
        let mut rows = vec![["SIGNED BY", "NODES", "IMAGE"].map(str::to_owned).to_vec()];
        rows.extend(keys.iter().map(|FoundKey { image, signed_by, nodes }| {
            let signed_by = signed_by.clone().unwrap_or_else(|| "-".to_owned());
            vec![signed_by, nodes.to_string(), image.clone()]
        }));
        text = format!("{text}{}", with_text(&rows, screen.width));
    }
    if *missing > 0 {
        text = format!("{text}kubectl prepull retry {job} brings back what is missing\n");
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use prepull_api::crd::status::{JobImageStatus, NodeRecheck, Summary};
    use prepull_api::task::ImageFacts;
    use serde_json::Value;

    use super::*;

    fn job(status: &Value) -> ImagePrePullJob {
        serde_json::from_value(json!({
            "metadata": {"name": "web", "generation": 1}, "spec": {"recheck": 2}, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn each_recheck_has_its_own_number() {
        let over = |rounds: u32, successful: u32| {
            let summary = Summary { successful, ..Summary::default() };
            job(
                &json!({"phase": "Completed", "observedGeneration": 1, "summary": summary, "recheck": {"rounds": rounds}}),
            )
        };
        assert_eq!(next_number(&over(2, 1)).unwrap(), 3);
        // What was left over at the end of the job starts nothing, and what was lowered counts.
        assert_eq!([0, 5].map(|rounds| next_number(&over(rounds, 1)).unwrap()), [3, 6]);
        assert!(
            next_number(&over(0, 0)).unwrap_err().to_string().contains("no node of job web has succeeded")
        );
        let running = job(&json!({"phase": "InProgress", "observedGeneration": 1}));
        assert!(next_number(&running).unwrap_err().to_string().contains("has not ended"));
    }

    #[test]
    fn distinguishes_missing_images_from_unchecked_ones() {
        let record = |node: &str, phase, not_checked: &str| NodeStatus {
            node_name: node.to_owned(),
            phase,
            reason: if phase == NodePhase::Failure { "removed: app:1".to_owned() } else { String::new() },
            recheck: Some(NodeRecheck {
                not_checked_reason: not_checked.to_owned(),
                ..NodeRecheck::default()
            }),
            ..NodeStatus::default()
        };
        let mut never = record("n3", NodePhase::Failure, "");
        never.recheck = None;
        let records = [
            record("n0", NodePhase::Successful, ""),
            record("n1", NodePhase::Failure, ""),
            record("n2", NodePhase::Successful, "offline"),
            never,
        ];
        let nodes = records.iter().filter_map(found_node).collect();
        let found = RecheckResult {
            job: "web".to_owned(),
            present: 1,
            missing: 1,
            not_checked: 1,
            nodes,
            keys: Vec::new(),
        };
        assert_eq!(outcome(&found), CommandOutcome::Failed);
        let waits = RecheckResult { missing: 0, ..found.clone() };
        assert_eq!(outcome(&waits), CommandOutcome::TimedOut);
        assert_eq!(outcome(&RecheckResult { not_checked: 0, ..waits }), CommandOutcome::Done);
        let text = render(&found, Screen::plain(80));
        let expected = "\
job web: 1 of 3 nodes still have every image, missing on 1, 1 not checked
NODE   FOUND         REASON
n1     missing       removed: app:1
n2     not checked   offline
kubectl prepull retry web brings back what is missing
";
        assert_eq!(text, expected);
    }

    #[test]
    fn shows_the_key_of_each_signature() {
        let image = |key: Option<&str>, status| JobImageStatus {
            image: "app:1".to_owned(),
            status,
            facts: ImageFacts { signed_by: key.map(str::to_owned), ..ImageFacts::default() },
            ..JobImageStatus::default()
        };
        let (old, new) = (Some("sha256:0123456789ab"), Some("sha256:ba9876543210"));
        let mut keys = KeyCounts::new();
        for (key, status) in [
            (old, Tristate::True),
            (new, Tristate::True),
            (new, Tristate::True),
            (None, Tristate::True),
            (old, Tristate::False),
        ] {
            let image_status = vec![image(key, status)];
            count_keys(&mut keys, &NodeStatus { image_status, ..NodeStatus::default() });
        }
        let keys = keys
            .into_iter()
            .map(|((image, signed_by), nodes)| FoundKey { image, signed_by, nodes })
            .collect();
        let found = RecheckResult {
            job: "web".to_owned(),
            present: 4,
            missing: 0,
            not_checked: 0,
            nodes: Vec::new(),
            keys,
        };
        let expected = "\
job web: 4 of 4 nodes still have every image
SIGNED BY             NODES   IMAGE
-                     1       app:1
sha256:0123456789ab   1       app:1
sha256:ba9876543210   2       app:1
";
        assert_eq!(render(&found, Screen::plain(80)), expected);
    }
}
