//! Kubernetes objects from files: YAML or JSON, several documents, Lists.
//!
//! An error names the file, the document and the place, and never quotes the text: it may be a Secret's.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::{Node, Secret};
use prepull_api::crd::GROUP;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::overriders::SecretRef;
use prepull_engine::prepull::plan::SecretLookup;
use prepull_engine::shared::node_view::NodeView;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Secrets;

/// The versions of [`GROUP`] that a job may have.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1alpha2"];

/// An object of a file, not yet of a type.
struct Object {
    api_version: String,
    kind: String,
    /// For messages: `Node edge-1`.
    title: String,
    value: Value,
}

/// The one job of a file.
pub(super) fn job(file: &Path) -> anyhow::Result<ImagePrePullJob> {
    let objects = read(file)?;
    let mut jobs = Vec::new();
    let mut others = BTreeMap::new();
    for object in objects {
        if object.kind == "ImagePrePullJob" {
            jobs.push(object);
        } else {
            *others.entry(object.kind).or_insert(0) += 1;
        }
    }
    let found = || {
        let kinds: Vec<_> = others.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        if kinds.is_empty() { "nothing at all".to_owned() } else { kinds.join(", ") }
    };
    ensure!(!jobs.is_empty(), "{}: no ImagePrePullJob in it, but {}", file.display(), found());
    if jobs.len() > 1 {
        let titles: Vec<_> = jobs.iter().map(|job| job.title.as_str()).collect();
        bail!("{}: plan takes one job, and there are {}: {}", file.display(), jobs.len(), titles.join(", "));
    }
    let job = jobs.swap_remove(0);
    ensure!(
        job.api_version.split_once('/').is_some_and(|(group, v)| group == GROUP && VERSIONS.contains(&v)),
        "{}: {} has apiVersion {:?}: write {GROUP}/v1alpha2 or {GROUP}/v1alpha1",
        file.display(),
        job.title,
        job.api_version,
    );
    typed(file, job)
}

/// The nodes of a file.
pub(super) fn nodes(file: &Path) -> anyhow::Result<Vec<NodeView>> {
    let nodes = of_kind::<Node>(file, "Node")?;
    ensure!(!nodes.is_empty(), "{}: no Node in it", file.display());
    Ok(nodes.iter().map(NodeView::from_node).collect())
}

/// The secrets of a file. One without a namespace is in `default`, where kubectl would put it.
pub(super) fn secrets(file: &Path) -> anyhow::Result<Secrets> {
    let mut secrets = Secrets::new();
    for secret in of_kind::<Secret>(file, "Secret")? {
        let namespace = secret.metadata.namespace.as_deref().unwrap_or("default");
        let name = secret.metadata.name.as_deref().unwrap_or_default();
        let key = SecretRef::new(namespace, name).with_context(|| format!("{}: a Secret", file.display()))?;
        secrets.insert(key, SecretLookup::from_secret(&secret));
    }
    Ok(secrets)
}

/// All objects of one of the core kinds; others are ignored, so that one file may hold everything.
fn of_kind<T: DeserializeOwned>(file: &Path, kind: &str) -> anyhow::Result<Vec<T>> {
    let objects = read(file)?.into_iter().filter(|object| object.kind == kind && object.api_version == "v1");
    objects.map(|object| typed(file, object)).collect()
}

fn typed<T: DeserializeOwned>(file: &Path, object: Object) -> anyhow::Result<T> {
    let is_secret = object.kind == "Secret";
    let Object { api_version: _, kind: _, title, value } = object;
    serde_json::from_value(value).map_err(|error| {
        // The error may quote the value that does not fit.
        let error = if is_secret { "a field is of the wrong kind".to_owned() } else { error.to_string() };
        anyhow::anyhow!("{}: {title}: {error}", file.display())
    })
}

fn read(file: &Path) -> anyhow::Result<Vec<Object>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let documents = documents(&text).with_context(|| format!("reading {}", file.display()))?;
    let mut objects = Vec::new();
    for (index, document) in documents.into_iter().enumerate() {
        flatten(document, "", "", &mut objects)
            .with_context(|| format!("{}: document {}", file.display(), index + 1))?;
    }
    Ok(objects)
}

fn documents(text: &str) -> anyhow::Result<Vec<Value>> {
    /// Parser events and nodes, at most. The library's own limits are for small configurations: ten thousand
    /// Nodes as kubectl prints them are some five million.
    const MOST: usize = 50_000_000;

    let mut budget = serde_saphyr::Budget::default();
    budget.max_events = MOST;
    budget.max_nodes = MOST;
    budget.max_documents = MOST;
    budget.max_total_scalar_bytes = usize::MAX; // the text is in memory already
    let mut options = serde_saphyr::Options::default();
    options.budget = Some(budget);
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| match error.location() {
        Some(at) => anyhow::anyhow!("not YAML: line {} column {}", at.line(), at.column()),
        None => anyhow::anyhow!("not YAML, or larger than this command reads"),
    })
}

/// Takes Lists apart. An item without a kind, as the API server sends it in a typed list, has the list's.
fn flatten(value: Value, api_version: &str, kind: &str, objects: &mut Vec<Object>) -> anyhow::Result<()> {
    let Value::Object(mut object) = value else { bail!("not a Kubernetes object") };
    let text = |field: &str, otherwise: &str| match object.get(field) {
        Some(Value::String(text)) => text.clone(),
        _ => otherwise.to_owned(),
    };
    let (api_version, kind) = (text("apiVersion", api_version), text("kind", kind));
    ensure!(!kind.is_empty(), "not a Kubernetes object: it has no kind");
    if let Some(of) = kind.strip_suffix("List")
        && let Some(Value::Array(items)) = object.remove("items")
    {
        // Items of a plain List say for themselves what they are.
        let api_version = if of.is_empty() { "" } else { &api_version };
        return items.into_iter().try_for_each(|item| flatten(item, api_version, of, objects));
    }
    let name =
        object.get("metadata").and_then(|m| m.get("name")).and_then(Value::as_str).unwrap_or("(unnamed)");
    let title = format!("{kind} {name}");
    objects.push(Object { api_version, kind, title, value: Value::Object(object) });
    Ok(())
}
