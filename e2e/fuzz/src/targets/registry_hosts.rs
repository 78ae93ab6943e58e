//! `hosts.toml` of a registry, written by an operator for the container runtime.

use prepull_api::image::Reference;
use prepull_api::wire::MAX_REASON;
use prepull_registry::{ClientSettings, ErrorKind, HostsFiles, RegistryClient};

/// A registry with a port, Docker's own, and one on the machine itself: each has its own rules.
const REFERENCES: [&str; 3] = [
    "r.io:5000/team/app:v1",
    "nginx:1.25",
    "localhost:5000/app@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
];

pub(crate) fn run(input: &[u8]) {
    let dir = tempfile::tempdir().expect("a directory for hosts.toml");
    let of_all = dir.path().join("_default");
    std::fs::create_dir(&of_all).expect("a directory for all registries");
    std::fs::write(of_all.join("hosts.toml"), input).expect("hosts.toml is written");
    let hosts = HostsFiles { dirs: vec![dir.path().to_path_buf()], ..HostsFiles::default() };
    let client = RegistryClient::new(ClientSettings { hosts, ..ClientSettings::default() });
    for reference in REFERENCES {
        let reference = Reference::parse(reference).expect("a reference").normalized();
        if let Err(error) = client.repository(&reference, None) {
            assert_eq!(error.kind, ErrorKind::Unsupported, "the runtime would not be asked: {error}");
            let is_line = error.message.len() <= MAX_REASON && !error.message.contains(char::is_control);
            assert!(is_line, "{:?}", error.message);
        }
    }
}
