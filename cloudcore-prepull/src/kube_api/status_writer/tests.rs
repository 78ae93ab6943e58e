#![allow(clippy::unwrap_used)]
use std::convert::Infallible;

use hyper::{Request, Response};
use kube::client::Body;
use serde_json::Value;

use super::*;

/// A writer whose API server answers lists with this, and the targets of all requests so far.
fn writer(answer: impl Fn(&str) -> Value + Send + Sync + 'static) -> (Writer, Arc<Mutex<Vec<String>>>) {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let (seen, answer) = (Arc::clone(&requests), Arc::new(answer));
    let serve = move |request: Request<Body>| {
        let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
        async move {
            let target = request.uri().to_string();
            let answer = answer(&target);
            seen.lock().unwrap().push(target);
            let code = answer["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(200);
            let body = Body::from(answer.to_string().into_bytes());
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        }
    };
    let client = Client::new(tower::service_fn(serve), "default");
    (Writer::new(client.clone(), Events::start(client)), requests)
}

fn list(kind: &str, items: &Value, next: Option<&str>) -> Value {
    json!({ "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": kind, "metadata": { "continue": next }, "items": items })
}

fn job(uid: &str, status: &Value) -> Value {
    json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
        "metadata": { "name": uid, "uid": uid, "generation": 1 },
        "spec": { "imagePrePullTemplate": { "images": ["nginx"], "nodeNames": ["a"] } }, "status": status,
    })
}

fn report(job: &str, index: u32) -> Value {
    json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullReport",
        "metadata": {
            "name": format!("{job}-{index}"), "resourceVersion": "7",
            "ownerReferences": [{ "apiVersion": "v1", "kind": "ImagePrePullJob", "name": job, "uid": job }],
        },
        "index": index,
    })
}

#[tokio::test]
async fn only_the_reports_of_jobs_that_run_are_read_and_those_by_label() {
    let over = json!({
        "phase": "Completed", "startTime": "2020-01-01T00:00:00Z", "completionTime": "2020-01-01T00:01:00Z",
        "observedGeneration": 1,
    });
    let runs = json!({ "phase": "InProgress", "startTime": "2020-01-01T00:00:00Z", "observedGeneration": 1 });
    let (writer, requests) = writer(move |target| {
        if target.contains("imageprepulljobs") {
            let jobs = json!([job("over", &over), job("runs", &runs), job("also-runs", &runs)]);
            return list("ImagePrePullJobList", &jobs, None);
        }
        // A label that somebody set on the report of another job, too.
        list(
            "ImagePrePullReportList",
            &json!([report("runs", 0), report("also-runs", 0), report("over", 0)]),
            None,
        )
    });
    let reports = writer.read_reports(Timestamp::now()).await;
    let owners: Vec<_> = reports.iter().map(|report| report.owner_references()[0].uid.as_str()).collect();
    assert_eq!(owners, ["runs", "also-runs"]);
    let requests = requests.lock().unwrap();
    let of_reports: Vec<_> =
        requests.iter().filter(|target| target.contains("imageprepullreports")).collect();
    assert_eq!(of_reports.len(), 1, "{requests:?}");
    assert!(of_reports[0].contains("labelSelector=operations.kubeedge.io%2Fjob-uid"), "{requests:?}");
    assert!(of_reports[0].contains("runs%2Calso-runs") && !of_reports[0].contains("over"), "{requests:?}");
}

#[tokio::test]
async fn an_unreadable_report_counts_as_lost() {
    let (writer, _) = writer(|_| {
        let mut broken = report("runs", 1);
        broken["nodeStatus"] = json!([{"nodeName": 7}]);
        list("ImagePrePullReportList", &json!([report("runs", 0), broken, report("runs", 2)]), None)
    });
    let reports = writer.read_reports_of(&JobUid("runs".to_owned())).await;
    assert_eq!(reports.iter().map(|report| report.body.index).collect::<Vec<_>>(), [0, 2]);
}

#[tokio::test]
async fn a_list_whose_pages_expire_is_read_in_one_answer() {
    let (writer, requests) = writer(|target| {
        if target.contains("continue=") {
            return json!({ "kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired", "message": "too old" });
        }
        let (items, next) = if target.contains("limit=") {
            (json!([report("runs", 0)]), Some("page-2"))
        } else {
            (json!([report("runs", 0), report("runs", 1)]), None)
        };
        list("ImagePrePullReportList", &items, next)
    });
    let reports = writer.read_reports_of(&JobUid("runs".to_owned())).await;
    assert_eq!(reports.iter().map(|report| report.body.index).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(requests.lock().unwrap().len(), 3);
}
