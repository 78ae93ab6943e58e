//! `kubectl prepull set`.

use std::str::FromStr;

use anyhow::bail;
use clap::Args;
use kube::ResourceExt;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::status::JobPhase;
use serde_json::{Map, Value, json};

use crate::cluster::Cluster;
use crate::job_fields::{FIELDS, ValueKind, keys};
use crate::jobs;
use crate::name::OwnJob;
use crate::order::{Concurrency, SecretName, parse_deltas};
use crate::output::print_changed;
use crate::problem::{WrongUsage, print_note};
use crate::session::{CommandOutcome, Session};
use crate::start::check_job;
use crate::window::WindowArg;

/// The arguments of `set`.
#[derive(Debug, Args)]
#[command(after_help = "\
Settings, each with = and its value; without a value it is unset:
  rate=2Mi            bytes a second on each node       site-rate=8Mi       over the uplink of a site
  share=true          share layers within a site        concurrency=50      nodes at a time, or 10%
  secret=shop/harbor  the secret of the images          window=22:00-04:00  when nodes may download; may be repeated
  wave=5%,25%         sizes of the waves                pause=10m           between two waves
  tolerate=0.2        the part that may fail            retries=5           of each image
  node-timeout=1h     of each node                      deadline=8h         of the whole job
  ttl=24h             until it is deleted               follow-nodes=true   whether nodes may join
  deltas=require      auto, never or require

Images and nodes are changed by `kubectl edit ippj JOB`, which begins another run once the job has ended.

Examples:
  kubectl prepull set spring-release rate=512Ki concurrency=20
  kubectl prepull set spring-release window=Mon-Fri,22:00-05:00@Europe/Berlin window=Sat,Sun,00:00+24h
  kubectl prepull set spring-release window=    # at any time")]
pub(crate) struct SetArgs {
    #[command(flatten)]
    own: OwnJob,
    /// Settings and their values.
    #[arg(required = true, value_name = "SETTING=VALUE")]
    settings: Vec<Setting>,
}

/// A setting as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting {
    key: String,
    value: String,
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("SETTING=VALUE, such as rate=2Mi")?;
        if FIELDS.iter().all(|field| field.key != key) {
            return Err(format!("there is no setting {key}: {}", keys().collect::<Vec<_>>().join(", ")));
        }
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &SetArgs,
) -> anyhow::Result<CommandOutcome> {
    let name = &args.own.job;
    let job = jobs::get(cluster, name).await?;
    if job.spec.cancel {
        bail!("job {name} was cancelled, which is for good: no setting has an effect. Create a new job");
    }
    let nodes = job.status.as_ref().map_or(0, |status| status.summary.desired);
    let patch = patch(&args.settings, cluster.namespace(), nodes)?;
    check_job(&merged(&job, &patch)?)?;
    let changed = jobs::patch(cluster, name, &patch).await?;
    let (before, after) = (json!(job), json!(changed));
    let lines: Vec<_> = changes(&args.settings, &before, &after);
    if lines.is_empty() {
        print_changed(&changed, "is as it was", session.global.output)?;
        return Ok(CommandOutcome::Done);
    }
    print_changed(&changed, &format!("changed: {}", lines.join(", ")), session.global.output)?;
    for text in effects(&args.settings, &job) {
        print_note(&text);
    }
    Ok(CommandOutcome::Done)
}

/// One merge patch of all settings.
fn patch(settings: &[Setting], namespace: &str, nodes: u32) -> anyhow::Result<Value> {
    let mut patch = json!({});
    for field in &FIELDS {
        let values: Vec<_> = settings
            .iter()
            .filter(|setting| setting.key == field.key)
            .map(|setting| &setting.value)
            .collect();
        let Some(last) = values.last() else { continue };
        let wrong = |text: String| WrongUsage(format!("{}={last}: {text}", field.key));
        if values.len() > 1 && field.kind != ValueKind::Windows {
            bail!(WrongUsage(format!("{} is set twice", field.key)));
        }
        let value = match field.kind {
            _ if values.iter().all(|value| value.is_empty()) => Value::Null,
            ValueKind::Text => json!(last),
            ValueKind::Texts => json!(last.split(',').collect::<Vec<_>>()),
            ValueKind::Truth => json!(last.parse::<bool>().map_err(|_| wrong("true or false".to_owned()))?),
            ValueKind::Number => json!(last.parse::<u32>().map_err(|_| wrong("a number".to_owned()))?),
            ValueKind::Seconds => {
                json!(humantime::parse_duration(last).map_err(|error| wrong(error.to_string()))?.as_secs())
            }
            ValueKind::Secret => json!(last.parse::<SecretName>().map_err(wrong)?.in_namespace(namespace)),
            ValueKind::Nodes => {
                let concurrency: Concurrency = last.parse().map_err(wrong)?;
                if nodes == 0 && matches!(concurrency, Concurrency::Percent(_)) {
                    bail!(wrong(
                        "the job has not begun, and how many nodes it has is not known: a number".to_owned()
                    ));
                }
                json!(concurrency.for_nodes(nodes as usize))
            }
            ValueKind::Deltas => json!(parse_deltas(last).map_err(wrong)?.as_str()),
            ValueKind::Windows => {
                let windows: Result<Vec<_>, _> =
                    values.iter().map(|value| value.parse::<WindowArg>().map(|window| window.0)).collect();
                json!(windows.map_err(wrong)?)
            }
        };
        put_at_path(&mut patch, field.path, value);
    }
    Ok(patch)
}

fn put_at_path(object: &mut Value, path: &str, value: Value) {
    let place = path.split('.').fold(object, |object, part| {
        if !object.is_object() {
            *object = Value::Object(Map::new());
        }
        &mut object[part]
    });
    *place = value;
}

/// The job as it will be, to be checked before.
fn merged(job: &ImagePrePullJob, patch: &Value) -> anyhow::Result<ImagePrePullJob> {
    let mut value = json!(job);
    json_patch::merge(&mut value, patch);
    Ok(serde_json::from_value(value)?)
}

/// The settings that are not as before.
fn changes(settings: &[Setting], before: &Value, after: &Value) -> Vec<String> {
    let at = |job: &Value, path: &str| path.split('.').fold(job.clone(), |value, part| value[part].clone());
    let shown = |value: &Value| match value {
        Value::Null => "unset".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let named = FIELDS.iter().filter(|field| settings.iter().any(|setting| setting.key == field.key));
    let changed = named.filter_map(|field| {
        let (old, new) = (at(before, field.path), at(after, field.path));
        (old != new).then(|| format!("{} from {} to {}", field.key, shown(&old), shown(&new)))
    });
    changed.collect()
}

/// What the changes do in the state of the job: decision 33.
fn effects(settings: &[Setting], job: &ImagePrePullJob) -> Vec<String> {
    let name = job.name_any();
    let has = |key: &str| settings.iter().any(|setting| setting.key == key);
    let status = job.status.as_ref();
    let has_begun = status.is_some_and(|status| status.start_time.is_some());
    let phase = status.map(|status| status.phase);
    let mut effects = Vec::new();
    if jobs::is_over(job) {
        if has("ttl") {
            effects.push("the time until it is deleted counts from its end".to_owned());
        }
        if settings.iter().any(|setting| setting.key != "ttl") {
            effects.push(if has_begun {
                format!("job {name} has ended: this is for its next round, kubectl prepull retry {name}")
            } else {
                format!("job {name} was refused, and is looked at again now")
            });
        }
        return effects;
    }
    if !has_begun || phase == Some(JobPhase::Init) {
        effects.push(format!("job {name} has not begun, and begins with this"));
        return effects;
    }
    if has("secret") {
        effects.push(
            "nodes that start from now on use the secret; those at work go on with the one they have"
                .to_owned(),
        );
    }
    if settings.iter().any(|setting| setting.key != "secret") {
        let but = if has("secret") { "everything else holds" } else { "it holds" };
        let state = if job.spec.suspend { "is suspended" } else { "runs" };
        effects.push(format!("job {name} {state}: {but} at once"));
    }
    effects
}

#[cfg(test)]
mod tests;
