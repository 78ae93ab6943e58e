//! Interprets a file of the kubelet like the kubelet itself (`MustAttemptImagePull` in its `pullmanager`). Pure.

use std::collections::BTreeMap;

use prepull_api::image::Reference;
use prepull_api::task::KubeletRecord;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Most repositories named in a reason.
const EXAMPLES: usize = 2;
/// API group of the files. Its version doesn't matter: v1alpha1 and v1beta1 have the same fields.
const GROUP: &str = "kubelet.config.k8s.io/";

/// The meaning of a record for pods that use the image by this reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// The kubelet ignores it for this image.
    NotOfThisImage,
    /// Every pod may use the image.
    Accessible,
    /// The kubelet asks the registry for some pods, or for all.
    Asks {
        /// Why, in one word.
        record: KubeletRecord,
        /// Why, as the end of a sentence.
        because: String,
    },
    /// The kubelet can't read it, and asks the registry with any policy.
    Unreadable,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PulledRecord {
    kind: String,
    api_version: String,
    #[serde(default)]
    image_ref: String,
    /// By the image of a container without its tag and digest, as the pod has it.
    #[serde(default)]
    credential_mapping: Option<BTreeMap<String, Credentials>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Credentials {
    #[serde(default)]
    kubernetes_secrets: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    kubernetes_service_accounts: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    node_pods_accessible: bool,
}

#[derive(Deserialize)]
struct PullIntent {
    #[serde(default)]
    image: String,
}

/// Judges the content of a file for the image with this id.
pub(super) fn judge_record(content: &[u8], id: &str, reference: &str) -> Judgement {
    let record = match serde_json::from_slice::<PulledRecord>(content) {
        Ok(record) if record.kind == "ImagePulledRecord" && record.api_version.starts_with(GROUP) => record,
        _ => return Judgement::Unreadable,
    };
    if record.image_ref != id {
        return Judgement::NotOfThisImage;
    }
    let asks = |record, because: String| Judgement::Asks { record, because };
    let mapping = record.credential_mapping.unwrap_or_default();
    let own = repository_of(reference);
    // The kubelet compares texts: for it, `nginx` and `docker.io/library/nginx` differ. We don't know the spelling in
    // the pods, so we treat both as equal.
    let of_own: Vec<_> = mapping.iter().filter(|(name, _)| repository_of(name) == own).collect();
    let count = |list: &Option<Vec<IgnoredAny>>| list.as_ref().map_or(0, Vec::len);
    let total = |list: fn(&Credentials) -> &Option<Vec<IgnoredAny>>| -> usize {
        of_own.iter().map(|(_, credentials)| count(list(credentials))).sum()
    };
    if of_own.iter().any(|(_, credentials)| credentials.node_pods_accessible) {
        return Judgement::Accessible;
    }
    let secrets = total(|credentials| &credentials.kubernetes_secrets);
    let accounts = total(|credentials| &credentials.kubernetes_service_accounts);
    if secrets + accounts > 0 {
        let because = format!(
            "only pods with the recorded pull secrets ({secrets}) or ServiceAccounts ({accounts}) may use it at once"
        );
        return asks(KubeletRecord::SomeCredentials, because);
    }
    if mapping.is_empty() || !of_own.is_empty() {
        let because =
            "it has a record of it without credentials, since it was stopped during a pull".to_owned();
        return asks(KubeletRecord::NoCredentials, because);
    }
    let names: Vec<_> = mapping.keys().take(EXAMPLES).map(String::as_str).collect();
    let more = mapping.len() - names.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let because = format!("it has a record of it from another repository, {}{more}", names.join(", "));
    asks(KubeletRecord::OtherRepository, because)
}

/// Whether this file records that the kubelet has begun to pull the reference.
pub(super) fn names_reference(content: &[u8], reference: &str) -> bool {
    let Ok(PullIntent { image }) = serde_json::from_slice(content) else { return false };
    Reference::parse(&image).is_ok_and(|image| image.normalized().to_string() == reference)
}

/// Registry and repository in full, without tag and digest. Returns an invalid reference unchanged.
fn repository_of(image: &str) -> String {
    Reference::parse(image).map_or_else(|_| image.to_owned(), |image| image.normalized().name())
}
