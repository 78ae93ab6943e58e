//! A rotation of the CA, as the Secret holds it. Each step is one write, so that a crash leaves either the old or the
//! new state.
//!
//! ```text
//!  settled ──rotate──▶ announced ──activate──▶ signing ──retire──▶ settled
//!   A signs             A signs                 B signs             B signs
//!   A trusted           A, B trusted            B, A trusted        B trusted
//! ```
//!
//! While B signs, the server also sends B's key certified by A, for edges that know A alone. A's own key is gone by
//! then.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;

use super::ca_set::{CaSet, certificates_of_pem};
use super::{Authority, PkiError};
use crate::edges::pki::CaCensus;

/// The signer. A release that knows no rotations reads these two alone.
pub(super) const CERTIFICATE: &str = "tls.crt";
pub(super) const KEY: &str = "tls.key";
/// The CA that is going to sign.
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";
/// The key of the newer CA, certified by the older one.
const CROSS: &str = "cross.crt";
/// The CA that has signed before. Its key is not kept.
const PREVIOUS: &str = "previous.crt";
/// When the last step was made.
const SINCE: &str = "since";

/// The content of the Secret.
pub struct Rotation {
    data: BTreeMap<String, ByteString>,
    pub(crate) set: CaSet,
    pub(crate) step: RotationStep,
    /// When this step began; none before the first rotation.
    pub(crate) since: Option<SystemTime>,
}

/// How long a new CA is trusted at least before it signs, and how long a leader serves before it lets it: the edges that
/// are about to connect learn of it first.
const ANNOUNCED_AT_LEAST: Duration = Duration::from_secs(10);
/// How long connected edges that do not confirm the new CA are waited for. They can do without: the server sends the
/// new CA's certificate by the old one.
const ANNOUNCED_AT_MOST: Duration = Duration::from_secs(600);
/// How long a leader serves before it retires a CA: an edge that needs it still has come back from the leader before by then,
/// and counts. The returns of a drained fleet are spread over ten minutes, and an edge that finds no leader waits for minutes
/// between two tries.
pub(crate) const SERVED_BEFORE_RETIREMENT: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum RotationStep {
    /// There is one CA.
    Settled,
    /// A new CA is trusted, and the old one signs.
    Announced,
    /// The new CA signs, and the old one is trusted.
    Signing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// [`Rotation::activate`].
    Activate,
    /// [`Rotation::retire`].
    Retire,
}

/// Why a step cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RotationError {
    /// There are two CAs already.
    #[error("a rotation is under way already: `cloudcore-prepull ca show` shows how far it is")]
    UnderWay,
    /// There is one CA.
    #[error("there is no old CA to retire: `cloudcore-prepull ca show` lists the CAs")]
    NothingToRetire,
    /// A certificate cannot be made.
    #[error(transparent)]
    Pki(#[from] PkiError),
}

impl Rotation {
    /// Reads the data of the Secret. `origin` names it in errors.
    pub fn parse(
        data: BTreeMap<String, ByteString>,
        origin: &str,
        now: SystemTime,
    ) -> Result<Self, PkiError> {
        let unusable = |reason: String| PkiError::Unusable { origin: origin.to_owned(), reason };
        let text = |name: &str| {
            let text = data.get(name).map(|bytes| std::str::from_utf8(&bytes.0));
            text.transpose().map_err(|_| unusable(format!("the key {name} is missing or is not text")))
        };
        let needed = |name: &str| {
            text(name)?.ok_or_else(|| unusable(format!("the key {name} is missing or is not text")))
        };
        let signer = Authority::from_pem(needed(CERTIFICATE)?, needed(KEY)?, origin, now)?;
        let mut further = Vec::new();
        for name in [NEXT_CERTIFICATE, PREVIOUS, CROSS] {
            // Before the new CA signs, its certificate by the old one is of no use.
            if let Some(pem) = text(name)?
                && (name != CROSS || !data.contains_key(NEXT_CERTIFICATE))
            {
                further.extend(
                    certificates_of_pem(pem).map_err(|reason| unusable(format!("{name}: {reason}")))?,
                );
            }
        }
        let step = if data.contains_key(NEXT_CERTIFICATE) {
            // Found now rather than when it is to sign.
            Authority::from_pem(needed(NEXT_CERTIFICATE)?, needed(NEXT_KEY)?, origin, now)?;
            RotationStep::Announced
        } else if data.contains_key(PREVIOUS) {
            RotationStep::Signing
        } else {
            RotationStep::Settled
        };
        let since = text(SINCE)?.and_then(|text| humantime::parse_rfc3339(text.trim()).ok());
        Ok(Self { set: CaSet::new(signer, further, origin)?, data, step, since })
    }

    /// The CAs to use.
    pub fn into_set(self) -> CaSet {
        self.set
    }

    /// The data of a Secret with a new CA and no other.
    pub(super) fn first_secret_data(now: SystemTime) -> Result<BTreeMap<String, ByteString>, PkiError> {
        let (authority, key) = Authority::generate(now)?;
        Ok([(CERTIFICATE, authority.pem()), (KEY, key)].map(data_entry).into())
    }

    /// The step that is due. `served` is how long this leader has served edges, `old_life` how long after the last
    /// certificate of the old CA the last one that it has signed is of any use.
    pub(crate) fn due_step(
        &self,
        census: &CaCensus,
        served: Duration,
        old_life: Duration,
        now: SystemTime,
    ) -> Option<Due> {
        let CaCensus { connected, informed, renewed, unable, old_subject: _ } = *census;
        let lasted = self.since.and_then(|since| now.duration_since(since).ok()).unwrap_or_default();
        match self.step {
            RotationStep::Settled => None,
            RotationStep::Announced => {
                let all_know = informed + unable >= connected && served.min(lasted) >= ANNOUNCED_AT_LEAST;
                (all_know || lasted >= ANNOUNCED_AT_MOST).then_some(Due::Activate)
            }
            RotationStep::Signing => {
                let is_needed = renewed < connected || informed < connected || unable > 0;
                // What is away for longer than the old life has no use of it either.
                let are_back = served >= SERVED_BEFORE_RETIREMENT.min(old_life);
                (!is_needed && are_back && lasted >= old_life).then_some(Due::Retire)
            }
        }
    }

    /// Adds a new CA, which is trusted from then on and does not sign yet.
    pub fn rotate(&self, now: SystemTime) -> Result<BTreeMap<String, ByteString>, RotationError> {
        if self.step != RotationStep::Settled {
            return Err(RotationError::UnderWay);
        }
        let (next, key) = Authority::generate(now)?;
        let cross = self.set.signer().cross_certify(&next, now)?;
        let mut data = self.data.clone();
        data.extend(
            [(NEXT_CERTIFICATE, next.pem()), (NEXT_KEY, key), (CROSS, cross), since_field(now)]
                .map(data_entry),
        );
        Ok(data)
    }

    /// Lets the new CA sign. The key of the old one is dropped.
    pub fn activate(&self, now: SystemTime) -> Option<BTreeMap<String, ByteString>> {
        let mut data = self.data.clone();
        let (certificate, key) = (data.remove(NEXT_CERTIFICATE)?, data.remove(NEXT_KEY)?);
        let previous = data.insert(CERTIFICATE.to_owned(), certificate)?;
        data.insert(KEY.to_owned(), key);
        data.insert(PREVIOUS.to_owned(), previous);
        data.extend([since_field(now)].map(data_entry));
        Some(data)
    }

    /// Ends the trust in the old CA.
    pub fn retire(&self, now: SystemTime) -> Result<BTreeMap<String, ByteString>, RotationError> {
        if self.step != RotationStep::Signing {
            return Err(RotationError::NothingToRetire);
        }
        let mut data = self.data.clone();
        data.remove(PREVIOUS);
        data.remove(CROSS);
        data.extend([since_field(now)].map(data_entry));
        Ok(data)
    }
}

fn since_field(now: SystemTime) -> (&'static str, String) {
    // Whole seconds are enough for steps that last minutes and months.
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    (SINCE, humantime::format_rfc3339_seconds(now).to_string())
}

fn data_entry((name, text): (&str, String)) -> (String, ByteString) {
    (name.to_owned(), ByteString(text.into_bytes()))
}

#[cfg(test)]
mod tests;
