//! The check that Kruise's kinds are ours to serve: two controllers would overwrite each other's objects.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::{Client, Error, ResourceExt};
use prepull_api::crd::kruise::{CONTROLLER_LEASE as LEASE, PART_OF, PART_OF_LABEL, crds, running_controller};

use crate::kube_api::cluster::read_with_retry;

#[derive(Debug, thiserror::Error)]
pub(crate) enum KruiseRefusal {
    #[error(
        "--enable-kruise-api: the definition {0} is missing; apply manifests/kruise/crds.yaml, or leave the flag out"
    )]
    Missing(String),
    /// The definition of a kind belongs to another controller.
    #[error(
        "--enable-kruise-api: the definition {name} is not of cloudcore-prepull (it has no label {PART_OF_LABEL}={PART_OF}{hint}): another controller, most likely Kruise itself, owns it; leave the flag out, or remove Kruise and apply manifests/kruise/crds.yaml"
    )]
    Foreign {
        name: String,
        /// The Helm release of the definition; may be empty.
        hint: String,
    },
    #[error(
        "--enable-kruise-api: Kruise's own controller is running (the Lease {namespace}/{name} is held by {holder}): both would write the same objects; leave the flag out, or stop Kruise first",
        namespace = LEASE.0, name = LEASE.1
    )]
    Running {
        /// holderIdentity of the Lease.
        holder: String,
    },
    /// The ClusterRole of Kruise's API is missing.
    #[error(
        "--enable-kruise-api: cloudcore-prepull may not read {what} ({said}); apply manifests/kruise/rbac.yaml"
    )]
    Forbidden { what: String, said: String },
}

/// Checks that the kinds are ours to serve. Waits while the API server is unavailable.
pub(crate) async fn check_ownership(client: &Client, now: Timestamp) -> Result<(), KruiseRefusal> {
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in crds() {
        let name = crd.name_any();
        let what = format!("the definition {name}");
        let found = require_allowed(
            &what,
            read_with_retry(&what, |_| None, || refusal_as_answer(definitions.get_opt(&name))).await,
        )?;
        let Some(found) = found else { return Err(KruiseRefusal::Missing(name)) };
        if found.labels().get(PART_OF_LABEL).map(String::as_str) != Some(PART_OF) {
            let hint = found.annotations().get("meta.helm.sh/release-name");
            let hint =
                hint.map(|release| format!("; it is of the Helm release {release}")).unwrap_or_default();
            return Err(KruiseRefusal::Foreign { name, hint });
        }
    }
    let leases = Api::<Lease>::namespaced(client.clone(), LEASE.0);
    let what = format!("the Lease {}/{}", LEASE.0, LEASE.1);
    let lease = require_allowed(
        &what,
        read_with_retry(&what, |_| None, || refusal_as_answer(leases.get_opt(LEASE.1))).await,
    )?;
    let holder = lease.as_ref().and_then(|lease| running_controller(lease, now));
    holder.map_or(Ok(()), |holder| Err(KruiseRefusal::Running { holder }))
}

/// A refusal is an answer; everything else passes.
async fn refusal_as_answer<T>(
    read: impl Future<Output = Result<T, Error>>,
) -> Result<Result<T, String>, Error> {
    match read.await {
        Ok(found) => Ok(Ok(found)),
        Err(Error::Api(answer)) if matches!(answer.code, 401 | 403) => Ok(Err(answer.message)),
        Err(error) => Err(error),
    }
}

fn require_allowed<T>(what: &str, answer: Result<T, String>) -> Result<T, KruiseRefusal> {
    answer.map_err(|said| KruiseRefusal::Forbidden { what: what.to_owned(), said })
}
