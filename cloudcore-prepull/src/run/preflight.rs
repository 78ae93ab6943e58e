//! Before a leader begins: whether the cluster has what there is no work without. After an upgrade a definition may be
//! missing, or a right.

use std::time::{Duration, Instant};

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ImagePrePullReport;
use tracing::{error, info, warn};

use crate::kube_api::refusal::{FailureLog, explain, with_causes};
use crate::run::http::Readiness;

/// Between two looks: an upgrade may be under way, and whoever applies what is missing waits for it to help.
const PERIOD: Duration = Duration::from_secs(2);
/// A list of one object takes milliseconds; a server that is restarting may never answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Waits until all of it is served and may be read. What is missing stands in the log, and is the answer of /readyz.
/// Dropping the future loses nothing.
pub(crate) async fn passes(client: &Client, readiness: &Readiness) {
    let log = FailureLog::default();
    let mut complained = false;
    loop {
        let problems = problems(client).await;
        if problems.is_empty() {
            if complained {
                info!("the definitions and rights that were missing are there");
            }
            readiness.waits_for(None);
            return;
        }
        let lasting = problems.iter().any(|problem| problem.lasts);
        let text = problems.into_iter().map(|problem| problem.text).collect::<Vec<_>>().join("; ");
        if log.is_due("start", &text, Instant::now()) {
            if lasting {
                error!(problem = text, "no work can begin; looking again until it can");
            } else {
                warn!(problem = text, "no work can begin yet; looking again");
            }
        }
        complained |= lasting;
        readiness.waits_for(Some(text));
        tokio::time::sleep(PERIOD).await;
    }
}

/// All that lasts, to be mended at once; of what may pass the first will do.
async fn problems(client: &Client) -> Vec<Problem> {
    let mut problems = Vec::new();
    let looks = [
        look::<ImagePrePullJob>(client).boxed(),
        look::<ImagePrePullReport>(client).boxed(),
        look::<Node>(client).boxed(),
    ];
    for look in looks {
        let Err(problem) = look.await else { continue };
        let passes = !problem.lasts;
        if !problems.iter().any(|known: &Problem| known.text == problem.text) {
            problems.push(problem);
        }
        if passes {
            break;
        }
    }
    problems
}

/// Why a kind cannot be read.
struct Problem {
    text: String,
    /// Until somebody does something.
    lasts: bool,
}

async fn look<K>(client: &Client) -> Result<(), Problem>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let one = ListParams::default().limit(1);
    let kind = K::plural(&());
    match tokio::time::timeout(ANSWER, api.list_metadata(&one)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(match explain::<K>(&error) {
            Some(text) => Problem { text, lasts: true },
            None => {
                Problem { text: format!("{kind} cannot be listed: {}", with_causes(&error)), lasts: false }
            }
        }),
        Err(_) => Err(Problem { text: format!("{kind}: no answer within {ANSWER:?}"), lasts: false }),
    }
}
