//! The ConfigMap with the certificates of the CAs and the progress of a rotation. Making join tokens takes only
//! the right to read it, and none to a key.

use std::collections::BTreeMap;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::ObjectMeta;
use prepull_admission::ca::BUNDLE;
pub(crate) use prepull_admission::ca::CA_CONFIG_MAP;
use serde::{Deserialize, Serialize};

use super::rotation::RotationStep;
use crate::edges::pki::CaCensus;
use crate::kube_api::field_manager::post_params;

/// A [`RotationProgress`] as JSON.
const PROGRESS: &str = "rotation.json";

/// The content of the ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Published {
    pub(crate) bundle: String,
    pub(crate) progress: Option<RotationProgress>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RotationProgress {
    pub(crate) step: RotationStep,
    /// When the step began, as RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<String>,
    /// When the old CA is retired by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retired_after: Option<String>,
    /// The edges that are connected, while there are two CAs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) edges: Option<CaCensus>,
    /// Since when the leader that counts them serves: edges may not be back yet. Absent from release 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) served_since: Option<String>,
}

impl Published {
    /// Reads the ConfigMap; none if there is none, or if it holds no certificate.
    pub(crate) async fn read(client: kube::Client, namespace: &str) -> kube::Result<Option<Self>> {
        let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
        Ok(maps.get_opt(CA_CONFIG_MAP).await?.as_ref().and_then(Self::from_map))
    }

    /// Makes the ConfigMap say this, if it does not.
    pub(crate) async fn write(&self, client: kube::Client, namespace: &str) -> kube::Result<()> {
        let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
        match maps.get_opt(CA_CONFIG_MAP).await? {
            Some(found) if Self::from_map(&found).as_ref() == Some(self) => Ok(()),
            Some(found) => {
                let map = ConfigMap { data: Some(self.to_map_data()), ..found };
                maps.replace(CA_CONFIG_MAP, &post_params(), &map).await.map(drop)
            }
            None => {
                let metadata = ObjectMeta { name: Some(CA_CONFIG_MAP.to_owned()), ..ObjectMeta::default() };
                let map = ConfigMap { metadata, data: Some(self.to_map_data()), ..ConfigMap::default() };
                maps.create(&post_params(), &map).await.map(drop)
            }
        }
    }

    fn from_map(map: &ConfigMap) -> Option<Self> {
        let data = map.data.as_ref()?;
        let progress = data.get(PROGRESS).and_then(|json| serde_json::from_str(json).ok());
        Some(Self { bundle: data.get(BUNDLE)?.clone(), progress })
    }

    fn to_map_data(&self) -> BTreeMap<String, String> {
        let progress = self.progress.as_ref().and_then(|progress| serde_json::to_string(progress).ok());
        let mut data = BTreeMap::from([(BUNDLE.to_owned(), self.bundle.clone())]);
        data.extend(progress.map(|json| (PROGRESS.to_owned(), json)));
        data
    }
}

/// A time as [`RotationProgress`] has it.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::edges::pki::{Authority, CaSet};

    #[test]
    fn publishes_the_signing_ca_without_keys() {
        let now = SystemTime::now();
        let (signer, other) = (Authority::generate(now).unwrap().0, Authority::generate(now).unwrap().0);
        let fingerprint = signer.fingerprint();
        let set = CaSet::new(signer, [other.certificate().clone()], "here").unwrap();
        let edges = Some(CaCensus { connected: 3, informed: 2, renewed: 1, unable: 1, old_subject: 1 });
        let progress = RotationProgress {
            step: RotationStep::Signing,
            since: Some(rfc3339(now)),
            retired_after: None,
            edges,
            served_since: Some(rfc3339(now)),
        };
        let published = Published { bundle: set.bundle(), progress: Some(progress) };
        let map = ConfigMap { data: Some(published.to_map_data()), ..ConfigMap::default() };
        assert!(!format!("{map:?}").contains("PRIVATE"));
        let read = Published::from_map(&map).unwrap();
        assert_eq!(read, published);
        assert_eq!(prepull_admission::ca::signer_of(&read.bundle), Some(fingerprint));
    }
}
