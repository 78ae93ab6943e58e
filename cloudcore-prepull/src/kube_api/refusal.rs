//! Requests that the API server refuses until an operator acts: the problem with its remedy, and a log that does not
//! repeat it every few seconds.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kube::core::Status;
use kube::{Error, Resource};
use parking_lot::Mutex;
use prepull_api::crd::kruise;
use prepull_program::errors::with_causes;
use tracing::{error, warn};

/// The same problem is logged once in this time, although the request is retried every few seconds.
const REPEAT: Duration = Duration::from_secs(60);

/// Fields of an object that is refused that one message names.
const NAMED_FIELDS: usize = 3;

/// What is wrong, and the remedy, if retrying does not help by itself: the definition of `K` is missing or refuses the
/// object, or it is too large, or a right to it is missing, or the credentials are not accepted. `None` for every error that
/// may pass.
pub(crate) fn explain_error<K: Resource<DynamicType = ()>>(error: &Error) -> Option<String> {
    let Error::Api(answer) = error else { return None };
    if is_unserved(answer) {
        let (kind, group, version) = (K::plural(&()), K::group(&()), K::version(&()));
        return Some(format!(
            "the definition {kind}.{group} is missing, or has no version {version}: \
             kubectl apply -f {}",
            manifests_path::<K>()
        ));
    }
    if answer.code == 401 {
        return Some(
            "the API server does not accept the credentials of --kubeconfig, or of the pod's ServiceAccount: they are \
             wrong or have expired"
                .to_owned(),
        );
    }
    if is_too_large(error) {
        return Some(
            "the object is too large for the API server or for etcd: a new job with fewer images, or with shorter names, is smaller"
                .to_owned(),
        );
    }
    if let Some(causes) = invalid_fields(answer) {
        let (kind, group) = (K::plural(&()), K::group(&()));
        return Some(format!(
            "the definition {kind}.{group} does not accept what is written ({causes}): it is of another release: \
             kubectl apply -f {}",
            manifests_path::<K>()
        ));
    }
    missing_right(answer).map(|right| {
        let folder = if is_kruise::<K>() { "kruise" } else { "cloudcore-prepull" };
        format!("a right is missing: {right}: kubectl apply -f manifests/{folder}/rbac.yaml")
    })
}

/// The fields that the definition of a kind refuses, and why. A test of a patch that fails is a 422 as well, but names no
/// field.
fn invalid_fields(answer: &Status) -> Option<String> {
    let causes = answer.details.as_ref().filter(|_| answer.code == 422).map(|details| &details.causes)?;
    let named = causes.iter().filter(|cause| !cause.field.is_empty());
    let named: Vec<_> =
        named.take(NAMED_FIELDS).map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
    (!named.is_empty()).then(|| named.join("; "))
}

/// Where the definition of a kind is.
fn manifests_path<K: Resource<DynamicType = ()>>() -> &'static str {
    if is_kruise::<K>() { "manifests/kruise/crds.yaml" } else { "manifests/crds" }
}

/// Whether the manifests of a kind are in manifests/kruise. Pods are only read for Kruise's podSelectors.
fn is_kruise<K: Resource<DynamicType = ()>>() -> bool {
    K::group(&()) == kruise::GROUP || K::kind(&()) == "Pod"
}

/// Whether a 404 means that the kind is not served. If only the object is missing, the answer names it.
pub(crate) fn is_unserved(answer: &Status) -> bool {
    answer.code == 404 && answer.details.as_ref().is_none_or(|details| details.name.is_empty())
}

/// Whether a write was refused because the object would be too large: by the API server, or by etcd or its client, which the
/// API server reports as a fault of its own.
pub(crate) fn is_too_large(error: &Error) -> bool {
    let Error::Api(answer) = error else { return false };
    let is_etcds = |words: &str| answer.message.contains(words);
    answer.code == 413 || is_etcds("request is too large") || is_etcds("message larger than max")
}

/// The RBAC part of a 403: `User "…" cannot list resource "…" in API group "…" at the cluster scope`. Admission also
/// answers 403, about one object and for reasons of its own.
fn missing_right(answer: &Status) -> Option<&str> {
    let refused = answer.message.get(answer.message.find("User \"")?..)?;
    (answer.code == 403 && refused.contains("\" cannot ")).then_some(refused)
}

/// Logs failed requests that are retried: a problem that lasts once a minute, any other failure each time.
#[derive(Debug, Default)]
pub(crate) struct FailureLog(Mutex<HashMap<&'static str, (Instant, String)>>);

impl FailureLog {
    /// Logs one failure. `problem` is the result of [`explain_error`], `operation` a verb such as `read`.
    pub(crate) fn record(
        &self,
        operation: &'static str,
        object: &str,
        problem: Option<&str>,
        error: &(dyn std::error::Error + 'static),
    ) {
        let Some(problem) = problem else {
            return warn!(operation, object, error = with_causes(error), "a request failed; retrying");
        };
        if self.is_due(operation, problem, Instant::now()) {
            error!(
                operation,
                object, problem, "the API server refused this request, and maybe others like it; retrying"
            );
        }
    }

    /// Whether to log this problem of an operation now: it is a new one, or a minute has passed.
    pub(crate) fn is_due(&self, operation: &'static str, problem: &str, now: Instant) -> bool {
        let mut logged = self.0.lock();
        let is_due = logged.get(operation).is_none_or(|(at, last)| last != problem || now >= *at + REPEAT);
        if is_due {
            logged.insert(operation, (now, problem.to_owned()));
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::report::ImagePrePullReport;
    use serde_json::json;

    use super::*;

    fn explained(status: serde_json::Value) -> Option<String> {
        let status: Status = serde_json::from_value(status).unwrap();
        explain_error::<ImagePrePullReport>(&Error::Api(status.boxed()))
    }

    #[test]
    fn distinguishes_missing_definitions_from_missing_objects() {
        // As kube makes it of "404 page not found", and as newer servers say it.
        for answer in [
            json!({ "code": 404, "message": "404 page not found", "reason": "Failed to parse error data" }),
            json!({ "code": 404, "message": "the server could not find the requested resource",
                "reason": "NotFound", "details": {} }),
        ] {
            let text = explained(answer).unwrap();
            assert!(text.contains("imageprepullreports.operations.kubeedge.io is missing"), "{text}");
            assert!(text.contains("v1alpha2: kubectl apply -f manifests/crds"), "{text}");
        }
        let object = json!({ "code": 404, "reason": "NotFound", "message": "\"a-1\" not found",
            "details": { "name": "a-1", "kind": "imageprepullreports" } });
        assert_eq!(explained(object), None);
    }

    #[test]
    fn a_denial_by_admission_is_no_missing_right() {
        let answer = |message: &str| explained(json!({ "code": 403, "message": message }));
        let text = answer(
            "imageprepullreports.operations.kubeedge.io \"a-1\" is forbidden: User \"u\" cannot update \
             resource \"imageprepullreports\" in API group \"operations.kubeedge.io\" at the cluster scope",
        );
        let text = text.unwrap();
        assert!(text.starts_with("a right is missing: User \"u\" cannot update resource"), "{text}");
        assert!(text.ends_with("kubectl apply -f manifests/cloudcore-prepull/rbac.yaml"), "{text}");
        assert_eq!(answer("admission webhook \"w\" denied the request: not on a Sunday"), None);
        assert_eq!(answer("pods \"a\" is forbidden: exceeded quota: User \"u\" has too many"), None);
    }

    #[test]
    fn distinguishes_refused_fields_from_patch_conflicts() {
        let refused =
            explained(json!({ "code": 422, "reason": "Invalid", "message": "… is invalid", "details": {
            "name": "a", "causes": [{ "reason": "FieldValueNotSupported", "field": "status.phase",
                "message": "Unsupported value: \"New\"" }] } }));
        let text = refused.unwrap();
        assert!(text.contains("(status.phase: Unsupported value: \"New\")"), "{text}");
        assert!(text.ends_with("kubectl apply -f manifests/crds"), "{text}");
        let raced = json!({ "code": 422, "reason": "Invalid", "details": {},
            "message": "the server rejected our request due to an error in our request" });
        assert_eq!(explained(raced), None);
    }

    #[test]
    fn etcds_words_mean_too_large() {
        for (answer, expected) in [
            (json!({ "code": 413, "message": "Request entity too large: limit is 3145728" }), true),
            (json!({ "code": 500, "message": "etcdserver: request is too large" }), true),
            (json!({ "code": 500, "message": "etcdserver: leader changed" }), false),
        ] {
            let text = explained(answer.clone());
            assert_eq!(text.is_some_and(|text| text.contains("too large for")), expected, "{answer}");
        }
    }

    #[test]
    fn rejected_credentials_are_explained() {
        let text = explained(json!({ "code": 401, "message": "Unauthorized" })).unwrap();
        assert!(text.contains("the credentials of --kubeconfig"), "{text}");
    }

    #[test]
    fn a_cause_is_not_repeated() {
        let inner = anyhow::anyhow!("refused").context("client error").context("ServiceError: client error");
        assert_eq!(with_causes(inner.as_ref()), "ServiceError: client error: refused");
    }

    #[test]
    fn problems_are_logged_once_a_minute() {
        let (log, now) = (FailureLog::default(), Instant::now());
        assert!(log.is_due("reports", "a", now));
        assert!(!log.is_due("reports", "a", now + REPEAT / 2));
        assert!(log.is_due("status", "a", now + REPEAT / 2));
        assert!(log.is_due("reports", "b", now + REPEAT / 2), "a new problem is not held back");
        assert!(!log.is_due("reports", "b", now + REPEAT));
        assert!(log.is_due("reports", "b", now + REPEAT / 2 + REPEAT));
    }
}
