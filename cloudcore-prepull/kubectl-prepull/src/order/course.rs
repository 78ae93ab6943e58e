//! The flags of how a job goes, and their values.

use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use prepull_api::download::Deltas;

use crate::window::WindowArg;

/// The flags that say how a job goes, of `run` and of `from`.
#[derive(Debug, Args)]
pub(crate) struct CourseArgs {
    /// Secret for images that find none otherwise: NAMESPACE/NAME, or a name in --namespace. Its owner has to allow it.
    #[arg(long, value_name = "NS/NAME")]
    pub(crate) secret: Option<SecretName>,
    /// Secret of a registry; may be repeated.
    #[arg(long, value_name = "REG=NS/NAME")]
    pub(crate) registry_secret: Vec<RegistryLogin>,
    /// The flags of any job.
    #[command(flatten)]
    pub(crate) pace: PaceArgs,
    /// Bytes a second on each node, such as 2Mi [default: no cap].
    #[arg(long, value_name = "RATE")]
    pub(crate) rate: Option<String>,
    /// Bytes a second that a site downloads over its uplink, with --share [default: no cap].
    #[arg(long, value_name = "RATE")]
    pub(crate) max_site_rate: Option<String>,
    /// Download each layer once per site, and share it there [default: as cloudcore-prepull is set].
    #[arg(long)]
    pub(crate) share: bool,
    /// Rebuild images from earlier ones and deltas: auto, never or require, which fails instead of the whole image [default: auto].
    #[arg(long, value_name = "RULE", value_parser = parse_deltas)]
    pub(crate) deltas: Option<Deltas>,
    /// Further tries of each image, after errors that may pass.
    #[arg(long, value_name = "TIMES", default_value_t = 3)]
    pub(crate) retries: u32,
}

/// The flags that say how a job goes, whether it pulls or removes.
#[derive(Debug, Args)]
pub(crate) struct PaceArgs {
    /// Nodes at work at the same time, as a number or as a percentage of the nodes that there are now [default: 10%].
    #[arg(long, value_name = "N|N%")]
    pub(crate) concurrency: Option<Concurrency>,
    /// How many nodes may have started by the end of each wave [default: all in one].
    #[arg(long, value_name = "N|N%,…", value_delimiter = ',')]
    pub(crate) wave: Vec<String>,
    /// The pause between two waves.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, requires = "wave")]
    pub(crate) pause: Option<Duration>,
    /// When nodes may work: [DAYS,]START-END[@ZONE], such as 22:00-04:00; may be repeated [default: always].
    #[arg(long, value_name = "WINDOW")]
    pub(crate) window: Vec<WindowArg>,
    /// How long each node may take [default: 5m].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) node_timeout: Option<Duration>,
    /// How long the whole job may take [default: as long as it takes].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) deadline: Option<Duration>,
    /// How long after its end the job is deleted [default: 7d; in the output of --dry-run it is kept].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Option<Duration>,
    /// The part of the nodes that may fail, from 0 to 1 [default: 0.1].
    #[arg(long, value_name = "PART")]
    pub(crate) tolerate: Option<String>,
    /// Let nodes join that become eligible while the job runs.
    #[arg(long, alias = "follow")]
    pub(crate) follow_nodes: bool,
}

/// How many nodes pull at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Concurrency {
    Nodes(u32),
    Percent(u32),
}

impl Default for Concurrency {
    fn default() -> Self {
        Self::Percent(10)
    }
}

impl Concurrency {
    pub(crate) fn for_nodes(self, nodes: usize) -> i64 {
        match self {
            Self::Nodes(nodes) => nodes.into(),
            Self::Percent(percent) => {
                let share = (nodes as u64 * u64::from(percent)).div_ceil(100).max(1);
                i64::try_from(share).unwrap_or(i64::MAX)
            }
        }
    }
}

impl FromStr for Concurrency {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number > 0);
        match text.strip_suffix('%') {
            Some(percent) => number(percent).filter(|percent| *percent <= 100).map(Self::Percent),
            None => number(text).map(Self::Nodes),
        }
        .ok_or_else(|| "a number of nodes such as 20, or a percentage such as 10%".to_owned())
    }
}

/// A rule for deltas, in upper or lower case.
pub(crate) fn parse_deltas(text: &str) -> Result<Deltas, String> {
    let named = |rule: &Deltas| rule.as_str().eq_ignore_ascii_case(text);
    Deltas::ALL.into_iter().find(named).ok_or_else(|| "auto, never or require".to_owned())
}

/// A secret, `namespace/name` or `name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SecretName(String);

impl SecretName {
    pub(crate) fn in_namespace(&self, namespace: &str) -> String {
        if self.0.contains('/') { self.0.clone() } else { format!("{namespace}/{}", self.0) }
    }
}

impl FromStr for SecretName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<_> = text.split('/').collect();
        let is_valid = parts.len() <= 2 && parts.iter().all(|part| !part.is_empty());
        is_valid
            .then(|| Self(text.to_owned()))
            .ok_or_else(|| "NAMESPACE/NAME, or a name in --namespace".to_owned())
    }
}

/// The secret of a registry, `registry=namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegistryLogin {
    pub(super) registry: String,
    pub(super) secret: SecretName,
}

impl FromStr for RegistryLogin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (registry, secret) = text
            .split_once('=')
            .filter(|(registry, _)| !registry.is_empty())
            .ok_or_else(|| "REGISTRY=NAMESPACE/NAME, such as harbor.example=shop/harbor".to_owned())?;
        Ok(Self { registry: registry.to_owned(), secret: secret.parse()? })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn percentages_round_up_to_at_least_one() {
        let of = |text: &str, nodes| text.parse::<Concurrency>().unwrap().for_nodes(nodes);
        assert_eq!((of("20", 5), of("10%", 101), of("10%", 0), of("100%", 7)), (20, 11, 1, 7));
        for bad in ["0", "0%", "101%", "-1", "ten", ""] {
            assert!(bad.parse::<Concurrency>().is_err(), "{bad}");
        }
    }

    #[test]
    fn rules_for_deltas_are_named_in_any_case() {
        assert_eq!(parse_deltas("require"), Ok(Deltas::Require));
        assert_eq!(parse_deltas("Never"), Ok(Deltas::Never));
        assert!(parse_deltas("always").is_err() && parse_deltas("other").is_err());
    }

    #[test]
    fn secrets_default_to_the_users_namespace() {
        let secret = |text: &str| text.parse::<SecretName>().map(|secret| secret.in_namespace("shop"));
        assert_eq!(secret("harbor").unwrap(), "shop/harbor");
        assert_eq!(secret("other/harbor").unwrap(), "other/harbor");
        assert!(secret("a/b/c").is_err() && secret("/b").is_err());
        let login: RegistryLogin = "harbor.example:5000/team=harbor".parse().unwrap();
        assert_eq!(login.registry, "harbor.example:5000/team");
        assert!("harbor".parse::<RegistryLogin>().is_err() && "=a/b".parse::<RegistryLogin>().is_err());
    }
}
