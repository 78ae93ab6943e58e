//! Kubernetes objects in files: YAML or JSON, with several documents and Lists.
//!
//! Errors name the file, the document and the place, and never quote the text, which may be a Secret's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::{Node, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaProps;
use prepull_api::crd::GROUP;
use prepull_api::crd::job::{self, ImagePrePullJob};
use prepull_api::overriders::SecretRef;
use prepull_engine::prepull::plan::SecretLookup;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::SecretLookups;
use super::definition;
use super::nodes::ListedNode;

/// The versions of [`GROUP`] that a job may be written in.
const VERSIONS: [&str; 2] = ["v1alpha1", "v1alpha2"];

/// An object that is not yet converted to its type.
struct RawObject {
    api_version: String,
    kind: String,
    /// Kind and name for messages, such as `Node edge-1`.
    title: String,
    value: Value,
}

/// Reads the only job in a file.
pub fn read_job(file: &Path) -> anyhow::Result<ImagePrePullJob> {
    let objects = read_objects(file)?;
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
    let mut job = jobs.swap_remove(0);
    ensure!(
        job.api_version.split_once('/').is_some_and(|(group, v)| group == GROUP && VERSIONS.contains(&v)),
        "{}: {} has apiVersion {:?}: write {GROUP}/v1alpha2 or {GROUP}/v1alpha1",
        file.display(),
        job.title,
        job.api_version,
    );
    check_definition(&mut job.value)
        .map_err(|problems| anyhow!("{}: {}: {problems}", file.display(), job.title))?;
    convert(file, job)
}

/// Checks a job against its definition, but for its metadata and its status, which a plan does not need.
fn check_definition(job: &mut Value) -> Result<(), String> {
    let Some(schema) =
        job::crd().spec.versions.into_iter().find_map(|version| version.schema?.open_api_v3_schema)
    else {
        return Ok(()); // impossible: every version has a schema
    };
    let mut schema = schema;
    let fields = schema.properties.get_or_insert_default();
    for (name, type_) in
        [("apiVersion", "string"), ("kind", "string"), ("metadata", "object"), ("status", "object")]
    {
        let of_field = JSONSchemaProps { type_: Some(type_.to_owned()), ..JSONSchemaProps::default() };
        fields.insert(name.to_owned(), of_field);
    }
    definition::check(job, &schema)?;
    job.as_object_mut().and_then(|job| job.remove("status"));
    Ok(())
}

pub(super) fn read_nodes(file: &Path) -> anyhow::Result<Vec<ListedNode>> {
    let nodes = read_kind::<Node>(file, "Node")?;
    ensure!(!nodes.is_empty(), "{}: no Node in it", file.display());
    let nodes: Vec<_> = nodes.iter().map(ListedNode::from_node).collect();
    let mut names = BTreeSet::new();
    for ListedNode { view, .. } in &nodes {
        ensure!(names.insert(&view.name), "{}: Node {} is there more than once", file.display(), view.name);
    }
    Ok(nodes)
}

/// Reads the secrets in a file. A secret without a namespace counts as in `default`, where kubectl would put it.
pub(super) fn read_secrets(file: &Path) -> anyhow::Result<SecretLookups> {
    let mut secrets = SecretLookups::new();
    for secret in read_kind::<Secret>(file, "Secret")? {
        let namespace = secret.metadata.namespace.as_deref().unwrap_or("default");
        let name = secret.metadata.name.as_deref().unwrap_or_default();
        let key = SecretRef::new(namespace, name).with_context(|| format!("{}: a Secret", file.display()))?;
        let title = key.to_string();
        let earlier = secrets.insert(key, SecretLookup::from_secret(&secret));
        ensure!(earlier.is_none(), "{}: Secret {title} is there more than once", file.display());
    }
    Ok(secrets)
}

/// Reads the objects of a core kind. Others are ignored, so that one file may hold everything.
fn read_kind<T: DeserializeOwned>(file: &Path, kind: &str) -> anyhow::Result<Vec<T>> {
    let objects =
        read_objects(file)?.into_iter().filter(|object| object.kind == kind && object.api_version == "v1");
    objects.map(|object| convert(file, object)).collect()
}

fn convert<T: DeserializeOwned>(file: &Path, object: RawObject) -> anyhow::Result<T> {
    let is_secret = object.kind == "Secret";
    let RawObject { api_version: _, kind: _, title, value } = object;
    serde_path_to_error::deserialize(value).map_err(|error| {
        // The error may quote the value, which in a Secret is confidential. So is, by mistake, a key below `data`.
        let path = error.path().to_string();
        let problem =
            if is_secret { "a value of the wrong kind".to_owned() } else { error.inner().to_string() };
        let field = if is_secret { path.split('.').next().unwrap_or_default() } else { &path };
        anyhow!("{}: {title}: {field}: {problem}", file.display())
    })
}

fn read_objects(file: &Path) -> anyhow::Result<Vec<RawObject>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let documents = parse_documents(&text).with_context(|| format!("reading {}", file.display()))?;
    let mut objects = Vec::new();
    for (index, document) in documents.into_iter().enumerate() {
        flatten(document, "", "", &mut objects)
            .with_context(|| format!("{}: document {}", file.display(), index + 1))?;
    }
    Ok(objects)
}

fn parse_documents(text: &str) -> anyhow::Result<Vec<Value>> {
    /// The most parser events and nodes. The library's default limits suit small files: ten thousand Nodes as kubectl
    /// prints them are about five million.
    const MAX_EVENTS: usize = 50_000_000;

    /// What aliases may add to a text, whichever its length: values that are written once and used in a few places.
    const ALIASES: usize = 64 * 1024;

    let mut budget = serde_saphyr::Budget::default();
    budget.max_events = MAX_EVENTS;
    budget.max_nodes = MAX_EVENTS;
    budget.max_documents = MAX_EVENTS;
    // The limits include what aliases repeat. Twice the text, since a few escapes and tags are longer than they are
    // written; without aliases no text comes near it.
    budget.max_total_scalar_bytes = text.len().saturating_mul(2).saturating_add(ALIASES);
    let mut options = serde_saphyr::Options::default();
    options.alias_limits.max_total_replayed_events = ALIASES;
    options.budget = Some(budget);
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| match error.location() {
        Some(at) => anyhow::anyhow!("not YAML: line {} column {}", at.line(), at.column()),
        None => anyhow::anyhow!("not YAML, or larger than this command reads"),
    })
}

/// Collects an object, or the items of a List. An item of a typed list has the list's kind, as the API server omits it.
fn flatten(value: Value, api_version: &str, kind: &str, objects: &mut Vec<RawObject>) -> anyhow::Result<()> {
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
        // The items of a plain List have a kind of their own.
        let api_version = if of.is_empty() { "" } else { &api_version };
        return items.into_iter().try_for_each(|item| flatten(item, api_version, of, objects));
    }
    let name =
        object.get("metadata").and_then(|m| m.get("name")).and_then(Value::as_str).unwrap_or("(unnamed)");
    let title = format!("{kind} {name}");
    objects.push(RawObject { api_version, kind, title, value: Value::Object(object) });
    Ok(())
}
