//! The ImagePrePullReport object around a report's content.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use kube::api::TypeMeta;
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::{ImagePrePullReport, JOB_NAME_LABEL, JOB_UID_LABEL, ReportBody};
use prepull_api::task::JobUid;
use serde::Serialize;

/// Bytes of the job's name in the name of a report: with a part of the UID and the index it stays below 253 bytes.
const NAME_LENGTH: usize = 220;
/// The limit for the value of a label, in bytes.
const LABEL_LENGTH: usize = 63;

/// The name of a report. It contains a part of the UID, because the reports of a deleted job may still be there when
/// another job of its name is created.
pub(crate) fn report_name(job: &JobUid, name: &str, index: u32) -> String {
    let name = name.get(..NAME_LENGTH).unwrap_or(name).trim_end_matches(['.', '-']);
    let uid: String = job.0.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
    format!("{name}-{}-{index}", uid.to_lowercase())
}

/// The job that owns a report, and its index: of an object that is no report of ours, none that exists.
pub(crate) fn report_id(metadata: &ObjectMeta) -> (JobUid, u32) {
    let owner = metadata.owner_references.iter().flatten().next();
    let name = metadata.name.as_deref().unwrap_or_default();
    let index = name.rsplit_once('-').and_then(|(_, index)| index.parse().ok());
    (JobUid(owner.map(|owner| owner.uid.clone()).unwrap_or_default()), index.unwrap_or(u32::MAX))
}

/// An [`ImagePrePullReport`] as it is written, without a copy of its content.
#[derive(Serialize)]
pub(crate) struct ReportObject<'a> {
    #[serde(flatten)]
    types: TypeMeta,
    metadata: ObjectMeta,
    #[serde(flatten)]
    body: &'a ReportBody,
}

/// A report that is owned by its job, and to be found by two labels.
pub(crate) fn report_object<'a>(
    job: &JobUid,
    name: &str,
    version: Option<String>,
    body: &'a ReportBody,
) -> ReportObject<'a> {
    let mut labels = BTreeMap::from([(JOB_UID_LABEL.to_owned(), job.0.clone())]);
    if name.len() <= LABEL_LENGTH {
        labels.insert(JOB_NAME_LABEL.to_owned(), name.to_owned());
    }
    let owner = OwnerReference {
        api_version: ImagePrePullJob::api_version(&()).into_owned(),
        kind: ImagePrePullJob::kind(&()).into_owned(),
        name: name.to_owned(),
        uid: job.0.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    ReportObject {
        types: ImagePrePullReport::type_meta(),
        metadata: ObjectMeta {
            name: Some(report_name(job, name, body.index)),
            labels: Some(labels),
            owner_references: Some(vec![owner]),
            resource_version: version,
            ..ObjectMeta::default()
        },
        body,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid() -> JobUid {
        JobUid("0f7c3a51-8a5c-4a3e-9d0b-111111111111".to_owned())
    }

    #[test]
    fn a_report_has_valid_name_and_owner() {
        assert_eq!(report_name(&uid(), "nginx", 12), "nginx-0f7c3a51-12");
        let long = report_name(&uid(), &format!("{}.{}", "a".repeat(219), "b".repeat(30)), u32::MAX);
        assert!(long.len() <= 253 && !long.contains(".-"), "{long}");
        let body = ReportBody { job_name: "nginx".to_owned(), index: 3, ..ReportBody::default() };
        let json = serde_json::to_value(report_object(&uid(), "nginx", Some("7".to_owned()), &body)).unwrap();
        assert_eq!(json["kind"], "ImagePrePullReport");
        assert_eq!(json["apiVersion"], "operations.kubeedge.io/v1alpha2");
        assert_eq!(json["metadata"]["ownerReferences"][0]["uid"], uid().0);
        assert_eq!(json["metadata"]["resourceVersion"], "7");
        assert_eq!(json["index"], 3);
        let written = report_object(&uid(), "nginx", None, &body);
        assert_eq!(report_id(&written.metadata), (uid(), 3));
    }
}
