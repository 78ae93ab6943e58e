//! The loop around the election, which reads and writes the Lease, waits, and keeps the leadership up to date.

use std::time::{Duration, Instant};

use anyhow::Context;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use kube::{Client, Error};
use prepull_program::errors::with_causes;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, info_span, warn};

use super::election::{Election, ElectionStep, LEASE};
use super::identity::new_identity;
use super::leadership::Leadership;
use super::timing::Timing;
use super::watchdog;
use crate::kube_api::field_manager::post_params;
use crate::kube_api::refusal::explain_error;

/// The limit for releasing the Lease. If that fails, the successor waits until the Lease expires.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

struct Elector {
    api: Api<Lease>,
    timing: Timing,
    election: Election,
    leadership: Leadership,
}

enum LeaseAttempt {
    /// This replica holds the Lease, since a moment before the write was sent.
    Held(Instant),
    /// Another replica holds the Lease, which is to be read again at this time at the latest.
    HeldByOther(Instant),
    /// This replica led and does not hold the Lease any more, for this reason.
    Deposed(String),
}

#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error("the API server has not answered within {0:?}")]
    Deadline(Duration),
    /// Another replica has written the Lease since it was read.
    #[error("another replica wrote it at the same time")]
    Conflict,
    #[error(transparent)]
    Api(Error),
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(status) if status.code == 409 => Self::Conflict,
            error => Self::Api(error),
        }
    }
}

/// The term of this replica. It is renewed until it is released; if a renewal does not succeed in time, the process
/// ends.
pub(crate) struct LeaderTerm {
    leadership: Leadership,
    /// `None` if there is no election.
    renewal: Option<(CancellationToken, JoinHandle<Elector>)>,
}

/// Waits until this replica leads. `None` if `shutdown` comes first. Without `timing` there is no election, and the
/// replica leads at once.
pub(crate) async fn wait_to_lead(
    client: Client,
    namespace: &str,
    timing: Option<Timing>,
    leadership: &Leadership,
    shutdown: &CancellationToken,
) -> anyhow::Result<Option<LeaderTerm>> {
    let Some(timing) = timing else {
        info!("leader election is off; no other replica may run");
        return Ok(Some(LeaderTerm { leadership: leadership.clone(), renewal: None }));
    };
    let identity = new_identity().ok().context("read random bytes from the operating system")?;
    let mut elector = Elector {
        api: Api::namespaced(client, namespace),
        timing,
        election: Election::new(identity, timing),
        leadership: leadership.clone(),
    };
    let span = info_span!("lease", lease = format!("{namespace}/{LEASE}"));
    let Some(since) = elector.campaign(shutdown).instrument(span.clone()).await else { return Ok(None) };
    if let Err(error) = watchdog::start(leadership.clone(), watchdog::exit) {
        elector.release().instrument(span).await;
        return Err(error).context("start the watchdog thread of the leader election");
    }
    let stop = CancellationToken::new();
    let renewal = {
        let stop = stop.clone();
        tokio::spawn(async move { elector.keep_renewing(since, &stop).await }.instrument(span))
    };
    Ok(Some(LeaderTerm { leadership: leadership.clone(), renewal: Some((stop, renewal)) }))
}

impl LeaderTerm {
    /// Releases the Lease, so that a successor need not wait. From here on nothing may be written any more.
    pub(crate) async fn release(self) {
        let Some((stop, renewal)) = self.renewal else { return };
        self.leadership.release();
        stop.cancel();
        if let Ok(elector) = renewal.await {
            elector.release().await;
        }
    }
}

impl Elector {
    /// Waits until this replica holds the Lease, and returns since when. `None` at the shutdown.
    async fn campaign(&mut self, shutdown: &CancellationToken) -> Option<Instant> {
        let identity = self.election.identity().to_owned();
        info!(identity, timing = ?self.timing, "waiting to become the leader");
        let mut logged = String::new();
        loop {
            let began = Instant::now();
            let mut next = began + self.timing.retry_period;
            let deadline = self.attempt_deadline();
            let found = tokio::select! {
                () = shutdown.cancelled() => return None,
                found = self.read(deadline) => found,
            };
            // Not cancelled at the shutdown: a write that is under way may succeed.
            let attempt = match found {
                Ok(found) => self.act_on(found, deadline).await,
                Err(error) => Err(error),
            };
            let why = match attempt {
                Ok(LeaseAttempt::Held(since)) => {
                    if shutdown.is_cancelled() {
                        self.release().await;
                        return None;
                    }
                    if self.leadership.leads_until(since + self.timing.renew_deadline, Instant::now()) {
                        self.election.mark_leading();
                        let transitions = self.leadership.transitions();
                        info!(identity, transitions, "this replica leads");
                        return Some(since);
                    }
                    next = began; // the API server has us as the holder; the next write shows whether it came in time
                    "the API server answers too late".to_owned()
                }
                Ok(LeaseAttempt::HeldByOther(until)) => {
                    logged.clear();
                    next = next.min(until);
                    sleep_until(next, shutdown).await?;
                    continue;
                }
                // Cannot happen: only a leader is deposed.
                Ok(LeaseAttempt::Deposed(why)) => why,
                Err(error) => format!("the Lease cannot be acquired: {}", failure_reason(&error)),
            };
            if why != logged {
                warn!(reason = why, "this replica does not lead");
                logged.clone_from(&why);
            }
            self.leadership.stand_by(why);
            sleep_until(next, shutdown).await?;
        }
    }

    /// Renews the Lease until `stop`, or until the term is lost: then the watchdog ends the process.
    async fn keep_renewing(mut self, since: Instant, stop: &CancellationToken) -> Self {
        let mut next = since + self.timing.retry_period;
        loop {
            if sleep_until(next, stop).await.is_none() {
                return self;
            }
            let began = Instant::now();
            next = began + self.timing.retry_period;
            let attempt = tokio::select! {
                () = stop.cancelled() => return self,
                attempt = self.attempt() => attempt,
            };
            match attempt {
                Ok(LeaseAttempt::Held(since)) => {
                    if !self.leadership.leads_until(since + self.timing.renew_deadline, Instant::now()) {
                        return self;
                    }
                }
                Ok(LeaseAttempt::Deposed(why)) => {
                    self.leadership.lose_term(why);
                    return self;
                }
                // Cannot happen: a leader does not wait for another holder.
                Ok(LeaseAttempt::HeldByOther(_)) => {}
                Err(error) => warn!(error = failure_reason(&error), "the Lease was not renewed; retrying"),
            }
        }
    }

    /// Reads the Lease, and writes it if the rules say so.
    async fn attempt(&mut self) -> Result<LeaseAttempt, AttemptError> {
        let deadline = self.attempt_deadline();
        let found = self.read(deadline).await?;
        self.act_on(found, deadline).await
    }

    /// The deadline of an attempt that begins now, for all its requests together.
    fn attempt_deadline(&self) -> tokio::time::Instant {
        tokio::time::Instant::now() + self.timing.attempt_limit()
    }

    async fn read(&self, deadline: tokio::time::Instant) -> Result<Option<Lease>, AttemptError> {
        self.in_time(deadline, self.api.get_opt(LEASE)).await
    }

    async fn act_on(
        &mut self,
        found: Option<Lease>,
        deadline: tokio::time::Instant,
    ) -> Result<LeaseAttempt, AttemptError> {
        let transitions = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
        if let Some(transitions) = found.as_ref().and_then(transitions) {
            self.leadership.saw_transitions(transitions.into());
        }
        match self.election.step(found.as_ref(), Instant::now(), Timestamp::now()) {
            ElectionStep::Write(lease) => {
                let since = Instant::now();
                let post = post_params();
                let written = match lease.metadata.resource_version {
                    Some(_) => self.in_time(deadline, self.api.replace(LEASE, &post, &lease)).await?,
                    None => self.in_time(deadline, self.api.create(&post, &lease)).await?,
                };
                self.leadership.saw_transitions(transitions(&written).unwrap_or(0).into());
                Ok(LeaseAttempt::Held(since))
            }
            ElectionStep::Wait { holder, until } => {
                if self.leadership.leader().as_ref() != Some(&holder) {
                    info!(%holder, "another replica leads; this one stands by");
                }
                self.leadership.follow_leader(holder);
                Ok(LeaseAttempt::HeldByOther(until))
            }
            ElectionStep::Deposed { by } => {
                let by = by.map_or("the Lease has no holder any more".to_owned(), |by| format!("{by} leads"));
                Ok(LeaseAttempt::Deposed(by))
            }
        }
    }

    /// Best effort: if it fails, the successor waits until the Lease expires.
    async fn release(&self) {
        let release = async {
            loop {
                let Some(lease) = self.api.get_opt(LEASE).await? else { return Ok(()) };
                let Some(lease) = self.election.without_holder(lease, Timestamp::now()) else {
                    return Ok(());
                };
                match self.api.replace(LEASE, &post_params(), &lease).await {
                    // A renewal of this replica, cancelled while in flight, was quicker.
                    Err(Error::Api(status)) if status.code == 409 => {}
                    written => return written.map(drop),
                }
            }
        };
        let identity = self.election.identity();
        match tokio::time::timeout(RELEASE_LIMIT, release).await {
            Ok(Ok(())) => info!(identity, "the Lease was released"),
            Ok(Err(error)) => warn!(%error, "the Lease was not released; it expires by itself"),
            Err(_) => {
                warn!(limit = ?RELEASE_LIMIT, "the Lease was not released in time; it expires by itself");
            }
        }
    }

    async fn in_time<T>(
        &self,
        deadline: tokio::time::Instant,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, AttemptError> {
        match tokio::time::timeout_at(deadline, request).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(AttemptError::Deadline(self.timing.attempt_limit())),
        }
    }
}

/// Sleeps until `next`. `None` if it is cancelled before.
async fn sleep_until(next: Instant, cancelled: &CancellationToken) -> Option<()> {
    cancelled.run_until_cancelled(tokio::time::sleep_until(next.into())).await
}

/// The remedy if there is one, else the error with its causes.
fn failure_reason(error: &AttemptError) -> String {
    match error {
        AttemptError::Api(error) => explain_error::<Lease>(error).unwrap_or_else(|| with_causes(error)),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use kube::client::Body;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// An API server that takes 3 s to say that there is no Lease, and does not answer the request to create one.
    async fn slow(request: hyper::Request<Body>) -> Result<hyper::Response<Body>, std::convert::Infallible> {
        let creates = request.method() == hyper::Method::POST;
        // The whole request has been sent.
        let _ = request.into_body().collect().await;
        tokio::time::sleep(Duration::from_secs(if creates { 3600 } else { 3 })).await;
        let status = serde_json::json!({
            "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": "not found",
        });
        let mut response = hyper::Response::new(Body::from(status.to_string().into_bytes()));
        *response.status_mut() = hyper::StatusCode::NOT_FOUND;
        Ok(response)
    }

    #[tokio::test(start_paused = true)]
    async fn reads_and_writes_share_one_deadline() {
        let timing = Timing::new(15 * SECOND, 10 * SECOND, 2 * SECOND).unwrap();
        let mut elector = Elector {
            api: Api::namespaced(Client::new(tower::service_fn(slow), "default"), "default"),
            timing,
            election: Election::new("a".to_owned(), timing),
            leadership: Leadership::standby(),
        };
        let began = tokio::time::Instant::now();
        assert!(matches!(elector.attempt().await, Err(AttemptError::Deadline(_))));
        assert_eq!(began.elapsed().as_secs(), 4);
    }
}
