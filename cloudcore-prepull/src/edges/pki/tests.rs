#![allow(clippy::unwrap_used)]

use rcgen::SanType;
use x509_parser::prelude::ParsedExtension;

use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn authority() -> Authority {
    Authority::generate(SystemTime::now()).unwrap().0
}

/// A CSR that asks for as much as a CSR can.
fn greedy_csr(key: &KeyPair) -> String {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "system:masters");
    params.distinguished_name.push(DnType::CommonName, "system:node:other");
    params.subject_alt_names = vec![SanType::DnsName("other".try_into().unwrap())];
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.serialize_request(key).unwrap().pem().unwrap()
}

#[test]
fn a_csr_yields_only_its_public_key() {
    let (authority, key, now) = (authority(), KeyPair::generate().unwrap(), SystemTime::now());
    let csr = VerifiedCsr::from_pem(&greedy_csr(&key)).unwrap();
    let signed =
        authority.sign_client(&csr, &"edge-1".into(), SubjectForm::Own, now..now + 30 * DAY).unwrap();

    let der = CertificateDer::from_pem_slice(signed.pem.as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&der).unwrap();
    assert_eq!(certificate.subject().to_string(), "O=prepull:nodes, CN=prepull:node:edge-1");
    assert_eq!(certificate.public_key().raw, key.subject_public_key_info());
    assert!(!certificate.is_ca());
    assert!(certificate.subject_alternative_name().unwrap().is_none());
    let usage = certificate.key_usage().unwrap().unwrap().value;
    assert_eq!(usage.flags, 1, "digitalSignature and nothing else");
    let extended = certificate.extended_key_usage().unwrap().unwrap().value;
    assert!(extended.client_auth && !extended.server_auth && !extended.any);
    assert!(
        certificate.extensions().iter().all(|e| !matches!(e.parsed_extension(), ParsedExtension::Unparsed))
    );

    let seconds = |time| i64::try_from(since_epoch(time).as_secs()).unwrap();
    assert_eq!(certificate.validity().not_before.timestamp(), seconds(now - BACKDATE));
    assert_eq!(certificate.validity().not_after.timestamp(), seconds(now + 30 * DAY));
}

#[test]
fn every_certificate_has_its_own_serial_number() {
    let (authority, key) = (authority(), KeyPair::generate().unwrap());
    let csr = VerifiedCsr::from_pem(&greedy_csr(&key)).unwrap();
    let now = SystemTime::now();
    let serial = || {
        let signed = authority.sign_client(&csr, &"edge-1".into(), SubjectForm::Own, now..now + DAY).unwrap();
        let der = CertificateDer::from_pem_slice(signed.pem.as_bytes()).unwrap();
        X509Certificate::from_der(&der).unwrap().1.raw_serial().to_vec()
    };
    assert_ne!(serial(), serial());
}

#[test]
fn no_certificate_outlives_the_ca() {
    let (authority, key) = (authority(), KeyPair::generate().unwrap());
    let csr = VerifiedCsr::from_pem(&greedy_csr(&key)).unwrap();
    let late = SystemTime::now() + 3645 * DAY;
    let signed =
        authority.sign_client(&csr, &"edge-1".into(), SubjectForm::Own, late..late + 30 * DAY).unwrap();
    assert_eq!(signed.not_after, authority.not_after);
}

#[test]
fn csrs_need_valid_signature_and_key_type() {
    let pem = greedy_csr(&KeyPair::generate().unwrap());
    let mut der =
        rustls_pki_types::CertificateSigningRequestDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec();
    let name = der.windows(5).position(|bytes| bytes == b"other").unwrap();
    der[name] = b'O';
    let forged = certificate_pem(&CertificateDer::from(der)).replace("CERTIFICATE", "CERTIFICATE REQUEST");
    let error = VerifiedCsr::from_pem(&forged).unwrap_err().to_string();
    assert_eq!(error, "the certificate request was refused: its signature was not made with its key");

    let other_key = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let error = VerifiedCsr::from_pem(&greedy_csr(&other_key)).unwrap_err().to_string();
    assert!(error.ends_with("its key is not ECDSA P-256"), "{error}");
    for bad in ["", "x", &authority().pem(), &"x".repeat(MAX_CSR + 1)] {
        assert!(matches!(VerifiedCsr::from_pem(bad), Err(PkiError::Csr(_))));
    }
}

#[test]
fn an_unusable_ca_is_refused_with_the_reason() {
    let now = SystemTime::now();
    let (authority, key) = Authority::generate(now).unwrap();
    let (_, other_key) = Authority::generate(now).unwrap();
    let (leaf, leaf_key, _) = authority.sign_server(Vec::new(), now).unwrap();
    for (certificate, key, at, reason) in [
        (authority.pem(), other_key, now, "key and certificate do not belong together"),
        (certificate_pem(&leaf), leaf_key.serialize_pem(), now, "CA:TRUE is missing"),
        (authority.pem(), key.clone(), now + 3651 * DAY, "the certificate expired at"),
        (String::new(), key.clone(), now, "not a PEM block CERTIFICATE"),
        (authority.pem(), "x".to_owned(), now, "not a PEM block PRIVATE KEY"),
    ] {
        let error = Authority::from_pem(&certificate, &key, "here", at).unwrap_err().to_string();
        assert!(error.starts_with("here holds no CA") && error.contains(reason), "{error}");
        assert!(!error.contains("BEGIN"), "{error}");
    }
}

#[test]
fn a_ca_with_the_clusters_key_is_refused() {
    let now = SystemTime::now();
    let ((own, _), (clusters, key)) = (Authority::generate(now).unwrap(), Authority::generate(now).unwrap());
    let mut params = certificate_params(now, now + DAY).unwrap();
    params.distinguished_name.push(DnType::CommonName, "kubernetes");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let renewed = params.self_signed(&KeyPair::from_pem(&key).unwrap()).unwrap();
    let of_cluster = [renewed.der().clone()];
    let own = CaSet::from(own);
    own.check_not_of(&of_cluster).unwrap();
    let fingerprint = prepull_api::enroll::hex(&clusters.fingerprint());
    let error = CaSet::from(clusters).check_not_of(&of_cluster).unwrap_err().to_string();
    assert!(error.contains(&fingerprint) && error.contains("is the cluster's own"), "{error}");
}
