//! The endpoints of a registry, in the order in which containerd would ask them.
//!
//! containerd reads them from `hosts.toml` in a directory for each registry, below its `config_path`; we read the same
//! files. What we cannot honour is an error of the kind [`ErrorKind::Unsupported`], so that the runtime pulls by itself.

mod file;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{HeaderMap, Uri};

use crate::connect::DIAL;
use crate::error::{ErrorKind, RegistryError};
use crate::location::HostPort;
use crate::tls::Tls;

/// Largest hosts.toml that is read.
const MAX_FILE: u64 = 1 << 20;

/// What an endpoint may be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// Manifests by digest, and blobs.
    pub(crate) pull: bool,
    /// What a tag points to.
    pub(crate) resolve: bool,
    pub(crate) referrers: bool,
}

impl Capabilities {
    pub(crate) const ALL: Self = Self { pull: true, resolve: true, referrers: true };
    pub(crate) const NONE: Self = Self { pull: false, resolve: false, referrers: false };
}

/// One place to ask for the content of a registry: a mirror, or the registry itself.
#[derive(Clone)]
pub(crate) struct RegistryEndpoint {
    /// `https` or `http`.
    pub(crate) scheme: String,
    /// Host, with the port if there is one.
    pub(crate) authority: String,
    /// The path before the repository: `/v2`, unless hosts.toml sets another.
    pub(crate) path: String,
    pub(crate) capabilities: Capabilities,
    pub(crate) tls: Tls,
    pub(crate) headers: HeaderMap,
    pub(crate) dial: Duration,
    /// Whether plain HTTP is tried where the other end does not speak TLS.
    pub(crate) may_fall_back: bool,
}

impl RegistryEndpoint {
    /// Host and port, as messages and [`crate::HostId`] have them.
    pub(crate) fn name(&self) -> &str {
        &self.authority
    }

    /// Where it is: the scheme decides about a port that isn't written, and plain HTTP has another one than TLS.
    pub(crate) fn places(&self) -> impl Iterator<Item = HostPort> {
        let plain = self.may_fall_back.then_some("http");
        let schemes = [Some(self.scheme.as_str()), plain].into_iter().flatten();
        schemes.filter_map(|scheme| HostPort::of(&self.uri(scheme, "/").ok()?))
    }

    pub(crate) fn uri(&self, scheme: &str, path_and_query: &str) -> Result<Uri, RegistryError> {
        let text = format!("{scheme}://{}{}{path_and_query}", self.authority, self.path);
        let bad = |_| {
            RegistryError::new(ErrorKind::Unsupported, format!("{} is no host to connect to", self.authority))
        };
        text.parse().map_err(bad)
    }
}

/// Where the files of the registries are, and how they are read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostsFiles {
    /// Directories with a directory for each registry: containerd's `config_path`, split at its colons. The first that has
    /// anything for a registry is the one that counts.
    pub dirs: Vec<PathBuf>,
    /// Whether a hosts.toml without a `host` table counts as none, as it does for containerd before 2.0: its `server` is
    /// ignored then.
    pub ignores_server_alone: bool,
}

/// The endpoints of a registry, by the first directory that has something for it.
pub(crate) fn endpoints(files: &HostsFiles, registry: &str) -> Result<Vec<RegistryEndpoint>, RegistryError> {
    for dir in files.dirs.iter().flat_map(|dir| config_dirs(dir, registry)) {
        if is_there(&dir)? {
            return file::load(&dir, registry, files.ignores_server_alone);
        }
    }
    Ok(vec![file::Host::default().into_endpoint(registry)?])
}

/// Whether there is something. A link that leads nowhere may lead somewhere for containerd, which may have more of the
/// node's file system than we do.
fn is_there(path: &Path) -> Result<bool, RegistryError> {
    match path.try_exists() {
        Ok(false) if path.is_symlink() => {
            let message =
                format!("{} is a link to what isn't there, or isn't mounted for the agent", path.display());
            Err(unsupported(message))
        }
        Ok(is_there) => Ok(is_there),
        Err(error) => Err(unsupported(format!("cannot read {}: {error}", path.display()))),
    }
}

/// Where the configuration of a registry may be below one directory.
fn config_dirs(root: &Path, registry: &str) -> Vec<PathBuf> {
    let port = registry.rfind(':').filter(|at| *at > 0);
    let spelt = port.map(|at| root.join(format!("{}_{}_", &registry[..at], &registry[at + 1..])));
    spelt.into_iter().chain([root.join(registry), root.join("_default")]).collect()
}

/// Whether the host is the machine itself, by its name or by its address.
fn is_localhost(registry: &str) -> bool {
    let (host, _) = split_port(registry);
    let address: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
    host == "localhost" || address.is_some_and(|address| address.is_loopback())
}

/// Host and port of an authority.
pub(crate) fn split_port(authority: &str) -> (&str, Option<&str>) {
    match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    }
}

fn unsupported(message: impl AsRef<str>) -> RegistryError {
    RegistryError::new(ErrorKind::Unsupported, message)
}

/// The limit of TCP, where the file has none.
const fn default_dial() -> Duration {
    DIAL
}
