//! `kubectl prepull allow`.

use std::collections::BTreeMap;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use kube::core::ObjectMeta;
use prepull_api::credentials::{ALLOW, ALLOW_HOSTS, Consent, RegistryPattern, SecretUser};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::order::SecretName;
use crate::problem::{self, MissingRight, WrongUsage};
use crate::screen::sanitize_line;
use crate::session::{CommandOutcome, Session};

/// The arguments of `allow`.
#[derive(Debug, Args)]
#[command(after_help = "\
The owner of a Secret allows its use, by the annotation prepull.kubeedge.io/allow. What others are allowed stays as it is. It
needs the rights to get and to patch the Secret; its content is not shown. `kubectl annotate --overwrite` takes consent back.

Examples:
  kubectl prepull allow shop/harbor spring-release
  kubectl prepull allow harbor -n shop 'web-*' nightly
  kubectl prepull allow shop/harbor nodeimage/edge-1    # OpenKruise's API, by hand
  kubectl prepull allow shop/wide --host harbor.example    # which entries with * in their host may serve")]
pub(crate) struct AllowArgs {
    /// The Secret: NAMESPACE/NAME, or a name in --namespace.
    #[arg(value_name = "SECRET")]
    secret: SecretName,
    /// Jobs that may use it, with * for any text; nodeimage/NAME for a NodeImage, or * for all.
    #[arg(required_unless_present = "hosts", value_name = "JOB")]
    users: Vec<String>,
    /// A host that the Secret's entries with * in their host may serve; may be repeated.
    #[arg(long = "host", value_name = "HOST")]
    hosts: Vec<String>,
}

pub(crate) async fn run(
    session: &Session,
    cluster: &Cluster,
    args: &AllowArgs,
) -> anyhow::Result<CommandOutcome> {
    let secret = args.secret.in_namespace(cluster.namespace());
    let (namespace, name) = secret.split_once('/').context("the secret has no namespace")?;
    let api: Api<Secret> = Api::namespaced(cluster.client(), namespace);
    let found = api.get_metadata_opt(name).await.with_context(|| format!("secret {secret} cannot be read"));
    let found = found.map_err(|error| of_owner(error, &secret))?;
    let Some(found) = found else {
        bail!("there is no secret {secret}: --namespace names another namespace")
    };
    let patch = consent_patch(&found.metadata, &args.users, &args.hosts);
    let patch = patch.with_context(|| format!("secret {secret}"))?;
    let is_allowed = patch.is_none();
    let after = match patch {
        None => found,
        Some(patch) => {
            let changed = api.patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch)).await;
            let changed = changed.with_context(|| format!("secret {secret} cannot be changed"));
            changed.map_err(|error| of_owner(error, &secret))?
        }
    };
    let text = |key| after.annotations().get(key).cloned().unwrap_or_default();
    let (users, hosts) = (text(ALLOW), text(ALLOW_HOSTS));
    let object = json!({"secret": secret, "allow": users, "allowHosts": hosts});
    session.print(&object, [format!("secret/{name}")], |_| {
        if is_allowed {
            let asked: Vec<_> = args.users.iter().chain(&args.hosts).map(String::as_str).collect();
            return format!("secret {secret} allows {} already\n", asked.join(", "));
        }
        let at =
            if hosts.is_empty() { String::new() } else { format!(", by * at {}", sanitize_line(&hosts)) };
        let users = if users.is_empty() { "no job".to_owned() } else { sanitize_line(&users) };
        format!("secret {secret} now allows {users}{at}\n")
    })?;
    Ok(CommandOutcome::Done)
}

/// No role of ours reads or changes a Secret: its owner allows its use.
fn of_owner(error: anyhow::Error, secret: &str) -> anyhow::Error {
    match problem::server_answer(&error).and_then(MissingRight::from_answer) {
        Some(right) => anyhow!(
            "{right}. That is for the owner of secret {secret}, who may get and patch it: have them run this command"
        ),
        None => error,
    }
}

/// The patch that adds the users and the hosts; none if all of them are allowed. It fails if another writer is faster.
fn consent_patch(metadata: &ObjectMeta, users: &[String], hosts: &[String]) -> anyhow::Result<Option<Value>> {
    let mut annotations = metadata.annotations.clone().unwrap_or_default();
    let before = annotations.clone();
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
            bail!(WrongUsage(refusal.to_string()));
        }
    }
    for host in hosts {
        RegistryPattern::parse(host).map_err(|error| WrongUsage(format!("--host {host}: {error}")))?;
        let extended = Consent::from_annotations(&annotations).extended_to(host);
        let corrected = |error| anyhow!("{error}. Correct it first: kubectl edit secret");
        if let Some(value) = extended.map_err(corrected)? {
            annotations.insert(ALLOW_HOSTS.to_owned(), value);
        }
    }
    let changed: BTreeMap<_, _> =
        annotations.into_iter().filter(|(key, value)| before.get(key) != Some(value)).collect();
    let version = metadata.resource_version.as_ref();
    let patch = || json!({"metadata": {"resourceVersion": version, "annotations": changed}});
    Ok((!changed.is_empty()).then(patch))
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
        let patch = consent_patch(&metadata, &users, &[]).map_err(|error| error.to_string())?;
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
    fn hosts_are_added_to_those_there() {
        let after = |before: &str, hosts: &[&str]| {
            let annotations = Some([(ALLOW_HOSTS.to_owned(), before.to_owned())].into());
            let hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
            let patch = consent_patch(&ObjectMeta { annotations, ..ObjectMeta::default() }, &[], &hosts);
            let value =
                |patch: Value| patch["metadata"]["annotations"][ALLOW_HOSTS].as_str().unwrap().to_owned();
            patch.map(|patch| patch.map(value)).map_err(|error| error.to_string())
        };
        assert_eq!(after("", &["a.example"]).unwrap().unwrap(), "a.example");
        assert_eq!(
            after("a.example", &["*.b.example", "a.example"]).unwrap().unwrap(),
            "a.example,*.b.example"
        );
        assert_eq!(after("a.example b.example", &["b.example"]).unwrap(), None);
        assert!(after("", &["c:x"]).unwrap_err().contains("--host c:x"));
        assert!(after("c:x", &["a.example"]).unwrap_err().contains("Correct it first"));
    }

    #[test]
    fn an_unreadable_consent_is_not_extended() {
        assert!(after(Some("a;b"), &["web"]).unwrap_err().contains("Correct it first"));
        assert!(after(Some("a"), &["Web Release"]).unwrap_err().contains("which is no name"));
    }
}
