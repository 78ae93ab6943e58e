#![allow(clippy::unwrap_used)]
use std::path::Path;

use prepull_api::task::NodeName;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustix::fs::{CWD, Mode, mkfifoat};

use super::*;
use crate::cloud::identity::Connection;
use crate::cloud::identity::files::StateDir;
use crate::cloud::identity::renew::until_a_rotation_asks;

/// A CA that issues certificates.
struct Ca {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // As cloudcore encodes it, so that texts can be compared.
        let pem = prepull_api::enroll::certificate_pem(params.self_signed(&key).unwrap().der());
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// Joins a node.
    fn join(&self, state_dir: &Path) -> Identity {
        let dir = StateDir::new(state_dir);
        dir.requested_key().unwrap();
        let urls = |scheme: &str| format!("{scheme}://localhost").into();
        let (tunnel_urls, enroll_urls) = (urls("wss"), urls("https"));
        let node_name = NodeName::from("edge-1");
        dir.store_connection(&self.pem, &Connection { tunnel_urls, enroll_urls, node_name }).unwrap();
        dir.store_certificate(&self.sign(state_dir)).unwrap();
        Identity::load(state_dir).unwrap()
    }

    /// A certificate for the key that was requested.
    fn sign(&self, state_dir: &Path) -> String {
        let key = std::fs::read_to_string(state_dir.join("pki/client.key.new")).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "system:node:edge-1");
        params.not_after = rcgen::date_time_ymd(2999, 1, 1);
        params.signed_by(&KeyPair::from_pem(&key).unwrap(), &self.issuer).unwrap().pem()
    }
}

fn named(cas: &[&Ca]) -> TrustedCas {
    let bundle = cas.iter().map(|ca| ca.pem.as_str()).collect();
    TrustedCas { bundle, renew_within: Duration::from_secs(100) }
}

#[test]
fn new_cas_are_stored_without_ending_sessions() {
    let (old, new, dir) = (Ca::new("old"), Ca::new("new"), tempfile::tempdir().unwrap());
    let identity = old.join(dir.path());
    let mut watched = identity.watch();
    let (both, now) = (named(&[&old, &new]), SystemTime::now());
    assert_eq!(identity.trusted_bundle_id(), bundle_id(&old.pem));

    let confirmed = identity.trust(&both, now, 0.5).unwrap();
    assert_eq!(confirmed, bundle_id(&both.bundle));
    assert_eq!(identity.trusted_bundle_id(), confirmed);
    assert!(!watched.has_changed().unwrap(), "a session would restart");
    assert_eq!(watched.borrow_and_update().bundle, both.bundle, "the next connection trusts both");
    assert_eq!(*identity.renew_at.borrow(), None, "the old CA still signs");
    assert_eq!(Identity::load(dir.path()).unwrap().trusted_bundle_id(), confirmed, "after a restart as well");
}

#[test]
fn a_rotation_renews_within_the_clouds_time() {
    let (old, new, dir) = (Ca::new("old"), Ca::new("new"), tempfile::tempdir().unwrap());
    let identity = old.join(dir.path());
    let (cas, now) = (named(&[&new, &old]), SystemTime::now());
    let due = || *identity.renew_at.borrow();
    identity.trust(&cas, now, 0.5).unwrap();
    assert_eq!(due(), Some(now + Duration::from_secs(50)));
    identity.trust(&cas, now + Duration::from_secs(40), 1.0).unwrap();
    assert_eq!(due(), Some(now + Duration::from_secs(50)), "a repeated message postpones nothing");

    identity.dir.requested_key().unwrap();
    identity.dir.store_certificate(&new.sign(dir.path())).unwrap();
    assert!(identity.reload().unwrap());
    identity.trust(&named(&[&new]), now, 0.5).unwrap();
    assert_eq!(due(), None);
}

#[test]
fn a_senseless_list_of_cas_changes_nothing() {
    let (old, dir) = (Ca::new("old"), tempfile::tempdir().unwrap());
    let identity = old.join(dir.path());
    let leaf = std::fs::read_to_string(dir.path().join("pki/client.crt")).unwrap();
    for bundle in [String::new(), "x".to_owned(), old.pem.repeat(9), leaf] {
        let cas = TrustedCas { bundle, renew_within: Duration::ZERO };
        assert!(matches!(identity.trust(&cas, SystemTime::now(), 0.0), Err(TrustError::Bundle(_))));
    }
    assert_eq!(Identity::load(dir.path()).unwrap().trusted_bundle_id(), bundle_id(&old.pem));
}

#[tokio::test(start_paused = true)]
async fn a_rotation_ends_a_long_wait() {
    let (old, new, dir) = (Ca::new("old"), Ca::new("new"), tempfile::tempdir().unwrap());
    let identity = old.join(dir.path());
    let hour = Duration::from_secs(3600);
    let waits = || async {
        let begun = tokio::time::Instant::now();
        let _ = tokio::time::timeout(hour, until_a_rotation_asks(identity.renew_at.subscribe())).await;
        begun.elapsed()
    };
    let (waited, ()) = tokio::join!(waits(), async {
        identity.trust(&named(&[&old, &new]), SystemTime::now(), 0.5).unwrap();
    });
    assert_eq!(waited, hour, "the old CA still signs");
    let (waited, ()) = tokio::join!(waits(), async {
        identity.trust(&named(&[&new, &old]), SystemTime::now(), 0.5).unwrap();
    });
    assert!((40..=50).contains(&waited.as_secs()), "the cloud's time: {waited:?}");
    assert_eq!(waits().await, hour, "a value seen before doesn't end the next wait");
}

#[tokio::test]
async fn a_hanging_disk_delays_nothing_else() {
    const RELEASED_AFTER: Duration = Duration::from_secs(5);
    let (ca, dir) = (Ca::new("ca"), tempfile::tempdir().unwrap());
    let (identity, known) = (ca.join(dir.path()), named(&[&ca]));
    // Reading it blocks until the other thread writes.
    let key = dir.path().join("pki/client.key.new");
    mkfifoat(CWD, &key, Mode::RUSR | Mode::WUSR).unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let releasing = std::thread::spawn(move || {
        let _ = released.recv_timeout(RELEASED_AFTER);
        std::fs::write(key, "")
    });
    let begun = std::time::Instant::now();
    let of_renewal = identity.clone();
    let renewing = tokio::spawn(async move { of_renewal.renew("https://localhost:1".to_owned()).await });
    let of_cloud = tokio::spawn(async move { identity.take_over(known).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(begun.elapsed() < RELEASED_AFTER && !renewing.is_finished() && !of_cloud.is_finished());
    renewing.abort();
    drop(release);
    assert!(of_cloud.await.unwrap().is_ok(), "its turn comes");
    releasing.join().unwrap().unwrap();
}
