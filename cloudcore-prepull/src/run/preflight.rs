//! The check before a leader starts its work: the definitions that it needs are served, and it may list them (after an
//! upgrade a definition or a right may be missing), and KubeEdge does not serve the same jobs.

use std::time::{Duration, Instant};

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_program::errors::with_causes;
use tracing::{error, info, warn};

use crate::kube_api::kubeedge;
use crate::kube_api::refusal::{FailureLog, explain};
use crate::run::http::Readiness;

/// The time between two checks. Short, because whoever applies what is missing waits for the effect.
const PERIOD: Duration = Duration::from_secs(2);
/// The limit for listing one object, which takes milliseconds; an API server that restarts may never answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Waits until every kind is served and may be listed. What is missing is logged, and is the answer of /readyz. Dropping
/// the future loses nothing.
pub(super) async fn wait_until_passed(client: &Client, namespace: &str, readiness: &Readiness) {
    let log = FailureLog::default();
    let mut was_lasting = false;
    loop {
        let mut problems = find_problems(client, namespace).await;
        if problems.is_empty() {
            problems.extend(find_kubeedge(client).boxed().await);
        }
        if problems.is_empty() {
            if was_lasting {
                info!("what was in the way of the start has been put right");
            }
            readiness.set_obstacle(None);
            return;
        }
        let lasting = problems.iter().any(|problem| problem.lasts);
        let text = problems.into_iter().map(|problem| problem.text).collect::<Vec<_>>().join("; ");
        if log.is_due("start", &text, Instant::now()) {
            if lasting {
                error!(problem = text, "cannot start to work; checking again until it is solved");
            } else {
                warn!(problem = text, "cannot start to work yet; checking again");
            }
        }
        was_lasting |= lasting;
        readiness.set_obstacle(Some(text));
        tokio::time::sleep(PERIOD).await;
    }
}

/// All problems that last, so that they can be solved together; of those that may pass, the first one.
async fn find_problems(client: &Client, namespace: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let checks = [
        check_kind::<ImagePrePullJob>(Api::all(client.clone())).boxed(),
        check_kind::<ImagePrePullReport>(Api::all(client.clone())).boxed(),
        check_kind::<Node>(Api::all(client.clone())).boxed(),
        check_kind::<ConfigMap>(Api::namespaced(client.clone(), namespace)).boxed(),
    ];
    for check in checks {
        let Err(problem) = check.await else { continue };
        let may_pass = !problem.lasts;
        if !problems.iter().any(|known: &Problem| known.text == problem.text) {
            problems.push(problem);
        }
        if may_pass {
            break;
        }
    }
    problems
}

/// Whether somebody else serves our kind. What cannot be found out now is found out at the next check.
async fn find_kubeedge(client: &Client) -> Option<Problem> {
    match tokio::time::timeout(ANSWER_LIMIT, kubeedge::find_obstacle(client)).await {
        Ok(Ok(obstacle)) => obstacle.map(|text| Problem { text, lasts: true }),
        Ok(Err(error)) => {
            let text =
                format!("it cannot be found out whether KubeEdge serves jobs: {}", with_causes(&error));
            Some(Problem { text, lasts: false })
        }
        Err(_) => {
            let text = format!("whether KubeEdge serves jobs: no answer within {ANSWER_LIMIT:?}");
            Some(Problem { text, lasts: false })
        }
    }
}

/// Why the work cannot begin.
struct Problem {
    text: String,
    /// Whether it lasts until somebody acts.
    lasts: bool,
}

async fn check_kind<K>(api: Api<K>) -> Result<(), Problem>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let one = ListParams::default().limit(1);
    let kind = K::plural(&());
    match tokio::time::timeout(ANSWER_LIMIT, api.list_metadata(&one)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(match explain::<K>(&error) {
            Some(text) => Problem { text, lasts: true },
            None => {
                Problem { text: format!("{kind} cannot be listed: {}", with_causes(&error)), lasts: false }
            }
        }),
        Err(_) => Err(Problem { text: format!("{kind}: no answer within {ANSWER_LIMIT:?}"), lasts: false }),
    }
}
