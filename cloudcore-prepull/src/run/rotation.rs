//! The leader's part in the rotation of the CA: it takes up what the Secret or the files say, makes the step that is due,
//! and publishes what there is.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Client, Resource};
use prepull_program::errors::with_causes;
use rustls_pki_types::CertificateDer;
use tracing::{error, info};

use crate::edges::EdgeMetrics;
use crate::edges::pki::CaCensus;
use crate::edges::pki::published::{Published, RotationProgress, rfc3339};
use crate::edges::pki::rotation::{Due, Rotation, RotationStep};
use crate::edges::pki::store::{CaStore, StoredCa};
use crate::edges::pki::{CaSet, PkiError, ServerIdentity};
use crate::edges::tunnel::Sessions;
use crate::kube_api::refusal::{FailureLog, explain_error};

/// The time between two looks at the Secret or the files: one small read each. The operator who rotates waits for it.
const PERIOD: Duration = Duration::from_secs(2);
/// How often the ConfigMap is read when we have nothing new to publish: a user may have changed or deleted it.
const CHECK_PUBLISHED: Duration = Duration::from_secs(30);
/// The time between two writes of the ConfigMap for numbers alone.
const PUBLISH_NUMBERS: Duration = Duration::from_secs(5);

pub(super) enum CaSource {
    /// The Secret: read by the one client, written by the leader's.
    Secret {
        read: Box<CaStore>,
        write: Box<CaStore>,
    },
    Files {
        certificates: PathBuf,
        key: PathBuf,
    },
}

pub(super) struct RotationKeeper {
    pub(super) source: CaSource,
    pub(super) clusters_cas: Vec<CertificateDer<'static>>,
    pub(super) identity: Arc<ServerIdentity>,
    pub(super) sessions: Sessions,
    pub(super) metrics: EdgeMetrics,
    pub(super) writes: Client,
    pub(super) namespace: String,
    /// When this leader began to serve edges.
    pub(super) served_since: SystemTime,
    /// How long after its last signature a CA has to be trusted.
    pub(super) old_life: Duration,
    pub(super) log: FailureLog,
}

pub(super) type LastPublished = Option<(Published, Instant)>;

impl RotationKeeper {
    /// Publishes the CAs before edges are served: a script may wait for the ports and then make a token at once.
    /// Returns when the leader began to serve, and what was published.
    pub(super) async fn publish_first(&self) -> (Instant, LastPublished) {
        let mut last = None;
        self.look_once(Duration::ZERO, &mut last).await;
        (Instant::now(), last)
    }

    /// Looks again and again, for as long as the process runs.
    pub(super) async fn keep_looking(self, begun: Instant, mut last: LastPublished) {
        loop {
            tokio::time::sleep(PERIOD).await;
            self.look_once(begun.elapsed(), &mut last).await;
        }
    }

    async fn look_once(&self, served: Duration, last: &mut LastPublished) {
        let census = self.sessions.ca_census(&self.identity.cas());
        self.metrics.set_outdated(&census);
        let progress = match &self.source {
            CaSource::Files { certificates, key } => {
                match CaSet::from_files(certificates, key) {
                    Ok(cas) => self.adopt(cas),
                    // Between the replacement of the one file and that of the other one.
                    Err(error) => self.report("read the files of", &error),
                }
                None
            }
            CaSource::Secret { read, write } => {
                match self.follow_secret(read, write, &census, served).await {
                    Ok(progress) => progress,
                    Err(error) => {
                        self.report("read or write", &error);
                        return;
                    }
                }
            }
        };
        self.publish(Published { bundle: self.identity.cas().bundle(), progress }, last).await;
    }

    /// Takes up the Secret, and makes the step that is due.
    async fn follow_secret(
        &self,
        read: &CaStore,
        write: &CaStore,
        census: &CaCensus,
        served: Duration,
    ) -> Result<Option<RotationProgress>, PkiError> {
        let Some(mut stored) = read.read().await? else {
            // The Secret was deleted. Keep the CAs that are in use; the next leader would make another one.
            let text =
                "the Secret prepull-ca is gone: restore it from a backup, or every edge has to join again";
            if self.log.is_due("read", text, Instant::now()) {
                error!(text);
            }
            return Ok(None);
        };
        let now = SystemTime::now();
        // Only if this process already serves with these CAs, so that the edges know them.
        let is_served = self.identity.cas().is_same(&stored.rotation.set);
        let due = stored.rotation.due_step(census, served, self.old_life, now).filter(|_| is_served);
        if let Some(due) = due {
            stored = self.step(write, stored, due, now).await?;
        }
        let Rotation { step, since, .. } = stored.rotation;
        self.adopt(stored.rotation.set);
        let retired_after =
            since.filter(|_| step == RotationStep::Signing).map(|since| since + self.old_life);
        Ok(Some(RotationProgress {
            step,
            since: since.map(rfc3339),
            retired_after: retired_after.map(rfc3339),
            // By the CAs that are in use now.
            edges: (step != RotationStep::Settled).then(|| self.sessions.ca_census(&self.identity.cas())),
            served_since: (step == RotationStep::Signing).then(|| rfc3339(self.served_since)),
        }))
    }

    async fn step(
        &self,
        write: &CaStore,
        stored: StoredCa,
        due: Due,
        now: SystemTime,
    ) -> Result<StoredCa, PkiError> {
        let (data, text) = match due {
            Due::Activate => (stored.rotation.activate(now), "the new CA signs from now on"),
            Due::Retire => (stored.rotation.retire(now).ok(), "the old CA is not trusted any more"),
        };
        // `due` asks for a step that can be made.
        let Some(data) = data else { return Ok(stored) };
        let stored = write.write(stored, data).await?;
        info!(ca = ?stored.rotation.set.signer(), "{text}");
        Ok(stored)
    }

    fn adopt(&self, cas: CaSet) {
        match cas.check_not_of(&self.clusters_cas).and_then(|()| self.identity.adopt(cas)) {
            Ok(true) => {
                let cas = self.identity.cas();
                info!(signer = ?cas.signer(), trusted = cas.trusted().count(), "other CAs are in use; edges are told");
            }
            Ok(false) => {}
            Err(error) => self.report("use", &error),
        }
    }

    async fn publish(&self, published: Published, last: &mut LastPublished) {
        let is_due = last.as_ref().is_none_or(|(said, at)| {
            let numbers_alone = said.bundle == published.bundle
                && said.progress.as_ref().map(|progress| progress.step)
                    == published.progress.as_ref().map(|progress| progress.step);
            let pause = match (*said == published, numbers_alone) {
                (true, _) => CHECK_PUBLISHED,
                (false, true) => PUBLISH_NUMBERS,
                (false, false) => Duration::ZERO,
            };
            at.elapsed() >= pause
        });
        if !is_due {
            return;
        }
        match published.write(self.writes.clone(), &self.namespace).await {
            Ok(()) => *last = Some((published, Instant::now())),
            Err(error) => {
                let object = ConfigMap::kind(&());
                self.log.record("publish", &object, explain_error::<ConfigMap>(&error).as_deref(), &error);
            }
        }
    }

    fn report(&self, operation: &'static str, error: &PkiError) {
        match error {
            PkiError::Unusable { .. } | PkiError::File { .. } | PkiError::OfCluster(_) => {
                let problem = with_causes(error);
                if self.log.is_due(operation, &problem, Instant::now()) {
                    error!(problem, "the CA is not taken up: the CAs of before stay in use");
                }
            }
            PkiError::Secret { source, .. } => {
                self.log.record(operation, "the CA", explain_error::<Secret>(source).as_deref(), error);
            }
            _ => self.log.record(operation, "the CA", None, error),
        }
    }
}
