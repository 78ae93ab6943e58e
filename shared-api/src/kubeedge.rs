//! KubeEdge beside us: its TaskManager and its controller-manager serve ImagePrePullJobs too. Two controllers would
//! overwrite each other's statuses, and pull each image twice. Judges KubeEdge's objects, which the caller has read.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// The namespace of KubeEdge's cloud side, as keadm and its chart make it.
pub const NAMESPACE: &str = "kubeedge";
/// The ConfigMap of its CloudCore, and the key of the configuration in it.
pub const CLOUDCORE: (&str, &str) = ("cloudcore", "cloudcore.yaml");
/// The Deployment of its controller-manager.
pub const CONTROLLER_MANAGER: &str = "kubeedge-controller-manager";
/// The definition that both of us bring.
pub const DEFINITION: &str = "imageprepulljobs.operations.kubeedge.io";
/// The minor version from which on the controller-manager carries out the cloud's part of jobs.
const SINCE: u32 = 21;
/// The feature gate that takes that part out of it.
const WITHOUT_JOBS: &str = "disableNodeTaskV1alpha2=true";

/// The step that stops KubeEdge from serving ImagePrePullJobs; `None` if it doesn't serve them. An object that is absent, or
/// that we may not read, is no obstacle.
pub fn obstacle(
    definition: Option<&CustomResourceDefinition>,
    configuration: Option<&Value>,
    manager: Option<&Deployment>,
) -> Option<String> {
    if definition.is_some_and(|definition| is_foreign(&serde_json::to_value(definition).unwrap_or_default()))
    {
        return Some(format!(
            "the definition {DEFINITION} is KubeEdge's, under which the API server drops most fields of a job: \
             kubectl apply -f manifests/crds"
        ));
    }
    if configuration.is_some_and(has_task_manager) {
        return Some(format!(
            "KubeEdge's TaskManager serves ImagePrePullJobs: set modules.taskManager.enable to false in the ConfigMap \
             {NAMESPACE}/{} and restart CloudCore (docs/kubeedge.md)",
            CLOUDCORE.0
        ));
    }
    manager.is_some_and(has_job_controller).then(|| {
        format!(
            "KubeEdge's controller-manager serves ImagePrePullJobs: give the Deployment {NAMESPACE}/{CONTROLLER_MANAGER} the \
             argument --feature-gates={WITHOUT_JOBS}, or scale it to 0 (docs/kubeedge.md)"
        )
    })
}

/// Whether the definition lacks a field that ours has had in every release.
fn is_foreign(definition: &Value) -> bool {
    const SPEC: &str = "/schema/openAPIV3Schema/properties/spec/properties";
    let versions = definition["spec"]["versions"].as_array();
    let field = format!("{SPEC}/imagePrePullTemplate/properties/registrySecrets");
    versions.is_some_and(|versions| {
        versions.iter().any(|version| version.pointer(SPEC).is_some() && version.pointer(&field).is_none())
    })
}

/// Whether CloudCore's configuration switches TaskManager on; it is off by default.
fn has_task_manager(configuration: &Value) -> bool {
    configuration["modules"]["taskManager"]["enable"] == true
}

/// Whether this controller-manager runs, is of a release that knows jobs, and hasn't its job controller switched off.
fn has_job_controller(manager: &Deployment) -> bool {
    let spec = &manager.spec;
    let containers = spec.template.spec.iter().flat_map(|pod| &pod.containers);
    spec.replicas.unwrap_or(1) > 0
        && containers.clone().any(|container| {
            let minor = container.image.as_deref().and_then(minor_version);
            let words = container.command.iter().chain(&container.args).flatten();
            minor.is_none_or(|minor| minor >= SINCE) && !words.clone().any(|word| word.contains(WITHOUT_JOBS))
        })
}

/// The 21 of `kubeedge/controller-manager:v1.21.0`; `None` if the tag is no version.
fn minor_version(image: &str) -> Option<u32> {
    let (_, tag) = image.rsplit_once(":v1.")?;
    tag.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;
    use crate::crd::job;

    #[test]
    fn task_manager_is_on_where_the_configuration_says_so() {
        let modules = |modules: Value| has_task_manager(&json!({"kind": "CloudCore", "modules": modules}));
        assert!(modules(json!({"cloudHub": {"nodeLimit": 1000}, "taskManager": {"enable": true}})));
        for off in [Value::Null, json!({}), json!({"taskManager": {"enable": false}})] {
            assert!(!modules(off.clone()), "{off}");
        }
    }

    #[test]
    fn kubeedge_serves_jobs_from_1_21_on() {
        let serves = |image: &str, replicas: Option<i32>, args: &[&str]| {
            let containers = json!([{"name": "controller-manager", "image": image, "args": args}]);
            let spec = json!({"replicas": replicas, "selector": {}, "template": {"spec": {"containers": containers}}});
            has_job_controller(&serde_json::from_value(json!({"spec": spec})).unwrap())
        };
        assert!(serves("kubeedge/controller-manager:v1.23.0", None, &[]));
        assert!(serves("mirror.example:5000/kubeedge/controller-manager:latest", Some(1), &["--v=2"]));
        assert!(!serves("kubeedge/controller-manager:v1.20.0", None, &[]));
        assert!(!serves("kubeedge/controller-manager:v1.23.0", Some(0), &[]));
        assert!(!serves(
            "kubeedge/controller-manager:v1.23.0",
            None,
            &["--feature-gates=disableNodeTaskV1alpha2=true"]
        ));
    }

    #[test]
    fn only_our_own_definition_is_ours() {
        let mut definition = serde_json::to_value(job::crd()).unwrap();
        assert!(!is_foreign(&definition));
        let spec = "/spec/versions/1/schema/openAPIV3Schema/properties/spec/properties";
        let template = definition.pointer_mut(&format!("{spec}/imagePrePullTemplate/properties")).unwrap();
        template.as_object_mut().unwrap().remove("registrySecrets").unwrap();
        assert!(is_foreign(&definition));
        assert!(!is_foreign(&json!({})), "no schema says nothing");
    }
}
