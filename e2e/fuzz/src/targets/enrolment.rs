//! The bodies of joining, in both directions, with the CSR in them; and the input as a CSR, as PEM and as DER.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cloudcore_prepull::edges::pki::{Authority, VerifiedCsr};
use prepull_api::enroll::{
    EnrollRequest, ErrorBody, IssuedCertificate, JoinToken, MAX_BODY, RenewRequest, SubjectForm,
    certificate_pem,
};
use prepull_api::task::NodeName;

static AUTHORITY: LazyLock<Option<Authority>> =
    LazyLock::new(|| Authority::generate(now()).ok().map(|(authority, _)| authority));

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

pub(crate) fn run(input: &[u8]) {
    if input.len() > MAX_BODY {
        return;
    }
    if let Ok(EnrollRequest { node, token, csr, organisation: _ }) = serde_json::from_slice(input) {
        if let Ok((id, secret)) = JoinToken::split_bearer(token.expose()) {
            assert_eq!(format!("{id}.{secret}"), token.expose());
        }
        sign_csr(&csr, &node);
    }
    if let Ok(RenewRequest { csr, organisation: _ }) = serde_json::from_slice(input) {
        sign_csr(&csr, &"edge-1".into());
    }
    let _ = serde_json::from_slice::<IssuedCertificate>(input);
    let _ = serde_json::from_slice::<ErrorBody>(input);
    if let Ok(text) = std::str::from_utf8(input) {
        sign_csr(text, &"edge-1".into());
        if let Ok(token) = text.parse::<JoinToken>() {
            assert_eq!(token.expose(), text.trim());
        }
    }
    sign_csr(&certificate_pem(input).replace("CERTIFICATE", "CERTIFICATE REQUEST"), &"edge-1".into());
}

/// Signs as the endpoint would, had the token been right. A token names valid nodes only.
fn sign_csr(csr: &str, node: &NodeName) {
    let Ok(csr) = VerifiedCsr::from_pem(csr) else { return };
    let Some(authority) = AUTHORITY.as_ref().filter(|_| node.is_valid()) else { return };
    let validity = now()..now() + Duration::from_secs(3600);
    let signed = authority.sign_client(&csr, node, SubjectForm::Own, validity);
    assert!(signed.is_ok(), "a CSR that was verified is signed: {:?}", signed.err());
}
