//! Registry secrets: the same text as Docker's `config.json` and as a Secret of either type.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use prepull_api::credentials::{RegistryConfig, RegistryCredential, RegistryPattern, Sensitive};
use prepull_api::image::Reference;

const IMAGES: [&str; 4] = [
    "nginx",
    "r.io/team/app:v1",
    "r.io:5000/a",
    "[::1]:5000/x/y/z@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
];

pub(crate) fn run(input: &[u8]) {
    let secret = |type_: &str, key: &str| {
        let data = BTreeMap::from([(key.to_owned(), input.to_vec())]);
        RegistryConfig::from_secret(&format!("kubernetes.io/{type_}"), &data)
    };
    let configs = [
        RegistryConfig::from_docker_config(input),
        secret("dockerconfigjson", ".dockerconfigjson"),
        secret("dockercfg", ".dockercfg"),
    ];
    if let [Ok(file), Ok(secret), _] = &configs {
        assert_eq!(file, secret, "a Secret means what the file means");
    }
    let mut all = RegistryConfig::default();
    for config in configs.into_iter().flatten() {
        check_credentials(&config);
        all.extend(config);
    }
    check_credentials(&all);
}

/// Checks that found credentials match, and that no printed text shows one.
pub(crate) fn check_credentials(config: &RegistryConfig) {
    let keys = config.registries();
    let of_keys = keys.iter().map(|key| format!("{}/app", key.trim_end_matches('/').replace('*', "a")));
    let images = IMAGES.iter().map(|image| (*image).to_owned()).chain(of_keys);
    let mut printed = format!("{config:?}");
    let mut credentials = Vec::new();
    for image in images.filter_map(|image| Some(Reference::parse(&image).ok()?.normalized())) {
        let lookup = config.lookup(&image);
        for credential in &lookup.credentials {
            let pattern = RegistryPattern::parse(&credential.server);
            let matches = pattern.is_ok_and(|pattern| pattern.matches(&image));
            assert!(matches || image.registry() == "docker.io", "{} for {image}", credential.server);
        }
        for RegistryCredential { server, .. } in config.lookup_exact(&image).credentials {
            let pattern = RegistryPattern::parse(&server);
            assert!(pattern.is_ok_and(|pattern| !pattern.has_wildcard()), "{server} is not one host");
        }
        let _ = write!(printed, "{lookup:?}"); // writing to a String cannot fail
        for problem in &lookup.broken {
            printed += &problem.to_string();
        }
        credentials.extend(lookup.credentials);
    }
    assert_hidden(&printed, &credentials, &keys);
}

/// Checks that a text shows none of the credentials. It may contain those that are a part of a registry's name, or too
/// short to be significant.
fn assert_hidden(printed: &str, credentials: &[RegistryCredential], keys: &[&str]) {
    let keys = format!("{keys:?}");
    for credential in credentials {
        let RegistryCredential { server: _, username, password, identity_token, registry_token } = credential;
        for secret in [username, password, identity_token, registry_token].map(Sensitive::expose) {
            let is_telling = secret.len() > 20 && !keys.contains(secret);
            assert!(!is_telling || !printed.contains(secret), "{secret} is shown in {printed}");
        }
    }
}
