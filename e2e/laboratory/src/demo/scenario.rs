//! Nodes, images and jobs of the demo, and the expected results. No IO.

use super::story::Story;

/// Host of the first registry, which has plain HTTP.
pub(super) const HARBOR: &str = "harbor.example";
/// Host of the second registry, which has TLS with a CA of its own, and all images of the first one.
pub(super) const HANGZHOU: &str = "hangzhou.example";
/// User of [`HARBOR`].
pub(super) const HARBOR_USER: &str = "alice";
/// User of [`HANGZHOU`].
pub(super) const HANGZHOU_USER: &str = "bob";

/// Label of a node's region. A kubelet can't set it for itself, since it decides about secrets.
pub(super) const REGION: &str = "node-restriction.kubernetes.io/region";
/// Edge nodes, each with its region if it has one.
pub(super) const NODES: [(&str, Option<&str>); 3] =
    [("edge-1", None), ("edge-2", Some("hangzhou")), ("edge-3", Some("hangzhou"))];
/// A node that the job names although it is not an edge node.
pub(super) const CLOUD_NODE: &str = "cloud-1";
/// A node that the job names although it is NotReady.
pub(super) const OFFLINE_NODE: &str = "edge-4";

/// An image of both registries: path, and sizes of the layers in bytes.
pub(super) struct DemoImage {
    pub(super) path: &'static str,
    pub(super) layers: &'static [u64],
}

const MB: u64 = 1_000_000;
/// Images of both registries.
pub(super) const IMAGES: [DemoImage; 6] = [
    DemoImage { path: "shop/web:v1", layers: &[12 * MB, 8 * MB] },
    DemoImage { path: "shop/api:v2", layers: &[10 * MB, 5 * MB, 3 * MB] },
    DemoImage { path: "shop/database:v3", layers: &[16 * MB, 6 * MB] },
    DemoImage { path: "ai/model:v1", layers: &[24 * MB] },
    DemoImage { path: "shop/cache:v1", layers: &[2 * MB] },
    DemoImage { path: "shop/queue:v1", layers: &[2 * MB, MB] },
];

/// The expectations of a job: the nodes that pull, and registry and path of each image as the job names it.
pub(super) struct DemoPlan {
    pub(super) name: &'static str,
    pub(super) nodes: &'static [&'static str],
    pub(super) images: &'static [(&'static str, &'static str)],
    words: &'static [&'static str],
    /// Exit status of `kubectl prepull status --watch`.
    pub(super) exit_status: i32,
}

/// Plan of the first job, which succeeds.
pub(super) const MAIN: DemoPlan = DemoPlan {
    name: "spring-release",
    nodes: &["edge-1", "edge-2", "edge-3"],
    images: &[
        (HARBOR, "shop/web:v1"),
        (HARBOR, "shop/api:v2"),
        (HARBOR, "shop/database:v3"),
        (HANGZHOU, "ai/model:v1"),
    ],
    words: &[
        "Secrets: by registry for both registries; database and model name one of their own.",
        "Overrider: nodes of the region hangzhou take everything from hangzhou.example, with its secret.",
        "Asked for as well, and to be left out: cloud-1 (not an edge node), edge-4 (NotReady).",
    ],
    exit_status: 0,
};

/// Plan of the second job. One of its images fails.
pub(super) const SECOND: DemoPlan = DemoPlan {
    name: "wrong-password",
    nodes: &["edge-1"],
    images: &[(HARBOR, "shop/cache:v1"), (HARBOR, "shop/queue:v1"), (HANGZHOU, "ai/model:v1")],
    words: &[
        "shop/cache names a secret with a wrong password, shop/queue the right one; ai/model is there already.",
    ],
    exit_status: 1,
};

impl DemoPlan {
    pub(super) fn explain(&self, story: &Story) {
        for line in self.words {
            story.print_line(line);
        }
    }
}

/// Registry from which a node pulls an image that the job names with `registry`.
pub(super) fn registry_for(node: &str, registry: &'static str) -> &'static str {
    let region = NODES.iter().find(|(name, _)| *name == node).and_then(|(_, region)| *region);
    if region == Some("hangzhou") { HANGZHOU } else { registry }
}

/// The first job as YAML.
pub(super) fn first_job() -> String {
    format!(
        r"apiVersion: operations.kubeedge.io/v1alpha2
kind: ImagePrePullJob
metadata:
  name: {name}
spec:
  imagePrePullTemplate:
    images:
    - {HARBOR}/shop/web:v1
    - {HARBOR}/shop/api:v2
    imageSources:
    - {{name: database, registry: {HARBOR}, repository: shop/database, tag: v3, imageSecret: default/harbor}}
    - {{name: model, registry: {HANGZHOU}, repository: ai/model, tag: v1, imageSecret: default/hangzhou}}
    registrySecrets:
    - {{registry: {HARBOR}, imageSecret: default/harbor}}
    - {{registry: {HANGZHOU}, imageSecret: default/hangzhou}}
    nodeNames: [edge-1, edge-2, edge-3, {CLOUD_NODE}, {OFFLINE_NODE}]
    concurrency: 2
    retryTimes: 1
    timeoutSeconds: 120
  imagePrePullOverriders:
  - imagePrePullOverrider:
      nodeLabel: {REGION}=hangzhou
      overriders:
        imageOverriders:
        - {{component: Registry, operator: replace, value: {HANGZHOU}}}
        secretOverriders:
        - {{component: SecretName, operator: replace, value: hangzhou}}
",
        name = MAIN.name
    )
}

/// The second job as YAML.
pub(super) fn second_job() -> String {
    format!(
        r"apiVersion: operations.kubeedge.io/v1alpha2
kind: ImagePrePullJob
metadata:
  name: {name}
spec:
  imagePrePullTemplate:
    imageSources:
    - {{registry: {HARBOR}, repository: shop/cache, tag: v1, imageSecret: default/wrong}}
    - {{registry: {HARBOR}, repository: shop/queue, tag: v1, imageSecret: default/harbor}}
    - {{registry: {HANGZHOU}, repository: ai/model, tag: v1, imageSecret: default/hangzhou}}
    nodeNames: [edge-1]
    retryTimes: 1
    timeoutSeconds: 60
",
        name = SECOND.name
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use prepull_api::crd::job::ImagePrePullJob;
    use prepull_e2e::cluster::documents;

    #[test]
    fn jobs_name_images_and_nodes_of_plans() {
        for (yaml, plan) in [(first_job(), MAIN), (second_job(), SECOND)] {
            let job: ImagePrePullJob = serde_json::from_value(documents(&yaml).unwrap().remove(0)).unwrap();
            let template = job.spec.image_pre_pull_template;
            let sources = template.image_sources.iter().map(|source| {
                let [registry, tag] = [&source.registry, &source.tag].map(|part| part.as_deref().unwrap());
                format!("{registry}/{}:{tag}", source.repository)
            });
            let asked: Vec<_> = template.images.iter().cloned().chain(sources).collect();
            let planned: Vec<_> =
                plan.images.iter().map(|(registry, path)| format!("{registry}/{path}")).collect();
            assert_eq!((job.metadata.name.as_deref(), asked), (Some(plan.name), planned));
            assert!(plan.nodes.iter().all(|node| template.node_names.iter().any(|name| name == node)));
        }
    }

    #[test]
    fn hangzhou_pulls_from_the_second_registry() {
        let from = NODES.map(|(node, _)| registry_for(node, HARBOR));
        assert_eq!(from, [HARBOR, HANGZHOU, HANGZHOU]);
    }
}
