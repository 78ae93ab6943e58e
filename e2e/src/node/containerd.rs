//! A containerd that belongs to one test.

mod config;
mod pins;
mod power;
mod unpacked;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::snapshots::ListSnapshotsRequest;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::{
    ListContentRequest, ListImagesRequest, ListRequest, ListStatusesRequest,
};
use containerd_client::types::Descriptor;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::{
    AuthConfig, ImageFsInfoRequest, ImageSpec, ImageStatusRequest, PullImageRequest, RemoveImageRequest,
};
use tonic::Request;
use tonic::transport::Channel;

use self::config::Habit;
pub(crate) use self::config::Paths;
use crate::cleanup::{Child, SOON, eventually};
use crate::disk::{Disk, Format};
use crate::network::Space;
use crate::parts;
use crate::place::{HOSTS, Place};

/// containerd namespace of the CRI plugin's images.
const NAMESPACE: &str = "k8s.io";
/// A containerd with root, state and socket in the test's place. It pulls only from the registries of the test, runs no
/// containers, and needs no CNI.
pub struct Containerd {
    place: Arc<Place>,
    name: String,
    dir: PathBuf,
    /// Its configuration, under the path that the process sees.
    config: PathBuf,
    enter: Enter,
    process: Option<Child>,
    disk: Option<Disk>,
}

/// The storage of its data.
pub(super) enum Data {
    /// The file system of the test.
    Shared,
    /// A tmpfs with this size in bytes.
    Memory(u64),
    /// A disk of this many bytes with a real file system and a power switch.
    Disk(Format, u64),
    /// A disk that records its writes.
    Recorded(Format),
}

impl From<Option<u64>> for Data {
    fn from(size: Option<u64>) -> Self {
        size.map_or(Self::Shared, Self::Memory)
    }
}

/// The namespaces of the process.
#[derive(Clone, Debug)]
enum Enter {
    /// Those of the test.
    Here,
    /// In a network namespace.
    Space(Space),
    /// In the namespaces of the process with this id.
    Machine(u32),
}

impl Enter {
    fn wrap_command(&self, command: Command) -> Command {
        match self {
            Self::Here => command,
            Self::Space(space) => space.wrap_command(&command),
            Self::Machine(init) => command_inside(*init, &command),
        }
    }
}

/// Wraps a command so that it runs in the namespaces of a process, with its root.
pub(crate) fn command_inside(init: u32, command: &Command) -> Command {
    let mut entered = Command::new("nsenter");
    let namespaces = ["--mount", "--net", "--uts", "--ipc", "--pid", "--root", "--wd", "--"];
    entered.args(["--target", &init.to_string()]).args(namespaces);
    entered.arg(command.get_program()).args(command.get_args());
    entered.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    entered
}

impl Containerd {
    /// Starts a containerd for the node of this name.
    pub async fn start(name: &str) -> Result<Self> {
        Self::start_as(name, Data::Shared, Habit::None, None).await
    }

    /// Starts a containerd, with its data on a disk of this many bytes if given. The disk is removed with the place.
    pub async fn start_on(name: &str, disk: Option<u64>) -> Result<Self> {
        Self::start_as(name, disk.into(), Habit::None, None).await
    }

    /// Starts a containerd that removes layers from its content store after unpacking, as on EKS, GKE and Talos.
    pub async fn start_discarding(name: &str) -> Result<Self> {
        Self::start_as(name, Data::Shared, Habit::DiscardsLayers, None).await
    }

    /// Starts a containerd with a snapshotter directory outside of its own.
    pub async fn start_unpacking_elsewhere(name: &str) -> Result<Self> {
        Self::start_as(name, Data::Shared, Habit::UnpacksElsewhere, None).await
    }

    /// Starts a containerd with this storage, in a network namespace.
    pub(super) async fn start_in(name: &str, data: Data, space: Option<Space>) -> Result<Self> {
        Self::start_as(name, data, Habit::None, space).await
    }

    async fn start_as(name: &str, data: Data, habit: Habit, space: Option<Space>) -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir(name)?;
        let config = dir.join("config.toml");
        let enter = space.map_or(Enter::Here, Enter::Space);
        let mut containerd =
            Self { place, name: name.to_owned(), dir, config, enter, process: None, disk: None };
        let root = containerd.root();
        std::fs::create_dir_all(&root)?;
        match data {
            Data::Shared => {}
            Data::Memory(size) => containerd.mount(&format!("size={size}")).await?,
            Data::Disk(format, size) => {
                containerd.disk = Some(Disk::mount(format, size, &containerd.dir, &root).await?);
            }
            Data::Recorded(format) => {
                containerd.disk = Some(Disk::record(format, &containerd.dir, &root).await?);
            }
        }
        std::fs::create_dir_all(containerd.registry_hosts())?;
        containerd.place.share_registry_hosts()?;
        let config = config::config(&containerd.dir, &containerd.registry_hosts(), habit)?;
        std::fs::write(&containerd.config, config)?;
        containerd.restart().await?;
        Ok(containerd)
    }

    /// Starts a containerd in the machine with this process 1. `machine` is the machine's root in the test's view.
    /// `sandbox` is the image of the containers that hold a pod's namespaces.
    pub(crate) async fn start_in_machine(
        name: &str,
        init: u32,
        machine: &Path,
        paths: &Paths,
        sandbox: &str,
    ) -> Result<Self> {
        let config = paths.config_file();
        let outside = |path: &Path| machine.join(path.strip_prefix("/").unwrap_or(path));
        std::fs::write(outside(&config), config::of_machine(paths, sandbox)?)?;
        let dir = outside(Path::new(paths.run));
        let (place, enter) = (Place::here()?, Enter::Machine(init));
        let mut containerd =
            Self { place, name: name.to_owned(), dir, config, enter, process: None, disk: None };
        containerd.restart().await?;
        Ok(containerd)
    }

    /// Directory of its data, which is a separate disk if containerd was started on one.
    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// Changes the size of containerd's disk.
    pub async fn resize_disk(&self, size: u64) -> Result<()> {
        self.mount(&format!("remount,size={size}")).await
    }

    /// Free bytes on the disk of containerd's data.
    pub fn free_space(&self) -> Result<u64> {
        Ok(self.disk_space()?.0)
    }

    /// Free bytes, and all bytes, of the disk of containerd's data.
    pub fn disk_space(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::statvfs(self.root())?;
        Ok((stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize))
    }

    /// Fills the disk with other files, until this many bytes are free.
    pub fn fill_disk(&self, free: u64) -> Result<()> {
        static PIECE: [u8; 64 * 1024] = [1; 64 * 1024];
        let mut ballast = File::options().create(true).append(true).open(self.root().join("ballast"))?;
        while self.free_space()? > free + PIECE.len() as u64 {
            ballast.write_all(&PIECE)?;
            ballast.sync_all()?;
        }
        Ok(())
    }

    async fn mount(&self, options: &str) -> Result<()> {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "prepull-e2e"]).arg(self.root());
        parts::run_command(command).await.map(drop)
    }

    /// Directory of all files of this containerd.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Endpoint for CRI clients, `unix:///…`.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Path of the socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    /// Directory of the registry hosts that this containerd reads: links to those of the test, or to its own.
    fn registry_hosts(&self) -> PathBuf {
        self.dir.join(HOSTS)
    }

    /// Gives only this containerd its own directory for a registry, with the files of `write`, instead of the test's
    /// common one.
    pub fn own_registry_host(&self, host: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let own = self.dir.join("own-hosts");
        write(&own)?;
        // Renamed into place, since containerd may read it at any moment.
        let link = self.dir.join("new-host");
        std::os::unix::fs::symlink(own.join(host), &link)?;
        Ok(std::fs::rename(link, self.registry_hosts().join(host))?)
    }

    /// Kills containerd, if it runs, and starts it with the same data.
    pub async fn restart(&mut self) -> Result<()> {
        self.kill9()?;
        let mut command = Command::new(parts::containerd());
        command.arg("--config").arg(&self.config);
        if let Some(dir) = parts::containerd_dir() {
            // Its shim is beside it.
            let path = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{path}", dir.display()));
        }
        let mut command = self.enter.wrap_command(command);
        // containerd looks for its unpack tools in the working directory; it must not find another one's files there.
        command.current_dir(&self.dir);
        let mut process = Child::spawn(&self.place, &format!("containerd-{}", self.name), command)?;
        let answers =
            async || self.cri().await?.image_fs_info(ImageFsInfoRequest {}).await.map(drop).context("CRI");
        if let Err(error) = eventually(&format!("containerd of {} answers", self.name), SOON, answers).await {
            process.check_running()?;
            return Err(error);
        }
        self.process = Some(process);
        Ok(())
    }

    /// Kills containerd with SIGKILL. Its data is kept.
    pub fn kill9(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), |mut process| process.kill9())
    }

    /// Process of containerd.
    pub fn process(&self) -> Result<&Child> {
        self.running()
    }

    /// Freezes containerd with SIGSTOP: connections are accepted and nothing is answered.
    pub fn pause(&self) -> Result<()> {
        self.running()?.stop()
    }

    /// Resumes containerd after [`Self::pause`].
    pub fn resume(&self) -> Result<()> {
        self.running()?.cont()
    }

    fn running(&self) -> Result<&Child> {
        self.process.as_ref().with_context(|| format!("the containerd of {} is stopped", self.name))
    }

    /// Connects to containerd's own API.
    pub async fn channel(&self) -> Result<Channel> {
        let channel = containerd_client::connect(self.socket()).await;
        channel.with_context(|| format!("cannot connect to {}", self.endpoint()))
    }

    /// Connects to the CRI.
    pub async fn cri(&self) -> Result<ImageServiceClient<Channel>> {
        Ok(ImageServiceClient::new(self.channel().await?))
    }

    /// Pulls through the CRI without an agent, with a user and a password or anonymously.
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

    /// Images by reference, with the digest of each. Leaves out the names by digest that the CRI adds.
    pub async fn images(&self) -> Result<BTreeMap<String, String>> {
        let all = self.all_images().await?;
        Ok(all.into_iter().filter(|(name, _)| !name.contains("sha256:")).collect())
    }

    /// All names of the image with this digest.
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

    /// Whether there is an image under this exact reference.
    pub async fn has_image(&self, reference: &str) -> Result<bool> {
        Ok(self.images().await?.contains_key(reference))
    }

    /// Incomplete content: its reference, and the bytes received so far.
    pub async fn ingests(&self) -> Result<BTreeMap<String, u64>> {
        let mut request = Request::new(ListStatusesRequest::default());
        request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
        let list = ContentClient::new(self.channel().await?).list_statuses(request).await?.into_inner();
        Ok(list.statuses.into_iter().map(|s| (s.r#ref, u64::try_from(s.offset).unwrap_or(0))).collect())
    }

    /// The CRI's status of an image: its id, its tags, its digests and its size. `None` if the image isn't there.
    pub async fn image_status(
        &self,
        reference: &str,
    ) -> Result<Option<(String, Vec<String>, Vec<String>, u64)>> {
        let image = Some(ImageSpec { image: reference.to_owned(), ..ImageSpec::default() });
        let request = ImageStatusRequest { image, verbose: false };
        let image = self.cri().await?.image_status(request).await?.into_inner().image;
        Ok(image.map(|image| (image.id, image.repo_tags, image.repo_digests, image.size)))
    }

    /// All content, by digest, with its labels; without those of the agent that say where it has fetched a blob from.
    pub async fn content_labels(&self) -> Result<BTreeMap<String, BTreeMap<String, String>>> {
        let mut request = Request::new(ListContentRequest::default());
        request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
        let mut parts = ContentClient::new(self.channel().await?).list(request).await?.into_inner();
        let mut all = BTreeMap::new();
        while let Some(part) = parts.message().await? {
            for mut info in part.info {
                info.labels.remove("prepull.kubeedge.io/fetched-from");
                all.insert(info.digest, info.labels.into_iter().collect());
            }
        }
        Ok(all)
    }

    /// All snapshots of layers, by name, with the one below and the labels of each.
    pub async fn snapshots(&self) -> Result<BTreeMap<String, (String, BTreeMap<String, String>)>> {
        let request = ListSnapshotsRequest { snapshotter: "overlayfs".to_owned(), filters: Vec::new() };
        let mut request = Request::new(request);
        request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
        let mut parts = SnapshotsClient::new(self.channel().await?).list(request).await?.into_inner();
        let mut all = BTreeMap::new();
        while let Some(part) = parts.message().await? {
            let info = part.info.into_iter();
            all.extend(info.map(|info| (info.name, (info.parent, info.labels.into_iter().collect()))));
        }
        Ok(all)
    }

    /// The ids of all leases.
    pub async fn leases(&self) -> Result<Vec<String>> {
        let mut request = Request::new(ListRequest::default());
        request.metadata_mut().insert("containerd-namespace", NAMESPACE.parse()?);
        let leases = LeasesClient::new(self.channel().await?).list(request).await?.into_inner().leases;
        Ok(leases.into_iter().map(|lease| lease.id).collect())
    }

    /// Removes an image, and the content that only this image uses.
    pub async fn remove_image(&self, reference: &str) -> Result<()> {
        let image = Some(ImageSpec { image: reference.to_owned(), ..ImageSpec::default() });
        let removed = self.cri().await?.remove_image(RemoveImageRequest { image }).await;
        removed.with_context(|| format!("cannot remove {reference} from {}", self.name))?;
        Ok(())
    }
}
