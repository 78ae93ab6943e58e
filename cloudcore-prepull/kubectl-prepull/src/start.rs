//! Makes a job and follows it, as `run` and `from` do.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use kube::ResourceExt;
use kube::api::PostParams;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::task::NodeName;
use prepull_engine::prepull::validate::validate;

use crate::amounts::count;
use crate::cluster::Cluster;
use crate::output::print_changed;
use crate::problem::WrongUsage;
use crate::progress::follow::follow;
use crate::session::{Ended, Session};
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
pub(crate) fn check(job: &ImagePrePullJob) -> Result<(), WrongUsage> {
    let name = job.name_any();
    // Nodes and jobs have the same rule for their names.
    if !NodeName::from(name.as_str()).is_valid() {
        return Err(WrongUsage(format!(
            "--name {name}: lower-case letters, digits, '-' and '.', with a letter or a digit at both ends"
        )));
    }
    validate(job).map(drop).map_err(|refusal| WrongUsage(refusal.to_string()))
}

/// Makes the job, and follows it as the flags say.
pub(crate) async fn start(
    session: &Session,
    cluster: &Cluster,
    job: &ImagePrePullJob,
    args: &WaitArgs,
) -> anyhow::Result<Ended> {
    check(job)?;
    if args.dry_run {
        session.print_document(job)?;
        return Ok(Ended::Done);
    }
    let name = job.name_any();
    let created = jobs::api(cluster).create(&PostParams::default(), job).await;
    let created = created.with_context(|| format!("job {name} cannot be made"));
    let created = match created {
        Ok(created) => created,
        Err(error) if problem::answer(&error).is_some_and(|answer| answer.code == 409) => {
            bail!(
                "there is a job {name} already (`kubectl prepull status {name}`): `kubectl prepull retry {name}` tries again \
                 what failed in it, --name makes another one beside it, `kubectl delete ippj {name}` makes room for a new one"
            )
        }
        Err(error) => return Err(error),
    };
    let limit = match args.wait {
        Wait::No => {
            print_changed(&created, "created", session.global.output)?;
            return Ok(Ended::Done);
        }
        Wait::For(limit) => Some(limit),
        Wait::Forever => None,
    };
    if session.global.output.is_none() {
        let template = &job.spec.image_pre_pull_template;
        let nodes = match template.node_names.len() as u64 {
            0 => "the nodes of its selector".to_owned(),
            nodes => count(nodes, "node"),
        };
        print_changed(&created, &format!("created, for {nodes}"), None)?;
    }
    follow(session, cluster, &name, limit).await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_is_checked_before_it_is_made() {
        let template = json!({"images": ["nginx:1.25"], "nodeNames": ["edge-1"]});
        let said = |name: &str, change: serde_json::Value| {
            let mut spec = json!({"imagePrePullTemplate": template});
            json_patch(&mut spec, &change);
            let job = ImagePrePullJob::new(name, serde_json::from_value(spec).unwrap());
            check(&job).map_err(|error| error.to_string())
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
    fn parses_wait_durations() {
        assert_eq!(parse_wait("30m"), Ok(Wait::For(Duration::from_secs(1800))));
        assert_eq!((parse_wait("0"), parse_wait("0s")), (Ok(Wait::No), Ok(Wait::No)));
        assert!(parse_wait("soon").is_err());
    }
}
