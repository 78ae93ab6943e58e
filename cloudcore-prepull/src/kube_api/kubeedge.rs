//! KubeEdge beside us: its TaskManager and its controller-manager serve ImagePrePullJobs too. Two controllers would
//! overwrite each other's statuses, and pull each image twice.
//!
//! While KubeEdge is set up to serve them, nothing is served here: see [`find_obstacle`]. The marks in a job
//! concern that job alone, since every author of jobs can write them: see [`has_begun`].

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::{Client, Error};
use prepull_api::kubeedge::{CLOUDCORE, CONTROLLER_MANAGER, DEFINITION, NAMESPACE, obstacle};
use serde_json::Value;
use tracing::info;

/// The finalizer that KubeEdge's controller gives to each job.
const FINALIZER: &str = "kubeedge.io/imageprepulljob-controller";

/// What has to be done so that KubeEdge serves ImagePrePullJobs no more; `None` if it does not serve them. Without the
/// right to look, nothing is found.
pub(crate) async fn find_obstacle(client: &Client) -> Result<Option<String>, Error> {
    let (map, key) = CLOUDCORE;
    // At once, since edges wait for a leader.
    let (definition, configuration, manager) = futures::try_join!(
        get_if_allowed(Api::<CustomResourceDefinition>::all(client.clone()), DEFINITION),
        get_if_allowed(Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE), map),
        get_if_allowed(Api::<Deployment>::namespaced(client.clone(), NAMESPACE), CONTROLLER_MANAGER),
    )?;
    let yaml = configuration.and_then(|map| map.data).and_then(|mut data| data.remove(key));
    // What is no YAML is no configuration of CloudCore either.
    let configuration = yaml.and_then(|yaml| serde_saphyr::from_str::<Value>(&yaml).ok());
    Ok(obstacle(definition.as_ref(), configuration.as_ref(), manager.as_ref()))
}

/// What may not be looked for is taken for absent: rights of an earlier release go on working.
async fn get_if_allowed<K>(api: Api<K>, name: &str) -> Result<Option<K>, Error>
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

/// Whether KubeEdge has begun with this job, and we have not. We leave such a job alone even after it has ended:
/// otherwise we would carry it out once more.
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
    use serde_json::json;

    use super::*;

    #[test]
    fn recognizes_jobs_that_kubeedge_began() {
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
}
