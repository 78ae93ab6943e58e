//! What the container runtime is set up with, as far as a fetch has to know it.

mod file;
mod images;

use std::path::{Path, PathBuf};

use containerd_client::services::v1::introspection_client::IntrospectionClient;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{ImageFsInfoRequest, StatusRequest, VersionRequest};
use serde::Deserialize;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::stop::Stop;
use crate::images::puller::cri::{MAX_MESSAGE, ask};
use crate::images::runtime::RuntimeEndpoint;

/// Where containerd has its registry hosts unless it is told otherwise.
const DEFAULT_HOSTS: &str = "/etc/containerd/certs.d";
/// What the directory of a snapshotter is called before its name.
const SNAPSHOTTER: &str = "io.containerd.snapshotter.v1.";
/// Snapshotters that unpack what is in the content store. Others may fetch by themselves, such as stargz, nydus and soci.
const UNPACKING: [&str; 7] =
    ["overlayfs", "fuse-overlayfs", "native", "btrfs", "zfs", "devmapper", "blockfile"];

/// Asks the runtime what it is set up with.
#[derive(Clone, Debug)]
pub(super) struct Runtime {
    endpoint: RuntimeEndpoint,
    cri: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    introspection: IntrospectionClient<Channel>,
}

/// What the runtime is set up with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// Directories with a directory for each registry.
    pub(super) hosts_dirs: Vec<PathBuf>,
    /// Name of the snapshotter.
    pub(super) snapshotter: String,
    /// Whether layers are removed from the content store once they are unpacked.
    pub(super) discards_layers: bool,
    /// Whether the runtime flushes a layer that it has unpacked to the disk when it's asked for that.
    pub(super) flushes_layers: bool,
    /// Where images are unpacked.
    pub(super) image_root: PathBuf,
    /// containerd's directory, below which the content store is.
    pub(super) root: PathBuf,
    /// Image of the containers that hold the namespaces of pods. Releases of containerd from 1.7.4 on report it as pinned,
    /// and those from 2.0 on don't say what it is.
    pub(super) sandbox: Option<String>,
}

/// A part of what containerd's CRI plugin is configured with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Registries {
    config_path: Option<String>,
    /// Whether there are mirrors or hosts in the main configuration, as it was done before there was `config_path`.
    has_old_settings: bool,
    discards_layers: bool,
}

impl Runtime {
    pub(super) fn new(channel: &Channel, endpoint: RuntimeEndpoint) -> Self {
        Self {
            endpoint,
            cri: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            images: ImageServiceClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE),
            introspection: IntrospectionClient::new(channel.clone()),
        }
    }

    /// Reads the facts, or says why the runtime has to pull by itself. `hosts_dir` replaces the directory that the
    /// runtime is set up with.
    pub(super) async fn read(&self, hosts_dir: Option<&Path>) -> Result<Facts, Stop> {
        let version = VersionRequest { version: "v1".to_owned() };
        let version = self.ask(self.cri.clone().version(version)).await?;
        if version.runtime_name != "containerd" {
            let runtime = version.runtime_name;
            return Err(Stop::StepBack(format!("{runtime} has no store that the agent can fetch into")));
        }
        let image_root = self.image_root().await?;
        let Some(snapshotter) = image_root
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix(SNAPSHOTTER).map(str::to_owned))
            .filter(|name| UNPACKING.contains(&name.as_str()))
        else {
            let root = image_root.display();
            return Err(Stop::StepBack(format!("the snapshotter at {root} may fetch by itself")));
        };
        let status = StatusRequest { verbose: true };
        let status = self.ask(self.cri.clone().status(status)).await?;
        let config: CriConfig = status
            .info
            .get("config")
            .and_then(|config| serde_json::from_str(config).ok())
            .unwrap_or_default();
        let root = match &config.containerd_root_dir {
            Some(root) => PathBuf::from(root),
            None => image_root.parent().map_or_else(|| image_root.clone(), Path::to_path_buf),
        };
        let registries = match config.registries() {
            Some(registries) => Some(registries),
            // containerd 2 does not tell it.
            None => file::read(self.config_file().await).await,
        };
        let (hosts_dirs, discards_layers) = hosts_dirs(hosts_dir, registries)?;
        let flushes_layers = flushes_layers(&version.runtime_version, &snapshotter);
        let sandbox = config.sandbox_image;
        Ok(Facts { hosts_dirs, snapshotter, discards_layers, flushes_layers, image_root, root, sandbox })
    }

    async fn image_root(&self) -> Result<PathBuf, Stop> {
        let answer = self.ask(self.images.clone().image_fs_info(ImageFsInfoRequest {})).await?;
        let mountpoint = answer.image_filesystems.into_iter().find_map(|usage| Some(usage.fs_id?.mountpoint));
        let missing = || Stop::StepBack("the runtime does not say where it keeps images".to_owned());
        mountpoint.map(PathBuf::from).ok_or_else(missing)
    }

    /// The file that containerd was started with: of its command line, where that can be read.
    async fn config_file(&self) -> Option<PathBuf> {
        let server = self.ask(self.introspection.clone().server(())).await.ok()?;
        file::of_process(server.pid, server.pidns)
    }

    async fn ask<T>(&self, question: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Stop> {
        Ok(ask(&self.endpoint, "", question).await?)
    }
}

/// Whether a containerd of this version obeys `sync_fs` with this snapshotter. Releases from 2.0 on do so for overlay and
/// bind mounts.
fn flushes_layers(version: &str, snapshotter: &str) -> bool {
    let major = version.trim_start_matches('v').split('.').next().and_then(|major| major.parse().ok());
    major.is_some_and(|major: u32| major >= 2) && ["overlayfs", "native"].contains(&snapshotter)
}

/// The directories of the registry hosts, and whether the runtime discards layers.
fn hosts_dirs(given: Option<&Path>, registries: Option<Registries>) -> Result<(Vec<PathBuf>, bool), Stop> {
    let discards = registries.as_ref().is_some_and(|registries| registries.discards_layers);
    let dirs = match (given, registries) {
        (Some(given), _) => vec![given.to_path_buf()],
        (None, None) => vec![PathBuf::from(DEFAULT_HOSTS)],
        (None, Some(Registries { config_path: Some(path), .. })) if !path.is_empty() => {
            path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect()
        }
        (None, Some(Registries { has_old_settings: true, .. })) => {
            let reason =
                "containerd's configuration has mirrors or hosts of registries outside of a config_path";
            return Err(Stop::StepBack(reason.to_owned()));
        }
        (None, Some(_)) => Vec::new(),
    };
    Ok((dirs, discards))
}

/// What containerd's CRI tells of its configuration.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CriConfig {
    containerd_root_dir: Option<String>,
    containerd: Option<CriContainerd>,
    sandbox_image: Option<String>,
    /// Absent from containerd 2 on.
    registry: Option<CriRegistry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CriContainerd {
    discard_unpacked_layers: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CriRegistry {
    config_path: String,
    mirrors: Option<serde_json::Map<String, serde_json::Value>>,
    configs: Option<serde_json::Map<String, serde_json::Value>>,
}

impl CriConfig {
    fn registries(&self) -> Option<Registries> {
        let CriRegistry { config_path, mirrors, configs } = self.registry.as_ref()?;
        let is_set = |map: &Option<serde_json::Map<_, _>>| map.as_ref().is_some_and(|map| !map.is_empty());
        Some(Registries {
            config_path: Some(config_path.clone()),
            has_old_settings: is_set(mirrors) || is_set(configs),
            discards_layers: self.containerd.as_ref().is_some_and(|config| config.discard_unpacked_layers),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn dirs(given: Option<&str>, registries: Option<Registries>) -> Result<Vec<PathBuf>, Stop> {
        hosts_dirs(given.map(Path::new), registries).map(|(dirs, _)| dirs)
    }

    #[test]
    fn registry_hosts_are_where_the_runtime_looks_for_them() {
        let path = |path: &str| Registries { config_path: Some(path.to_owned()), ..Registries::default() };
        let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(dirs(None, Some(path("/a:/b"))).unwrap(), paths(&["/a", "/b"]));
        assert_eq!(dirs(Some("/c"), Some(path("/a"))).unwrap(), paths(&["/c"]));
        assert_eq!(dirs(None, Some(path(""))).unwrap(), paths(&[]), "it looks nowhere");
        assert_eq!(dirs(None, None).unwrap(), paths(&[DEFAULT_HOSTS]), "it does not say");
        let old = Registries { has_old_settings: true, ..path("") };
        assert!(matches!(dirs(None, Some(old.clone())), Err(Stop::StepBack(_))));
        assert_eq!(dirs(Some("/c"), Some(old)).unwrap(), paths(&["/c"]));
    }

    #[test]
    fn containerd_2_flushes_what_it_mounts_itself() {
        for (version, snapshotter, expected) in [
            ("1.6.20~ds1", "overlayfs", false),
            ("v1.7.24", "overlayfs", false),
            ("v2.0.0", "overlayfs", true),
            ("2.1.9+ds1", "native", true),
            ("2.1.9", "devmapper", false),
            ("", "overlayfs", false),
            ("devel", "overlayfs", false),
        ] {
            assert_eq!(flushes_layers(version, snapshotter), expected, "{version} {snapshotter}");
        }
    }

    #[test]
    fn containerd_1_tells_its_registries_and_containerd_2_does_not() {
        let parse = |json: &str| serde_json::from_str::<CriConfig>(json).unwrap().registries();
        let one = r#"{"containerd":{"snapshotter":"overlayfs","discardUnpackedLayers":true},
            "registry":{"configPath":"/a","mirrors":null,"configs":{}},"containerdRootDir":"/r"}"#;
        let config_path = Some("/a".to_owned());
        assert_eq!(
            parse(one),
            Some(Registries { config_path, has_old_settings: false, discards_layers: true })
        );
        assert!(parse(r#"{"registry":{"mirrors":{"r.io":{}}}}"#).unwrap().has_old_settings);
        assert_eq!(parse(r#"{"containerd":{"runtimes":{}},"containerdRootDir":"/r"}"#), None);
    }
}
