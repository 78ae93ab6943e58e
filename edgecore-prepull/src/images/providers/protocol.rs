//! The plugin protocol `credentialprovider.kubelet.k8s.io`: request and response.

use std::collections::BTreeMap;
use std::time::Duration;

use prepull_api::credentials::{RegistryConfig, Sensitive};
use serde::{Deserialize, Serialize};

use super::duration;

const GROUP: &str = "credentialprovider.kubelet.k8s.io/";

/// Versions of the protocol. They don't differ in the fields that we use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginApiVersion {
    /// `v1`.
    V1,
    /// `v1beta1`.
    V1Beta1,
    /// `v1alpha1`.
    V1Alpha1,
}

impl PluginApiVersion {
    /// All versions, the newest first.
    pub const ALL: [Self; 3] = [Self::V1, Self::V1Beta1, Self::V1Alpha1];

    /// The version as in `apiVersion`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "credentialprovider.kubelet.k8s.io/v1",
            Self::V1Beta1 => "credentialprovider.kubelet.k8s.io/v1beta1",
            Self::V1Alpha1 => "credentialprovider.kubelet.k8s.io/v1alpha1",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }
}

/// The images that an answer is valid for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
pub enum CacheKeyType {
    /// Only the requested image, with any tag.
    Image,
    /// All images of its registry.
    Registry,
    /// All images that the provider is asked for.
    Global,
}

/// A valid answer.
#[derive(Debug, PartialEq, Eq)]
pub struct Response {
    /// The images that the answer is valid for.
    pub key_type: CacheKeyType,
    /// Time for which to keep the answer. `None` for the provider's default.
    pub cache_for: Option<Duration>,
    /// The credentials.
    pub logins: RegistryConfig,
}

/// The request for the plugin's stdin.
pub(super) fn encode_request(version: PluginApiVersion, image: &str) -> Vec<u8> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct PluginRequest<'a> {
        api_version: &'static str,
        kind: &'static str,
        image: &'a str,
    }
    let request = PluginRequest { api_version: version.as_str(), kind: "CredentialProviderRequest", image };
    // A struct of strings always serializes.
    serde_json::to_vec(&request).unwrap_or_default()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawResponse {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    cache_key_type: Option<Sensitive>,
    #[serde(default)]
    cache_duration: Option<Sensitive>,
    #[serde(default)]
    auth: Option<BTreeMap<String, Option<RawLogin>>>,
}

#[derive(Default, Deserialize)]
struct RawLogin {
    #[serde(default)]
    username: Option<Sensitive>,
    #[serde(default)]
    password: Option<Sensitive>,
}

/// Decodes an answer. Errors quote nothing from it, because any part may be a credential.
pub fn decode_response(version: PluginApiVersion, output: &[u8]) -> Result<Response, String> {
    let raw: RawResponse = serde_json::from_slice(output).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        match error.classify() {
            serde_json::error::Category::Data => {
                format!("a field is missing or of the wrong type at line {line} column {column}")
            }
            serde_json::error::Category::Eof if output.is_empty() => "it wrote nothing".to_owned(),
            serde_json::error::Category::Eof => format!("it ends too early at line {line} column {column}"),
            _ => format!("it is not JSON at line {line} column {column}"),
        }
    })?;
    let RawResponse { api_version, kind, cache_key_type, cache_duration, auth } = raw;
    if kind != "CredentialProviderResponse" {
        return Err("its kind is not CredentialProviderResponse".to_owned());
    }
    if api_version != version.as_str() {
        let found = PluginApiVersion::parse(&api_version)
            .map_or("another group or version", PluginApiVersion::as_str);
        return Err(format!("its apiVersion is {found}, and {} was asked for", version.as_str()));
    }
    let key_type = match cache_key_type.as_ref().map(Sensitive::expose) {
        Some("Image") => CacheKeyType::Image,
        Some("Registry") => CacheKeyType::Registry,
        Some("Global") => CacheKeyType::Global,
        _ => return Err("its cacheKeyType is not one of Image, Registry and Global".to_owned()),
    };
    let cache_for = match cache_duration.as_ref().map(Sensitive::expose) {
        None => None,
        Some(text) => {
            let read =
                duration::parse(text).ok_or("its cacheDuration is not a duration such as 12h or 30m")?;
            // Like the kubelet, do not cache an answer with a negative duration.
            Some(if read.negative { Duration::ZERO } else { read.length })
        }
    };
    let logins = auth.unwrap_or_default().into_iter().map(|(registry, login)| {
        let RawLogin { username, password } = login.unwrap_or_default();
        (registry, username.unwrap_or_default(), password.unwrap_or_default())
    });
    Ok(Response { key_type, cache_for, logins: RegistryConfig::from_logins(logins) })
}

/// All versions, for an error about `apiVersion`.
pub(super) fn list_versions() -> String {
    let names = PluginApiVersion::ALL.map(|version| version.as_str().trim_start_matches(GROUP));
    format!("{GROUP}{{{}}}", names.join(","))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use prepull_api::image::Reference;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn answer(change: &serde_json::Value) -> Result<Response, String> {
        let mut answer = json!({
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "kind": "CredentialProviderResponse",
            "cacheKeyType": "Registry",
            "cacheDuration": "5m",
            "auth": {"r.io": {"username": "u", "password": "s3cret"}},
        });
        for (field, value) in change.as_object().unwrap() {
            answer[field] = value.clone();
        }
        decode_response(PluginApiVersion::V1, answer.to_string().as_bytes())
    }

    #[test]
    fn the_request_equals_the_kubelets() {
        let request: serde_json::Value =
            serde_json::from_slice(&encode_request(PluginApiVersion::V1Beta1, "r.io/team/app")).unwrap();
        let expected = json!({
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1beta1",
            "kind": "CredentialProviderRequest",
            "image": "r.io/team/app",
        });
        assert_eq!(request, expected);
    }

    #[test]
    fn unknown_fields_of_an_answer_are_ignored() {
        let image = Reference::parse("r.io/app").unwrap().normalized();
        let response = answer(&json!({"unknown": 1})).unwrap();
        assert_eq!(response.key_type, CacheKeyType::Registry);
        assert_eq!(response.cache_for, Some(Duration::from_secs(300)));
        assert_eq!(response.logins.credentials_for(&image)[0].password.expose(), "s3cret");
        for (duration, expected) in [
            (json!(null), None),
            (json!("0s"), Some(Duration::ZERO)),
            (json!("-5m"), Some(Duration::ZERO)),
            (json!("1h30m"), Some(Duration::from_secs(5400))),
        ] {
            let response = answer(&json!({"cacheDuration": duration})).unwrap();
            assert_eq!(response.cache_for, expected, "{duration}");
        }
        for (name, key_type) in [("Image", CacheKeyType::Image), ("Global", CacheKeyType::Global)] {
            assert_eq!(answer(&json!({"cacheKeyType": name})).unwrap().key_type, key_type);
        }
        for nothing in [json!(null), json!({})] {
            let response = answer(&json!({"auth": nothing})).unwrap();
            assert_eq!(response.logins, RegistryConfig::default());
        }
        let empty = answer(&json!({"auth": {"r.io": null}})).unwrap();
        assert_eq!(empty.logins.lookup(&image).broken.len(), 1);
    }

    #[test]
    fn an_error_quotes_no_answer() {
        for (change, message) in [
            (json!({"kind": "s3cret"}), "its kind is not CredentialProviderResponse"),
            (
                json!({"apiVersion": "s3cret"}),
                "its apiVersion is another group or version, and credentialprovider.kubelet.k8s.io/v1 was asked for",
            ),
            (
                json!({"apiVersion": "credentialprovider.kubelet.k8s.io/v1beta1"}),
                "its apiVersion is credentialprovider.kubelet.k8s.io/v1beta1, and \
                 credentialprovider.kubelet.k8s.io/v1 was asked for",
            ),
            (json!({"cacheKeyType": "s3cret"}), "its cacheKeyType is not one of Image, Registry and Global"),
            (json!({"cacheKeyType": null}), "its cacheKeyType is not one of Image, Registry and Global"),
            (json!({"cacheDuration": "s3cret"}), "its cacheDuration is not a duration such as 12h or 30m"),
        ] {
            assert_eq!(answer(&change).unwrap_err(), message);
        }
        for change in
            [json!({"auth": "s3cret"}), json!({"auth": {"r.io": "s3cret"}}), json!({"cacheDuration": 5})]
        {
            let error = answer(&change).unwrap_err();
            assert!(error.starts_with("a field is missing or of the wrong type at line 1"), "{error}");
        }
        for (output, message) in [
            ("", "it wrote nothing"),
            ("{\"s3cret\"", "it ends too early at line 1 column 9"),
            ("s3cret", "it is not JSON at line 1 column 1"),
        ] {
            assert_eq!(decode_response(PluginApiVersion::V1, output.as_bytes()).unwrap_err(), message);
        }
        let printed = format!("{:?}", answer(&json!({})));
        assert!(printed.contains("Ok") && !printed.contains("s3cret"), "{printed}");
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = decode_response(PluginApiVersion::V1, &bytes);
        }

        #[test]
        fn cut_answers_never_panic(cut in 0usize..200, at in 0usize..200, byte: u8) {
            let whole = json!({
                "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
                "kind": "CredentialProviderResponse",
                "cacheKeyType": "Registry",
                "auth": {"r.io": {"username": "u", "password": "p"}},
            });
            let mut bytes = whole.to_string().into_bytes();
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
            bytes.truncate(cut);
            let _ = decode_response(PluginApiVersion::V1, &bytes);
        }
    }
}
