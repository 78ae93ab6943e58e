//! `kubectl prepull from`.

use std::io::Read;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};

use anyhow::{Context, anyhow, bail};
use clap::{ArgGroup, Args};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::ResourceExt;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use prepull_api::crd::status::Summary;
use prepull_api::selector::Selector;
use serde_json::Value;
use tokio::io::AsyncWriteExt;

use crate::amounts::{format_count, format_names};
use crate::cluster::Cluster;
use crate::jobs;
use crate::order::{ChosenNodes, CourseArgs, JobOrder, edge_selector, name_base};
use crate::pages::pages;
use crate::problem::{self, WrongUsage};
use crate::progress::follow::unless_interrupted;
use crate::session::{CommandOutcome, GlobalArgs, Session};
use crate::start::{Wait, WaitArgs, make_and_follow};
use crate::workload::choice::{PodPlacement, describe_taint};
use crate::workload::{self, Workload, each_once, find_workloads, parse_documents};

/// Nodes per page. A node may have 20 KiB.
const NODES_OF_A_PAGE: u32 = 250;
/// Nodes or images that are named where there may be many.
const EXAMPLES: usize = 3;

/// The arguments of `from`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("source").args(["workload", "filename"]).required(true), after_help = "\
The images of all containers, of image volumes too, become a job for the edge nodes on which the pods may run: by nodeName,
nodeSelector, required node affinity and tolerations; --selector and --node name others in their place. What a container pulls Always, the job pulls Always too. The pull secrets of the pods, or else of their ServiceAccount, serve
the registries of the images; their owner has to allow it. Which registry a secret is for stands in it, and it is not read:
beside other registries, docker.io gets none. --secret and --registry-secret say otherwise.

--apply-then waits for the job, and if it is Completed runs `kubectl apply` with what was read. A note has the number of nodes
that failed, within --tolerate, or were skipped: they may lack images.

Examples:
  kubectl prepull from -f app.yaml --concurrency 10% --apply-then
  kubectl prepull from deployment/web -n shop
  kubectl kustomize overlays/prod | kubectl prepull from -f - --name prod --wait=0
  kubectl prepull from -f app.yaml --registry-secret harbor.example=shop/harbor --dry-run")]
pub(crate) struct FromArgs {
    /// The workload: deployment/web, cronjob/report, …
    #[arg(value_name = "TYPE/NAME")]
    workload: Option<String>,
    /// File with the workloads, or - for standard input.
    #[arg(short, long, value_name = "FILE")]
    filename: Option<String>,
    /// Name of the job [default: those of namespace and workload, the tag of the first image, and a digest of images and nodes].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The nodes [default: those of the workload].
    #[command(flatten)]
    on: ChosenNodes,
    /// Apply the file once the job is Completed.
    #[arg(long, requires = "filename", conflicts_with = "dry_run")]
    apply_then: bool,
    /// The flags of how the job goes.
    #[command(flatten)]
    course: CourseArgs,
    /// Whether to create and to follow.
    #[command(flatten)]
    wait: WaitArgs,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &FromArgs,
) -> anyhow::Result<CommandOutcome> {
    if args.apply_then && args.wait.wait == Wait::No {
        bail!(WrongUsage("--apply-then waits for the job: it does not go with --wait=0".to_owned()));
    }
    let text = args.filename.as_deref().map(read_input).transpose()?;
    let (source, objects) = match (&text, &args.workload) {
        (Some(text), _) => {
            let file = args.filename.as_deref().unwrap_or_default();
            (format!("-f {file}"), parse_documents(text).with_context(|| format!("-f {file}"))?)
        }
        (None, workload) => {
            let workload = workload.as_deref().unwrap_or_default();
            (workload.to_owned(), vec![get(cluster, workload).await?])
        }
    };
    let workloads = find_workloads(&objects).with_context(|| source.clone())?;
    let Some(first) = workloads.first() else { bail!("{source}: there is nothing with pods in it") };
    let of_all =
        |of: fn(&Workload) -> &Vec<String>| each_once(workloads.iter().flat_map(of).map(String::as_str));
    let (images, always) = (of_all(|workload| &workload.images), of_all(|workload| &workload.always));
    if !always.is_empty() {
        problem::print_note(&note_on(&always));
    }
    // A workload has an image.
    let first_image = images.first().cloned().unwrap_or_default();
    // Jobs have no namespace, and the same workload may be in several.
    let of_namespace =
        format!("{}-{}", first.namespace.as_deref().unwrap_or_else(|| cluster.namespace()), first.name);
    let mut order =
        JobOrder { images, always: Some(always), selector: edge_selector(), ..JobOrder::default() };
    choose_nodes(cluster, args, &workloads, &mut order).await?;
    let mut order = order.with_name(args.name.as_ref(), &name_base(Some(&of_namespace), &first_image));
    if args.course.secret.is_none() && args.course.registry_secret.is_empty() {
        take_secrets(cluster, &objects, &workloads, &mut order).await?;
    }
    let order = order.with_course(&args.course, cluster.namespace());
    let ended = make_and_follow(session, cluster, &order, &args.wait).await?;
    match text {
        Some(text) if args.apply_then && ended == CommandOutcome::Done => {
            // The job may be gone by now, and that is no reason against.
            let Some(job) = unless_interrupted(Box::pin(jobs::get(cluster, &order.name))).await? else {
                problem::print_note(&format!("{source} is not applied"));
                return Ok(CommandOutcome::Interrupted);
            };
            if let Some(note) =
                job.ok().and_then(|job| note_on_nodes_without(&order.name, &job.status?.summary))
            {
                problem::print_note(&note);
            }
            let status = kubectl_apply(&session.global, &text).await?;
            Ok(if status.success() { CommandOutcome::Done } else { CommandOutcome::Failed })
        }
        _ if args.apply_then => {
            problem::print_note(&format!("{source} is not applied: the images are not on the nodes"));
            Ok(ended)
        }
        _ => Ok(ended),
    }
}

/// On how many nodes the images may be missing after a job that is Completed.
fn note_on_nodes_without(job: &str, nodes: &Summary) -> Option<String> {
    let Summary { desired, successful, skipped, .. } = *nodes;
    let failed = desired.saturating_sub(successful);
    let all = format_count(u64::from(desired) + u64::from(skipped), "node");
    (failed > 0 || skipped > 0).then(|| {
        format!(
            "of {all} {successful} have the images ({failed} failed, {skipped} skipped): on the others pods pull for \
             themselves; kubectl prepull status {job} has the reasons"
        )
    })
}

/// What pulling ahead doesn't change for images that pods pull Always.
fn note_on(always: &[String]) -> String {
    let images = format_names(&always[..always.len().min(EXAMPLES)], always.len() as u64);
    format!(
        "pods ask the registry at each start for {images} (imagePullPolicy Always), and don't start while it is away: set \
         IfNotPresent and a tag that doesn't move, or a digest, where they must start offline"
    )
}

fn read_input(file: &str) -> anyhow::Result<String> {
    if file == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("-f -: standard input cannot be read")?;
        return Ok(text);
    }
    std::fs::read_to_string(file).with_context(|| format!("-f {file}"))
}

/// The kinds that are taken by name, with what people call them.
const KINDS: [(&str, &str, &str, &[&str]); 8] = [
    ("apps", "v1", "Deployment", &["deployment", "deployments", "deploy"]),
    ("apps", "v1", "StatefulSet", &["statefulset", "statefulsets", "sts"]),
    ("apps", "v1", "DaemonSet", &["daemonset", "daemonsets", "ds"]),
    ("apps", "v1", "ReplicaSet", &["replicaset", "replicasets", "rs"]),
    ("batch", "v1", "CronJob", &["cronjob", "cronjobs", "cj"]),
    ("batch", "v1", "Job", &["job", "jobs"]),
    ("", "v1", "Pod", &["pod", "pods", "po"]),
    ("", "v1", "ReplicationController", &["replicationcontroller", "replicationcontrollers", "rc"]),
];

/// Group, version and kind of `deployment/web`, and the name.
fn kind_and_name(workload: &str) -> Result<(GroupVersionKind, &str), WrongUsage> {
    let wrong = |text: String| WrongUsage(format!("{workload}: {text}"));
    let (kind, name) = workload
        .split_once('/')
        .filter(|(_, name)| !name.is_empty())
        .ok_or_else(|| wrong("write TYPE/NAME, such as deployment/web, or -f FILE".to_owned()))?;
    let is_it = |names: &[&str]| names.contains(&kind.to_lowercase().as_str());
    let known = KINDS.iter().find(|(.., names)| is_it(names)).ok_or_else(|| {
        let all: Vec<_> = KINDS.iter().map(|(.., names)| names[0]).collect();
        wrong(format!("no such type: {}; what has other pods is taken by -f FILE", all.join(", ")))
    })?;
    Ok((GroupVersionKind::gvk(known.0, known.1, known.2), name))
}

async fn get(cluster: &Cluster, workload: &str) -> anyhow::Result<Value> {
    let (kind, name) = kind_and_name(workload)?;
    let namespace = cluster.namespace();
    let read = |kind: GroupVersionKind| async move {
        let resource = ApiResource::from_gvk(&kind);
        let api = Api::<DynamicObject>::namespaced_with(cluster.client(), namespace, &resource);
        let read = api.get(name).await;
        read.with_context(|| format!("{workload} in namespace {namespace} cannot be read"))
    };
    let is_missing =
        |error: &anyhow::Error| problem::server_answer(error).is_some_and(|answer| answer.code == 404);
    let mut found = read(kind.clone()).await;
    // Before Kubernetes 1.21.
    if kind.kind == "CronJob" && found.as_ref().is_err_and(is_missing) {
        found = read(GroupVersionKind::gvk("batch", "v1beta1", "CronJob")).await;
    }
    match found {
        Ok(object) => {
            let mut object = serde_json::to_value(object)?;
            object["kind"] = kind.kind.into();
            Ok(object)
        }
        Err(error) if is_missing(&error) => {
            bail!("there is no {workload} in namespace {namespace}: -n names another one")
        }
        Err(error) => Err(error),
    }
}

/// What to do where the nodes of a workload cannot be taken over.
const REMEDY: &str = "say where by -l SELECTOR or --node NAME";

/// Chooses the nodes: those of the flags, or else those on which the pods may run.
async fn choose_nodes(
    cluster: &Cluster,
    args: &FromArgs,
    workloads: &[Workload],
    order: &mut JobOrder,
) -> anyhow::Result<()> {
    if !args.on.nodes.is_empty() {
        order.nodes.clone_from(&args.on.nodes);
        return Ok(());
    }
    if let Some(selector) = args.on.selector()? {
        order.selector = selector;
        return Ok(());
    }
    let choice = &workloads[0].choice;
    if let Some(other) = workloads.iter().find(|workload| workload.choice != *choice) {
        let (one, other) = (&workloads[0].title, &other.title);
        bail!(WrongUsage(format!(
            "{one} and {other} run on different nodes: make a job for each, or {REMEDY}"
        )));
    }
    if let Some(beyond) = &choice.beyond {
        let title = &workloads[0].title;
        bail!(WrongUsage(format!(
            "{title}: its node affinity ({beyond}) is beyond the selector of a job: {REMEDY}"
        )));
    }
    if let Some(node) = &choice.node {
        order.nodes = vec![node.clone()];
        return Ok(());
    }
    order.selector = choice.selector.clone();
    let (kept, left_out) = by_taints(cluster, choice, &order.node_selector()?).await?;
    if left_out.is_empty() {
        return Ok(());
    }
    let title = &workloads[0].title;
    let examples: Vec<_> =
        left_out.iter().take(EXAMPLES).map(|(node, taint)| format!("{node} ({taint})")).collect();
    let examples = format_names(&examples, left_out.len() as u64);
    if kept.is_empty() {
        bail!("{title} tolerates the taints of no edge node that it selects: {examples}");
    }
    // A selector knows no taints.
    order.nodes = kept;
    problem::print_note(&format!(
        "left out, since {title} does not tolerate their taints: {}: {examples}",
        format_count(left_out.len() as u64, "node")
    ));
    Ok(())
}

/// The edge nodes of the selector, and those of them with a taint that keeps the pods away.
async fn by_taints(
    cluster: &Cluster,
    choice: &PodPlacement,
    selector: &Selector,
) -> anyhow::Result<(Vec<String>, Vec<(String, String)>)> {
    let api = Api::<Node>::all(cluster.client());
    let asked = ListParams::default().labels(&selector.to_string()).limit(NODES_OF_A_PAGE);
    let mut pages = pin!(pages(api, asked));
    let (mut kept, mut left_out) = (Vec::new(), Vec::new());
    let failed = "the nodes cannot be listed, to look at their taints";
    while let Some(nodes) = pages.try_next().await.context(failed)? {
        for node in nodes {
            let taints = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
            match choice.kept_away_by(&taints) {
                Some(taint) => left_out.push((node.name_any(), describe_taint(taint))),
                None => kept.push(node.name_any()),
            }
        }
    }
    Ok((kept, left_out))
}

async fn take_secrets(
    cluster: &Cluster,
    objects: &[Value],
    workloads: &[Workload],
    order: &mut JobOrder,
) -> anyhow::Result<()> {
    let mut secrets: Vec<String> = Vec::new();
    for workload in workloads {
        let namespace = workload.namespace.as_deref().unwrap_or_else(|| cluster.namespace());
        let names = if workload.pull_secrets.is_empty() {
            let account = &workload.service_account;
            match workload::account_secrets(objects, namespace, account) {
                Some(names) => names,
                None => secrets_of(cluster, namespace, account).await?,
            }
        } else {
            workload.pull_secrets.clone()
        };
        for secret in names.iter().map(|name| format!("{namespace}/{name}")) {
            if !secrets.contains(&secret) {
                secrets.push(secret);
            }
        }
    }
    let logins = workload::assign_logins(&order.images, &secrets).map_err(|registries| {
        anyhow!(WrongUsage(format!(
            "there are several pull secrets ({}), and which registry each is for stands in them, where it is not looked for: \
             give --registry-secret REGISTRY=NAMESPACE/NAME for those of {registries} that need one",
            secrets.join(", ")
        )))
    })?;
    if let Some(registry) = &logins.without {
        problem::print_note(&format!(
            "images of {registry} are pulled without a secret; --registry-secret {registry}=NAMESPACE/NAME gives them one"
        ));
    }
    order.registry_secrets = logins.by_registry;
    order.more_secrets = logins.more;
    Ok(())
}

/// The pull secrets of a ServiceAccount. One that does not exist yet has none.
async fn secrets_of(cluster: &Cluster, namespace: &str, account: &str) -> anyhow::Result<Vec<String>> {
    let api = Api::<ServiceAccount>::namespaced(cluster.client(), namespace);
    let found = api.get_opt(account).await;
    let found = found.with_context(|| format!("ServiceAccount {namespace}/{account} cannot be read"))?;
    let secrets = found.and_then(|account| account.image_pull_secrets).unwrap_or_default();
    Ok(secrets.into_iter().map(|secret| secret.name).collect())
}

/// Applies what was read, as the person would: by kubectl, with the same cluster and the same namespace.
async fn kubectl_apply(global: &GlobalArgs, text: &str) -> anyhow::Result<ExitStatus> {
    let GlobalArgs { namespace, context, kubeconfig, request_timeout, .. } = global;
    let mut command = tokio::process::Command::new("kubectl");
    if let Some(file) = kubeconfig {
        command.arg("--kubeconfig").arg(file);
    }
    for (flag, value) in [("--context", context), ("--namespace", namespace)] {
        if let Some(value) = value {
            command.args([flag, value]);
        }
    }
    // To kubectl, too, 0 means that it waits.
    command.arg(format!("--request-timeout={}s", request_timeout.as_secs_f64()));
    let child = command.args(["apply", "-f", "-"]).stdin(Stdio::piped()).spawn();
    let mut child = child.context("--apply-then runs kubectl, which cannot be started")?;
    let mut stdin = child.stdin.take().context("kubectl has no standard input")?;
    // If kubectl stops reading early, its exit status shows it.
    let _ = stdin.write_all(text.as_bytes()).await;
    drop(stdin);
    child.wait().await.context("kubectl apply cannot be waited for")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_note_names_what_is_pulled_always() {
        let note = note_on(&["a", "b", "c", "d", "e"].map(str::to_owned));
        assert!(note.contains("at each start for a, b, c and 2 more (imagePullPolicy Always)"), "{note}");
    }

    #[test]
    fn a_note_counts_nodes_without_the_images() {
        let of = |desired, successful, skipped| {
            let nodes = Summary { desired, successful, skipped, ..Summary::default() };
            note_on_nodes_without("web", &nodes)
        };
        assert_eq!(of(9, 9, 0), None);
        let note = of(9, 8, 3).unwrap();
        assert!(note.starts_with("of 12 nodes 8 have the images (1 failed, 3 skipped): "), "{note}");
        assert!(of(9, 9, 1).unwrap().contains("(0 failed, 1 skipped)"));
    }

    #[test]
    fn workloads_are_named_as_in_kubectl() {
        for (text, kind) in
            [("deployment/web", "Deployment"), ("sts/db", "StatefulSet"), ("CronJob/a", "CronJob")]
        {
            assert_eq!(kind_and_name(text).unwrap().0.kind, kind);
        }
        for (text, words) in
            [("web", "TYPE/NAME"), ("deploy/", "TYPE/NAME"), ("service/web", "no such type: deployment")]
        {
            let said = kind_and_name(text).unwrap_err().to_string();
            assert!(said.contains(words), "{said}");
        }
    }
}
