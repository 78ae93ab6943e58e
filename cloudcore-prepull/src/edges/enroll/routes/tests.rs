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
const CA: [u8; 32] = [7; 32];

fn routes() -> Routes {
    Routes {
        identity: ServerIdentity::new(Authority::generate(SystemTime::now()).unwrap().0, &[]).unwrap(),
        tokens: Tokens::in_memory(),
        roster: Roster::in_memory(),
        settings: EnrollSettings::default(),
        refusal_log: LogRate::default(),
        node_log: NodeLogRate::default(),
        issue_rate: IssueRate::default(),
    }
}

fn csr(key: &KeyPair) -> String {
    CertificateParams::default().serialize_request(key).unwrap().pem().unwrap()
}

async fn post(
    routes: &Routes,
    path: &str,
    body: impl Into<Bytes>,
    peer: &Result<PeerIdentity, PeerError>,
) -> (u16, String) {
    let request = Request::builder().method("POST").uri(path).body(Full::new(body.into())).unwrap();
    let response = match read_body(request).await {
        Ok(request) => routes.handle(request, peer, [192, 0, 2, 1].into()).await,
        Err(response) => response,
    };
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
    PeerIdentity::from_chain(Some(&chain), SystemTime::now()).unwrap().node.to_string()
}

#[tokio::test]
async fn a_token_yields_a_certificate_for_its_node() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let scope = Scope::Node("edge-1".into());
    let token = routes.tokens.stored().create([0; 32], scope, HOUR, SystemTime::now()).await.unwrap();
    for _ in 0..2 {
        let (status, body) = enroll(&routes, "edge-1", &token, &key).await;
        assert_eq!((status, issued_to(&body).as_str()), (200, "edge-1"));
    }
    let (status, body) = enroll(&routes, "edge-1", &token, &KeyPair::generate().unwrap()).await;
    assert_eq!(status, 403);
    assert!(body.starts_with(r#"{"error":"the token has been used with another key"#), "{body}");
}

#[tokio::test]
async fn refusals_have_reasons_without_the_token() {
    let (routes, key, now) = (routes(), KeyPair::generate().unwrap(), SystemTime::now());
    let fleet = routes.tokens.stored().create([0; 32], Scope::Fleet, HOUR, now).await.unwrap();
    let expired =
        async |ago| routes.tokens.stored().create([0; 32], Scope::Fleet, HOUR, now - ago).await.unwrap();
    // The next creation deletes the older one, so that it's unknown.
    let (past, long_past) = (expired(2 * HOUR).await, expired(26 * HOUR).await);
    let edge_1 =
        routes.tokens.stored().create([0; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
    let wrong = JoinToken { secret: Sensitive::new("0".repeat(64)), ..fleet.clone() };
    for (node, token, status, reason) in [
        ("edge-2", &edge_1, 403, "the token is for node edge-1"),
        ("edge-2", &wrong, 401, "unknown token"),
        ("edge-2", &past, 403, "the token expired at"),
        ("edge-2", &long_past, 401, "unknown token"),
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
async fn wrong_tokens_dont_block_a_valid_one() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let token = routes.tokens.stored().create([0; 32], Scope::Fleet, HOUR, SystemTime::now()).await.unwrap();
    let wrong = JoinToken { secret: Sensitive::new("0".repeat(64)), ..token.clone() };
    for _ in 0..300 {
        assert_eq!(enroll(&routes, "edge-1", &wrong, &key).await.0, 401);
    }
    assert_eq!(enroll(&routes, "edge-1", &token, &key).await.0, 200);
}

fn peer(node: &str, key: u8) -> PeerIdentity {
    let (key, form) = (KeyHash::new([key; 32]), SubjectForm::Own);
    PeerIdentity { node: node.into(), form, key, not_after: SystemTime::now() + HOUR }
}

async fn renew(routes: &Routes, peer: PeerIdentity, key: &KeyPair) -> (u16, String) {
    let body = serde_json::to_vec(&RenewRequest { csr: csr(key), organisation: None }).unwrap();
    post(routes, RENEW_PATH, body, &Ok(peer)).await
}

fn key_of(body: &str) -> KeyHash {
    let issued: IssuedCertificate = serde_json::from_str(body).unwrap();
    let chain = [CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap()];
    PeerIdentity::from_chain(Some(&chain), SystemTime::now()).unwrap().key
}

#[tokio::test]
async fn a_renewal_repeats_until_its_key_is_used() {
    let (routes, second) = (routes(), KeyPair::generate().unwrap());
    for _ in 0..2 {
        // The answer was lost: the old certificate asks for the same key again.
        let (status, body) = renew(&routes, peer("edge-1", 1), &second).await;
        assert_eq!(status, 200, "{body}");
    }
    let (_, body) = renew(&routes, peer("edge-1", 1), &second).await;
    let renewed = PeerIdentity { key: key_of(&body), ..peer("edge-1", 0) };
    routes.roster.admit(&renewed, CA).unwrap();
    let third = KeyPair::generate().unwrap();
    assert_eq!(renew(&routes, renewed, &third).await.0, 200);
    let (status, body) = renew(&routes, peer("edge-1", 1), &KeyPair::generate().unwrap()).await;
    assert_eq!(status, 403);
    assert!(body.contains("a newer key of node edge-1 has superseded this one"), "{body}");
}

#[tokio::test]
async fn too_many_renewals_get_a_retry_time() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    for _ in 0..20 {
        assert_eq!(renew(&routes, peer("edge-1", 1), &key).await.0, 200);
    }
    let body = serde_json::to_vec(&RenewRequest { csr: csr(&key), organisation: None }).unwrap();
    let request = Request::post(RENEW_PATH).body(Bytes::from(body)).unwrap();
    let response = routes.handle(request, &Ok(peer("edge-1", 1)), [192, 0, 2, 1].into()).await;
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()[RETRY_AFTER], "60");
    let (_, body) = renew(&routes, peer("edge-1", 1), &key).await;
    assert!(body.starts_with(r#"{"error":"node edge-1 got several"#), "{body}");
    assert_eq!(renew(&routes, peer("edge-2", 1), &key).await.0, 200, "another node's pace is its own");
}

#[tokio::test]
async fn a_thief_with_an_old_key_uses_up_nothing() {
    let (routes, second) = (routes(), KeyPair::generate().unwrap());
    let (_, body) = renew(&routes, peer("edge-1", 1), &second).await;
    let renewed = PeerIdentity { key: key_of(&body), ..peer("edge-1", 0) };
    routes.roster.admit(&renewed, CA).unwrap();
    for _ in 0..30 {
        assert_eq!(renew(&routes, peer("edge-1", 1), &KeyPair::generate().unwrap()).await.0, 403);
    }
    assert_eq!(renew(&routes, renewed, &second).await.0, 200);
}

#[tokio::test]
async fn a_token_joins_a_node_at_a_bounded_rate() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let fleet = routes.tokens.stored().create([0; 32], Scope::Fleet, HOUR, SystemTime::now()).await.unwrap();
    let mut joined = 0;
    while enroll(&routes, "edge-1", &fleet, &key).await.0 == 200 && joined < 40 {
        joined += 1;
    }
    assert_eq!(joined, 20);
    assert_eq!(enroll(&routes, "edge-1", &fleet, &key).await.0, 429);
    assert_eq!(enroll(&routes, "edge-2", &fleet, &key).await.0, 200);
}

#[tokio::test]
async fn only_a_nodes_token_admits_it_again() {
    let routes = routes();
    let token = |scope| routes.tokens.stored().create([0; 32], scope, HOUR, SystemTime::now());
    let fleet = token(Scope::Fleet).await.unwrap();
    let (first, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    for _ in 0..2 {
        assert_eq!(enroll(&routes, "edge-1", &fleet, &first).await.0, 200, "its answer may be lost");
    }
    let (status, body) = enroll(&routes, "edge-1", &fleet, &other).await;
    assert_eq!(status, 403);
    assert!(body.contains("has joined before") && body.contains("tokens create --node edge-1"), "{body}");
    let own = token(Scope::Node("edge-1".into())).await.unwrap();
    assert_eq!(enroll(&routes, "edge-1", &own, &other).await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn joins_and_renewals_need_a_node() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let fleet = routes.tokens.stored().create([0; 32], Scope::Fleet, HOUR, SystemTime::now()).await.unwrap();
    routes.roster.set_nodes([("edge-1".into(), true), ("master".into(), false)].into_iter());
    for (node, status, reason) in [
        ("edge-1", 200, "BEGIN CERTIFICATE"),
        ("master", 403, "the Node master is none"),
        ("edge-2", 403, "the cluster has no Node edge-2"),
    ] {
        let (got, body) = enroll(&routes, node, &fleet, &key).await;
        assert_eq!((got, body.contains(reason)), (status, true), "{body}");
    }
    let newer = KeyPair::generate().unwrap();
    let holder = PeerIdentity {
        key: KeyHash::of_der(&rcgen::PublicKeyData::subject_public_key_info(&key)),
        ..peer("edge-1", 0)
    };
    routes.roster.set_node(&"edge-1".into(), None);
    let (status, body) = renew(&routes, holder.clone(), &newer).await;
    assert_eq!((status, body.contains("the cluster has no Node edge-1")), (403, true), "{body}");
    assert!(routes.roster.admit(&holder, CA).is_err());
    routes.roster.set_node(&"edge-1".into(), Some(true));
    routes.roster.admit(&holder, CA).unwrap();
    assert_eq!(renew(&routes, holder, &newer).await.0, 200);
}

#[tokio::test]
async fn a_renewal_is_for_the_node_of_the_certificate() {
    let (routes, key) = (routes(), KeyPair::generate().unwrap());
    let body = serde_json::to_vec(&RenewRequest { csr: csr(&key), organisation: None }).unwrap();
    let peer = Ok(peer("edge-7", 1));
    let (status, issued) = post(&routes, RENEW_PATH, body.clone(), &peer).await;
    assert_eq!((status, issued_to(&issued).as_str()), (200, "edge-7"));
    let (status, denied) = post(&routes, RENEW_PATH, body, &Err(PeerError::Missing)).await;
    assert_eq!(status, 403);
    assert!(denied.contains("no client certificate: join this node first"), "{denied}");
}

#[tokio::test]
async fn the_ca_is_served_without_a_client_certificate() {
    let routes = routes();
    let request = Request::builder().uri(CA_PATH).body(Bytes::new()).unwrap();
    let response = routes.handle(request, &Err(PeerError::Missing), [192, 0, 2, 1].into()).await;
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), routes.identity.cas().bundle());
}

#[tokio::test]
async fn the_old_subject_is_issued_only_while_accepted() {
    let (mut routes, key) = (routes(), KeyPair::generate().unwrap());
    let new = Ok(peer("edge-1", 1));
    let old = Ok(PeerIdentity { form: SubjectForm::Kubelet, ..peer("edge-1", 1) });
    let renew =
        async |routes: &Routes, peer: &Result<PeerIdentity, PeerError>, organisation: Option<&str>| {
            let request = RenewRequest { csr: csr(&key), organisation: organisation.map(str::to_owned) };
            let (status, body) = post(routes, RENEW_PATH, serde_json::to_vec(&request).unwrap(), peer).await;
            let subject = serde_json::from_str::<IssuedCertificate>(&body).map(|issued| {
                let der = CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap();
                let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
                certificate.subject().to_string()
            });
            (status, subject.unwrap_or(body))
        };
    let subjects = ["O=prepull:nodes, CN=prepull:node:edge-1", "O=system:nodes, CN=system:node:edge-1"];
    for peer in [&new, &old] {
        // More renewals than one node has at once.
        routes.issue_rate = IssueRate::default();
        assert_eq!(renew(&routes, peer, Some("prepull:nodes")).await, (200, subjects[0].to_owned()));
        for other in [None, Some("system:masters")] {
            assert_eq!(renew(&routes, peer, other).await, (200, subjects[1].to_owned()));
        }
    }
    routes.settings.accept_system_nodes = false;
    assert_eq!(renew(&routes, &new, Some("prepull:nodes")).await.0, 200);
    let (status, reason) = renew(&routes, &old, Some("prepull:nodes")).await;
    assert!(status == 403 && reason.contains("has the subject of release 0.1"), "{reason}");
    let (status, reason) = renew(&routes, &new, None).await;
    assert!(status == 403 && reason.contains("this agent is of release 0.1"), "{reason}");
}
