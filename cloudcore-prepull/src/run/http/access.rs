//! Access to the metrics with `--metrics-secure`: a client needs a token of the API server and the right to `get` the
//! path /metrics. We do it as controller-runtime does, so that the same collectors work.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::edges::pki::sha256;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use prepull_engine::shared::pacing::TokenBucket;
use prepull_program::http::{HttpAnswer, TEXT};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// How long a right is good without being looked up again, and how long one that was taken away may still be used.
const GOOD_FOR: Duration = Duration::from_secs(60);
/// How long a collector is known as one. Its right is looked up again beside a flood of unknown tokens.
const KNOWN_FOR: Duration = Duration::from_secs(3600);
/// The most collectors that are known.
const MAX_KNOWN: usize = 64;
/// Look-ups of unknown tokens, per second and at once. Each costs two requests to the API server, and anybody in the
/// cluster can cause them.
const LOOKUPS: (f64, f64) = (5.0, 20.0);
/// Look-ups under way.
const AT_A_TIME: usize = 4;
/// How long a look-up may take. A collector waits for ten seconds.
const DEADLINE: Duration = Duration::from_secs(5);
/// The path that a collector has to be allowed to `get`.
pub(super) const PATH: &str = "/metrics";

/// Decides who may read the metrics. Clones share what is known.
#[derive(Clone)]
pub(super) struct MetricsAccess(Arc<SharedAccess>);

struct SharedAccess {
    client: Client,
    lookups: Semaphore,
    state: Mutex<AccessState>,
}

struct AccessState {
    rate: TokenBucket<std::time::Instant>,
    /// When the right of each collector was last found, by the hash of its token.
    known: HashMap<[u8; 32], Instant>,
}

enum Review {
    Allowed,
    Unknown,
    Forbidden(String),
}

impl MetricsAccess {
    pub(super) fn new(client: Client) -> Self {
        let (per_second, burst) = LOOKUPS;
        let state = AccessState { rate: TokenBucket::new(per_second, burst), known: HashMap::new() };
        Self(Arc::new(SharedAccess { client, lookups: Semaphore::new(AT_A_TIME), state: Mutex::new(state) }))
    }

    /// Whether the bearer of this header may read the metrics; the error is the answer for one who may not.
    pub(super) async fn check_bearer(&self, authorization: Option<&HeaderValue>) -> Result<(), HttpAnswer> {
        let token = authorization.and_then(|header| header.to_str().ok()).and_then(bearer_token);
        let token = token.ok_or_else(|| {
            refusal_answer(StatusCode::UNAUTHORIZED, "a bearer token of the cluster is needed")
        })?;
        let key = sha256(token.as_bytes());
        if self.is_good(key, Instant::now())? {
            return Ok(());
        }
        // Never closed.
        let _lookup = self.0.lookups.acquire().await;
        let review = timeout(DEADLINE, self.review(token)).await;
        let now = Instant::now();
        match review {
            Ok(Ok(Review::Allowed)) => {
                self.0.state.lock().remember(key, now);
                Ok(())
            }
            Ok(Ok(Review::Unknown)) => {
                self.0.state.lock().known.remove(&key);
                Err(refusal_answer(StatusCode::UNAUTHORIZED, "the API server does not know this token"))
            }
            Ok(Ok(Review::Forbidden(user))) => {
                self.0.state.lock().known.remove(&key);
                let error =
                    format!("{user} may not get {PATH}: bind it to a ClusterRole with this nonResourceURL");
                Err(refusal_answer(StatusCode::FORBIDDEN, &error))
            }
            Ok(Err(error)) => {
                let error = prepull_program::errors::with_causes(&error);
                tracing::warn!(
                    error,
                    "a reader of the metrics was not looked up; is manifests/components/metrics-secure applied?"
                );
                Err(refusal_answer(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the API server refuses the look-up: see the log",
                ))
            }
            Err(_) => {
                Err(refusal_answer(StatusCode::SERVICE_UNAVAILABLE, "the API server does not answer in time"))
            }
        }
    }

    /// Whether the right is known, and was found lately. The error is the answer where it cannot even be looked up.
    fn is_good(&self, key: [u8; 32], now: Instant) -> Result<bool, HttpAnswer> {
        let mut state = self.0.state.lock();
        state.known.retain(|_, found| now.duration_since(*found) < KNOWN_FOR);
        match state.known.get(&key).copied() {
            Some(found) => Ok(now.duration_since(found) < GOOD_FOR),
            None if state.rate.try_take(1.0, now.into_std()).is_ok() => Ok(false),
            None => Err(refusal_answer(
                StatusCode::TOO_MANY_REQUESTS,
                "too many unknown tokens: try again in a second",
            )),
        }
    }

    async fn review(&self, token: &str) -> Result<Review, kube::Error> {
        let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviewed = Api::<TokenReview>::all(self.0.client.clone());
        let status = reviewed.create(&PostParams::default(), &review).await?.status.unwrap_or_default();
        let (Some(true), Some(user)) = (status.authenticated, status.user) else {
            return Ok(Review::Unknown);
        };
        let UserInfo { username, groups, uid, extra } = user;
        let spec = SubjectAccessReviewSpec {
            non_resource_attributes: Some(NonResourceAttributes {
                path: Some(PATH.to_owned()),
                verb: Some("get".to_owned()),
            }),
            user: username.clone(),
            groups,
            uid,
            extra,
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let reviewed = Api::<SubjectAccessReview>::all(self.0.client.clone());
        let status = reviewed.create(&PostParams::default(), &review).await?.status;
        let is_allowed = status.is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if is_allowed { Review::Allowed } else { Review::Forbidden(username.unwrap_or_default()) })
    }
}

impl AccessState {
    fn remember(&mut self, key: [u8; 32], now: Instant) {
        if self.known.len() >= MAX_KNOWN && !self.known.contains_key(&key) {
            let oldest = self.known.iter().min_by_key(|(_, found)| **found).map(|(key, _)| *key);
            oldest.map(|oldest| self.known.remove(&oldest));
        }
        self.known.insert(key, now);
    }
}

fn bearer_token(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn refusal_answer(status: StatusCode, error: &str) -> HttpAnswer {
    (status, TEXT, format!("{error}\n"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http_body_util::BodyExt;
    use hyper::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// An API server that knows `collector`, who may read the metrics, and `somebody`, who may not. Counts requests.
    fn api_server() -> (MetricsAccess, Arc<AtomicUsize>) {
        let requests = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&requests);
        let serve = move |request: Request<Body>| {
            count.fetch_add(1, Ordering::Relaxed);
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let mut object: Value = serde_json::from_slice(&body).unwrap();
                object["status"] = if path.ends_with("/tokenreviews") {
                    let token = object["spec"]["token"].as_str().unwrap();
                    let known = ["collector", "somebody"].contains(&token);
                    json!({ "authenticated": known, "user": { "username": token, "groups": ["g"] } })
                } else {
                    assert_eq!(
                        object["spec"]["nonResourceAttributes"],
                        json!({ "path": "/metrics", "verb": "get" })
                    );
                    assert_eq!(object["spec"]["groups"], json!(["g"]));
                    json!({ "allowed": object["spec"]["user"] == "collector" })
                };
                Ok::<_, Infallible>(Response::new(Body::from(object.to_string().into_bytes())))
            }
        };
        (MetricsAccess::new(Client::new(tower::service_fn(serve), "default")), requests)
    }

    async fn status(access: &MetricsAccess, header: &str) -> u16 {
        let header = HeaderValue::from_str(header).unwrap();
        access.check_bearer(Some(&header)).await.map_or_else(|(status, ..)| status.as_u16(), |()| 200)
    }

    #[tokio::test(start_paused = true)]
    async fn metrics_need_the_right_to_get_them() {
        let (access, _) = api_server();
        assert_eq!(access.check_bearer(None).await.unwrap_err().0, StatusCode::UNAUTHORIZED);
        for (header, expected) in [
            ("Bearer collector", 200),
            ("bearer collector", 200),
            ("Bearer somebody", 403),
            ("Bearer nobody", 401),
            ("Bearer ", 401),
            ("Basic collector", 401),
            ("collector", 401),
        ] {
            assert_eq!(status(&access, header).await, expected, "{header}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_kept_for_a_minute() {
        let (access, requests) = api_server();
        for _ in 0..10 {
            assert_eq!(status(&access, "Bearer collector").await, 200);
        }
        assert_eq!(requests.load(Ordering::Relaxed), 2);
        tokio::time::advance(GOOD_FOR).await;
        assert_eq!(status(&access, "Bearer collector").await, 200);
        assert_eq!(requests.load(Ordering::Relaxed), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn unknown_tokens_do_not_lock_out_collectors() {
        let (access, requests) = api_server();
        assert_eq!(status(&access, "Bearer collector").await, 200);
        tokio::time::advance(GOOD_FOR).await;
        for n in 0..1000 {
            let refused = status(&access, &format!("Bearer wrong-{n}")).await;
            assert!(refused == 401 || refused == 429, "{refused}");
        }
        assert_eq!(status(&access, "Bearer collector").await, 200);
        // The real clock counts for the rate; a slow machine allows some more.
        assert!(requests.load(Ordering::Relaxed) < 100);
        assert!(access.0.state.lock().known.len() <= MAX_KNOWN);
    }
}
