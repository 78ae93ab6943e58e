#![allow(clippy::unwrap_used)]
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn now() -> SystemTime {
    SystemTime::now()
}

fn read(data: BTreeMap<String, ByteString>) -> Rotation {
    Rotation::parse(data, "here", now()).unwrap()
}

/// Whether a client with these roots trusts the server.
fn is_server_trusted(set: &CaSet, roots: &[CertificateDer<'static>]) -> bool {
    let mut store = RootCertStore::empty();
    for root in roots {
        store.add(root.clone()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(store.into(), provider).build().unwrap();
    let names = vec![rcgen::SanType::DnsName("cloud.example".try_into().unwrap())];
    let (leaf, _, _) = set.signer().sign_server(names, now()).unwrap();
    let chain: Vec<_> = set.chain().collect();
    let name = ServerName::try_from("cloud.example").unwrap();
    verifier.verify_server_cert(&leaf, &chain, &name, &[], UnixTime::now()).is_ok()
}

#[test]
fn each_step_keeps_the_trust_of_the_last() {
    let settled = read(Rotation::first_secret_data(now()).unwrap());
    let old: Vec<_> = settled.set.trusted().cloned().collect();
    assert_eq!((settled.step, settled.since), (RotationStep::Settled, None));
    assert!(is_server_trusted(&settled.set, &old));

    let announced = read(settled.rotate(now()).unwrap());
    let both: Vec<_> = announced.set.trusted().cloned().collect();
    assert_eq!(announced.step, RotationStep::Announced);
    assert_eq!((both.len(), &both[0]), (2, &old[0]), "the old one signs still");
    assert!(is_server_trusted(&announced.set, &old) && is_server_trusted(&announced.set, &both));

    let signing = read(announced.activate(now()).unwrap());
    let new = [both[1].clone()];
    assert_eq!(signing.step, RotationStep::Signing);
    assert_eq!(signing.set.trusted().cloned().collect::<Vec<_>>(), [both[1].clone(), both[0].clone()]);
    for roots in [&old[..], &both, &new] {
        assert!(is_server_trusted(&signing.set, roots), "also to whoever knows the old CA alone");
    }

    let retired = read(signing.retire(now()).unwrap());
    assert_eq!(retired.step, RotationStep::Settled);
    assert_eq!(retired.set.trusted().cloned().collect::<Vec<_>>(), new);
    assert!(is_server_trusted(&retired.set, &both) && is_server_trusted(&retired.set, &new));
    assert!(!is_server_trusted(&retired.set, &old));
}

#[test]
fn the_old_key_goes_once_the_new_signs() {
    let first = Rotation::first_secret_data(now()).unwrap();
    let old_key = first[KEY].clone();
    let announced = read(first).rotate(now()).unwrap();
    assert_eq!(announced[KEY], old_key);
    let signing = read(announced).activate(now()).unwrap();
    assert!(!signing.values().any(|value| *value == old_key));
}

#[test]
fn older_releases_can_read_every_step() {
    let mut data = Rotation::first_secret_data(now()).unwrap();
    let reads = |data: &BTreeMap<String, ByteString>| {
        let part = |name| std::str::from_utf8(&data[name].0).unwrap();
        Authority::from_pem(part("tls.crt"), part("tls.key"), "here", now()).unwrap().fingerprint()
    };
    for step in [Rotation::rotate, |r: &Rotation, now| Ok(r.activate(now).unwrap()), Rotation::retire] {
        data = step(&read(data), now()).unwrap();
        assert_eq!(reads(&data), read(data.clone()).set.signer().fingerprint());
    }
}

#[test]
fn steps_are_made_in_their_order_alone() {
    let settled = read(Rotation::first_secret_data(now()).unwrap());
    assert!(settled.activate(now()).is_none());
    assert!(matches!(settled.retire(now()), Err(RotationError::NothingToRetire)));
    let announced = read(settled.rotate(now()).unwrap());
    assert!(matches!(announced.rotate(now()), Err(RotationError::UnderWay)));
    assert!(matches!(announced.retire(now()), Err(RotationError::NothingToRetire)));
    let signing = read(announced.activate(now()).unwrap());
    assert!(matches!(signing.rotate(now()), Err(RotationError::UnderWay)));
    assert!(signing.activate(now()).is_none());
    let since = signing.since.unwrap();
    assert!(now().duration_since(since).unwrap() < Duration::from_secs(60));
}

#[test]
fn a_client_belongs_to_its_signing_ca() {
    let announced = read(read(Rotation::first_secret_data(now()).unwrap()).rotate(now()).unwrap());
    let signing = read(announced.activate(now()).unwrap());
    let leaf = |set: &CaSet| set.signer().sign_server(Vec::new(), now()).unwrap().0;
    let (old, new) = (announced.set.signer().fingerprint(), signing.set.signer().fingerprint());
    assert_eq!(signing.set.issuer_of(&leaf(&announced.set)), Some(old));
    assert_eq!(signing.set.issuer_of(&leaf(&signing.set)), Some(new));
    let stranger = read(Rotation::first_secret_data(now()).unwrap());
    assert_eq!(signing.set.issuer_of(&leaf(&stranger.set)), None);
    let retired = read(signing.retire(now()).unwrap());
    assert!(signing.set.is_trusted(&old) && !retired.set.is_trusted(&old) && retired.set.is_trusted(&new));
}

#[test]
fn each_tls_config_has_its_own_ticket_key() {
    let announced = read(read(Rotation::first_secret_data(now()).unwrap()).rotate(now()).unwrap());
    let signing = read(announced.activate(now()).unwrap());
    let retired = read(signing.retire(now()).unwrap());
    let identity = super::super::ServerIdentity::new(signing.set, &[]).unwrap();
    let ticket = |config: &ServerConfig| config.ticketer.encrypt(b"state").unwrap();
    let before = identity.serving();
    assert!(identity.adopt(retired.set).unwrap());
    let after = identity.serving();
    assert_eq!(before.tunnel.ticketer.decrypt(&ticket(&before.tunnel)).unwrap(), b"state");
    assert_eq!(after.tunnel.ticketer.decrypt(&ticket(&before.tunnel)), None, "no ticket outlives the trust");
    assert_eq!(after.enroll.ticketer.decrypt(&ticket(&after.tunnel)), None);
}

#[test]
fn an_unreadable_part_is_named() {
    let announced = read(Rotation::first_secret_data(now()).unwrap()).rotate(now()).unwrap();
    for (name, value, reason) in [
        ("tls.key", None, "the key tls.key is missing or is not text"),
        ("next.key", None, "the key next.key is missing or is not text"),
        ("next.crt", Some("x"), "next.crt: the certificate is not a PEM block"),
        ("tls.crt", Some("\u{1}"), "not a PEM block CERTIFICATE"),
    ] {
        let mut data = announced.clone();
        data.remove(name);
        data.extend(value.map(|value| data_entry((name, value.to_owned()))));
        let error = Rotation::parse(data, "Secret ns/prepull-ca", now()).err().unwrap().to_string();
        assert!(error.starts_with("Secret ns/prepull-ca holds no CA") && error.contains(reason), "{error}");
    }
}

mod pace {
    use super::*;

    fn census(connected: usize, informed: usize, renewed: usize, unable: usize) -> CaCensus {
        CaCensus { connected, informed, renewed, unable, old_subject: 0 }
    }

    #[test]
    fn a_new_ca_signs_once_edges_know_it() {
        let announced = read(read(Rotation::first_secret_data(now()).unwrap()).rotate(now()).unwrap());
        let begun = announced.since.unwrap();
        let due = |seconds, served, census| {
            let now = begun + Duration::from_secs(seconds);
            announced.due_step(&census, Duration::from_secs(served), 120 * DAY, now)
        };
        assert_eq!(due(60, 60, census(3, 3, 3, 0)), Some(Due::Activate));
        assert_eq!(due(60, 60, census(3, 2, 3, 1)), Some(Due::Activate), "one cannot be told");
        assert_eq!(due(60, 60, census(3, 2, 3, 0)), None);
        assert_eq!(due(5, 60, census(3, 3, 3, 0)), None, "edges may just be connecting");
        assert_eq!(due(60, 5, census(0, 0, 0, 0)), None, "this leader is a new one");
        assert_eq!(
            due(600, 1, census(3, 2, 3, 0)),
            Some(Due::Activate),
            "who does not answer is not waited for"
        );
    }

    #[test]
    fn an_unneeded_expired_ca_is_retired() {
        let announced = read(read(Rotation::first_secret_data(now()).unwrap()).rotate(now()).unwrap());
        let signing = read(announced.activate(now()).unwrap());
        let begun = signing.since.unwrap();
        let due = |days, census| signing.due_step(&census, DAY, 120 * DAY, begun + days * DAY);
        assert_eq!(due(119, census(3, 3, 3, 0)), None);
        assert_eq!(due(120, census(3, 3, 3, 0)), Some(Due::Retire));
        for late in [census(3, 3, 2, 0), census(3, 2, 3, 0), census(3, 2, 3, 1)] {
            assert_eq!(due(200, late), None, "{late:?} would be locked out");
        }
        let of_new_leader =
            |served, old_life| signing.due_step(&census(0, 0, 0, 0), served, old_life, begun + 200 * DAY);
        assert_eq!(of_new_leader(Duration::from_secs(3599), 120 * DAY), None, "the edges aren't back yet");
        assert_eq!(of_new_leader(Duration::from_secs(3600), 120 * DAY), Some(Due::Retire));
        assert_eq!(of_new_leader(Duration::from_secs(60), Duration::from_secs(60)), Some(Due::Retire));
        let settled = read(signing.retire(now()).unwrap());
        assert_eq!(settled.due_step(&census(3, 3, 3, 0), DAY, DAY, now() + 999 * DAY), None);
    }
}
