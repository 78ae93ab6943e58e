//! `kubectl prepull allow`.

use anyhow::{Context, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use kube::core::ObjectMeta;
use prepull_api::credentials::{ALLOW, Consent, SecretUser};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::order::SecretName;
use crate::output::print;
use crate::session::{Ended, Session};

/// The arguments of `allow`.
#[derive(Debug, Args)]
#[command(after_help = "\
The owner of a Secret allows its use, by the annotation prepull.kubeedge.io/allow. What others are allowed stays as it is. It
needs the rights to get and to patch the Secret; its content is not shown. `kubectl annotate --overwrite` takes consent back.

Examples:
  kubectl prepull allow shop/harbor spring-release
  kubectl prepull allow harbor -n shop 'web-*' nightly
  kubectl prepull allow shop/harbor nodeimage/edge-1    # OpenKruise's API, by hand")]
pub(crate) struct AllowArgs {
    /// The Secret: NAMESPACE/NAME, or a name in --namespace.
    #[arg(value_name = "SECRET")]
    secret: SecretName,
    /// Jobs that may use it, with * for any text; nodeimage/NAME for a NodeImage, or * for all.
    #[arg(required = true, value_name = "JOB")]
    users: Vec<String>,
}

pub(crate) async fn run(session: &Session, cluster: &Cluster, args: &AllowArgs) -> anyhow::Result<Ended> {
    let secret = args.secret.in_namespace(cluster.namespace());
    let (namespace, name) = secret.split_once('/').context("the secret has no namespace")?;
    let api: Api<Secret> = Api::namespaced(cluster.client(), namespace);
    let found =
        api.get_metadata_opt(name).await.with_context(|| format!("secret {secret} cannot be read"))?;
    let Some(found) = found else {
        bail!("there is no secret {secret}: --namespace names another namespace")
    };
    let Some(patch) = consent(&found.metadata, &args.users).with_context(|| format!("secret {secret}"))?
    else {
        print(&format!("secret {secret} allows {} already\n", args.users.join(", ")))?;
        return Ok(Ended::Done);
    };
    let changed = api.patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch)).await;
    let changed = changed.with_context(|| format!("secret {secret} cannot be changed"))?;
    let text = changed.annotations().get(ALLOW).cloned().unwrap_or_default();
    session.print(&json!({"secret": secret, "allow": text}), [format!("secret/{name}")], |_| {
        format!("secret {secret} now allows {}\n", crate::screen::tame(&text))
    })?;
    Ok(Ended::Done)
}

/// The patch that adds the users; none if all of them are allowed. It fails if another writer is faster.
fn consent(metadata: &ObjectMeta, users: &[String]) -> anyhow::Result<Option<Value>> {
    let mut annotations = metadata.annotations.clone().unwrap_or_default();
    let before = annotations.get(ALLOW).cloned();
    for user in users {
        let consent = Consent::from_annotations(&annotations);
        let user = user.strip_prefix("nodeimage/").map_or(SecretUser::Job(user), SecretUser::NodeImage);
        if consent.check(user).is_ok() {
            continue;
        }
        let Some(value) = consent.extended_by(user) else {
            let refusal = consent.check(user).err().map(|refusal| refusal.to_string()).unwrap_or_default();
            bail!("{refusal}. Correct it first: kubectl edit secret");
        };
        annotations.insert(ALLOW.to_owned(), value);
        // A name that is none would make the whole list unreadable.
        if let Err(refusal) = Consent::from_annotations(&annotations).check(user) {
            bail!(crate::problem::WrongUsage(refusal.to_string()));
        }
    }
    let value = annotations.get(ALLOW).filter(|value| Some(*value) != before.as_ref());
    let version = metadata.resource_version.as_ref();
    Ok(value.map(|value| json!({"metadata": {"resourceVersion": version, "annotations": {ALLOW: value}}})))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn after(before: Option<&str>, users: &[&str]) -> Result<Option<String>, String> {
        let annotations = before.map(|value| [(ALLOW.to_owned(), value.to_owned())].into());
        let metadata =
            ObjectMeta { annotations, resource_version: Some("7".to_owned()), ..ObjectMeta::default() };
        let users: Vec<_> = users.iter().map(ToString::to_string).collect();
        let patch = consent(&metadata, &users).map_err(|error| error.to_string())?;
        if let Some(patch) = &patch {
            assert_eq!(patch["metadata"]["resourceVersion"], "7");
        }
        Ok(patch.map(|patch| patch["metadata"]["annotations"][ALLOW].as_str().unwrap().to_owned()))
    }

    #[test]
    fn consent_is_added_and_never_taken_away() {
        for (before, users, value) in [
            (None, &["web"][..], Some("web")),
            (Some("a, b-*"), &["web", "nightly"], Some("a, b-*,web,nightly")),
            (Some("a"), &["nodeimage/edge-1"], Some("a,nodeimage/edge-1")),
            (Some("web-*"), &["web-v2"], None),
            (Some("*"), &["web"], None),
            (None, &["web-*"], Some("web-*")),
        ] {
            assert_eq!(after(before, users).unwrap().as_deref(), value, "{before:?} {users:?}");
        }
    }

    #[test]
    fn an_unreadable_consent_is_not_extended() {
        assert!(after(Some("a;b"), &["web"]).unwrap_err().contains("Correct it first"));
        assert!(after(Some("a"), &["Web Release"]).unwrap_err().contains("which is no name"));
    }
}
