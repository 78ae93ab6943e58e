//! Applies YAML with several documents and Lists.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::discovery::{Scope, pinned_kind};
use serde_json::Value;

use super::{Cluster, settled};

impl Cluster {
    /// Applies YAML like `kubectl apply`: creates missing objects and merges into existing ones. We don't use
    /// server-side apply, because it rejects unknown fields, such as CEL rules before 1.25. An object without a
    /// namespace goes to `default`.
    pub async fn apply(&self, yaml: &str) -> Result<()> {
        for object in documents(yaml)? {
            self.apply_object(object).await?;
        }
        Ok(())
    }

    /// Applies a file.
    pub async fn apply_file(&self, path: &Path) -> Result<()> {
        let yaml =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        self.apply(&yaml).await.with_context(|| format!("cannot apply {}", path.display()))
    }

    async fn apply_object(&self, object: Value) -> Result<()> {
        let object: DynamicObject = serde_json::from_value(object).context("not a Kubernetes object")?;
        let types = object.types.clone().context("an object has neither apiVersion nor kind")?;
        let name = object.metadata.name.clone().with_context(|| format!("a {} has no name", types.kind))?;
        let kind = GroupVersionKind::try_from(&types)?;
        let (resource, scope) = self.kind(&kind).await?;
        let api: Api<DynamicObject> = match scope {
            Scope::Cluster => Api::all_with(self.client(), &resource),
            Scope::Namespaced => {
                let namespace = object.metadata.namespace.as_deref().unwrap_or("default");
                Api::namespaced_with(self.client(), namespace, &resource)
            }
        };
        let applied = match api.create(&PostParams::default(), &object).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                api.patch(&name, &PatchParams::default(), &Patch::Merge(&object)).await
            }
            created => created,
        };
        applied.with_context(|| format!("cannot apply {} {name}", types.kind))?;
        Ok(())
    }

    /// Waits until a kind is served, which takes a moment after its definition is established.
    async fn kind(&self, kind: &GroupVersionKind) -> Result<(ApiResource, Scope)> {
        let (resource, capabilities) =
            settled(&format!("{}/{} is served", kind.group, kind.kind), async || {
                Ok(pinned_kind(&self.client(), kind).await?)
            })
            .await?;
        Ok((resource, capabilities.scope))
    }
}

/// The objects of a YAML text: documents, and the items of Lists.
pub fn documents(yaml: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).context("not YAML")?;
    let mut objects = Vec::new();
    for mut document in documents {
        match document.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => objects.extend(items),
            _ if document.is_null() => {}
            _ => objects.push(document),
        }
    }
    Ok(objects)
}

/// The YAML files of a directory of the workspace, sorted by name.
pub(super) fn manifests(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_empty_string_is_not_null() {
        let labels = &documents("labels: {edge: \"\", other: ''}\n").unwrap()[0]["labels"];
        assert_eq!(*labels, serde_json::json!({"edge": "", "other": ""}));
    }

    #[test]
    fn documents_and_lists_are_flattened() {
        let text = "kind: A\n---\nkind: List\nitems:\n- kind: B\n- kind: C\n---\n---\nkind: D\n";
        let kinds: Vec<_> =
            documents(text).unwrap().iter().map(|o| o["kind"].as_str().unwrap().to_owned()).collect();
        assert_eq!(kinds, ["A", "B", "C", "D"]);
    }
}
