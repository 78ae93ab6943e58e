//! Credentials as docker's configuration has them: in the file, or with a helper program.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use prepull_api::credentials::{RegistryConfig, RegistryCredential, Sensitive};
use prepull_api::image::NormalizedReference;
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

/// How long a helper may take. Those of clouds ask a server.
const PATIENCE: Duration = Duration::from_secs(30);
/// The key of Docker Hub in the configuration, and for its helpers.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";
/// In place of the user, where a helper has a token.
const TOKEN_USER: &str = "<token>";

#[derive(Default)]
pub(super) struct DockerConfig {
    entries: RegistryConfig,
    helpers: Helpers,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Helpers {
    #[serde(rename = "credHelpers")]
    by_server: BTreeMap<String, String>,
    #[serde(rename = "credsStore")]
    other: String,
    auths: Option<serde::de::IgnoredAny>,
}

impl DockerConfig {
    /// Reads the file that is named, or else the first one that is there.
    pub(super) fn read(named: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) =
            named.map(Path::to_owned).or_else(|| usual_places().into_iter().find(|path| path.exists()))
        else {
            return Ok(Self::default());
        };
        let content = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&content).with_context(|| format!("{} cannot be used", path.display()))
    }

    fn parse(content: &[u8]) -> anyhow::Result<Self> {
        // Not the parser's own message: it may show a password.
        let helpers: Helpers = match serde_json::from_slice(content) {
            Ok(helpers) => helpers,
            Err(error) => bail!("it is no configuration of docker, at line {}", error.line()),
        };
        let entries = match helpers.auths {
            Some(_) => RegistryConfig::from_docker_config(content)?,
            None => RegistryConfig::default(),
        };
        Ok(Self { entries, helpers })
    }

    /// The credentials for an image, in the order to try them; none to ask anonymously.
    pub(super) async fn credentials_for(
        &self,
        image: &NormalizedReference,
    ) -> anyhow::Result<Vec<RegistryCredential>> {
        let server = if image.registry() == "docker.io" { DOCKER_HUB } else { image.registry() };
        let helper =
            self.helpers.by_server.get(server).or_else(|| self.helpers.by_server.get(image.registry()));
        let helper = helper.unwrap_or(&self.helpers.other);
        if !helper.is_empty()
            && let Some(credential) = ask_helper(helper, server).await?
        {
            return Ok(vec![credential]);
        }
        Ok(self.entries.credentials_for(image))
    }
}

fn usual_places() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let docker = variable("DOCKER_CONFIG").or_else(|| Some(variable("HOME")?.join(".docker")));
    let podman = variable("REGISTRY_AUTH_FILE")
        .or_else(|| Some(variable("XDG_RUNTIME_DIR")?.join("containers").join("auth.json")));
    docker.map(|dir| dir.join("config.json")).into_iter().chain(podman).collect()
}

/// Asks `docker-credential-NAME`. `None` if it has nothing for the server.
async fn ask_helper(name: &str, server: &str) -> anyhow::Result<Option<RegistryCredential>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct HelperAnswer {
        username: String,
        secret: Sensitive,
    }
    let program = format!("docker-credential-{name}");
    let mut command = Command::new(&program);
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
    let ask = async {
        let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        if let Some(mut input) = child.stdin.take() {
            // One that has exited doesn't read.
            let _ = input.write_all(server.as_bytes()).await;
        }
        child.wait_with_output().await.with_context(|| format!("cannot read from {program}"))
    };
    let output = timeout(PATIENCE, ask).await;
    let output =
        output.with_context(|| format!("{program} has not answered within {} s", PATIENCE.as_secs()))??;
    if !output.status.success() {
        return Ok(None);
    }
    let Ok(HelperAnswer { username, secret }) = serde_json::from_slice(&output.stdout) else {
        bail!("{program} gives no credentials for {server}");
    };
    let server = server.to_owned();
    Ok(Some(if username == TOKEN_USER {
        RegistryCredential { server, identity_token: secret, ..RegistryCredential::default() }
    } else {
        let username = Sensitive::new(username);
        RegistryCredential { server, username, password: secret, ..RegistryCredential::default() }
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::image::Reference;

    use super::*;

    #[tokio::test]
    async fn entries_are_used_where_no_helper_answers() {
        let image = Reference::parse("r.example/team/app:v1").unwrap().normalized();
        let config = br#"{"auths": {"r.example": {"username": "u", "password": "p"}}}"#;
        let found = DockerConfig::parse(config).unwrap().credentials_for(&image).await.unwrap();
        assert_eq!((found.len(), found[0].username.expose()), (1, "u"));
        let none = DockerConfig::parse(br#"{"credHelpers": {"other.example": "x"}}"#).unwrap();
        assert_eq!(none.credentials_for(&image).await.unwrap(), []);
        let missing = DockerConfig::parse(br#"{"credHelpers": {"r.example": "there-is-none"}}"#).unwrap();
        let error = missing.credentials_for(&image).await.unwrap_err().to_string();
        assert_eq!(error, "cannot start docker-credential-there-is-none");
        let Err(error) = DockerConfig::parse(br#"{"auths": "secret""#) else { panic!("it is no JSON") };
        assert_eq!(error.to_string(), "it is no configuration of docker, at line 1");
    }
}
