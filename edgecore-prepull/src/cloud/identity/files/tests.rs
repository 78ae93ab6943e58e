#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;

use rcgen::{DistinguishedName, DnType};

use super::*;

struct State {
    dir: StateDir,
    root: tempfile::TempDir,
}

fn state() -> State {
    let root = tempfile::tempdir().unwrap();
    State { dir: StateDir::new(&root.path().join("state")), root }
}

impl State {
    /// The certificate that a server would issue for this key.
    fn certificate(key: &NewKey, node: &str) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("system:node:{node}"));
        params.self_signed(&key.0).unwrap().pem()
    }

    fn join(&self, node: &str) {
        let key = self.dir.requested_key().unwrap();
        let certificate = Self::certificate(&key, node);
        let connection = Connection {
            tunnel_urls: "wss://cloud.example:10000/v1/edge".into(),
            enroll_urls: "https://cloud.example:10002".into(),
            node_name: node.into(),
        };
        self.dir.store_connection(&certificate, &connection).unwrap();
        self.dir.store_certificate(&certificate).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join("state").join(name)
    }
}

#[test]
fn a_key_without_certificate_is_reused() {
    let state = state();
    let first = state.dir.requested_key().unwrap();
    assert_eq!(state.dir.requested_key().unwrap().public_key(), first.public_key());
    let mode = |name| fs::metadata(state.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("pki"), mode("pki/client.key.new")), (0o700, 0o600));
    state.dir.store_certificate(&State::certificate(&first, "edge-1")).unwrap();
    assert_eq!(mode("pki/client.key"), 0o600);
    assert_ne!(state.dir.requested_key().unwrap().public_key(), first.public_key());
}

#[test]
fn a_stored_identity_is_read_back() {
    let state = state();
    assert!(matches!(state.dir.read_pki(), Err(IdentityError::NotJoined(_))));
    assert_eq!(state.dir.joined_as().unwrap(), None);
    state.join("edge-1");
    assert_eq!(state.dir.read_pki().unwrap().facts.node, "edge-1".into());
    assert_eq!(state.dir.joined_as().unwrap(), Some("edge-1".into()));
    assert_eq!(Connection::load(&state.path("")).unwrap().enroll_urls, "https://cloud.example:10002".into());
    assert!(fs::read_dir(state.path("pki")).unwrap().all(|file| {
        let name = file.unwrap().file_name();
        ["ca.crt", "client.crt", "client.key"].iter().any(|expected| name == *expected)
    }));
}

#[test]
fn a_cut_before_the_key_keeps_the_new() {
    let state = state();
    state.join("edge-1");
    let key = state.dir.requested_key().unwrap();
    // The renewed certificate is written, and its key isn't in place yet.
    write(&state.path("pki/client.crt"), State::certificate(&key, "edge-1").as_bytes(), 0o644).unwrap();
    assert_eq!(state.dir.read_pki().unwrap().facts.public_key, key.public_key());
    assert!(!state.path("pki/client.key.new").exists(), "the key is in place from here on");
    assert_eq!(state.dir.read_pki().unwrap().facts.public_key, key.public_key());
}

#[test]
fn a_cut_before_the_certificate_keeps_the_old() {
    let state = state();
    state.join("edge-1");
    let before = state.dir.read_pki().unwrap().facts.public_key;
    state.dir.requested_key().unwrap();
    assert_eq!(state.dir.read_pki().unwrap().facts.public_key, before);
}

#[test]
fn a_foreign_file_is_named() {
    let state = state();
    state.join("edge-1");
    let stranger = KeyPair::generate().unwrap().serialize_pem();
    write(&state.path("pki/client.key"), stranger.as_bytes(), 0o600).unwrap();
    let Err(error) = state.dir.read_pki() else { panic!("accepted") };
    assert!(
        error
            .to_string()
            .ends_with("client.key: it is not the key of client.crt: join again with a new token")
    );
    write(&state.path("pki/client.crt"), b"x", 0o644).unwrap();
    let Err(error) = state.dir.read_pki() else { panic!("accepted") };
    assert!(error.to_string().contains("client.crt: it is not a PEM block CERTIFICATE"), "{error}");
    assert_eq!(state.dir.joined_as().unwrap(), None, "joining again is the remedy, so it must be possible");
}

#[test]
fn a_new_key_is_used_on_a_read_only_disk() {
    let failed = |kind: io::ErrorKind| {
        or_read_only(Err(IdentityError::for_file("rename to", Path::new("client.key"), kind.into())))
    };
    assert!(or_read_only(Ok(())).is_ok());
    assert!(failed(io::ErrorKind::ReadOnlyFilesystem).is_ok());
    assert!(failed(io::ErrorKind::StorageFull).is_err());
}

#[test]
fn a_failed_write_leaves_no_file() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("program");
    fs::create_dir(&path).unwrap();
    assert!(replace_file(&path, b"new", 0o600).is_err(), "a directory is no file to replace");
    assert!(!temporary_of(&path).exists());
}
