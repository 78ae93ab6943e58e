//! The CAs that this node trusts, which cloudcore changes during a rotation of the CA.

use std::time::{Duration, SystemTime};

use prepull_api::enroll::hex;
use prepull_api::wire::TrustedCas;
use ring::digest::{SHA256, digest};

use super::current::Identity;
use super::error::IdentityError;
use super::files::{are_cas, parse_bundle};
use crate::backoff::random_fraction;

/// The longest time over which a renewal is spread, even if the cloud asks for more.
const LONGEST_SPREAD: Duration = Duration::from_secs(3600);

/// Reason why the CAs were not taken over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrustError {
    #[error("the list of CAs cannot be used: {0}")]
    Bundle(&'static str),
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

impl Identity {
    /// The name of the set of CAs that this node trusts.
    pub(crate) fn trusted_bundle_id(&self) -> String {
        bundle_id(&self.current.borrow().bundle)
    }

    /// Whether this node trusts the CA with this SHA-256.
    pub(crate) fn is_trusted(&self, fingerprint: &[u8; 32]) -> bool {
        let cas = parse_bundle(&self.current.borrow().bundle).unwrap_or_default();
        cas.iter().any(|ca| digest(&SHA256, ca).as_ref() == fingerprint)
    }

    /// Trusts these CAs of the cloud, and returns the name of their set. It goes on if the caller is dropped.
    pub(crate) async fn take_over(&self, cas: TrustedCas) -> Result<String, TrustError> {
        let trust = move |identity: &Self| identity.trust(&cas, SystemTime::now(), random_fraction());
        self.use_files(trust).await
    }

    /// Trusts these CAs from now on, also after a restart. If another CA than the first one issued the certificate,
    /// it's renewed soon; `chance`, from 0 to 1, spreads these renewals. Sessions go on.
    fn trust(&self, cas: &TrustedCas, now: SystemTime, chance: f64) -> Result<String, TrustError> {
        let certificates = parse_bundle(&cas.bundle).map_err(TrustError::Bundle)?;
        if !are_cas(&certificates) {
            return Err(TrustError::Bundle("it has a certificate that is not a CA's"));
        }
        if self.current.borrow().bundle != cas.bundle {
            self.dir.store_bundle(&cas.bundle)?;
            self.reload()?;
        }
        let is_of_signer = self.current.borrow().is_of_signer;
        let due = (!is_of_signer).then(|| now + cas.renew_within.min(LONGEST_SPREAD).mul_f64(chance));
        self.renew_at.send_if_modified(|at| {
            // A second message must not postpone the renewal.
            let next = due.map(|due| at.map_or(due, |at| at.min(due)));
            std::mem::replace(at, next) != next
        });
        Ok(bundle_id(&cas.bundle))
    }
}

fn bundle_id(bundle: &str) -> String {
    hex(digest(&SHA256, bundle.as_bytes()).as_ref())
}

#[cfg(test)]
mod tests;
