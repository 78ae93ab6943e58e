//! Other controllers that serve the same kinds.

use jiff::Timestamp;
use kube::ResourceExt;
use prepull_api::crd::kruise::{PART_OF, PART_OF_LABEL, running_controller};
use prepull_api::kubeedge::{CLOUDCORE, obstacle};
use serde_json::Value;

use super::super::facts::ClusterFacts;
use crate::checklist::Point;

pub(super) fn points(facts: &ClusterFacts, now: Timestamp) -> Vec<Point> {
    vec![kubeedge_point(facts), kruise_point(facts, now)]
}

fn kubeedge_point(facts: &ClusterFacts) -> Point {
    let read = |map: &k8s_openapi::api::core::v1::ConfigMap| {
        serde_saphyr::from_str::<Value>(map.data.as_ref()?.get(CLOUDCORE.1)?).ok()
    };
    let configuration = facts.cloudcore.as_ref().ok().and_then(|map| read(map.as_ref()?));
    let definition = facts.jobs.as_ref().ok().and_then(Option::as_ref);
    let manager = facts.manager.as_ref().ok().and_then(Option::as_ref);
    if let Some(obstacle) = obstacle(definition, configuration.as_ref(), manager) {
        let (what, remedy) = obstacle.split_once(": ").unwrap_or((&obstacle, "docs/kubeedge.md"));
        return Point::bad(what, remedy);
    }
    let unread = [facts.cloudcore.as_ref().err(), facts.manager.as_ref().err()];
    match unread.into_iter().flatten().next() {
        Some(error) => {
            Point::open(format!("whether KubeEdge serves ImagePrePullJobs too is not known: {error}"))
        }
        None => Point::good("KubeEdge does not serve ImagePrePullJobs beside it"),
    }
}

fn kruise_point(facts: &ClusterFacts, now: Timestamp) -> Point {
    let (definition, lease) = match (&facts.kruise, &facts.kruise_lease) {
        (Ok(definition), Ok(lease)) => (definition, lease),
        (Err(error), _) | (_, Err(error)) => {
            return Point::open(format!("whether OpenKruise runs is not known: {error}"));
        }
    };
    let Some(definition) = definition else {
        return Point::good("OpenKruise's kinds are not installed, and not needed");
    };
    let is_ours = definition.labels().get(PART_OF_LABEL).map(String::as_str) == Some(PART_OF);
    match lease.as_ref().and_then(|lease| running_controller(lease, now)) {
        _ if !is_ours => {
            Point::good("OpenKruise's kinds are its own: cloudcore-prepull runs without --enable-kruise-api")
        }
        Some(holder) => Point::bad(
            format!(
                "OpenKruise's own controller ({holder}) serves ImagePullJobs, whose definitions are cloudcore-prepull's"
            ),
            "stop one of them: kruise-manager, or --enable-kruise-api (docs/kruise.md)",
        ),
        None => {
            Point::good("OpenKruise's kinds are cloudcore-prepull's, and no other controller serves them")
        }
    }
}
