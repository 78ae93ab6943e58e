//! An error answer of the API server as one sentence: what is wrong, and what to do about it. Pure.

use kube::core::Status;

/// Mistakes of one object that are named. Of more, the number.
const MISTAKES: usize = 3;
/// Longest part of an answer that is repeated: some webhooks answer with pages.
const LONGEST: usize = 400;

/// The sentence. It has the server's own words once, without the envelope that they come in.
pub(super) fn sentence(answer: &Status) -> String {
    let said = shorten_message(answer.message.trim());
    if is_page(said) {
        return format!(
            "a web page came back instead of an answer of the Kubernetes API{}: a portal or a proxy is in between. Log in to \
             the network, or add the API server to NO_PROXY",
            title(said).map(|title| format!(" ({title}, {})", answer.code)).unwrap_or_default()
        );
    }
    if let Some((webhook, why)) = quoted(said, "admission webhook \"", "\" denied the request") {
        let why = why.trim_start_matches(':').trim();
        let why = if why.is_empty() { "it gives no reason" } else { why };
        return format!("the admission webhook {webhook} refuses it: {why}");
    }
    if let Some((webhook, why)) = quoted(said, "failed calling webhook \"", "\"") {
        return format!(
            "the admission webhook {webhook} does not answer, and the API server lets nothing through without it: {}. See to \
             its pods: kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations names its Service",
            why.trim_start_matches(':').trim()
        );
    }
    if let Some((_, quota)) = said.split_once("exceeded quota: ") {
        return format!("the quota is used up: {quota}. Delete what is no longer needed, or have it raised");
    }
    // It may follow the whole object.
    if let Some((_, unknown)) = answer.message.split_once("strict decoding error: ") {
        let unknown = shorten_message(unknown.trim());
        return format!(
            "the definitions of the cluster are of an older version ({unknown}), and nothing was changed: update \
             cloudcore-prepull with them (kubectl apply -f manifests/crds)"
        );
    }
    if let Some((policy, why)) = quoted(said, "ValidatingAdmissionPolicy '", "' ") {
        let why = why.split_once("denied request: ").map_or(why, |(_, why)| why);
        return format!("the admission policy {policy} refuses it: {why}");
    }
    match answer.code {
        409 if answer.reason == "AlreadyExists" => {
            format!("{said}: choose another name, or delete the old one")
        }
        409 => format!("it was changed by another writer at the same moment: try again ({said})"),
        422 => explain_invalid(answer, said),
        403 => {
            format!("it is refused: {said}. The rule is one of the cluster's, and an administrator knows it")
        }
        429 => format!("the API server has too much to do: try again in a moment ({said})"),
        502..=504 => format!("the API server cannot answer now: try again in a moment ({said})"),
        _ if said.is_empty() => {
            format!("the API server answers with status {} and without a reason", answer.code)
        }
        _ => said.to_owned(),
    }
}

/// The text of something that is no answer of the API, such as a page with status 200.
pub(super) const NO_ANSWER: &str = "what came back is no answer of the Kubernetes API: a portal or a proxy is in between, or it is \
     another server. Log in to the network, or add the API server to NO_PROXY";

pub(super) fn is_page(text: &str) -> bool {
    let begins =
        |tag: &str| text.trim_start().get(..tag.len()).is_some_and(|text| text.eq_ignore_ascii_case(tag));
    ["<!doctype html", "<html", "<head"].into_iter().any(begins)
}

fn title(page: &str) -> Option<&str> {
    let (_, rest) = page.split_once("<title>")?;
    rest.split_once("</title>").map(|(title, _)| title.trim())
}

/// What stands between the two texts, and what follows.
fn quoted<'a>(text: &'a str, before: &str, after: &str) -> Option<(&'a str, &'a str)> {
    text.split_once(before)?.1.split_once(after)
}

/// The fields that are wrong, each with its mistake.
fn explain_invalid(answer: &Status, said: &str) -> String {
    let details = answer.details.as_ref();
    let causes = details.map(|details| details.causes.as_slice()).unwrap_or_default();
    if causes.is_empty() {
        return format!("it is invalid: {said}");
    }
    let named = causes.iter().take(MISTAKES).map(|cause| match cause.field.as_str() {
        "" | "<nil>" => cause.message.clone(),
        field => format!("{field}: {}", cause.message),
    });
    let more = causes.len().saturating_sub(MISTAKES);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("correct {}{more}", named.collect::<Vec<_>>().join("; "))
}

fn shorten_message(text: &str) -> &str {
    text.char_indices().nth(LONGEST).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    fn said(answer: Value) -> String {
        sentence(&serde_json::from_value(answer).unwrap())
    }

    #[test]
    fn each_answer_is_one_sentence_with_remedy() {
        for (answer, words) in [
            (
                json!({"code": 409, "reason": "Conflict", "message": "Operation cannot be fulfilled on x \"web\": the object \
                       has been modified"}),
                "it was changed by another writer at the same moment: try again (Operation",
            ),
            (
                json!({"code": 422, "message": "ImagePrePullJob \"web\" is invalid: [spec.a: b, spec.c: d]",
                       "details": {"causes": [{"field": "spec.retry", "message": "Invalid value: 2000: at most 1000"}]}}),
                "correct spec.retry: Invalid value: 2000: at most 1000",
            ),
            (
                json!({"code": 403, "message": "jobs \"web\" is forbidden: exceeded quota: team, requested: count/jobs=1, \
                       used: count/jobs=5, limited: count/jobs=5"}),
                "the quota is used up: team, requested: count/jobs=1, used: count/jobs=5, limited: count/jobs=5. Delete",
            ),
            (
                json!({"code": 400, "message": "ImagePrePullJob in version \"v1alpha2\" cannot be handled as a \
                       ImagePrePullJob: strict decoding error: unknown field \"spec.pause\""}),
                "the definitions of the cluster are of an older version (unknown field \"spec.pause\"), and nothing was",
            ),
            (
                json!({"code": 422, "message": "imageprepulljobs.operations.kubeedge.io \"web\" is forbidden: \
                       ValidatingAdmissionPolicy 'no-sundays' with binding 'no-sundays' denied request: no pulls on Sunday",
                       "details": {"causes": [{"message": "ValidatingAdmissionPolicy 'no-sundays' with binding \
                       'no-sundays' denied request: no pulls on Sunday"}]}}),
                "the admission policy no-sundays refuses it: no pulls on Sunday",
            ),
            (
                json!({"code": 400, "message": "admission webhook \"w.example\" denied the request: no pulls on Sunday"}),
                "the admission webhook w.example refuses it: no pulls on Sunday",
            ),
            (
                json!({"code": 500, "message": "Internal error occurred: failed calling webhook \"w.example\": Post \
                       \"https://w.shop.svc\": connection refused"}),
                "the admission webhook w.example does not answer, and the API server lets nothing through without it: Post \
                 \"https://w.shop.svc\": connection refused. See to its pods: ",
            ),
            (
                json!({"code": 511, "message": "<!DOCTYPE html>\n<html><head><title>Hotel Wi-Fi</title></head>…"}),
                "a web page came back instead of an answer of the Kubernetes API (Hotel Wi-Fi, 511): a portal",
            ),
            (
                json!({"code": 503, "message": "apiserver is shutting down"}),
                "the API server cannot answer now: try",
            ),
            (json!({"code": 418, "message": ""}), "the API server answers with status 418"),
        ] {
            let said = said(answer);
            assert!(said.starts_with(words) && !said.contains("Status {"), "{said}");
        }
    }

    #[test]
    fn long_answers_are_cut() {
        let said = said(json!({"code": 500, "message": "é".repeat(5_000)}));
        assert_eq!(said.chars().count(), LONGEST);
    }
}
