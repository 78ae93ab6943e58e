//! The loop around the election: reads and writes the Lease, waits, and says what came of it.

use std::time::{Duration, Instant};

use anyhow::Context;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, PostParams};
use kube::{Client, Error};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, info_span, warn};

use super::election::{Election, Step};
use super::{LEASE, Leadership, Timing, identity, watchdog};
use crate::kube_api::refusal::{explain, with_causes};

/// To give the Lease back may take so long. Where it does not succeed, the successor waits until it runs out.
const RELEASE: Duration = Duration::from_secs(2);

struct Elector {
    api: Api<Lease>,
    timing: Timing,
    election: Election,
    leadership: Leadership,
}

/// What came of one look at the Lease.
enum Attempt {
    /// It is ours; since before the write was sent.
    Ours(Instant),
    /// To be looked at again then at the latest.
    Another(Instant),
    /// It was ours.
    Deposed(String),
}

/// Why one look came to nothing.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error("the API server does not answer within {0:?}")]
    Late(Duration),
    /// The last one to write it was not us.
    #[error("somebody else wrote it at the same time")]
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

/// A term of ours. It is renewed until it is given back; where that does not succeed in time, the process ends.
pub struct Term {
    leadership: Leadership,
    /// None where there is no election.
    renewal: Option<(CancellationToken, JoinHandle<Elector>)>,
}

/// Waits until this replica leads. None when `shutdown` comes first. Without `timing` there is no election, and it
/// leads at once.
pub async fn lead(
    client: Client,
    namespace: &str,
    timing: Option<Timing>,
    leadership: &Leadership,
    shutdown: &CancellationToken,
) -> anyhow::Result<Option<Term>> {
    let Some(timing) = timing else {
        info!("no leader election; there must be no other replica");
        return Ok(Some(Term { leadership: leadership.clone(), renewal: None }));
    };
    let identity = identity().ok().context("no random bytes from the operating system")?;
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
        return Err(error).context("start the thread that watches over the Lease");
    }
    let stop = CancellationToken::new();
    let renewal = {
        let stop = stop.clone();
        tokio::spawn(async move { elector.hold(since, &stop).await }.instrument(span))
    };
    Ok(Some(Term { leadership: leadership.clone(), renewal: Some((stop, renewal)) }))
}

impl Term {
    /// Gives the Lease back, so that a successor need not wait. Nothing may be written any more from here on.
    pub async fn release(self) {
        let Some((stop, renewal)) = self.renewal else { return };
        self.leadership.release();
        stop.cancel();
        if let Ok(elector) = renewal.await {
            elector.release().await;
        }
    }
}

impl Elector {
    /// Until the Lease is ours: since when it is. None at the shutdown.
    async fn campaign(&mut self, shutdown: &CancellationToken) -> Option<Instant> {
        let identity = self.election.identity().to_owned();
        info!(identity, timing = ?self.timing, "waiting to become the leader");
        let mut said = String::new();
        loop {
            let began = Instant::now();
            let mut next = began + self.timing.retry_period;
            let late = self.late();
            let found = tokio::select! {
                () = shutdown.cancelled() => return None,
                found = self.read(late) => found,
            };
            // Not to be cancelled: a write that is under way may succeed.
            let attempt = match found {
                Ok(found) => self.decide(found, late).await,
                Err(error) => Err(error),
            };
            let why = match attempt {
                Ok(Attempt::Ours(since)) => {
                    if shutdown.is_cancelled() {
                        self.release().await;
                        return None;
                    }
                    if self.leadership.leads_until(since + self.timing.renew_deadline, Instant::now()) {
                        self.election.won();
                        let transitions = self.leadership.transitions();
                        info!(identity, transitions, "this replica leads");
                        return Some(since);
                    }
                    next = began; // it is ours in the API server: the next write tells whether in time
                    "the API server answers too late".to_owned()
                }
                Ok(Attempt::Another(until)) => {
                    said.clear();
                    next = next.min(until);
                    continue_after(next, shutdown).await?;
                    continue;
                }
                // Only who leads can be deposed.
                Ok(Attempt::Deposed(why)) => why,
                Err(error) => format!("the Lease cannot be had: {}", chain(&error)),
            };
            if why != said {
                warn!(why, "this replica does not lead");
                said.clone_from(&why);
            }
            self.leadership.stand_by(why);
            continue_after(next, shutdown).await?;
        }
    }

    /// Renews until it is told to stop, or the term is lost: then the watchdog ends the process.
    async fn hold(mut self, since: Instant, stop: &CancellationToken) -> Self {
        let mut next = since + self.timing.retry_period;
        loop {
            if continue_after(next, stop).await.is_none() {
                return self;
            }
            let began = Instant::now();
            next = began + self.timing.retry_period;
            let attempt = tokio::select! {
                () = stop.cancelled() => return self,
                attempt = self.attempt() => attempt,
            };
            match attempt {
                Ok(Attempt::Ours(since)) => {
                    if !self.leadership.leads_until(since + self.timing.renew_deadline, Instant::now()) {
                        return self;
                    }
                }
                Ok(Attempt::Deposed(why)) => {
                    self.leadership.lose(why);
                    return self;
                }
                // Who leads does not wait.
                Ok(Attempt::Another(_)) => {}
                Err(error) => warn!(error = chain(&error), "the Lease was not renewed; trying again"),
            }
        }
    }

    /// One look at the Lease.
    async fn attempt(&mut self) -> Result<Attempt, AttemptError> {
        let late = self.late();
        let found = self.read(late).await?;
        self.decide(found, late).await
    }

    /// When an attempt that begins now is to have ended, with all its requests.
    fn late(&self) -> tokio::time::Instant {
        tokio::time::Instant::now() + self.timing.attempt()
    }

    async fn read(&self, late: tokio::time::Instant) -> Result<Option<Lease>, AttemptError> {
        self.in_time(late, self.api.get_opt(LEASE)).await
    }

    /// What follows from the Lease, done.
    async fn decide(
        &mut self,
        found: Option<Lease>,
        late: tokio::time::Instant,
    ) -> Result<Attempt, AttemptError> {
        let transitions = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
        if let Some(transitions) = found.as_ref().and_then(transitions) {
            self.leadership.saw_transitions(transitions.into());
        }
        match self.election.step(found.as_ref(), Instant::now(), Timestamp::now()) {
            Step::Write(lease) => {
                let since = Instant::now();
                let post = PostParams::default();
                let written = match lease.metadata.resource_version {
                    Some(_) => self.in_time(late, self.api.replace(LEASE, &post, &lease)).await?,
                    None => self.in_time(late, self.api.create(&post, &lease)).await?,
                };
                self.leadership.saw_transitions(transitions(&written).unwrap_or(0).into());
                Ok(Attempt::Ours(since))
            }
            Step::Wait { holder, until } => {
                let why = format!("{holder} leads");
                if self.leadership.why_not().as_ref() != Some(&why) {
                    info!(%holder, "another replica leads; this one stands by");
                }
                self.leadership.stand_by(why);
                Ok(Attempt::Another(until))
            }
            Step::Deposed { by } => {
                let by = by.map_or("nobody holds the Lease any more".to_owned(), |by| format!("{by} leads"));
                Ok(Attempt::Deposed(by))
            }
        }
    }

    /// Best effort: the successor waits where it fails.
    async fn release(&self) {
        let release = async {
            loop {
                let Some(lease) = self.api.get_opt(LEASE).await? else { return Ok(()) };
                let Some(lease) = self.election.released(lease, Timestamp::now()) else { return Ok(()) };
                match self.api.replace(LEASE, &PostParams::default(), &lease).await {
                    // A renewal of our own that was cancelled on its way.
                    Err(Error::Api(status)) if status.code == 409 => {}
                    written => return written.map(drop),
                }
            }
        };
        let identity = self.election.identity();
        match tokio::time::timeout(RELEASE, release).await {
            Ok(Ok(())) => info!(identity, "the Lease was given back"),
            Ok(Err(error)) => warn!(%error, "the Lease was not given back; it runs out"),
            Err(_) => warn!(deadline = ?RELEASE, "the Lease was not given back in time; it runs out"),
        }
    }

    async fn in_time<T>(
        &self,
        late: tokio::time::Instant,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, AttemptError> {
        match tokio::time::timeout_at(late, request).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(AttemptError::Late(self.timing.attempt())),
        }
    }
}

/// None where it is cancelled before.
async fn continue_after(next: Instant, cancelled: &CancellationToken) -> Option<()> {
    cancelled.run_until_cancelled(tokio::time::sleep_until(next.into())).await
}

/// With what caused it, or the remedy.
fn chain(error: &AttemptError) -> String {
    match error {
        AttemptError::Api(error) => explain::<Lease>(error).unwrap_or_else(|| with_causes(error)),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use kube::client::Body;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// An API server that is slow to say that there is no Lease, and never says what came of making one.
    async fn slow(request: hyper::Request<Body>) -> Result<hyper::Response<Body>, std::convert::Infallible> {
        let making = request.method() == hyper::Method::POST;
        // All of it was sent.
        let _ = request.into_body().collect().await;
        tokio::time::sleep(Duration::from_secs(if making { 3600 } else { 3 })).await;
        let status = serde_json::json!({
            "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": "not found",
        });
        let mut response = hyper::Response::new(Body::from(status.to_string().into_bytes()));
        *response.status_mut() = hyper::StatusCode::NOT_FOUND;
        Ok(response)
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_read_has_taken_is_not_left_for_the_write() {
        let timing = Timing::new(15 * SECOND, 10 * SECOND, 2 * SECOND).unwrap();
        let mut elector = Elector {
            api: Api::namespaced(Client::new(tower::service_fn(slow), "default"), "default"),
            timing,
            election: Election::new("a".to_owned(), timing),
            leadership: Leadership::standby(),
        };
        let began = tokio::time::Instant::now();
        assert!(matches!(elector.attempt().await, Err(AttemptError::Late(_))));
        assert_eq!(began.elapsed().as_secs(), 4);
    }
}
