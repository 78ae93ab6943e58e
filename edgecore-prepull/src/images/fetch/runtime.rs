//! The configuration of the container runtime, as far as a fetch needs it.
//!
//! If the agent can't see a part of it, the image is left to the runtime: that part may be the mirror that every image
//! must come from.

mod config;
mod file;
mod images;
mod release;
mod snapshotter;
mod view;

use std::path::{Path, PathBuf};

use containerd_client::services::v1::introspection_client::IntrospectionClient;
use containerd_client::services::v1::{Plugin, PluginsRequest};
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{ImageFsInfoRequest, StatusRequest, VersionRequest};
use prepull_api::image::{Reference, listed_name};
use prepull_registry::HostsFiles;
use tonic::transport::Channel;
use tonic::{Response, Status};

use self::config::CriConfig;
use self::file::MainFile;
use self::release::Release;
use self::snapshotter::{PLUGIN_TYPE, Snapshotter};
use self::view::{FilesystemView, Sight};
use super::stop::FetchStop;
use crate::images::containerd::ingests_dir;
use crate::images::flushes::ImageDirectories;
use crate::images::puller::PullError;
use crate::images::puller::cri::{MAX_MESSAGE, ask};
use crate::images::runtime::RuntimeEndpoint;

/// Reads the configuration of the runtime.
#[derive(Clone, Debug)]
pub(super) struct Runtime {
    endpoint: RuntimeEndpoint,
    cri: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    introspection: IntrospectionClient<Channel>,
}

/// The configuration of the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RuntimeFacts {
    /// The files with the endpoints of registries.
    pub(super) hosts: HostsFiles,
    /// Name of the snapshotter.
    pub(super) snapshotter: String,
    /// Whether layers are removed from the content store after unpacking.
    pub(super) discards_layers: bool,
    /// Whether the runtime flushes an unpacked layer to disk on request.
    pub(super) flushes_layers: bool,
    /// Where containerd keeps images.
    pub(super) directories: ImageDirectories,
    /// Image of the containers that hold the namespaces of pods, by the name that containerd lists. containerd reports it as pinned since 1.7.4, and since
    /// 2.0 it no longer reports the name.
    pub(super) sandbox: Option<String>,
}

/// The part of the configuration that shows what containerd needs.
pub(super) struct SurveyFacts {
    /// Name of the snapshotter. `None` for one that may fetch by itself.
    pub(super) snapshotter: Option<String>,
    /// The image of the sandboxes of pods, by the name that containerd lists, if it reports it.
    pub(super) sandbox: Option<String>,
}

/// Where containerd keeps what it has.
struct Storage {
    release: Release,
    config: CriConfig,
    snapshotter: String,
    directories: ImageDirectories,
}

/// A part of the configuration of containerd's CRI plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Registries {
    config_path: Option<String>,
    /// Whether the main configuration has credentials, or mirrors or hosts in the old form from before `config_path`.
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

    /// Reads the facts, or returns a reason to leave the pull to the runtime. `hosts_dir` replaces the directory in the
    /// runtime's configuration.
    pub(super) async fn read_facts(&self, hosts_dir: Option<&Path>) -> Result<RuntimeFacts, FetchStop> {
        let Storage { release, config, snapshotter, directories } = self.read_storage().await?;
        let root = &directories.root;

        let peer = self.endpoint.peer_pid().await;
        let view = FilesystemView::of_peer(peer);
        let registries = match config.registries() {
            Some(registries) => registries,
            None => match file::read_registries(MainFile::find(peer, root), view.clone()).await {
                Ok(registries) => registries,
                // The operator has set the directory.
                Err(why) if hosts_dir.is_some() => {
                    tracing::debug!(why, "--registry-config-path counts");
                    Registries::default()
                }
                Err(why) => return Err(FetchStop::StepBack(why)),
            },
        };
        let discards_layers = registries.discards_layers;
        let dirs = hosts_dirs(hosts_dir, registries, release).map_err(FetchStop::StepBack)?;
        if let Some(hidden) = dirs.iter().find(|dir| view.look_at(dir) == Sight::Hidden) {
            let (hidden, whose) =
                (hidden.display(), if hosts_dir.is_some() { "--registry-config-path" } else { "containerd" });
            return Err(FetchStop::StepBack(format!(
                "{whose} has registries in {hidden}, which the agent cannot see: mount it into the agent's container, at this path"
            )));
        }
        let hosts = HostsFiles { dirs, ignores_server_alone: release.ignores_server_alone() };
        let flushes_layers = release.flushes_layers(&snapshotter);
        let sandbox = sandbox_name(&config);
        Ok(RuntimeFacts { hosts, snapshotter, discards_layers, flushes_layers, directories, sandbox })
    }

    /// Reads where containerd keeps what it has, or returns a reason why that isn't known.
    async fn read_storage(&self) -> Result<Storage, FetchStop> {
        let (release, config) = self.read_config().await?;
        let Snapshotter { name: snapshotter, root: unpacked } = self.find_snapshotter(&config).await?;
        let root = config.root().or_else(|| unpacked.parent()).unwrap_or(&unpacked).to_path_buf();
        Ok(Storage { release, config, snapshotter, directories: ImageDirectories { unpacked, root } })
    }

    /// Reads the configuration of containerd. Another runtime is a reason to leave the pull to it.
    async fn read_config(&self) -> Result<(Release, CriConfig), FetchStop> {
        let version = VersionRequest { version: "v1".to_owned() };
        let version = self.ask(self.cri.clone().version(version)).await?;
        if version.runtime_name != "containerd" {
            let runtime = version.runtime_name;
            return Err(FetchStop::StepBack(format!("{runtime} has no store that the agent can fetch into")));
        }
        let release = Release::parse(&version.runtime_version);
        let status = StatusRequest { verbose: true };
        let status = self.ask(self.cri.clone().status(status)).await?;
        let config = status.info.get("config").and_then(|config| serde_json::from_str(config).ok());
        Ok((release, config.unwrap_or_default()))
    }

    async fn find_snapshotter(&self, config: &CriConfig) -> Result<Snapshotter, FetchStop> {
        let images = self.image_root().await?;
        let snapshotter = snapshotter::find(&images, config.snapshotter(), &self.snapshotters().await?);
        snapshotter.map_err(FetchStop::StepBack)
    }

    /// Where containerd keeps images. `None` for other runtimes, and if containerd doesn't answer.
    pub(super) async fn directories(&self) -> Option<ImageDirectories> {
        Some(self.read_storage().await.ok()?.directories)
    }

    /// What a survey of containerd needs to know. `None` for other runtimes.
    pub(super) async fn survey_facts(&self) -> Result<Option<SurveyFacts>, PullError> {
        let Some((_, config)) = known(self.read_config().await)? else { return Ok(None) };
        let snapshotter = known(self.find_snapshotter(&config).await)?.map(|snapshotter| snapshotter.name);
        Ok(Some(SurveyFacts { snapshotter, sandbox: sandbox_name(&config) }))
    }

    /// Whether the agent sees the files of containerd's ingests.
    pub(super) async fn shows_ingests(&self, hosts_dir: Option<&Path>) -> bool {
        let Ok(facts) = self.read_facts(hosts_dir).await else { return false };
        let (dir, view) =
            (ingests_dir(&facts.directories.root), FilesystemView::of_peer(self.endpoint.peer_pid().await));
        // containerd from 1.7 on makes the directory for the first blob.
        let dir = if view.look_at(&dir) == Sight::Absent { &facts.directories.root } else { &dir };
        view.look_at(dir) == Sight::There && std::fs::read_dir(dir).is_ok()
    }

    async fn image_root(&self) -> Result<PathBuf, FetchStop> {
        let answer = self.ask(self.images.clone().image_fs_info(ImageFsInfoRequest {})).await?;
        let mountpoint = answer.image_filesystems.into_iter().find_map(|usage| Some(usage.fs_id?.mountpoint));
        let missing = || FetchStop::StepBack("the runtime does not say where it keeps images".to_owned());
        mountpoint.map(PathBuf::from).ok_or_else(missing)
    }

    async fn snapshotters(&self) -> Result<Vec<Plugin>, FetchStop> {
        let request = PluginsRequest { filters: vec![format!("type=={PLUGIN_TYPE}")] };
        Ok(self.ask(self.introspection.clone().plugins(request)).await?.plugins)
    }

    async fn ask<T>(
        &self,
        question: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, FetchStop> {
        Ok(ask(&self.endpoint, "", question).await?)
    }
}

fn sandbox_name(config: &CriConfig) -> Option<String> {
    let sandbox = Reference::parse(config.sandbox_image.as_deref()?).ok()?;
    Some(listed_name(&sandbox.normalized().to_string()).into_owned())
}

/// What was read, or `None` where the runtime doesn't have it.
fn known<T>(read: Result<T, FetchStop>) -> Result<Option<T>, PullError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(FetchStop::StepBack(_)) => Ok(None),
        Err(FetchStop::Failed(error) | FetchStop::NoConnection { error, .. }) => Err(error),
    }
}

/// The directories of the registry hosts, or the reason why the agent doesn't know them.
fn hosts_dirs(
    given: Option<&Path>,
    registries: Registries,
    release: Release,
) -> Result<Vec<PathBuf>, String> {
    let Registries { config_path, has_old_settings, discards_layers: _ } = registries;
    match (given, config_path) {
        (Some(given), _) => Ok(vec![given.to_path_buf()]),
        (None, _) if has_old_settings => Err(
            "containerd's configuration has mirrors, hosts or credentials of registries outside of a config_path".to_owned(),
        ),
        (None, Some(path)) if !path.is_empty() => {
            Ok(path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect())
        }
        (None, _) => Ok(release.default_hosts()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn registry_hosts_are_where_the_runtime_looks() {
        let path = |path: &str| Registries { config_path: Some(path.to_owned()), ..Registries::default() };
        let old = |registries| Registries { has_old_settings: true, ..registries };
        let both = ["/etc/containerd/certs.d", "/etc/docker/certs.d"];
        for (given, registries, version, expected) in [
            (None, path("/a:/b"), "1.6.20", Some(&["/a", "/b"][..])),
            (None, path("/a::"), "2.1.9", Some(&["/a"])),
            (Some("/c"), path("/a"), "1.6.20", Some(&["/c"])),
            // 1.7 has no default directory; since 2.2 there are two.
            (None, path(""), "1.7.24", Some(&[])),
            (None, Registries::default(), "2.1.9", Some(&[])),
            (None, Registries::default(), "2.2.0", Some(&both)),
            (None, path(""), "2.4.1", Some(&both)),
            (None, old(path("")), "2.2.0", None),
            (None, old(path("/a")), "1.6.20", None),
            (Some("/c"), old(path("")), "1.6.20", Some(&["/c"])),
        ] {
            let dirs = hosts_dirs(given.map(Path::new), registries.clone(), Release::parse(version));
            let expected = expected.map(|dirs| dirs.iter().map(PathBuf::from).collect::<Vec<_>>());
            assert_eq!(dirs.ok(), expected, "{given:?} {registries:?} {version}");
        }
    }
}
