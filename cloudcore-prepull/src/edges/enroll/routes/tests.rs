#![allow(clippy::unwrap_used)]

use std::time::Duration;

use prepull_api::credentials::Sensitive;
use prepull_api::enroll::JoinToken;
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use super::*;
use crate::edges::pki::Authority;
use crate::edges::tokens::Scope;

const HOUR: Duration = Duration::from_secs(3600);

fn routes() -> Routes {
    Routes {
        identity: ServerIdentity::new(Authority::generate(SystemTime::now()).unwrap().0, &[]).unwrap(),
        tokens: Tokens::in_memory(),
        settings: Settings::default(),
        refusal_log: LogRate::default(),
    }
}

fn csr(key: &KeyPair) -> String {
    CertificateParams::default().serialize_request(key).unwrap().pem().unwrap()
}

async fn post(
    routes: &Routes,
    path: &str,
    body: impl Into<Bytes>,
    peer: &Result<Peer, PeerError>,
) -> (u16, String) {
    let request = Request::builder().method("POST").uri(path).body(Full::new(body.into())).unwrap();
    let response = routes.handle(request, peer, [192, 0, 2, 1].into()).await;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn enroll(routes: &Routes, node: &str, token: &JoinToken, key: &KeyPair) -> (u16, String) {
    let request =
        EnrollRequest { node: node.into(), token: token.bearer(), csr: csr(key), organisation: None };
    post(routes, ENROLL_PATH, serde_json::to_vec(&request).unwrap(), &Err(PeerError::Missing)).await
}

fn issued_to(body: &str) -> String {
    let issued: IssuedCertificate = serde_json::from_str(body).unwrap();
    let chain = [CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap()];
    Peer::from_chain(Some(&chain), SystemTime::now()).unwrap().node.to_string()
}

#[tokio::test]
async fn a_token_yields_a_certificate_for_its_node() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let scope = Scope::Node("edge-1".into());
    let token = routes.tokens.create([0; 32], scope, HOUR, SystemTime::now()).await.unwrap();
    for _ in 0..2 {
        let (status, body) = enroll(&routes, "edge-1", &token, &key).await;
        assert_eq!((status, issued_to(&body).as_str()), (200, "edge-1"));
    }
    let (status, body) = enroll(&routes, "edge-1", &token, &KeyPair::generate().unwrap()).await;
    assert_eq!(status, 403);
    assert!(body.starts_with(r#"{"error":"the token has been used with another key"#), "{body}");
}

#[tokio::test]
async fn every_refusal_gives_a_reason_and_never_quotes_the_token() {
    let (routes, key, now) = (routes(), KeyPair::generate().unwrap(), SystemTime::now());
    let fleet = routes.tokens.create([0; 32], Scope::Fleet, HOUR, now).await.unwrap();
    let past = routes.tokens.create([0; 32], Scope::Fleet, HOUR, now - 2 * HOUR).await;
    assert!(past.is_ok(), "expired, so that the next creation deletes it and it is unknown");
    let edge_1 = routes.tokens.create([0; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
    let wrong = JoinToken { secret: Sensitive::new("0".repeat(64)), ..fleet.clone() };
    for (node, token, status, reason) in [
        ("edge-2", &edge_1, 403, "the token is for node edge-1"),
        ("edge-2", &wrong, 401, "unknown token"),
        ("edge-2", &past.unwrap(), 401, "unknown token"),
        ("../x", &fleet, 400, "is not a node's name"),
    ] {
        let (got, body) = enroll(&routes, node, token, &key).await;
        assert_eq!(got, status, "{body}");
        assert!(body.contains(reason) && !body.contains(token.secret.expose()), "{body}");
    }
    let nobody = Err(PeerError::Missing);
    let bearer = fleet.bearer();
    let broken = format!(r#"{{"node":"edge-1","token":["{}"]}}"#, bearer.expose());
    let (status, body) = post(&routes, ENROLL_PATH, broken, &nobody).await;
    assert_eq!((status, body.contains(fleet.secret.expose())), (400, false), "{body}");
    let (status, _) = post(&routes, ENROLL_PATH, vec![b' '; MAX_BODY + 1], &nobody).await;
    assert_eq!(status, 413);
    assert_eq!(post(&routes, CA_PATH, "", &nobody).await.0, 405);
    assert_eq!(post(&routes, "/v1", "", &nobody).await.0, 404);
}

/// Wrong tokens cannot be guessed and cost nothing: there is nothing to limit, and behind a NAT it would hit others.
#[tokio::test]
async fn a_valid_token_is_good_however_many_wrong_ones_came_before() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let token = routes.tokens.create([0; 32], Scope::Fleet, HOUR, SystemTime::now()).await.unwrap();
    let wrong = JoinToken { secret: Sensitive::new("0".repeat(64)), ..token.clone() };
    for _ in 0..300 {
        assert_eq!(enroll(&routes, "edge-1", &wrong, &key).await.0, 401);
    }
    assert_eq!(enroll(&routes, "edge-1", &token, &key).await.0, 200);
}

#[tokio::test]
async fn a_renewal_is_for_the_node_of_the_certificate() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let body = serde_json::to_vec(&RenewRequest { csr: csr(&key), organisation: None }).unwrap();
    let peer =
        Ok(Peer { node: "edge-7".into(), form: SubjectForm::Own, not_after: SystemTime::now() + HOUR });
    let (status, issued) = post(&routes, RENEW_PATH, body.clone(), &peer).await;
    assert_eq!((status, issued_to(&issued).as_str()), (200, "edge-7"));
    let (status, denied) = post(&routes, RENEW_PATH, body, &Err(PeerError::Missing)).await;
    assert_eq!(status, 403);
    assert!(denied.contains("no client certificate: join this node first"), "{denied}");
}

#[tokio::test]
async fn the_ca_is_served_without_a_client_certificate() {
    let routes = routes();
    let request = Request::builder().uri(CA_PATH).body(Full::new(Bytes::new())).unwrap();
    let response = routes.handle(request, &Err(PeerError::Missing), [192, 0, 2, 1].into()).await;
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), routes.identity.cas().bundle());
}

#[tokio::test]
async fn an_edge_gets_the_subject_that_it_knows_and_the_old_one_only_while_that_is_accepted() {
    let (mut routes, key) = (routes(), KeyPair::generate().unwrap());
    let not_after = SystemTime::now() + HOUR;
    let peer = Ok(Peer { node: "edge-1".into(), form: SubjectForm::Kubelet, not_after });
    let renew = async |routes: &Routes, organisation: Option<&str>| {
        let request = RenewRequest { csr: csr(&key), organisation: organisation.map(str::to_owned) };
        let (status, body) = post(routes, RENEW_PATH, serde_json::to_vec(&request).unwrap(), &peer).await;
        let subject = serde_json::from_str::<IssuedCertificate>(&body).map(|issued| {
            let der = CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap();
            let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
            certificate.subject().to_string()
        });
        (status, subject.unwrap_or(body))
    };
    let (own, old) = ("O=prepull:nodes, CN=prepull:node:edge-1", "O=system:nodes, CN=system:node:edge-1");
    assert_eq!(renew(&routes, Some("prepull:nodes")).await, (200, own.to_owned()));
    for other in [None, Some("system:masters")] {
        assert_eq!(renew(&routes, other).await, (200, old.to_owned()));
    }
    routes.settings.accept_system_nodes = false;
    assert_eq!(renew(&routes, Some("prepull:nodes")).await.0, 200);
    let (status, reason) = renew(&routes, None).await;
    assert!(status == 403 && reason.contains("this agent is of release 0.1"), "{reason}");
}
