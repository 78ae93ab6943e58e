//! Renewal of the certificate, well before it expires and without a restart.

use std::time::{Duration, SystemTime};

use prepull_api::enroll::{IssuedCertificate, RENEW_PATH, RenewRequest, SubjectForm};
use prepull_registry::Proxies;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::current::Identity;
use super::error::IdentityError;
use super::files::check_issued;
use crate::backoff::{Backoff, random_fraction};
use crate::cloud::endpoint::{BadUrl, ENROLL_SCHEME, RequestError, Urls, post_to_any};

/// The first and the longest wait after a failed renewal, with full jitter. There's no hurry, since a third of the
/// certificate's life is left, and the fleet must not return in one moment.
const RETRY: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));
/// The first wait while the CA is being rotated. The rotation ends only when every edge has renewed, and a cloudcore
/// that was killed in the middle has a successor within seconds. Only the edges that were due in between retry this
/// soon, 50 a second, and repeated failures back off as usual.
const FIRST_RETRY_IN_ROTATION: Duration = Duration::from_secs(5);
/// The shortest wait after a failed renewal, regardless of the jitter.
const SHORTEST_RETRY: Duration = Duration::from_secs(1);
/// The longest sleep. Sleep follows the monotonic clock, but certificates follow the cloud's, which a session sets, or the wall
/// clock, which may jump.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);
/// Interval of looking for the certificate of a new `join`, while the current one is expired.
const LOOK_FOR_JOIN: Duration = Duration::from_secs(60);
/// The shortest time between two renewals, however short-lived the certificates are.
const SHORTEST_PAUSE: Duration = Duration::from_secs(60);

/// Why the certificate was not renewed.
#[derive(Debug, thiserror::Error)]
pub enum RenewError {
    /// A URL of the enrolment endpoint cannot be dialled.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// No server answered, or one refused.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The files of the identity cannot be read or written.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The certificate request could not be made.
    #[error("making a certificate request: {0}")]
    Csr(#[from] rcgen::Error),
    /// The certificate that the server issued cannot be used.
    #[error("the certificate that the server issued cannot be used: {0}")]
    Answer(&'static str),
}

impl RenewError {
    /// How long we have to wait at least: what the server asks for, up to our own longest wait.
    fn least_wait(&self) -> Duration {
        let Self::Request(error) = self else { return Duration::ZERO };
        error.retry_after().unwrap_or_default().min(RETRY.1)
    }
}

impl Identity {
    /// Requests a certificate for a new key from the first server that answers, over mTLS with the current one. From
    /// then on, all users of this identity have the new certificate.
    pub async fn renew(&self, enroll_urls: impl Into<Urls>) -> Result<(), RenewError> {
        let endpoints = enroll_urls.into().endpoints_to_dial(ENROLL_SCHEME, &Proxies::from_env())?;
        let key = self.use_files(|identity| identity.dir.requested_key()).await?;
        let tls = self.current.borrow().tls.clone();
        let request =
            RenewRequest { csr: key.csr()?, organisation: Some(SubjectForm::Own.organisation().to_owned()) };
        let IssuedCertificate { certificate, ca: _, not_after: _ } =
            post_to_any(&endpoints, RENEW_PATH, tls, &request).await?;
        check_issued(&certificate, &self.node(), &key).map_err(RenewError::Answer)?;
        let store = move |identity: &Self| {
            identity.dir.store_certificate(&certificate)?;
            identity.reload()?;
            identity.renew_at.send_replace(None);
            Ok(())
        };
        self.use_files(store).await
    }

    /// Renews the certificate at two thirds of its life, plus a random delay, until `shutdown`. An expired certificate
    /// is renewed immediately, which cloudcore-prepull allows for some time (`--renew-grace`). After that, this keeps
    /// trying with growing waits, and takes over the certificate of a new `join`.
    pub async fn keep_renewed(self, enroll_urls: impl Into<Urls>, shutdown: CancellationToken) {
        let enroll_urls = enroll_urls.into();
        let work = async {
            let mut retries = Retries::new();
            loop {
                self.sleep_until_due().await;
                let asked = self.renew_at.subscribe();
                match self.renew_or_reload(&enroll_urls).await {
                    Ok(()) => {
                        let until = humantime::format_rfc3339_seconds(self.not_after());
                        tracing::info!(%until, "the certificate was renewed");
                        retries.reset();
                        let pause = if self.has_expired() {
                            tracing::error!(%until, "the new certificate has ended by this machine's clock: set the clock");
                            RETRY.1
                        } else {
                            SHORTEST_PAUSE
                        };
                        self.sleep_or_take_over(pause).await;
                    }
                    Err(error) => {
                        let least = error.least_wait();
                        let pause = retries.next(self.is_superseded(), random_fraction()).max(least);
                        let until = humantime::format_rfc3339_seconds(self.not_after());
                        if self.has_expired() {
                            tracing::error!(
                                %error, retry_in = ?pause, %until,
                                "the certificate has expired and was not renewed; a new `join` is taken over, too"
                            );
                        } else {
                            tracing::warn!(%error, retry_in = ?pause, %until, "the certificate was not renewed");
                        }
                        self.sleep_or_take_over(least).await;
                        tokio::select! {
                            () = self.sleep_or_take_over(pause.saturating_sub(least)) => {}
                            () = until_a_rotation_asks(asked) => {}
                        }
                    }
                }
            }
        };
        shutdown.run_until_cancelled(work).await;
    }

    async fn renew_or_reload(&self, enroll_urls: &Urls) -> Result<(), RenewError> {
        if self.has_expired() && self.use_files(Self::reload).await? && !self.has_expired() {
            return Ok(());
        }
        self.renew(enroll_urls.clone()).await
    }

    /// Sleeps. If the certificate has expired, wakes up when a new `join` has stored another one.
    async fn sleep_or_take_over(&self, pause: Duration) {
        let end = tokio::time::Instant::now() + pause;
        loop {
            let left = end.saturating_duration_since(tokio::time::Instant::now());
            tokio::time::sleep(left.min(LOOK_FOR_JOIN)).await;
            let has_joined = self.has_expired() && self.use_files(Self::reload).await.unwrap_or(false);
            if left <= LOOK_FOR_JOIN || has_joined {
                return;
            }
        }
    }

    /// Whether another CA signs now than the one that issued the certificate.
    fn is_superseded(&self) -> bool {
        self.renew_at.borrow().is_some()
    }

    async fn sleep_until_due(&self) {
        let chance = random_fraction();
        let (mut renew_at, mut refused) = (self.renew_at.subscribe(), self.refused.subscribe());
        loop {
            let early = *renew_at.borrow_and_update();
            let due = {
                let current = self.current.borrow();
                renewal_due(current.not_before, current.not_after, chance)
            };
            let left = due.duration_since(self.now()).unwrap_or_default();
            let left = match early {
                Some(early) => left.min(early.duration_since(SystemTime::now()).unwrap_or_default()),
                None => left,
            };
            if left.is_zero() || self.has_expired() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(LONGEST_SLEEP)) => {}
                Ok(()) = renew_at.changed() => {}
                Ok(()) = refused.changed() => {}
            }
        }
    }
}

/// Waits until the cloud names a CA that requires a renewal, and then until the time that it gives. A value that the
/// receiver has already seen doesn't count: the wait was chosen with it in mind.
pub(super) async fn until_a_rotation_asks(mut renew_at: watch::Receiver<Option<SystemTime>>) {
    let mut asked: Option<SystemTime> = None;
    loop {
        let left = asked.map(|at| at.duration_since(SystemTime::now()).unwrap_or_default());
        let due = async {
            match left {
                Some(left) => tokio::time::sleep(left).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = due => return,
            Ok(()) = renew_at.changed() => asked = *renew_at.borrow_and_update(),
        }
    }
}

/// The waits after failed renewals.
struct Retries {
    usual: Backoff,
    in_rotation: Backoff,
}

impl Retries {
    fn new() -> Self {
        let (first, last) = RETRY;
        Self { usual: Backoff::new(first, last), in_rotation: Backoff::new(FIRST_RETRY_IN_ROTATION, last) }
    }

    /// Starts again from the first waits, after a success.
    fn reset(&mut self) {
        self.usual.reset();
        self.in_rotation.reset();
    }

    /// The next wait; `chance`, from 0 to 1, is the jitter.
    fn next(&mut self, is_superseded: bool, chance: f64) -> Duration {
        let backoff = if is_superseded { &mut self.in_rotation } else { &mut self.usual };
        backoff.next(chance).max(SHORTEST_RETRY)
    }
}

/// Time to renew: after two thirds of the certificate's life, plus up to a twentieth of it, so that edges that joined
/// together don't renew together.
fn renewal_due(not_before: SystemTime, not_after: SystemTime, chance: f64) -> SystemTime {
    let life = not_after.duration_since(not_before).unwrap_or_default();
    not_before + life * 2 / 3 + (life / 20).mul_f64(chance)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn renewal_is_due_at_two_thirds() {
        let day = |n: u64| UNIX_EPOCH + Duration::from_secs(n * 24 * 3600);
        assert_eq!(renewal_due(day(100), day(130), 0.0), day(120));
        assert_eq!(renewal_due(day(100), day(130), 1.0), day(121) + Duration::from_secs(12 * 3600));
        assert_eq!(renewal_due(day(100), day(90), 1.0), day(100));
    }

    #[test]
    fn failed_renewals_retry_soon_during_a_rotation() {
        let waits = |is_superseded| {
            let mut retries = Retries::new();
            [(); 11].map(|()| retries.next(is_superseded, 1.0).as_secs())
        };
        assert_eq!(waits(true), [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600]);
        assert_eq!(waits(false), [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600, 3600]);
        assert_eq!(Retries::new().next(true, 0.0), SHORTEST_RETRY, "nobody hammers");
    }

    #[test]
    fn a_server_sets_the_shortest_wait() {
        let refused = |seconds: u64| RequestError::Refused {
            authority: "cloud:10002".to_owned(),
            status: hyper::StatusCode::TOO_MANY_REQUESTS,
            reason: "wait".to_owned(),
            retry_after: Some(Duration::from_secs(seconds)),
        };
        let least = |error: RequestError| RenewError::from(error).least_wait().as_secs();
        assert_eq!(least(refused(42)), 42);
        assert_eq!(least(refused(1_000_000)), 3600, "bounded");
        assert_eq!(least(RequestError::NoneOf(vec![refused(42), refused(7)])), 7);
        assert_eq!(least(RequestError::TooSlow("cloud:10002".to_owned())), 0);
    }
}
