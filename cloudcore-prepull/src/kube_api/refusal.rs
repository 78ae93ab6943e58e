//! Requests that the API server will refuse until somebody does something: what that is, and how often it is said.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::core::Status;
use kube::{Error, Resource};
use prepull_api::crd::kruise;

/// Between two lines about the same thing: no request that is tried again every few seconds fills the log.
const REPEAT: Duration = Duration::from_secs(60);

/// What is wrong, and the remedy, where trying again is no help by itself: the definition of `K` is missing, or a right
/// to it. None for all that may pass.
pub fn explain<K: Resource<DynamicType = ()>>(error: &Error) -> Option<String> {
    let Error::Api(answer) = error else { return None };
    if is_unserved(answer) {
        let (kind, group, version) = (K::plural(&()), K::group(&()), K::version(&()));
        return Some(format!(
            "the definition {kind}.{group} is missing, or has no version {version}: \
             kubectl apply -f {}",
            if is_kruise::<K>() { "manifests/kruise/crds.yaml" } else { "manifests/crds" }
        ));
    }
    if answer.code == 401 {
        return Some(
            "the API server does not know who asks: the credentials of --kubeconfig, or of the pod's ServiceAccount, \
             are wrong or too old"
                .to_owned(),
        );
    }
    missing_right(answer).map(|right| {
        let folder = if is_kruise::<K>() { "kruise" } else { "cloudcore-prepull" };
        format!("a right is missing: {right}: kubectl apply -f manifests/{folder}/rbac.yaml")
    })
}

/// Whether what concerns a kind stands in manifests/kruise. Pods are read for podSelectors, and for nothing else.
fn is_kruise<K: Resource<DynamicType = ()>>() -> bool {
    K::group(&()) == kruise::GROUP || K::kind(&()) == "Pod"
}

/// Whether the server knows no such kind. Where it only has no such object, it says which.
pub fn is_unserved(answer: &Status) -> bool {
    answer.code == 404 && answer.details.as_ref().is_none_or(|details| details.name.is_empty())
}

/// `User "…" cannot list resource "…" in API group "…" at the cluster scope`. Admission says 403 as well, of one object
/// and for reasons of its own.
fn missing_right(answer: &Status) -> Option<&str> {
    let refused = answer.message.get(answer.message.find("User \"")?..)?;
    (answer.code == 403 && refused.contains("\" cannot ")).then_some(refused)
}

/// An error with what caused it, each once: kube repeats itself.
pub fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).fold(String::new(), |text, cause| match text {
        text if text.is_empty() => cause,
        text if text.contains(&cause) => text,
        text => format!("{text}: {cause}"),
    })
}

/// What was said last about each matter, and when.
#[derive(Debug, Default)]
pub struct Said(Mutex<HashMap<&'static str, (Instant, String)>>);

impl Said {
    /// Whether it is time to say this of the matter: it is new, or a minute has passed.
    pub fn is_due(&self, matter: &'static str, text: &str, now: Instant) -> bool {
        // Nothing that holds the lock can leave the map half changed.
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = said.get(matter).is_none_or(|(at, last)| last != text || now >= *at + REPEAT);
        if due {
            said.insert(matter, (now, text.to_owned()));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::report::ImagePrePullReport;
    use serde_json::json;

    use super::*;

    fn explained(status: serde_json::Value) -> Option<String> {
        let status: Status = serde_json::from_value(status).unwrap();
        explain::<ImagePrePullReport>(&Error::Api(status.boxed()))
    }

    #[test]
    fn a_missing_definition_is_no_missing_object() {
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
    fn a_missing_right_is_named_and_admission_is_not_taken_for_one() {
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
    fn whoever_is_not_known_is_told_so() {
        let text = explained(json!({ "code": 401, "message": "Unauthorized" })).unwrap();
        assert!(text.contains("the credentials of --kubeconfig"), "{text}");
    }

    #[test]
    fn causes_are_told_once() {
        let inner = anyhow::anyhow!("refused").context("client error").context("ServiceError: client error");
        assert_eq!(with_causes(inner.as_ref()), "ServiceError: client error: refused");
    }

    #[test]
    fn the_same_is_said_once_a_minute_of_each_matter() {
        let (said, now) = (Said::default(), Instant::now());
        assert!(said.is_due("reports", "a", now));
        assert!(!said.is_due("reports", "a", now + REPEAT / 2));
        assert!(said.is_due("status", "a", now + REPEAT / 2));
        assert!(said.is_due("reports", "b", now + REPEAT / 2), "it is another one by now");
        assert!(!said.is_due("reports", "b", now + REPEAT));
        assert!(said.is_due("reports", "b", now + REPEAT / 2 + REPEAT));
    }
}
