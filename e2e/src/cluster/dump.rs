//! Dump of the cluster at the end of a test, beside its logs.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, ListParams};
use kube::core::GroupVersion;
use prepull_api::crd::kruise;

/// Limit of the dump, since the test may have broken the API server.
const LIMIT: Duration = Duration::from_secs(5);
/// Kinds to dump. Not secrets: the logs are searched for credentials.
const KINDS: [(&str, &str, &str, &str); 8] = [
    ("operations.kubeedge.io", "v1alpha2", "ImagePrePullJob", "imageprepulljobs"),
    ("operations.kubeedge.io", "v1alpha2", "ImagePrePullReport", "imageprepullreports"),
    ("operations.kubeedge.io", "v1alpha2", "ImagePrePullSettings", "imageprepullsettings"),
    (kruise::GROUP, kruise::VERSION, "ImagePullJob", "imagepulljobs"),
    (kruise::GROUP, kruise::VERSION, "ImageListPullJob", "imagelistpulljobs"),
    (kruise::GROUP, kruise::VERSION, "NodeImage", "nodeimages"),
    ("", "v1", "Event", "events"),
    ("", "v1", "Node", "nodes"),
];

/// Writes `<plural>.yaml` for each kind that has objects.
pub(super) async fn write(client: &Client, logs: &Path) -> Result<()> {
    tokio::time::timeout(LIMIT, async {
        for (group, version, kind, plural) in KINDS {
            let resource = ApiResource {
                group: group.to_owned(),
                version: version.to_owned(),
                api_version: GroupVersion::gv(group, version).api_version(),
                kind: kind.to_owned(),
                plural: plural.to_owned(),
            };
            let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
            // A kind that the server does not know has no objects.
            let Ok(mut list) = api.list(&ListParams::default()).await else { continue };
            for object in &mut list.items {
                object.metadata.managed_fields = None;
            }
            if !list.items.is_empty() {
                std::fs::write(logs.join(format!("{plural}.yaml")), serde_saphyr::to_string(&list.items)?)?;
            }
        }
        Ok(())
    })
    .await?
}
