//! Makes a job and follows it, as `run`, `from`, `remove` and `upgrade` do.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::JobPhase;
use prepull_api::selector::Selector;
use prepull_api::task::NodeName;
use prepull_api::task::PullPolicy;
use prepull_engine::prepull::validate::validate;
use serde_json::{Map, Value};

use crate::amounts::{format_count, format_duration};
use crate::cluster::Cluster;
use crate::job_fields::is_setting;
use crate::order::JobOrder;
use crate::output::print_changed;
use crate::problem::{MissingRight, WrongUsage, print_note};
use crate::progress::follow::{follow_job, note_that_it_goes_on, or_interrupted};
use crate::session::{CommandOutcome, Session};
use crate::{jobs, problem};

/// The flags of whether to make a job and to follow it.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Print the job and make nothing. It is checked as cloudcore-prepull checks it.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Follow the job for at most this time; 0 does not follow it [default: until it is over].
    #[arg(
        long, value_name = "TIME", value_parser = parse_wait, num_args = 0..=1, require_equals = true,
        default_missing_value = "forever", default_value = "forever", hide_default_value = true
    )]
    pub(crate) wait: Wait,
}

/// How long a job is kept after its end without --ttl: long enough for a post-mortem, and jobs don't pile up.
const TTL_SECONDS: i64 = 7 * 24 * 3600;

/// Nodes of one page: the metadata of each has a few KiB.
const NODES_OF_A_PAGE: u32 = 500;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    For(Duration),
    Forever,
}

fn parse_wait(text: &str) -> Result<Wait, String> {
    match text {
        "0" => Ok(Wait::No),
        "forever" => Ok(Wait::Forever),
        _ => match humantime::parse_duration(text) {
            Ok(Duration::ZERO) => Ok(Wait::No),
            Ok(time) => Ok(Wait::For(time)),
            Err(error) => Err(format!("{error}; such as 30m, or 0")),
        },
    }
}

/// Fails for a job that the API server or cloudcore-prepull would refuse.
pub(crate) fn check_job(job: &ImagePrePullJob) -> Result<(), WrongUsage> {
    let name = job.name_any();
    // Nodes and jobs have the same rule for their names.
    if !NodeName::from(name.as_str()).is_valid() {
        return Err(WrongUsage(format!(
            "--name {name}: lower-case letters, digits, '-' and '.', with a letter or a digit at both ends"
        )));
    }
    validate(job).map(drop).map_err(|refusal| WrongUsage(refusal.to_string()))
}

/// What a job is that was just made.
fn describe_created(job: &ImagePrePullJob) -> String {
    let template = &job.spec.image_pre_pull_template;
    let nodes = match template.node_names.len() as u64 {
        0 => "the nodes of its selector".to_owned(),
        nodes => format_count(nodes, "node"),
    };
    let at_once = format_count(u64::try_from(template.concurrency).unwrap_or(0), "node");
    let ttl = u64::try_from(job.spec.ttl_seconds_after_finished.unwrap_or(0)).unwrap_or(0);
    format!("created, for {nodes}, {at_once} at a time; deleted {} after its end", format_duration(ttl))
}

fn is_taken(error: &anyhow::Error) -> bool {
    problem::server_answer(error).is_some_and(|answer| answer.code == 409 && answer.reason == "AlreadyExists")
}

/// An annotation with the digest of the order of a job, by which the same command knows it after `set` has changed it
/// (docs/decisions/0046-names-of-jobs.md).
const ORDER: &str = "prepull.kubeedge.io/order";

/// What the job is that is there, if it does what this one asks for, and fails otherwise. A pipeline that runs twice follows the one
/// job, with the settings that it has by then.
fn check_same_job(there: &ImagePrePullJob, wanted: &ImagePrePullJob) -> anyhow::Result<String> {
    let name = there.name_any();
    let [before, after] = [there, wanted].map(|job| {
        let mut spec = job.spec.clone();
        // What is done to a job later.
        (spec.suspend, spec.pause, spec.retry, spec.recheck) = (false, false, 0, 0);
        serde_json::to_value(spec).unwrap_or_default()
    });
    let mut fields = Vec::new();
    collect_differences(&before, &after, "spec", &mut fields);
    let how = ways_out(&name);
    if there.spec.cancel {
        bail!("there is a job {name} already, and it was cancelled: {how}");
    }
    if fields.is_empty() {
        return Ok("is there already, with the same spec".to_owned());
    }
    let [ordered, orders] = [there, wanted].map(|job| job.annotations().get(ORDER));
    let is_same_order = ordered.is_some() && ordered == orders;
    let (listed, are_settings) = (fields.join(", "), fields.iter().all(|path| is_setting(path)));
    if !(is_same_order && are_settings) {
        bail!(
            "there is a job {name} already, with another spec ({listed}): `kubectl prepull set {name}` changes its settings, {how}"
        );
    }
    Ok(format!("is there already, with settings that were changed since ({listed})"))
}

/// What to do where a job is in the way.
fn ways_out(name: &str) -> String {
    format!("`kubectl delete ippj {name}` makes room for a new job, --name makes another one beside it")
}

/// Fails for a job that has ended, if it may have something to do by now: its nodes may have images to remove again, or the registry
/// has another image under one of its names, for which pods ask.
fn refuse_old_success(there: &ImagePrePullJob) -> anyhow::Result<()> {
    if !jobs::is_over(there) {
        return Ok(());
    }
    let name = there.name_any();
    let how = ways_out(&name);
    if there.spec.image_pre_pull_template.remove.is_some() {
        bail!("job {name} has ended, and its nodes may have other images by now: {how}");
    }
    let images = validate(there).map(|job| job.images).unwrap_or_default();
    let moves = images.iter().find(|image| {
        image.policy.unwrap_or_else(|| image.reference.default_pull_policy()) == PullPolicy::Always
    });
    if let Some(image) = moves {
        bail!(
            "job {name} has ended, and {} may be another image by now (imagePullPolicy Always): {how}",
            image.image
        );
    }
    Ok(())
}

/// The paths of the fields that are not the same.
fn collect_differences(one: &Value, other: &Value, path: &str, found: &mut Vec<String>) {
    match (one, other) {
        (Value::Object(_), Value::Object(_) | Value::Null) | (Value::Null, Value::Object(_)) => {
            let fields = [one, other].into_iter().filter_map(Value::as_object).flat_map(Map::keys);
            for field in fields.collect::<BTreeSet<_>>() {
                collect_differences(&one[field], &other[field], &format!("{path}.{field}"), found);
            }
        }
        _ if one != other => found.push(path.to_owned()),
        _ => {}
    }
}

/// The number of nodes, if the job's concurrency is a percentage of it.
async fn nodes_of(order: &JobOrder, cluster: &Cluster) -> anyhow::Result<usize> {
    if !order.needs_count() {
        return Ok(0);
    }
    if !order.nodes.is_empty() {
        return Ok(order.nodes.len());
    }
    let nodes = list_selected(&order.node_selector()?, cluster).await;
    if nodes.as_ref().is_err_and(is_refused) && order.is_any_concurrency {
        print_note("you may not list nodes, so it is one node at a time: --concurrency gives another number");
        return Ok(1);
    }
    let unknown = "--concurrency is a percentage of the nodes (10% by default), and they cannot be listed";
    Ok(nodes.context(unknown)?.len())
}

fn is_refused(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if MissingRight::from_answer(answer).is_some())
}

/// The names of the nodes with these labels. The metadata of thousands isn't in memory at once.
async fn list_selected(selector: &Selector, cluster: &Cluster) -> kube::Result<Vec<String>> {
    let nodes = Api::<Node>::all(cluster.client());
    let mut asked = ListParams::default().labels(&selector.to_string()).limit(NODES_OF_A_PAGE);
    let mut names = Vec::new();
    loop {
        let page = nodes.list_metadata(&asked).await?;
        names.extend(page.items.iter().map(ResourceExt::name_any));
        let Some(token) = page.metadata.continue_.filter(|token| !token.is_empty()) else { return Ok(names) };
        asked.continue_token = Some(token);
    }
}

/// Fails for a job that has succeeded, if its selector fits nodes by now that it never had.
async fn refuse_partial_success(
    there: &ImagePrePullJob,
    order: &JobOrder,
    cluster: &Cluster,
) -> anyhow::Result<()> {
    let has_succeeded = there.status.as_ref().is_some_and(|status| status.phase == JobPhase::Completed);
    if !(order.nodes.is_empty() && has_succeeded && jobs::is_over(there)) {
        return Ok(());
    }
    match list_selected(&order.node_selector()?, cluster).await {
        Ok(nodes) => refuse_new_nodes(there, &nodes),
        // Without that right, the job is followed as it is.
        Err(error) if is_refused(&error) => Ok(()),
        Err(error) => Err(error).context("the nodes of the job cannot be listed, and it may lack new ones"),
    }
}

/// Fails if some of these nodes, which the job selects by now, were not in it. Its status names up to 200 nodes, and counts all.
fn refuse_new_nodes(there: &ImagePrePullJob, nodes: &[String]) -> anyhow::Result<()> {
    let Some(status) = &there.status else { return Ok(()) };
    let (desired, skipped) = (status.summary.desired as usize, status.summary.skipped as usize);
    let names_all = desired <= status.node_status.len() && skipped <= status.skipped_nodes.len();
    let (lacking, example) = if names_all {
        let had = status.node_status.iter().map(|record| &record.node_name);
        let had: BTreeSet<_> = had.chain(status.skipped_nodes.iter().map(|node| &node.node_name)).collect();
        let mut new = nodes.iter().filter(|node| !had.contains(node));
        let example = new.next().map(|node| format!(", such as {node}"));
        (new.count() + usize::from(example.is_some()), example)
    } else {
        (nodes.len().saturating_sub(desired + skipped), None)
    };
    if lacking > 0 {
        let (name, lacking) = (there.name_any(), format_count(lacking as u64, "node"));
        let (example, how) = (example.unwrap_or_default(), ways_out(&name));
        bail!("job {name} has ended without {lacking} that it selects by now{example}: {how}");
    }
    Ok(())
}

/// Makes the job, unless it is there, and follows it as the flags say.
pub(crate) async fn make_and_follow(
    session: &Session,
    cluster: &Cluster,
    order: &JobOrder,
    args: &WaitArgs,
) -> anyhow::Result<CommandOutcome> {
    let mut job = order.to_job(nodes_of(order, cluster).await?);
    check_job(&job)?;
    if args.dry_run {
        session.print_document(&job)?;
        return Ok(CommandOutcome::Done);
    }
    let name = job.name_any();
    job.spec.ttl_seconds_after_finished.get_or_insert(TTL_SECONDS);
    job.annotations_mut().insert(ORDER.to_owned(), order.digest());
    let (job, what) = match jobs::create(cluster, &job).await {
        Ok(created) => (created, describe_created(&job)),
        Err(error) if is_taken(&error) => {
            let there = jobs::get(cluster, &name).await?;
            if order.needs_count() {
                // A part of the nodes that there were then.
                let before = &there.spec.image_pre_pull_template;
                job.spec.image_pre_pull_template.concurrency = before.concurrency;
            }
            let what = check_same_job(&there, &job)?;
            refuse_old_success(&there)?;
            refuse_partial_success(&there, order, cluster).await?;
            (there, what)
        }
        Err(error) => return Err(error),
    };
    let limit = match args.wait {
        Wait::No => {
            print_changed(&job, &what, session.global.output)?;
            return Ok(CommandOutcome::Done);
        }
        Wait::For(limit) => Some(limit),
        Wait::Forever => None,
    };
    if session.global.output.is_none() {
        let printed = print_changed(&job, &what, None).map(|()| CommandOutcome::Done);
        if or_interrupted(printed)? == CommandOutcome::Interrupted {
            note_that_it_goes_on(CommandOutcome::Interrupted, &name, None);
            return Ok(CommandOutcome::Interrupted);
        }
    }
    follow_job(session, cluster, &name, limit).await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::crd::job::ImagePrePullJobSpec;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_is_checked_before_it_is_made() {
        let template = json!({"images": ["nginx:1.25"], "nodeNames": ["edge-1"]});
        let said = |name: &str, change: serde_json::Value| {
            let mut spec = json!({"imagePrePullTemplate": template});
            json_patch(&mut spec, &change);
            let job = ImagePrePullJob::new(name, serde_json::from_value(spec).unwrap());
            check_job(&job).map_err(|error| error.to_string())
        };
        assert_eq!(said("web", json!({})), Ok(()));
        for (name, change, words) in [
            ("Spring_Release", json!({}), "--name Spring_Release: lower-case"),
            ("web", json!({"download": {"maxRate": "fast"}}), "spec.download.maxRate: "),
            ("web", json!({"rollout": {"steps": ["5", "3"]}}), "spec.rollout.steps[1]: 3 is not more"),
        ] {
            assert!(said(name, change).unwrap_err().starts_with(words), "{words}");
        }
    }

    fn json_patch(spec: &mut serde_json::Value, change: &serde_json::Value) {
        for (field, value) in change.as_object().unwrap() {
            spec[field] = value.clone();
        }
    }

    #[test]
    fn the_same_job_is_followed_another_is_refused() {
        let job = |images: Value, more: Value| {
            let mut spec = json!({"imagePrePullTemplate": {"images": images, "nodeNames": ["edge-1"]}});
            json_patch(&mut spec, &more);
            ImagePrePullJob::new("web", serde_json::from_value(spec).unwrap())
        };
        let wanted = job(json!(["a:1"]), json!({}));
        let said =
            |there: ImagePrePullJob| check_same_job(&there, &wanted).map_err(|error| error.to_string());
        let follows = Ok("is there already, with the same spec".to_owned());
        assert_eq!(said(wanted.clone()), follows);
        assert_eq!(
            said(job(json!(["a:1"]), json!({"retry": 2, "recheck": 1, "suspend": true, "pause": true}))),
            follows
        );
        let other = said(job(json!(["a:2"]), json!({"download": {"maxRate": "1Mi"}}))).unwrap_err();
        let fields = "(spec.download.maxRate, spec.imagePrePullTemplate.images)";
        assert!(other.contains(fields) && other.contains("kubectl prepull set web"), "{other}");
        assert!(said(job(json!(["a:1"]), json!({"cancel": true}))).unwrap_err().contains("was cancelled"));
        let text = "created, for 1 node, 1 node at a time; deleted 0s after its end";
        assert_eq!(describe_created(&wanted), text);
    }

    #[test]
    fn changed_settings_are_followed_in_the_same_order() {
        let job = |order: &str, more: Value| {
            let mut spec = json!({"imagePrePullTemplate": {"images": ["a:1"], "nodeNames": ["edge-1"]}});
            json_patch(&mut spec, &more);
            let mut job = ImagePrePullJob::new("web", serde_json::from_value(spec).unwrap());
            job.annotations_mut().insert(ORDER.to_owned(), order.to_owned());
            job
        };
        let slower = json!({"download": {"maxRate": "1Mi"}, "rollout": {"steps": ["5%"]}});
        let said = |there| check_same_job(&there, &job("1", json!({}))).map_err(|error| error.to_string());
        let fields = "(spec.download.maxRate, spec.rollout.pauseSeconds, spec.rollout.steps)";
        assert!(said(job("1", slower.clone())).unwrap().contains(fields));
        assert!(said(job("2", slower)).unwrap_err().contains(fields));
        let other = json!({"imagePrePullTemplate": {"images": ["a:2"], "nodeNames": ["edge-1"]}});
        assert!(said(job("1", other)).unwrap_err().contains("imagePrePullTemplate.images"));
    }

    #[test]
    fn an_old_success_with_a_moving_tag_is_refused() {
        let said = |image: &str, more: Value, phase: &str| {
            let mut spec = json!({"imagePrePullTemplate": {"images": [image], "nodeNames": ["edge-1"]}});
            json_patch(&mut spec["imagePrePullTemplate"], &more);
            let mut job = ImagePrePullJob::new("web", serde_json::from_value(spec).unwrap());
            job.status = serde_json::from_value(json!({"phase": phase})).unwrap();
            refuse_old_success(&job).map_err(|error| error.to_string())
        };
        let removes = json!({"images": [], "remove": {"images": ["a:1"]}});
        assert_eq!(said("a:1", removes.clone(), "InProgress"), Ok(()));
        assert!(said("a:1", removes, "Completed").unwrap_err().contains("may have other images by now"));
        let always = json!({"imagePullPolicy": "Always"});
        for (image, more, phase) in [
            ("a:1", json!({}), "Completed"),
            ("a:latest", json!({}), "InProgress"),
            ("a:latest", json!({"imagePullPolicy": "IfNotPresent"}), "Completed"),
        ] {
            assert_eq!(said(image, more, phase), Ok(()), "{image} {phase}");
        }
        for (image, more) in [("a", json!({})), ("a:latest", json!({})), ("a:1", always)] {
            let error = said(image, more, "Completed").unwrap_err();
            assert!(error.starts_with("job web has ended, and a") && error.contains("--name"), "{error}");
        }
    }

    #[test]
    fn nodes_after_a_success_count() {
        let said = |desired: usize, skipped: usize, nodes: &[&str]| {
            let names =
                |count: usize, word: &str| (0..count).map(|n| format!("{word}-{n}")).collect::<Vec<_>>();
            let had = names(desired.min(200), "had").into_iter();
            let had: Vec<_> = had.map(|name| json!({"nodeName": name, "phase": "Successful"})).collect();
            let left = names(skipped.min(200), "left").into_iter();
            let left: Vec<_> = left.map(|name| json!({"nodeName": name, "reason": "NotReady"})).collect();
            let mut job = ImagePrePullJob::new("web", ImagePrePullJobSpec::default());
            let summary = json!({"desired": desired, "skipped": skipped});
            job.status = serde_json::from_value(
                json!({"phase": "Completed", "summary": summary, "nodeStatus": had, "skippedNodes": left}),
            )
            .unwrap();
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            refuse_new_nodes(&job, &nodes).map_err(|error| error.to_string())
        };
        assert_eq!(said(2, 1, &["had-0", "had-1", "left-0"]), Ok(()));
        // One has left the cluster, and another has come.
        let refused = said(2, 1, &["had-0", "left-0", "new-0"]).unwrap_err();
        assert!(
            refused.starts_with("job web has ended without 1 node that it selects by now, such as new-0: ")
        );
        assert!(refused.ends_with(&ways_out("web")), "{refused}");
        // The status names a part of a large job's nodes: their number alone is known.
        let many: Vec<_> = (0..305).map(|n| format!("any-{n}")).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert_eq!(said(300, 2, &many[..302]), Ok(()));
        let refused = said(300, 2, &many).unwrap_err();
        assert!(
            refused.starts_with("job web has ended without 3 nodes that it selects by now: "),
            "{refused}"
        );
    }

    #[test]
    fn parses_wait_durations() {
        assert_eq!(parse_wait("30m"), Ok(Wait::For(Duration::from_secs(1800))));
        assert_eq!((parse_wait("0"), parse_wait("0s")), (Ok(Wait::No), Ok(Wait::No)));
        assert!(parse_wait("soon").is_err());
    }
}
