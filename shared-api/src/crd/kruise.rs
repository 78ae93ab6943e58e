//! OpenKruise's image API: ImagePullJob, ImageListPullJob and NodeImage of the group `apps.kruise.io`.
//!
//! Names, defaults and meaning of the fields are those of Kruise 1.9. The types accept any value of the right JSON type.
//! Whether the value is valid is decided by cloudcore's rules, which report it in the status; on API servers that
//! support CEL, the CEL rules refuse the same mistakes at once. `v1alpha1` and `v1beta1` have the same schema; `v1beta1`
//! is stored, as by Kruise.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::CustomResourceExt;

mod list_job;
mod node_image;
mod pull_job;
mod schema;

pub use list_job::{
    FailedImageStatus, ImageListPullJob, ImageListPullJobSpec, ImageListPullJobStatus, MAX_IMAGES_IN_LIST,
};
pub use node_image::{
    ImageSpec, ImageStatus, ImageTagPullPolicy, ImageTagSpec, ImageTagStatus, MAX_IMAGES, MAX_TAGS,
    NodeImage, NodeImageSpec, NodeImageStatus, PullPhase, SecretObject,
};
pub use pull_job::{
    CompletionPolicy, ImagePullJob, ImagePullJobSpec, ImagePullJobStatus, NodeSelector, PodSelector,
    PullJobTemplate, PullLimits, SandboxConfig,
};

/// Kruise's API group.
pub const GROUP: &str = "apps.kruise.io";
/// Version that is stored, and that cloudcore uses.
pub const VERSION: &str = "v1beta1";
/// Label of our definitions, with the value [`PART_OF`]. A definition of these kinds without it belongs to another
/// controller.
pub const PART_OF_LABEL: &str = "app.kubernetes.io/part-of";
/// Value of [`PART_OF_LABEL`] on our definitions.
pub const PART_OF: &str = "image-prepull";

/// Where Kruise's own controller has its Lease, if it runs: namespace and name.
pub const CONTROLLER_LEASE: (&str, &str) = ("kruise-system", "kruise-manager");
/// A Lease that was renewed less than this ago is alive: Kruise renews it every few seconds.
const ALIVE: SignedDuration = SignedDuration::from_secs(60);

/// Who holds the Lease of Kruise's own controller, if that runs.
pub fn running_controller(lease: &Lease, now: Timestamp) -> Option<String> {
    let spec = lease.spec.as_ref()?;
    let is_alive = now.duration_since(spec.renew_time.as_ref()?.0) < ALIVE;
    spec.holder_identity.clone().filter(|holder| is_alive && !holder.is_empty())
}

/// The definitions of ImagePullJob, ImageListPullJob and NodeImage.
pub fn crds() -> [CustomResourceDefinition; 3] {
    [ImagePullJob::crd(), ImageListPullJob::crd(), NodeImage::crd()].map(|mut crd| {
        crd.metadata.labels = Some([(PART_OF_LABEL.to_owned(), PART_OF.to_owned())].into_iter().collect());
        for version in &mut crd.spec.versions {
            if let Some(root) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut())
            {
                schema::complete_schema(root);
            }
        }
        let mut old = crd.spec.versions[0].clone();
        "v1alpha1".clone_into(&mut old.name);
        old.storage = false;
        crd.spec.versions.insert(0, old);
        crd
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_have_one_schema_and_our_label() {
        for crd in crds() {
            let versions: Vec<_> =
                crd.spec.versions.iter().map(|v| (v.name.as_str(), v.served, v.storage)).collect();
            assert_eq!(versions, [("v1alpha1", true, false), ("v1beta1", true, true)]);
            assert_eq!(crd.spec.versions[0].schema, crd.spec.versions[1].schema);
            assert_eq!(crd.metadata.labels.unwrap()[PART_OF_LABEL], PART_OF);
        }
    }

    #[test]
    fn printer_columns_are_those_of_kruise() {
        let columns = |crd: &CustomResourceDefinition| {
            let columns = crd.spec.versions[0].additional_printer_columns.clone().unwrap();
            columns.into_iter().map(|column| column.name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            crds().each_ref().map(columns),
            [
                "TOTAL ACTIVE SUCCEED FAILED AGE MESSAGE",
                "TOTAL SUCCEEDED COMPLETED AGE",
                "DESIRED PULLING SUCCEED FAILED AGE"
            ]
        );
    }
}
