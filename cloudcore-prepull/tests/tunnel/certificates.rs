//! Admission by certificate.

use std::io::{Read, Write};
use std::time::{Duration, SystemTime};

use cloudcore_prepull::edges::tunnel::ListenerSettings;
use prepull_api::wire::{CloudMessage, EdgeMessage, SUBPROTOCOL};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use tokio_tungstenite::tungstenite::Error;

use crate::cloud::{Cloud, HOUR, ack};
use crate::raw::{self, Credentials, closed, dial, dial_path, heard, say, tls};

/// Asserts that TLS refused the certificate. With TLS 1.3, the client learns of it only when it reads.
fn tls_refused(outcome: Result<raw::Socket, Error>, alert: &str) {
    let Err(Error::Io(error)) = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains(alert), "{error}");
}

fn refused(outcome: Result<raw::Socket, Error>, status: u16, reason: &str) {
    let Err(Error::Http(response)) = outcome else { panic!("{outcome:?}") };
    let body = String::from_utf8_lossy(response.body().as_deref().unwrap_or_default()).into_owned();
    assert_eq!(response.status().as_u16(), status, "{body}");
    assert!(body.contains(reason), "{body}");
}

#[tokio::test]
async fn a_node_is_who_its_certificate_says() {
    let mut cloud = Cloud::start();
    let mut socket = raw::session(&mut cloud, "edge-1").await;
    // A message cannot claim another identity: unknown fields are ignored.
    let forged = r#"{"type":"accepted","task":{"job":"j","attempt":1,"node":"edge-2"},"node":"edge-2"}"#;
    futures::SinkExt::send(&mut socket, forged.into()).await.unwrap();
    assert_eq!(cloud.message().await.0, "edge-1".into());
    // Messages for another node do not arrive here.
    let mut other = raw::session(&mut cloud, "edge-2").await;
    cloud.sessions.send(&"edge-2".into(), ack("two")).unwrap();
    cloud.sessions.send(&"edge-1".into(), ack("one")).unwrap();
    assert_eq!(heard(&mut socket).await, ack("one"));
    assert_eq!(heard(&mut other).await, ack("two"));
}

#[tokio::test]
async fn bad_certificates_end_at_the_handshake() {
    let mut cloud = Cloud::start();
    let stranger = Cloud::start();
    let now = SystemTime::now();
    let foreign = Credentials::of(&stranger, "edge-1");
    let expired = Credentials::until(&cloud, "edge-1", HOUR, now - 2 * HOUR);
    let future = Credentials::until(&cloud, "edge-1", 2 * HOUR, now + HOUR);
    tls_refused(dial(cloud.tunnel, tls(&cloud, None)).await, "CertificateRequired");
    tls_refused(dial(cloud.tunnel, tls(&cloud, Some(&foreign))).await, "alert");
    tls_refused(dial(cloud.tunnel, tls(&cloud, Some(&expired))).await, "CertificateExpired");
    tls_refused(dial(cloud.tunnel, tls(&cloud, Some(&future))).await, "alert");
    cloud.no_event(Duration::from_millis(100)).await;
}

#[tokio::test]
async fn clocks_may_be_five_minutes_apart() {
    let mut cloud = Cloud::start();
    let ahead = SystemTime::now() + Duration::from_secs(300);
    let credentials = Credentials::until(&cloud, "edge-1", HOUR, ahead);
    let mut socket = dial(cloud.tunnel, tls(&cloud, Some(&credentials))).await.unwrap();
    say(&mut socket, &EdgeMessage::Hello(Box::default())).await;
    assert_eq!(cloud.up().await.0, "edge-1".into());
}

#[tokio::test]
async fn another_subjects_certificate_is_refused() {
    let cloud = Cloud::start();
    let ca_key = KeyPair::from_pem(&cloud.authority_key).unwrap();
    let issuer = Issuer::from_ca_cert_der(cloud.cas().signer().certificate(), ca_key).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["system:node:edge-1".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "admin");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let certificate = params.signed_by(&key, &issuer).unwrap().pem();
    let credentials = Credentials { key: key.serialize_pem(), certificate };
    refused(dial(cloud.tunnel, tls(&cloud, Some(&credentials))).await, 403, "is not a node's");
}

#[tokio::test]
async fn kubelet_subjects_enter_only_while_accepted() {
    for accept_system_nodes in [true, false] {
        let cloud =
            Cloud::start_with(ListenerSettings { accept_system_nodes, ..ListenerSettings::default() });
        let credentials = Credentials::with_old_subject(&cloud, "edge-1");
        let outcome = dial(cloud.tunnel, tls(&cloud, Some(&credentials))).await;
        if accept_system_nodes {
            outcome.unwrap();
        } else {
            refused(outcome, 403, "has the subject of release 0.1 (O=system:nodes)");
        }
    }
}

#[tokio::test]
async fn nothing_outlives_its_certificate() {
    let cloud = Cloud::start();
    let credentials = Credentials::until(&cloud, "edge-1", Duration::from_secs(4), SystemTime::now());
    let tls = tls(&cloud, Some(&credentials));
    let mut first = dial(cloud.tunnel, tls.clone()).await.unwrap();
    say(&mut first, &EdgeMessage::Hello(Box::default())).await;
    assert!(matches!(heard(&mut first).await, CloudMessage::Welcome(_)));
    let second = dial(cloud.tunnel, tls.clone()).await.unwrap();
    let resumed = second.get_ref().get_ref().1.handshake_kind();
    assert_eq!(
        resumed,
        Some(rustls::HandshakeKind::Resumed),
        "otherwise the rest of the test proves nothing"
    );
    drop(second);
    let (code, reason) = closed(&mut first).await;
    assert_eq!((code, reason.starts_with("the client certificate has expired")), (1008, true), "{reason}");
    // TLS accepts the ticket without checking the validity of the chain in it.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    refused(dial(cloud.tunnel, tls).await, 403, "expired at");
}

#[tokio::test]
async fn plain_websockets_are_refused() {
    let cloud = Cloud::start();
    let address = cloud.tunnel;
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(crate::cloud::SOON)).unwrap();
        let request = "GET /v1/edge HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    });
    let answer = String::from_utf8_lossy(&answer.await.unwrap()).into_owned();
    assert!(!answer.contains("HTTP"), "{answer}");
}

#[tokio::test]
async fn another_path_or_subprotocol_is_refused() {
    let cloud = Cloud::start();
    let tls = tls(&cloud, Some(&Credentials::of(&cloud, "edge-1")));
    let try_with = |path, protocol| dial_path(cloud.tunnel, tls.clone(), path, protocol);
    refused(try_with("/v2/edge", Some(SUBPROTOCOL)).await, 404, "/v1/edge");
    refused(try_with("/v1/edge", None).await, 400, "prepull.v1");
    refused(try_with("/v1/edge", Some("prepull.v2")).await, 400, "prepull.v1");
    assert!(try_with("/v1/edge", Some("prepull.v2, prepull.v1")).await.is_ok());
}
