//! An API server for unit tests, with scripted answers.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use hyper::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// Methods and targets of the requests so far.
pub(crate) type SeenRequests = Arc<Mutex<Vec<String>>>;

/// A client that gets these answers, each by its method and target. An answer with a `code` has that status.
pub(crate) fn client_answering(
    answer: impl Fn(&str) -> Value + Send + Sync + 'static,
) -> (Client, SeenRequests) {
    let requests = SeenRequests::default();
    let (seen, answer) = (Arc::clone(&requests), Arc::new(answer));
    let serve = move |request: Request<Body>| {
        let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
        async move {
            let target = format!("{} {}", request.method(), request.uri());
            let answer = answer(&target);
            seen.lock().unwrap().push(target);
            let code = answer["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(200);
            let body = Body::from(answer.to_string().into_bytes());
            Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
        }
    };
    (Client::new(tower::service_fn(serve), "default"), requests)
}

pub(crate) fn refusal_status(code: u16) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "Conflict",
        "message": "made up", "details": { "name": "a" },
    })
}
