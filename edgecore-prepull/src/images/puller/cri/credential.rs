//! Credentials in CRI, including those that only Docker accepts.

use k8s_cri::v1::AuthConfig;
use prepull_api::credentials::RegistryCredential;

use crate::images::puller::{ErrorClass, PullError};

/// Converts a credential for CRI. Like the kubelet's, it names no server: containerd would compare that with the host
/// that it talks to, which differs for docker.io and for mirrors, and would then silently drop the credential.
pub(super) fn to_auth_config(credential: &RegistryCredential) -> AuthConfig {
    let RegistryCredential { server: _, username, password, identity_token, registry_token } = credential;
    AuthConfig {
        username: username.expose().to_owned(),
        password: password.expose().to_owned(),
        auth: String::new(),
        server_address: String::new(),
        identity_token: identity_token.expose().to_owned(),
        registry_token: registry_token.expose().to_owned(),
    }
}

/// Whether the credential is only a token from the registry, without user and password.
pub(in crate::images) fn is_registry_token_alone(credential: &RegistryCredential) -> bool {
    let RegistryCredential { server: _, username, password, identity_token, registry_token } = credential;
    !registry_token.expose().is_empty()
        && [username, password, identity_token].iter().all(|text| text.expose().is_empty())
}

/// The error for a registry token that the runtime doesn't use. It looks like a refusal by the registry, so that
/// another credential is tried.
pub(in crate::images) fn unusable(credential: &RegistryCredential, runtime: &str) -> PullError {
    let message = format!(
        "the credential for {} is a registry token, which {runtime} does not use: give a user and a password, or an identity token",
        credential.server
    );
    PullError::new(ErrorClass::Auth, message)
}
