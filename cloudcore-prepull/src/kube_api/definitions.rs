//! The definitions of our kinds, as the cluster serves them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::{Client, Error, ResourceExt};
use prepull_api::crd::{job, report, served, settings};
use tracing::debug;

/// Fields that are named in one message; of the rest, the number.
const NAMED: usize = 5;

/// What the definitions of jobs, reports and settings lack, and the remedy; `None` if they have all that this program knows. Without
/// the right to read one, nothing is found there: rights of an earlier release go on working.
pub(crate) async fn find_obstacle(client: &Client) -> Result<Option<String>, Error> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for ours in [job::crd(), report::crd(), settings::crd()] {
        let name = ours.name_any();
        let served = match api.get_opt(&name).await {
            Err(Error::Api(answer)) if answer.code == 403 => {
                debug!(definition = name, reason = answer.message, "not compared with ours");
                continue;
            }
            served => served?,
        };
        // One that is missing is named by the check that lists its objects.
        let Some(served) = served else { continue };
        let lacking = served::missing_paths(&served, &ours);
        if !lacking.is_empty() {
            return Ok(Some(describe_lacking(&name, &lacking)));
        }
    }
    Ok(None)
}

fn describe_lacking(name: &str, lacking: &[String]) -> String {
    let (named, rest) = lacking.split_at(lacking.len().min(NAMED));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    format!(
        "the definition {name} is of another release, under which the API server drops {}{more}: \
         kubectl apply -f manifests/crds",
        named.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_fields_are_named_and_the_rest_counted() {
        let lacking: Vec<_> = (1..=7).map(|number| format!("spec.f{number}")).collect();
        let text = describe_lacking("a.b", &lacking);
        assert!(
            text.contains("drops spec.f1, spec.f2, spec.f3, spec.f4, spec.f5 and 2 more: kubectl"),
            "{text}"
        );
        assert!(describe_lacking("a.b", &lacking[..1]).contains("drops spec.f1: kubectl"));
    }
}
