//! Workloads, of any kind that has pods: their images, their pull secrets, and the nodes that they may run on. Pure.

pub(crate) mod choice;
#[cfg(test)]
mod tests;

use anyhow::{Context, anyhow, ensure};
use k8s_openapi::api::core::v1::PodSpec;
use prepull_api::image::Reference;
use prepull_api::task::PullPolicy;
use serde_json::Value;

use choice::PodPlacement;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Workload {
    /// Kind and name for people: `Deployment web`.
    pub(crate) title: String,
    pub(crate) name: String,
    pub(crate) namespace: Option<String>,
    /// Its images, each once: of init containers, containers, ephemeral containers, and volumes.
    pub(crate) images: Vec<String>,
    /// Those of them that a pod asks the registry for at each start, by `imagePullPolicy` or its default.
    pub(crate) always: Vec<String>,
    /// The pull secrets of its pods. Where there are none, those of the ServiceAccount count.
    pub(crate) pull_secrets: Vec<String>,
    pub(crate) service_account: String,
    /// The nodes that its pods may run on.
    pub(crate) choice: PodPlacement,
}

/// Reads the documents of a YAML or JSON text. The error does not quote it: it may hold a Secret.
pub(crate) fn parse_documents(text: &str) -> anyhow::Result<Vec<Value>> {
    let parsed: Result<Vec<Value>, _> = serde_saphyr::from_multiple(text);
    let documents = parsed.map_err(|error| match error.location() {
        Some(at) => anyhow!("not YAML: line {} column {}", at.line(), at.column()),
        None => anyhow!("not YAML"),
    })?;
    let mut objects = Vec::new();
    for document in documents {
        flatten(document, &mut objects);
    }
    Ok(objects)
}

fn flatten(mut value: Value, objects: &mut Vec<Value>) {
    let is_list = value["kind"].as_str().is_some_and(|kind| kind.ends_with("List"));
    match value.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) if is_list => items.into_iter().for_each(|item| flatten(item, objects)),
        _ if value.is_null() => {} // nothing between two separators
        _ => objects.push(value),
    }
}

pub(crate) fn find_workloads(objects: &[Value]) -> anyhow::Result<Vec<Workload>> {
    objects.iter().filter_map(|object| Workload::from_object(object).transpose()).collect()
}

/// The pull secrets of a ServiceAccount among the objects, if it is there.
pub(crate) fn account_secrets(objects: &[Value], namespace: &str, name: &str) -> Option<Vec<String>> {
    let is_it = |object: &&Value| {
        let of = |field: &str| object["metadata"][field].as_str();
        object["kind"] == "ServiceAccount"
            && of("name") == Some(name)
            && of("namespace").is_none_or(|other| other == namespace)
    };
    let secrets = objects.iter().find(is_it)?["imagePullSecrets"].as_array().cloned().unwrap_or_default();
    Some(secrets.iter().filter_map(|secret| secret["name"].as_str()).map(str::to_owned).collect())
}

impl Workload {
    /// Reads a workload; none if the object has no pods.
    pub(crate) fn from_object(object: &Value) -> anyhow::Result<Option<Self>> {
        let kind = object["kind"].as_str().unwrap_or_default();
        let spec = &object["spec"];
        let pod = match kind {
            "Pod" => spec,
            "CronJob" => &spec["jobTemplate"]["spec"]["template"]["spec"],
            "PodTemplate" => &object["template"]["spec"],
            // Deployments and all others, those of other people's definitions included.
            _ => &spec["template"]["spec"],
        };
        if pod.get("containers").is_none() {
            return Ok(None);
        }
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let title = format!("{kind} {name}");
        let pod: PodSpec = serde_json::from_value(pod.clone())
            .with_context(|| format!("{title}: the spec of its pods cannot be read"))?;
        let uses = image_uses(&pod);
        let images = each_once(uses.iter().map(|(image, _)| *image));
        let always = each_once(
            uses.iter().filter(|(image, policy)| is_always(image, *policy)).map(|(image, _)| *image),
        );
        for image in &images {
            Reference::parse(image).with_context(|| format!("{title}: image {image:?}"))?;
        }
        ensure!(!images.is_empty(), "{title}: it has no image");
        let secrets = pod.image_pull_secrets.iter().flatten();
        // The API server takes an empty name for none, and then the older alias.
        let mut accounts = [&pod.service_account_name, &pod.service_account].into_iter().flatten();
        let account = accounts.find(|account| !account.is_empty()).cloned();
        Ok(Some(Self {
            namespace: object["metadata"]["namespace"].as_str().map(str::to_owned),
            pull_secrets: secrets.map(|secret| secret.name.clone()).filter(|name| !name.is_empty()).collect(),
            service_account: account.unwrap_or_else(|| "default".to_owned()),
            choice: PodPlacement::from_pod(&pod),
            images,
            always,
            name,
            title,
        }))
    }
}

/// An image, and the pull policy where one is written.
type Use<'a> = (&'a str, Option<&'a str>);

fn image_uses(pod: &PodSpec) -> Vec<Use<'_>> {
    let init = pod.init_containers.iter().flatten().map(|of| (&of.image, &of.image_pull_policy));
    let main = pod.containers.iter().map(|of| (&of.image, &of.image_pull_policy));
    let ephemeral = pod.ephemeral_containers.iter().flatten().map(|of| (&of.image, &of.image_pull_policy));
    let volumes = pod.volumes.iter().flatten().filter_map(|volume| volume.image.as_ref());
    let volumes = volumes.map(|of| (&of.reference, &of.pull_policy));
    let all = init.chain(main).chain(ephemeral).chain(volumes);
    let with_image = all.filter_map(|(image, policy)| Some((image.as_deref()?, policy.as_deref())));
    with_image.filter(|(image, _)| !image.is_empty()).collect()
}

/// Whether a pod asks the registry at each start. Without a policy it goes by the tag, as in a job.
fn is_always(image: &str, policy: Option<&str>) -> bool {
    match policy.filter(|policy| !policy.is_empty()) {
        Some(policy) => policy == "Always",
        None => Reference::parse(image).is_ok_and(|image| image.default_pull_policy() == PullPolicy::Always),
    }
}

/// The images, in the order in which they first occur.
pub(crate) fn each_once<'a>(images: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut once: Vec<String> = Vec::new();
    for image in images {
        if !once.iter().any(|other| other == image) {
            once.push(image.to_owned());
        }
    }
    once
}

/// How the pull secrets of workloads are said in a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Logins {
    pub(crate) by_registry: Vec<(String, String)>,
    pub(crate) more: Vec<String>,
    /// A registry that gets none.
    pub(crate) without: Option<String>,
}

/// A registry that serves strangers as well.
const PUBLIC: &str = "docker.io";

/// Gives the secrets to the registries of the images. The registry of a secret is inside it, and we may not read it. In a
/// job, unlike in a pod, an image fails if its secret has nothing for it. So we take images of Docker Hub beside those of
/// another registry for public ones. The error names the registries that the user must assign.
pub(crate) fn assign_logins(images: &[String], secrets: &[String]) -> Result<Logins, String> {
    let Some((first, more)) = secrets.split_first() else { return Ok(Logins::default()) };
    let mut registries: Vec<String> = Vec::new();
    for image in images.iter().filter_map(|image| Reference::parse(image).ok()) {
        let registry = image.normalized().registry().to_owned();
        if !registries.contains(&registry) {
            registries.push(registry);
        }
    }
    let is_mixed = registries.len() > 1 && registries.iter().any(|registry| registry == PUBLIC);
    if is_mixed && !more.is_empty() {
        return Err(registries.join(", "));
    }
    let served = registries.into_iter().filter(|registry| !is_mixed || registry != PUBLIC);
    Ok(Logins {
        by_registry: served.map(|registry| (registry, first.clone())).collect(),
        more: more.to_vec(),
        without: is_mixed.then(|| PUBLIC.to_owned()),
    })
}
