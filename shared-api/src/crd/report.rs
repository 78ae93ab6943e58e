//! ImagePrePullReport: the records of a job's nodes in objects of bounded size, as EndpointSlices are to a Service.

use std::borrow::Cow;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceColumnDefinition, CustomResourceDefinition, CustomResourceDefinitionNames,
    CustomResourceDefinitionSpec, CustomResourceDefinitionVersion, CustomResourceValidation, JSONSchemaProps,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::TypeMeta;
use kube::core::schema::{OptionalEnum, OptionalIntOrString, StructuralSchemaRewriter};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use schemars::transform::AddNullable;
use serde::{Deserialize, Serialize};

use super::GROUP;
use super::defaults::{remove_all_defaults, replace_unsigned_formats};
use super::status::{NodeStatus, Summary};

/// Most nodes in one report. Reports of nodes with many images hold fewer, to stay well below etcd's limit of 1.5 MiB
/// for an object.
pub const MAX_NODES_IN_REPORT: usize = 250;
/// Label of a report: the UID of its job.
pub const JOB_UID_LABEL: &str = "operations.kubeedge.io/job-uid";
/// Label of a report: the name of its job, if that fits into a label (63 bytes).
pub const JOB_NAME_LABEL: &str = "operations.kubeedge.io/job-name";

/// The state of some nodes of an ImagePrePullJob. The reports of a job together hold all of its nodes, each node once.
/// Cluster-scoped, owned by the job, and written by cloudcore alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePrePullReport {
    /// apiVersion and kind. An object that is sent needs [`Self::type_meta`].
    #[serde(flatten)]
    pub types: Option<TypeMeta>,
    /// Name, labels, and the job as the owner.
    pub metadata: ObjectMeta,
    /// Content of the report.
    #[serde(flatten)]
    pub body: ReportBody,
}

/// The content of a report.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportBody {
    /// Name of the job.
    #[serde(default)]
    pub job_name: String,
    /// Number of this report among those of the job, counted from 0.
    #[serde(default)]
    pub index: u32,
    /// How many rounds of `spec.retry` had begun when this was written: if it is fewer than `status.retry` of the job, the
    /// nodes in it are still to begin the last one. Reports of version 0.1 do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<u32>,
    /// How many re-checks had begun when this was written, as `retry` has it of the rounds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub recheck: u32,
    /// Whether what had begun last was a re-check, and not a round of `spec.retry`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub rechecking: bool,
    /// `status.firstAttempt` of the job when this was written. A report with another number than the job has is of an
    /// earlier run: its nodes don't count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_attempt: Option<u32>,
    /// Counts of the nodes in this report by phase.
    #[serde(default)]
    pub summary: Summary,
    /// Records of the nodes, in the order of the job.
    #[serde(default)]
    pub node_status: Vec<NodeStatus>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(value: &bool) -> bool {
    !value
}

impl ImagePrePullReport {
    /// apiVersion and kind of a report.
    pub fn type_meta() -> TypeMeta {
        TypeMeta::resource::<Self>()
    }
}

impl kube::Resource for ImagePrePullReport {
    type DynamicType = ();
    type Scope = kube::core::ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "ImagePrePullReport".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

const VERSION: &str = "v1alpha2";
const PLURAL: &str = "imageprepullreports";

/// The definition of ImagePrePullReport.
pub fn crd() -> CustomResourceDefinition {
    let column = |name: &str, type_: &str, path: &str| CustomResourceColumnDefinition {
        name: name.to_owned(),
        type_: type_.to_owned(),
        json_path: path.to_owned(),
        ..CustomResourceColumnDefinition::default()
    };
    CustomResourceDefinition {
        metadata: ObjectMeta { name: Some(format!("{PLURAL}.{GROUP}")), ..ObjectMeta::default() },
        spec: CustomResourceDefinitionSpec {
            group: GROUP.to_owned(),
            names: CustomResourceDefinitionNames {
                kind: "ImagePrePullReport".to_owned(),
                plural: PLURAL.to_owned(),
                singular: Some("imageprepullreport".to_owned()),
                short_names: Some(vec!["ippr".to_owned()]),
                ..CustomResourceDefinitionNames::default()
            },
            scope: "Cluster".to_owned(),
            versions: vec![CustomResourceDefinitionVersion {
                name: VERSION.to_owned(),
                served: true,
                storage: true,
                schema: Some(CustomResourceValidation { open_api_v3_schema: Some(schema()) }),
                additional_printer_columns: Some(vec![
                    column("Job", "string", ".jobName"),
                    column("Nodes", "integer", ".summary.desired"),
                    column("Successful", "integer", ".summary.successful"),
                    column("Failed", "integer", ".summary.failure"),
                    column("Unknown", "integer", ".summary.unknown"),
                    column("Age", "date", ".metadata.creationTimestamp"),
                ]),
                ..CustomResourceDefinitionVersion::default()
            }],
            ..CustomResourceDefinitionSpec::default()
        },
        ..CustomResourceDefinition::default()
    }
}

/// The schema as kube's derive would generate it. The API server adds apiVersion, kind and metadata.
fn schema() -> JSONSchemaProps {
    let generator = SchemaSettings::openapi3()
        .with(|settings| {
            settings.inline_subschemas = true;
            settings.meta_schema = None;
        })
        .with_transform(AddNullable::default())
        .with_transform(StructuralSchemaRewriter)
        .with_transform(OptionalEnum)
        .with_transform(OptionalIntOrString)
        .into_generator();
    let json = serde_json::to_value(generator.into_root_schema_for::<ReportBody>()).unwrap_or_default();
    let mut schema: JSONSchemaProps = serde_json::from_value(json).unwrap_or_default();
    remove_all_defaults(&mut schema);
    replace_unsigned_formats(&mut schema);
    schema.description = Some(
        "The state of some nodes of an ImagePrePullJob. The reports of a job together hold all of its nodes, each node once."
            .to_owned(),
    );
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_has_every_field_of_a_report() {
        let crd = crd();
        let schema = crd.spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap();
        let fields: Vec<_> = schema.properties.unwrap().into_keys().collect();
        assert_eq!(
            fields,
            ["firstAttempt", "index", "jobName", "nodeStatus", "recheck", "rechecking", "retry", "summary"]
        );
    }

    #[test]
    fn the_body_of_a_report_is_flattened_into_the_object() {
        let report = ImagePrePullReport {
            body: ReportBody { job_name: "j".to_owned(), index: 2, ..ReportBody::default() },
            ..ImagePrePullReport::default()
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((&json["jobName"], &json["index"]), (&"j".into(), &2.into()));
    }
}
