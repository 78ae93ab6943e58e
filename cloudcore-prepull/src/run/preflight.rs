//! The check before a leader starts its work: the definitions that it needs are served with every field that it knows, and
//! it may list them (after an upgrade a definition or a right may be missing), and KubeEdge does not serve the same jobs.
//! A leader goes on looking at the definitions, which may be replaced by those of an earlier release.
//!
//! A standby makes the same check, and isn't available before it has passed: a rollout would otherwise end well with
//! replicas that all fail to lead.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use prepull_engine::shared::pacing::Backoff;
use prepull_program::errors::with_causes;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::kube_api::refusal::{FailureLog, explain_error};
use crate::kube_api::{definitions, kubeedge};
use crate::run::http::Readiness;

/// The time between two checks of a leader. Short, because the person who applies what is missing waits for the effect.
const PERIOD: Duration = Duration::from_secs(2);
/// The longest time between two checks of a standby. A rollout waits for it, but no edge does, and a standby may lack
/// something for days while its leader works.
const LONGEST_PERIOD: Duration = Duration::from_secs(30);
/// The time between two looks of a leader at the definitions. What an older one drops until then is lost.
const DEFINITIONS_PERIOD: Duration = Duration::from_secs(15);
/// The limit for listing one object, which takes milliseconds; an API server that restarts may never answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Preflight {
    client: Client,
    namespace: String,
    readiness: Arc<Readiness>,
    /// Shared by both roles, since a standby that becomes the leader meets the same problem again.
    log: FailureLog,
    stopped: AtomicBool,
}

impl Preflight {
    pub(super) fn new(client: Client, namespace: &str, readiness: Arc<Readiness>) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            readiness,
            log: FailureLog::default(),
            stopped: AtomicBool::new(false),
        }
    }

    /// Waits until every kind is served and may be listed. What is missing is logged, and is the answer of /readyz.
    /// Dropping the future loses nothing.
    pub(super) async fn wait_until_passed(&self) {
        self.check_until_passed(Backoff::new(PERIOD, PERIOD)).await;
    }

    /// Checks as a standby while `lead` waits for the leadership, and returns what that returns. What is missing is logged,
    /// and is the answer of /availablez.
    pub(super) async fn stand_by_until<T>(&self, lead: impl Future<Output = T>) -> T {
        let standing_by = async {
            self.check_until_passed(Backoff::new(PERIOD, LONGEST_PERIOD)).await;
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            biased;
            led = lead => led,
            never = standing_by => match never {},
        }
    }

    /// Checks the definitions for as long as the leader works. Ends `part` when they are those of an earlier release;
    /// [`Self::has_stopped`] returns whether it has.
    pub(super) async fn stop_on_older_definitions(&self, part: CancellationToken) {
        loop {
            tokio::time::sleep(DEFINITIONS_PERIOD).await;
            let Some(PreflightProblem { text, lasts: true }) = find_older_definitions(&self.client).await
            else {
                continue;
            };
            error!(
                problem = text,
                "the definitions were replaced: the work stops until they are right again"
            );
            self.stopped.store(true, Ordering::Relaxed);
            return part.cancel();
        }
    }

    /// Whether the work was stopped to be checked for again. Asking resets it.
    pub(super) fn has_stopped(&self) -> bool {
        self.stopped.swap(false, Ordering::Relaxed)
    }

    async fn check_until_passed(&self, mut pause: Backoff) {
        let mut was_lasting = false;
        loop {
            let mut problems = find_problems(&self.client, &self.namespace).await;
            if problems.is_empty() {
                problems.extend(find_kubeedge(&self.client).boxed().await);
            }
            if problems.is_empty() {
                problems.extend(find_older_definitions(&self.client).boxed().await);
            }
            if problems.is_empty() {
                if was_lasting {
                    info!("what was in the way has been put right");
                }
                self.readiness.pass_preflight();
                return;
            }
            let lasting = problems.iter().any(|problem| problem.lasts);
            let text = problems.into_iter().map(|problem| problem.text).collect::<Vec<_>>().join("; ");
            if self.log.is_due("start", &text, Instant::now()) {
                if lasting {
                    error!(problem = text, "cannot work as the leader; checking again until it is solved");
                } else {
                    warn!(problem = text, "cannot work as the leader yet; checking again");
                }
            }
            was_lasting |= lasting;
            self.readiness.set_obstacle(text);
            tokio::time::sleep(pause.next_wait()).await;
        }
    }
}

/// All problems that last, so that they can be solved together; of those that may pass, the first one.
async fn find_problems(client: &Client, namespace: &str) -> Vec<PreflightProblem> {
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
        if !problems.iter().any(|known: &PreflightProblem| known.text == problem.text) {
            problems.push(problem);
        }
        if may_pass {
            break;
        }
    }
    problems
}

/// Whether KubeEdge serves our kind.
async fn find_kubeedge(client: &Client) -> Option<PreflightProblem> {
    let unknown = "it cannot be found out whether KubeEdge serves jobs";
    find_obstacle(unknown, kubeedge::find_obstacle(client)).await
}

/// Whether a definition lacks what this program writes or reads.
async fn find_older_definitions(client: &Client) -> Option<PreflightProblem> {
    find_obstacle("the definitions cannot be read", definitions::find_obstacle(client)).await
}

/// The obstacle that `look` finds. If `look` fails, `unknown` describes the problem, which lasts until the next check.
async fn find_obstacle(
    unknown: &str,
    look: impl Future<Output = Result<Option<String>, kube::Error>>,
) -> Option<PreflightProblem> {
    let why = match tokio::time::timeout(ANSWER_LIMIT, look).await {
        Ok(Ok(obstacle)) => return obstacle.map(|text| PreflightProblem { text, lasts: true }),
        Ok(Err(error)) => with_causes(&error),
        Err(_) => format!("no answer within {ANSWER_LIMIT:?}"),
    };
    Some(PreflightProblem { text: format!("{unknown}: {why}"), lasts: false })
}

struct PreflightProblem {
    text: String,
    /// Whether it lasts until an operator acts.
    lasts: bool,
}

async fn check_kind<K>(api: Api<K>) -> Result<(), PreflightProblem>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    // By a name that none has: one object that can't be decoded must not stand in the way of all others.
    let none = ListParams::default().fields("metadata.name=preflight-of-cloudcore-prepull").limit(1);
    let kind = K::plural(&());
    match tokio::time::timeout(ANSWER_LIMIT, api.list_metadata(&none)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(match explain_error::<K>(&error) {
            Some(text) => PreflightProblem { text, lasts: true },
            None => PreflightProblem {
                text: format!("{kind} cannot be listed: {}", with_causes(&error)),
                lasts: false,
            },
        }),
        Err(_) => {
            Err(PreflightProblem { text: format!("{kind}: no answer within {ANSWER_LIMIT:?}"), lasts: false })
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kube_api::fake_api::client_answering;
    use crate::kube_api::leader::Leadership;
    use crate::kube_api::leader_label::LeaderLabel;

    #[tokio::test]
    async fn one_undecodable_object_fails_no_check() {
        let (client, _) = client_answering(|target| {
            if target.contains("fieldSelector=metadata.name%3D") {
                return json!({ "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {}, "items": [] });
            }
            json!({ "kind": "Status", "status": "Failure", "code": 500, "message": "invalid character 'o'" })
        });
        let checked = check_kind(Api::<ImagePrePullReport>::all(client)).await;
        assert!(checked.is_ok(), "{:?}", checked.map_err(|problem| problem.text));
    }

    /// Requests of one check: a list of each kind.
    const REQUESTS: usize = 4;

    #[tokio::test(start_paused = true)]
    async fn a_standby_checks_ever_less_often() {
        let (client, requests) = client_answering(|_| {
            json!({
                "kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403,
                "message": "User \"u\" cannot list resource \"r\" in API group \"g\" at the cluster scope",
            })
        });
        let label = LeaderLabel::start(client.clone(), "default", None);
        let readiness = Arc::new(Readiness::new(Leadership::standby(), label));
        let preflight = Preflight::new(client, "default", readiness);
        preflight.stand_by_until(tokio::time::sleep(Duration::from_secs(61))).await;
        // After 0, 2, 6, 14, 30 and 60 s.
        assert_eq!(requests.lock().unwrap().len(), 6 * REQUESTS);
    }
}
