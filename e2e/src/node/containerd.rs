//! A container runtime of the test's own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{ListImagesRequest, ListStatusesRequest};
use containerd_client::types::Descriptor;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::{AuthConfig, ImageFsInfoRequest, ImageSpec, PullImageRequest, RemoveImageRequest};
use tonic::Request;
use tonic::transport::Channel;

use crate::cleanup::{Child, eventually};
use crate::parts;
use crate::place::Place;

/// Half a second alone on the machine.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Where the CRI keeps images.
const NAMESPACE: &str = "k8s.io";
/// Of no use here, or in need of what is not here; left out, it starts sooner.
const LEFT_OUT: [&str; 8] = [
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.snapshotter.v1.blockfile",
];

/// containerd with root, state and socket in the test's place. It pulls from the registries of the test and of
/// nobody else, runs no containers, and needs no CNI.
pub struct Containerd {
    place: Arc<Place>,
    name: String,
    dir: PathBuf,
    process: Option<Child>,
}

impl Containerd {
    /// Starts one, for the node of that name.
    pub async fn start(name: &str) -> Result<Self> {
        Self::start_on(name, None).await
    }

    /// Starts one whose data is on a disk of its own, of so many bytes. It goes with the place.
    pub async fn start_on(name: &str, disk: Option<u64>) -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir(name)?;
        let mut containerd = Self { place, name: name.to_owned(), dir, process: None };
        if let Some(size) = disk {
            std::fs::create_dir_all(containerd.root())?;
            containerd.mount(&format!("size={size}")).await?;
        }
        std::fs::create_dir_all(containerd.own_registry_hosts())?;
        std::fs::write(containerd.dir.join("config.toml"), containerd.config())?;
        containerd.restart().await?;
        Ok(containerd)
    }

    fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// Changes the size of the disk that it was started on.
    pub async fn resize_disk(&self, size: u64) -> Result<()> {
        self.mount(&format!("remount,size={size}")).await
    }

    async fn mount(&self, options: &str) -> Result<()> {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "prepull-e2e"]).arg(self.root());
        parts::output(command).await.map(drop)
    }

    fn config(&self) -> String {
        let dir = self.dir.display();
        // The first directory that has a registry's host wins.
        let hosts =
            format!("{}:{}", self.own_registry_hosts().display(), self.place.registry_hosts().display());
        format!(
            r#"version = 2
root = "{dir}/root"
state = "{dir}/state"
disabled_plugins = {LEFT_OUT:?}
[grpc]
address = "{dir}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
disable_tcp_service = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{dir}/cni"
bin_dir = "{dir}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{hosts}"
"#
        )
    }

    /// The name it was started under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Everything that it has.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `unix:///…`, as CRI clients take it.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    /// How this one reaches registries, where it differs from the others of the test.
    pub fn own_registry_hosts(&self) -> PathBuf {
        self.dir.join("certs.d")
    }

    /// Kills it, if it runs, and starts it with the same data.
    pub async fn restart(&mut self) -> Result<()> {
        self.kill9()?;
        let mut command = Command::new("containerd");
        command.arg("--config").arg(self.dir.join("config.toml")).current_dir(&self.dir);
        // What it unpacks with, it looks for there; another one's temporary files are none of its business.
        let mut process = Child::spawn(&self.place, &format!("containerd-{}", self.name), command)?;
        let answers =
            async || self.cri().await?.image_fs_info(ImageFsInfoRequest {}).await.map(drop).context("CRI");
        if let Err(error) =
            eventually(&format!("containerd of {} answers", self.name), START_LIMIT, answers).await
        {
            process.check_running()?;
            return Err(error);
        }
        self.process = Some(process);
        Ok(())
    }

    /// SIGKILL. Its data stays.
    pub fn kill9(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), |mut process| process.kill9())
    }

    /// SIGSTOP: it accepts connections and answers nothing.
    pub fn pause(&self) -> Result<()> {
        self.running()?.stop()
    }

    /// It goes on.
    pub fn resume(&self) -> Result<()> {
        self.running()?.cont()
    }

    fn running(&self) -> Result<&Child> {
        self.process.as_ref().with_context(|| format!("the containerd of {} is stopped", self.name))
    }

    /// A client of containerd's own API.
    pub async fn channel(&self) -> Result<Channel> {
        let channel = containerd_client::connect(self.socket()).await;
        channel.with_context(|| format!("cannot connect to {}", self.endpoint()))
    }

    /// A client of the CRI.
    pub async fn cri(&self) -> Result<ImageServiceClient<Channel>> {
        Ok(ImageServiceClient::new(self.channel().await?))
    }

    /// Pulls through the CRI, with a user and a password or as nobody. The benchmark's other side.
    pub async fn pull(&self, reference: &str, login: Option<(&str, &str)>) -> Result<()> {
        let auth = login.map(|(user, password)| AuthConfig {
            username: user.to_owned(),
            password: password.to_owned(),
            ..AuthConfig::default()
        });
        let image = Some(ImageSpec { image: reference.to_owned(), ..ImageSpec::default() });
        let request = PullImageRequest { image, auth, sandbox_config: None };
        let pulled = self.cri().await?.pull_image(request).await;
        pulled.with_context(|| format!("cannot pull {reference} on {}", self.name))?;
        Ok(())
    }

    /// What is there: reference and the digest that it leads to. Without the names that the CRI adds: the digests.
    pub async fn images(&self) -> Result<BTreeMap<String, String>> {
        let all = self.all_images().await?;
        Ok(all.into_iter().filter(|(name, _)| !name.contains("sha256:")).collect())
    }

    /// Every name of what has this digest.
    pub async fn names_of(&self, digest: &str) -> Result<Vec<String>> {
        let all = self.all_images().await?;
        Ok(all.into_iter().filter(|(_, found)| found == digest).map(|(name, _)| name).collect())
    }

    async fn all_images(&self) -> Result<BTreeMap<String, String>> {
        let mut request = Request::new(ListImagesRequest::default());
        request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
        let list = ImagesClient::new(self.channel().await?).list(request).await?.into_inner().images;
        let digest = |target: Option<_>| target.map(|target: Descriptor| target.digest).unwrap_or_default();
        Ok(list.into_iter().map(|image| (image.name, digest(image.target))).collect())
    }

    /// Whether it is there, under that very reference.
    pub async fn has_image(&self, reference: &str) -> Result<bool> {
        Ok(self.images().await?.contains_key(reference))
    }

    /// Content that is not whole yet: what it is, and the bytes that are there.
    pub async fn ingests(&self) -> Result<BTreeMap<String, u64>> {
        let mut request = Request::new(ListStatusesRequest::default());
        request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
        let list = ContentClient::new(self.channel().await?).list_statuses(request).await?.into_inner();
        Ok(list.statuses.into_iter().map(|s| (s.r#ref, u64::try_from(s.offset).unwrap_or(0))).collect())
    }

    /// Removes it, and what only it needs.
    pub async fn remove_image(&self, reference: &str) -> Result<()> {
        let image = Some(ImageSpec { image: reference.to_owned(), ..ImageSpec::default() });
        let removed = self.cri().await?.remove_image(RemoveImageRequest { image }).await;
        removed.with_context(|| format!("cannot remove {reference} from {}", self.name))?;
        Ok(())
    }
}
