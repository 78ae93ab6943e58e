//! The identity of a peer, taken from its client certificate and never from its messages.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_api::enroll::SubjectForm;
use prepull_api::task::NodeName;
use rustls_pki_types::CertificateDer;
use x509_parser::oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::KeyHash;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerIdentity {
    pub(crate) node: NodeName,
    pub(crate) form: SubjectForm,
    pub(crate) key: KeyHash,
    pub(crate) not_after: SystemTime,
}

/// Why a client certificate does not identify a node.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PeerError {
    #[error("no client certificate: join this node first (edgecore-prepull join)")]
    Missing,
    #[error("the client certificate is malformed")]
    Malformed,
    #[error(
        "the client certificate is not a node's: its subject must be CN={}<name>, O={} and nothing else",
        SubjectForm::Own.prefix(),
        SubjectForm::Own.organisation()
    )]
    NotANode,
    #[error(
        "the client certificate of node {0} has the subject of release 0.1 (O=system:nodes), which cloudcore does not \
         accept: set --accept-system-nodes=true while agents of 0.1 are upgraded, or upgrade this one and join again with a \
         new token"
    )]
    OldSubject(NodeName),
    #[error(
        "the client certificate of node {node} expired at {}: join again with a new token",
        humantime::format_rfc3339_seconds(*not_after)
    )]
    Expired { node: NodeName, not_after: SystemTime },
}

impl PeerIdentity {
    /// Refuses a subject of release 0.1, unless those are accepted.
    pub(crate) fn check_subject(&self, accept_system_nodes: bool) -> Result<(), PeerError> {
        if self.form == SubjectForm::Own || accept_system_nodes {
            Ok(())
        } else {
            Err(PeerError::OldSubject(self.node.clone()))
        }
    }

    /// Reads the identity from the leaf of a chain that TLS has verified against our CA.
    ///
    /// The expiry is checked again because TLS checks it only in a full handshake: a resumed session brings the chain
    /// back unchecked for as long as its ticket is valid.
    pub(crate) fn from_chain(
        chain: Option<&[CertificateDer<'_>]>,
        now: SystemTime,
    ) -> Result<Self, PeerError> {
        Self::from_chain_within(chain, now, Duration::ZERO)
    }

    /// Like [`Self::from_chain`], but the certificate may have expired, no longer ago than `grace`: for renewing it.
    pub(crate) fn from_chain_within(
        chain: Option<&[CertificateDer<'_>]>,
        now: SystemTime,
        grace: Duration,
    ) -> Result<Self, PeerError> {
        let leaf = chain.and_then(<[_]>::first).ok_or(PeerError::Missing)?;
        let (_, certificate) = X509Certificate::from_der(leaf).map_err(|_| PeerError::Malformed)?;
        let (node, form) = node_name(&certificate).ok_or(PeerError::NotANode)?;
        let seconds =
            u64::try_from(certificate.validity().not_after.timestamp()).map_err(|_| PeerError::Malformed)?;
        let not_after = UNIX_EPOCH + Duration::from_secs(seconds);
        if not_after + grace <= now {
            Err(PeerError::Expired { node, not_after })
        } else {
            Ok(Self { node, form, key: KeyHash::of_der(certificate.public_key().raw), not_after })
        }
    }
}

fn node_name(certificate: &X509Certificate<'_>) -> Option<(NodeName, SubjectForm)> {
    let (mut common_name, mut organisation) = (None, None);
    for attribute in certificate.subject().iter_attributes() {
        let part = if *attribute.attr_type() == OID_X509_COMMON_NAME {
            &mut common_name
        } else if *attribute.attr_type() == OID_X509_ORGANIZATION_NAME {
            &mut organisation
        } else {
            return None;
        };
        if part.replace(attribute.as_str().ok()?).is_some() {
            return None;
        }
    }
    let organisation = organisation?;
    let form = SubjectForm::ALL.into_iter().find(|form| form.organisation() == organisation)?;
    let node = NodeName::from(common_name?.strip_prefix(form.prefix())?);
    node.is_valid().then_some((node, form))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn certificate(subject: &[(DnType, &str)]) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["system:node:san".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in subject {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.not_after = rcgen::date_time_ymd(2030, 1, 1);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().into()
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn only_the_exact_subject_names_a_node() {
        use DnType::{CommonName as CN, OrganizationName as O, OrganizationalUnitName as OU};
        let read =
            |subject: &[(DnType, &str)]| PeerIdentity::from_chain(Some(&[certificate(subject)]), at(0));
        let own = read(&[(O, "prepull:nodes"), (CN, "prepull:node:edge-1")]).unwrap();
        assert_eq!((own.node, own.form), ("edge-1".into(), SubjectForm::Own));
        let old = read(&[(O, "system:nodes"), (CN, "system:node:edge-1")]).unwrap();
        assert_eq!((old.node, old.form), ("edge-1".into(), SubjectForm::Kubelet));
        let long = format!("system:node:{}", vec!["a".repeat(60); 4].join("."));
        assert_eq!(read(&[(CN, &long), (O, "system:nodes")]).unwrap().node.as_str().len(), 243);
        for bad in [
            &[][..],
            &[(CN, "system:node:edge-1")],
            &[(O, "system:nodes")],
            &[(O, "system:masters"), (CN, "system:node:edge-1")],
            &[(O, "system:nodes"), (CN, "prepull:node:edge-1")],
            &[(O, "prepull:nodes"), (CN, "system:node:edge-1")],
            &[(O, "system:nodes"), (CN, "edge-1")],
            &[(O, "system:nodes"), (CN, "system:node:")],
            &[(O, "system:nodes"), (CN, "system:node:Edge_1")],
            &[(O, "system:nodes"), (OU, "x"), (CN, "system:node:edge-1")],
        ] {
            assert_eq!(read(bad), Err(PeerError::NotANode), "{bad:?}");
        }
    }

    #[test]
    fn expired_missing_and_malformed_certificates_are_distinguished() {
        let leaf = [certificate(&[
            (DnType::OrganizationName, "system:nodes"),
            (DnType::CommonName, "system:node:edge-1"),
        ])];
        let end = 1_893_456_000; // 2030-01-01
        assert!(PeerIdentity::from_chain(Some(&leaf), at(end - 1)).is_ok());
        let within = |seconds, grace| {
            PeerIdentity::from_chain_within(Some(&leaf), at(end + seconds), Duration::from_secs(grace))
                .is_ok()
        };
        assert!(within(59, 60) && !within(60, 60) && !within(0, 0));
        let error = PeerIdentity::from_chain(Some(&leaf), at(end)).unwrap_err().to_string();
        assert!(error.contains("edge-1 expired at 2030-01-01T00:00:00Z: join again"), "{error}");
        assert_eq!(PeerIdentity::from_chain(None, at(0)), Err(PeerError::Missing));
        assert_eq!(PeerIdentity::from_chain(Some(&[vec![0; 9].into()]), at(0)), Err(PeerError::Malformed));
    }
}
