//! The CAs of each session: the one that signed the node's certificate, and those that the node trusts.

use std::time::Duration;

use parking_lot::Mutex;
use prepull_api::enroll::{SubjectForm, unhex};
use prepull_api::wire::{CloudMessage, Hello, TrustedCas};

use crate::edges::pki::ca_set::CaFingerprint;
use crate::edges::pki::{CaCensus, CaSet};

/// The rate at which a fleet renews its certificates for another CA: each is two handshakes, of some milliseconds of a
/// core, beside all other work.
const RENEWALS_PER_SECOND: u32 = 50;
/// The shortest time over which renewals are spread.
const MIN_SPREAD: Duration = Duration::from_secs(2);

/// The CAs as the node of one session has them.
#[derive(Debug, Default)]
pub(super) struct SessionTrust {
    issuer: CaFingerprint,
    has_old_subject: bool,
    /// The hash of the bundle that the node has; none if the agent is too old to get another one.
    bundle: Mutex<Option<CaFingerprint>>,
}

impl SessionTrust {
    pub(super) fn new(issuer: CaFingerprint, form: SubjectForm, hello: &Hello) -> Self {
        let bundle = Mutex::new(hello.trusts.as_deref().and_then(unhex));
        Self { issuer, has_old_subject: form == SubjectForm::Kubelet, bundle }
    }

    pub(super) fn is_accepted(&self, cas: &CaSet) -> bool {
        cas.is_trusted(&self.issuer)
    }

    /// The node has stored a bundle.
    pub(super) fn confirm_bundle(&self, bundle: &str) {
        *self.bundle.lock() = unhex(bundle);
    }

    /// The message about CAs that the node needs now, if any; `sessions` is the number of nodes.
    pub(super) fn ca_message(&self, cas: &CaSet, sessions: usize) -> Option<CloudMessage> {
        let known = self.bundle()?;
        if cas.bundle_hash() == known && self.issuer == cas.signer().fingerprint() {
            return None;
        }
        let sessions = u32::try_from(sessions).unwrap_or(u32::MAX);
        let spread = Duration::from_secs(1).saturating_mul(sessions) / RENEWALS_PER_SECOND;
        let news = TrustedCas { bundle: cas.bundle(), renew_within: spread.max(MIN_SPREAD) };
        Some(CloudMessage::Trust(news))
    }

    fn bundle(&self) -> Option<CaFingerprint> {
        *self.bundle.lock()
    }
}

impl CaCensus {
    pub(super) fn from_sessions<'a>(sessions: impl Iterator<Item = &'a SessionTrust>, cas: &CaSet) -> Self {
        let (bundle, signer) = (cas.bundle_hash(), cas.signer().fingerprint());
        let mut census = Self::default();
        for session in sessions {
            let known = session.bundle();
            census.connected += 1;
            census.informed += usize::from(known == Some(bundle));
            census.renewed += usize::from(session.issuer == signer);
            census.unable += usize::from(known.is_none());
            census.old_subject += usize::from(session.has_old_subject);
        }
        census
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::SystemTime;

    use prepull_api::enroll::hex;

    use super::*;
    use crate::edges::pki::Authority;

    #[test]
    fn announces_cas_until_the_edge_has_them() {
        let cas = CaSet::from(Authority::generate(SystemTime::now()).unwrap().0);
        let signer = cas.signer().fingerprint();
        let session = |issuer, trusts: Option<String>| {
            // An agent of release 0.1 doesn't report its CAs.
            let form = if trusts.is_some() { SubjectForm::Own } else { SubjectForm::Kubelet };
            SessionTrust::new(issuer, form, &Hello { trusts, ..Hello::default() })
        };
        let told = |session: &SessionTrust| session.ca_message(&cas, 0).is_some();
        let (id, other) = (hex(&cas.bundle_hash()), "0".repeat(64));
        let sessions = [
            session(signer, Some(id.clone())),
            session(signer, Some(other.clone())),
            session([0; 32], Some(id.clone())),
            session([0; 32], None),
        ];
        assert_eq!(sessions.each_ref().map(told), [false, true, true, false]);
        assert_eq!(
            CaCensus::from_sessions(sessions.iter(), &cas),
            CaCensus { connected: 4, informed: 2, renewed: 2, unable: 1, old_subject: 1 }
        );
        sessions[1].confirm_bundle(&id);
        assert!(!told(&sessions[1]));
        assert_eq!(CaCensus::from_sessions(sessions.iter(), &cas).informed, 3);
    }

    #[test]
    fn a_fleet_spreads_its_renewals() {
        let cas = CaSet::from(Authority::generate(SystemTime::now()).unwrap().0);
        let hello = Hello { trusts: Some("0".repeat(64)), ..Hello::default() };
        let session = SessionTrust::new([0; 32], SubjectForm::Own, &hello);
        let spread = |sessions| match session.ca_message(&cas, sessions).unwrap() {
            CloudMessage::Trust(cas) => cas.renew_within.as_secs(),
            other => panic!("{other:?}"),
        };
        assert_eq!([1, 1000, 20_000].map(spread), [2, 20, 400]);
    }
}
