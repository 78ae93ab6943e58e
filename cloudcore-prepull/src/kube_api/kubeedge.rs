//! KubeEdge beside us: its TaskManager and its controller-manager serve ImagePrePullJobs too. Two controllers would
//! overwrite each other's statuses, and pull each image twice.
//!
//! While KubeEdge is set up to serve them, nothing is served here: see [`find_obstacle`]. What a job says of itself
//! concerns that job alone, since whoever may create jobs may write it: see [`has_begun`].

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::{Client, Error};
use serde_json::Value;
use tracing::info;

/// The namespace of KubeEdge's cloud side, as keadm and its chart make it.
const NAMESPACE: &str = "kubeedge";
/// The ConfigMap of its CloudCore, and the key of the configuration in it.
const CLOUDCORE: (&str, &str) = ("cloudcore", "cloudcore.yaml");
/// The Deployment of its controller-manager, which carries out the cloud's part of jobs from this release on.
const CONTROLLER_MANAGER: (&str, u32) = ("kubeedge-controller-manager", 21);
/// The feature gate that takes that part out of it.
const WITHOUT_JOBS: &str = "disableNodeTaskV1alpha2=true";
/// The definition that both of us bring.
const DEFINITION: &str = "imageprepulljobs.operations.kubeedge.io";
/// The finalizer that KubeEdge's controller gives to each job.
const FINALIZER: &str = "kubeedge.io/imageprepulljob-controller";

/// What has to be done so that KubeEdge serves ImagePrePullJobs no more; `None` if it does not serve them. Without the
/// right to look, nothing is found.
pub(crate) async fn find_obstacle(client: &Client) -> Result<Option<String>, Error> {
    let (map, key) = CLOUDCORE;
    let (manager, since) = CONTROLLER_MANAGER;
    // At once, since edges wait for a leader.
    let (definition, configuration, found) = futures::try_join!(
        look(Api::<CustomResourceDefinition>::all(client.clone()), DEFINITION),
        look(Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE), map),
        look(Api::<Deployment>::namespaced(client.clone(), NAMESPACE), manager),
    )?;
    if definition.is_some_and(|definition| is_foreign(&serde_json::to_value(definition).unwrap_or_default()))
    {
        return Ok(Some(format!(
            "the definition {DEFINITION} is KubeEdge's, under which the API server drops most fields of a job: \
             kubectl apply -f manifests/crds"
        )));
    }
    let configuration = configuration.and_then(|map| map.data).and_then(|mut data| data.remove(key));
    if configuration.is_some_and(|yaml| has_task_manager(&yaml)) {
        return Ok(Some(format!(
            "KubeEdge's TaskManager serves ImagePrePullJobs: set modules.taskManager.enable to false in the ConfigMap \
             {NAMESPACE}/{map} and restart CloudCore (docs/kubeedge.md)"
        )));
    }
    Ok(found.is_some_and(|found| has_job_controller(&found, since)).then(|| {
        format!(
            "KubeEdge's controller-manager serves ImagePrePullJobs: give the Deployment {NAMESPACE}/{manager} the argument \
             --feature-gates={WITHOUT_JOBS}, or scale it to 0 (docs/kubeedge.md)"
        )
    }))
}

/// What may not be looked for is taken for absent: rights of an earlier release go on working.
async fn look<K>(api: Api<K>, name: &str) -> Result<Option<K>, Error>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    match api.get_opt(name).await {
        Err(Error::Api(answer)) if answer.code == 403 => {
            info!(reason = answer.message, "whether KubeEdge serves ImagePrePullJobs is not known");
            Ok(None)
        }
        found => found,
    }
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
fn has_task_manager(yaml: &str) -> bool {
    serde_saphyr::from_str::<Value>(yaml)
        .is_ok_and(|config| config["modules"]["taskManager"]["enable"] == true)
}

/// Whether this controller-manager runs, is of a release that knows jobs, and has not been told to leave them alone.
fn has_job_controller(manager: &Deployment, since: u32) -> bool {
    let spec = &manager.spec;
    let containers = spec.template.spec.iter().flat_map(|pod| &pod.containers);
    spec.replicas.unwrap_or(1) > 0
        && containers.clone().any(|container| {
            let minor = container.image.as_deref().and_then(minor_version);
            let words = container.command.iter().chain(&container.args).flatten();
            minor.is_none_or(|minor| minor >= since) && !words.clone().any(|word| word.contains(WITHOUT_JOBS))
        })
}

/// The 21 of `kubeedge/controller-manager:v1.21.0`; `None` if the tag is no version.
fn minor_version(image: &str) -> Option<u32> {
    let (_, tag) = image.rsplit_once(":v1.")?;
    tag.split('.').next()?.parse().ok()
}

/// Whether KubeEdge has begun with this job, and we have not. It is left alone, whatever became of it: a job that has ended
/// would otherwise be carried out once more.
pub(super) fn has_begun(job: &Value) -> bool {
    let status = &job["status"];
    let is_ours = ["startTime", "observedGeneration"].iter().any(|field| !status[*field].is_null());
    let finalizers = job["metadata"]["finalizers"].as_array();
    let has_state = status["state"].as_str().is_some_and(|state| !state.is_empty());
    let has_nodes = status["nodeStatus"].as_array().is_some_and(|nodes| !nodes.is_empty());
    let has_phase = status["phase"].as_str().is_some_and(|phase| !matches!(phase, "" | "Init"));
    !is_ours
        && (finalizers.is_some_and(|all| all.iter().any(|one| one == FINALIZER))
            || has_state
            || has_nodes
            || has_phase)
}

#[cfg(test)]
mod tests {
    use prepull_api::crd::job;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_that_kubeedge_has_begun_is_told_from_ours_and_from_a_new_one() {
        let job = |finalizers: Value, status: Value| json!({"metadata": {"finalizers": finalizers}, "status": status});
        let theirs = json!([FINALIZER]);
        for (what, object, expected) in [
            ("new", job(Value::Null, Value::Null), false),
            (
                "new, with the defaults of a status",
                job(json!([]), json!({"phase": "Init", "state": ""})),
                false,
            ),
            ("another finalizer", job(json!(["example/other"]), json!({})), false),
            ("just taken", job(theirs.clone(), Value::Null), true),
            (
                "initialised",
                job(
                    theirs.clone(),
                    json!({"phase": "Init", "nodeStatus": [{"nodeName": "a", "phase": "Pending"}]}),
                ),
                true,
            ),
            (
                "ended, and the finalizer removed by hand",
                job(Value::Null, json!({"phase": "Completed"})),
                true,
            ),
            ("of v1alpha1", job(Value::Null, json!({"state": "successful"})), true),
            (
                "ours, to which their controller gave its finalizer",
                job(theirs, json!({"phase": "InProgress", "startTime": "2026-11-21T09:00:00Z"})),
                false,
            ),
            ("refused by us", job(Value::Null, json!({"phase": "Failure", "observedGeneration": 1})), false),
        ] {
            assert_eq!(has_begun(&object), expected, "{what}");
        }
    }

    #[test]
    fn task_manager_is_on_where_the_configuration_says_so() {
        let modules = |modules: &str| {
            has_task_manager(&format!(
                "apiVersion: cloudcore.config.kubeedge.io/v1alpha2\nkind: CloudCore\n{modules}"
            ))
        };
        assert!(modules("modules:\n  cloudHub: {nodeLimit: 1000}\n  taskManager:\n    enable: true\n"));
        for off in ["", "modules: {}\n", "modules: {taskManager: {enable: false}}\n", "modules: [\n"] {
            assert!(!modules(off), "{off:?}");
        }
    }

    #[test]
    fn a_controller_manager_serves_jobs_from_1_21_on_unless_it_is_told_not_to() {
        let serves = |image: &str, replicas: Option<i32>, args: &[&str]| {
            let containers = json!([{"name": "controller-manager", "image": image, "args": args}]);
            let spec = json!({"replicas": replicas, "selector": {}, "template": {"spec": {"containers": containers}}});
            has_job_controller(&serde_json::from_value(json!({"spec": spec})).unwrap(), CONTROLLER_MANAGER.1)
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
    fn our_own_definition_is_not_foreign_and_one_without_our_fields_is() {
        let mut definition = serde_json::to_value(job::crd()).unwrap();
        assert!(!is_foreign(&definition));
        let spec = "/spec/versions/1/schema/openAPIV3Schema/properties/spec/properties";
        let template = definition.pointer_mut(&format!("{spec}/imagePrePullTemplate/properties")).unwrap();
        template.as_object_mut().unwrap().remove("registrySecrets").unwrap();
        assert!(is_foreign(&definition));
        assert!(!is_foreign(&json!({})), "no schema says nothing");
    }
}
