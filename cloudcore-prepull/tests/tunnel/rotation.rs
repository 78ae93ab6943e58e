//! Rotation of the CA, with edges that are away at each of its steps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use cloudcore_prepull::edges::pki::{CaSet, Rotation};
use cloudcore_prepull::edges::tokens::Scope;
use edgecore_prepull::cloud::identity::Identity;
use k8s_openapi::ByteString;
use prepull_api::wire::{CloudMessage, EdgeMessage};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::agent::{Agent, impatient, join};
use crate::cloud::{Cloud, SOON};
use crate::raw::{self, Credentials, closed, dial, heard, say};

/// A rotation as the leader and `cloudcore-prepull ca` make it, without the Secret.
struct Steps {
    data: BTreeMap<String, ByteString>,
}

impl Steps {
    fn of(cloud: &Cloud) -> Self {
        let part = |name: &str, text: String| (name.to_owned(), ByteString(text.into_bytes()));
        let data = [part("tls.crt", cloud.cas().bundle()), part("tls.key", cloud.authority_key.clone())];
        Self { data: data.into() }
    }

    fn read(&self) -> Rotation {
        Rotation::parse(self.data.clone(), "the test", SystemTime::now()).unwrap()
    }

    /// Makes a step, which the cloud takes up.
    fn make(
        &mut self,
        cloud: &Cloud,
        step: impl Fn(&Rotation, SystemTime) -> Option<BTreeMap<String, ByteString>>,
    ) {
        self.data = step(&self.read(), SystemTime::now()).unwrap();
        assert!(cloud.identity.adopt(self.read().into_set()).unwrap());
    }

    fn announce(&mut self, cloud: &Cloud) {
        self.make(cloud, |rotation, now| rotation.rotate(now).ok());
    }

    fn activate(&mut self, cloud: &Cloud) {
        self.make(cloud, Rotation::activate);
    }

    fn retire(&mut self, cloud: &Cloud) {
        self.make(cloud, |rotation, now| rotation.retire(now).ok());
    }
}

fn read(state: &Path, name: &str) -> String {
    std::fs::read_to_string(state.join("pki").join(name)).unwrap()
}

/// Whether the node's certificate is of the CA that signs.
fn is_of_signer(state: &Path, cas: &CaSet) -> bool {
    let certificate = CertificateDer::from_pem_slice(read(state, "client.crt").as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&certificate).unwrap();
    let (_, signer) = X509Certificate::from_der(cas.signer().certificate()).unwrap();
    certificate.verify_signature(Some(signer.public_key())).is_ok()
}

/// Copies what joining has left.
fn copy_pki(from: &Path, to: &Path) {
    std::fs::create_dir(to.join("pki")).unwrap();
    for file in ["ca.crt", "client.crt", "client.key"] {
        std::fs::copy(from.join("pki").join(file), to.join("pki").join(file)).unwrap();
    }
}

async fn until(what: &str, is_met: impl Fn() -> bool) {
    let met = async {
        while !is_met() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, met).await.unwrap_or_else(|_| panic!("{what}: not in time"));
}

/// An agent that runs, with all that it does by itself.
struct Running {
    state: PathBuf,
    shutdown: CancellationToken,
}

fn wake(cloud: &Cloud, state: TempDir) -> Running {
    let path = state.path().to_owned();
    let agent = Agent::wake(state, vec![cloud.tunnel_url()], impatient());
    let shutdown = agent.shutdown.clone();
    tokio::spawn(agent.identity.clone().keep_renewed(cloud.enroll_url(), shutdown.clone()));
    tokio::spawn(agent.say_hello_forever());
    Running { state: path, shutdown }
}

impl Running {
    /// Waits until the node trusts the CAs, and has a certificate of the signer.
    async fn is_done(&self, cloud: &Cloud) {
        let cas = cloud.cas();
        until("the edge has the CAs and a certificate of the signer", || {
            read(&self.state, "ca.crt") == cas.bundle() && is_of_signer(&self.state, &cas)
        })
        .await;
    }
}

/// Waits until sessions have stopped to come and go.
async fn quiet(cloud: &mut Cloud) {
    while tokio::time::timeout(Duration::from_secs(1), cloud.event()).await.is_ok() {}
}

#[tokio::test]
async fn absent_edges_survive_a_rotation() {
    let mut cloud = Cloud::start();
    let mut steps = Steps::of(&cloud);
    let before = cloud.cas();
    let old_token = cloud.token(Scope::Fleet).await;
    let present = wake(&cloud, Agent::join(&cloud, "present").await);
    let (asleep, too_long) = (Agent::join(&cloud, "asleep").await, Agent::join(&cloud, "too-long").await);
    // Knows of the announcement, and of nothing later.
    let leaving = Agent::join(&cloud, "leaves-early").await;
    let copy = tempfile::tempdir().unwrap();
    let leaves_early = wake(&cloud, leaving);
    for _ in 0..2 {
        cloud.up().await;
    }

    steps.announce(&cloud);
    for running in [&present, &leaves_early] {
        running.is_done(&cloud).await;
    }
    assert!(is_of_signer(&present.state, &before), "the old CA signs still");
    copy_pki(&leaves_early.state, copy.path());
    leaves_early.shutdown.cancel();
    assert_eq!(cloud.down().await.0, "leaves-early".into());

    steps.activate(&cloud);
    present.is_done(&cloud).await;
    assert!(!is_of_signer(&present.state, &before));
    // It knows the old CA alone, and has slept through all of it.
    assert_eq!(read(asleep.path(), "ca.crt"), before.bundle());
    let asleep = wake(&cloud, asleep);
    asleep.is_done(&cloud).await;
    // A token of before the rotation names the old CA.
    let late = tempfile::tempdir().unwrap();
    join(&cloud, &old_token, "late", late.path()).await.unwrap();
    let late = wake(&cloud, late);
    late.is_done(&cloud).await;
    let left = wake(&cloud, copy);
    left.is_done(&cloud).await;

    // The retirement ends no session of an edge that is done.
    quiet(&mut cloud).await;
    steps.retire(&cloud);
    for running in [&present, &asleep, &late, &left] {
        running.is_done(&cloud).await;
        assert!(!read(&running.state, "ca.crt").contains(&before.bundle()), "the old CA is trusted still");
    }
    cloud.no_event(Duration::from_millis(500)).await;
    assert!(cloud.sessions.is_online(&"present".into()));

    // Now the old CA is of no use to anybody.
    let refused = Identity::load(too_long.path()).unwrap().renew(cloud.enroll_url()).await.unwrap_err();
    assert!(refused.to_string().contains("not from the CA that this node has joined"), "{refused}");
    let refused = join(&cloud, &old_token, "later", tempfile::tempdir().unwrap().path()).await.unwrap_err();
    assert!(refused.to_string().contains("the server is not the one that the token is for"), "{refused}");
}

#[tokio::test]
async fn a_retired_cas_certificates_are_refused() {
    let mut cloud = Cloud::start();
    let mut steps = Steps::of(&cloud);
    // An agent without support for rotations sends no CAs and receives none.
    let credentials = Credentials::of(&cloud, "edge-1");
    let tls = raw::tls(&cloud, Some(&credentials));
    let mut socket = dial(cloud.tunnel, tls.clone()).await.unwrap();
    say(&mut socket, &EdgeMessage::Hello(Box::default())).await;
    assert!(matches!(heard(&mut socket).await, CloudMessage::Welcome(_)));
    cloud.up().await;

    steps.announce(&cloud);
    steps.activate(&cloud);
    // It trusts the old CA alone: the chain leads there. The ticket of before is of no use, and not needed.
    let second = dial(cloud.tunnel, tls.clone()).await.unwrap();
    assert_eq!(second.get_ref().get_ref().1.handshake_kind(), Some(rustls::HandshakeKind::Full));
    drop(second);
    cloud.no_event(Duration::from_millis(200)).await;

    steps.retire(&cloud);
    let (code, reason) = closed(&mut socket).await;
    assert_eq!(
        (code, reason.starts_with("the CA of the client certificate is not trusted")),
        (1008, true),
        "{reason}"
    );
    // Even if it trusts the new one: the server does not trust its certificate.
    let tls = raw::tls(&cloud, Some(&credentials));
    assert!(dial(cloud.tunnel, tls).await.is_err());
}

/// A false cloud had the key of the CA, and named a CA of its own beside it or instead of it.
#[tokio::test]
async fn the_next_session_drops_a_foreign_ca() {
    let cloud = Cloud::start();
    let (honest, foreign) = (cloud.cas().bundle(), Cloud::start().cas().bundle());
    let led_astray = Agent::join(&cloud, "led-astray").await;
    std::fs::write(led_astray.path().join("pki/ca.crt"), format!("{honest}{foreign}")).unwrap();
    wake(&cloud, led_astray).is_done(&cloud).await;

    // One that trusts the foreign CA alone stays away until it joins again.
    let lost = Agent::join(&cloud, "lost").await;
    std::fs::write(lost.path().join("pki/ca.crt"), &foreign).unwrap();
    let refused = Identity::load(lost.path()).unwrap().renew(cloud.enroll_url()).await.unwrap_err();
    assert!(refused.to_string().contains("not from the CA that this node has joined"), "{refused}");
    let token = cloud.token(Scope::Node("lost".into())).await;
    join(&cloud, &token, "lost", lost.path()).await.unwrap();
    assert_eq!(read(lost.path(), "ca.crt"), honest);
    wake(&cloud, lost).is_done(&cloud).await;
}
