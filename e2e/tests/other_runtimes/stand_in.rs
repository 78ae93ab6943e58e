//! A stand-in for CRI-O, and for cri-dockerd with its dockerd: it answers pulls like them, and records them.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_cri::v1::image_service_server::{ImageService, ImageServiceServer};
use k8s_cri::v1::{
    FilesystemIdentifier, FilesystemUsage, Image, ImageFsInfoRequest, ImageFsInfoResponse,
    ImageStatusRequest, ImageStatusResponse, ListImagesRequest, ListImagesResponse, PullImageRequest,
    PullImageResponse, RemoveImageRequest, RemoveImageResponse,
};
use prepull_e2e::prelude::*;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Request, Response, Status};

use self::version::{FakeService, VersionAnswer, accept};

/// Of the agent's unit tests, which use the rest of it.
#[path = "../../../edgecore-prepull/src/images/runtime/fake.rs"]
#[allow(dead_code)]
mod version;

/// The imitated runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runtime {
    CriO,
    Docker,
}

impl Runtime {
    /// The name in `VersionAnswer`.
    fn name(self) -> &'static str {
        match self {
            Self::CriO => "cri-o",
            Self::Docker => "docker",
        }
    }
}

/// The course of a pull. One without a script succeeds.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Fail(Code, String),
    /// Succeeds with this password, and fails with this answer otherwise.
    Password(&'static str, Code, String),
    /// Downloads until [`StandIn::finish_downloads`].
    Download,
}

/// A recorded pull, and its fate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pull {
    pub(super) reference: String,
    pub(super) password: String,
    /// Whether it named a lease, which only containerd has.
    pub(super) has_lease: bool,
    /// Whether the agent went away before the answer.
    pub(super) abandoned: bool,
}

/// The runtime, at a socket of its own until it is dropped.
pub(super) struct StandIn {
    shared: Arc<Shared>,
    dir: PathBuf,
    _server: AbortOnDropHandle<()>,
    _place: Arc<Place>,
}

struct Shared {
    runtime: Runtime,
    /// Image directory; the free space is read there.
    store: String,
    state: Mutex<State>,
    finished: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    scripts: HashMap<String, VecDeque<Act>>,
    pulls: Vec<Pull>,
    images: HashMap<String, Image>,
    /// The names of an image after its pull.
    lists: HashMap<String, Vec<String>>,
}

/// Makes a digest of one digit.
pub(super) fn digest(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

/// The id of every image.
pub(super) fn id() -> String {
    digest('e')
}

impl StandIn {
    pub(super) fn start(runtime: Runtime) -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir("runtime")?;
        let shared = Arc::new(Shared {
            runtime,
            store: dir.display().to_string(),
            state: Mutex::default(),
            finished: watch::Sender::new(false),
        });
        let connections = accept(&dir.join("cri.sock"));
        let server = tonic::transport::Server::builder()
            .add_service(ImageServiceServer::new(Images(Arc::clone(&shared))))
            .add_service(FakeService(VersionAnswer(Ok(runtime.name()))));
        let server = tokio::spawn(async move {
            // It ends with the test.
            let _ = server.serve_with_incoming(connections).await;
        });
        Ok(Self { shared, dir, _server: AbortOnDropHandle::new(server), _place: place })
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("cri.sock")
    }

    /// Sets the course of the next pulls of an image, in this order.
    pub(super) fn script(&self, reference: &str, acts: impl IntoIterator<Item = Act>) {
        self.shared.state().scripts.insert(reference.to_owned(), acts.into_iter().collect());
    }

    /// Sets the listed digests of an image, each with its repository.
    pub(super) fn lists(&self, reference: &str, digests: &[(&str, char)]) {
        let list = digests.iter().map(|(repository, digit)| format!("{repository}@{}", digest(*digit)));
        self.shared.state().lists.insert(reference.to_owned(), list.collect());
    }

    /// Has an image with these names, of 7 bytes.
    pub(super) fn keeps(&self, digit: char, names: &[&str], pinned: bool) {
        let repo_tags: Vec<_> = names.iter().map(ToString::to_string).collect();
        let image = Image { id: digest(digit), repo_tags, pinned, size: 7, ..Image::default() };
        self.shared.state().images.insert(names.concat(), image);
    }

    /// Completes current and later downloads.
    pub(super) fn finish_downloads(&self) {
        self.shared.finished.send_replace(true);
    }

    pub(super) fn pulls(&self) -> Vec<Pull> {
        self.shared.state().pulls.clone()
    }

    pub(super) fn has_image(&self, reference: &str) -> bool {
        self.shared.state().images.contains_key(reference)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn download(self: Arc<Self>, reference: String) -> PullImageResponse {
        // This can't fail: the sender is a field of `self`.
        let _ = self.finished.subscribe().wait_for(|finished| *finished).await;
        self.keep(&reference)
    }

    /// Stores an image, and returns the answer to its pull: Docker does not answer with the id.
    fn keep(&self, reference: &str) -> PullImageResponse {
        let mut state = self.state();
        let repository = reference.rsplit_once(':').map_or(reference, |(repository, _)| repository);
        let listed = state.lists.get(reference).cloned();
        let repo_digests = listed.unwrap_or_else(|| vec![format!("{repository}@{}", digest('d'))]);
        let (id, image_ref) = match self.runtime {
            Runtime::CriO => {
                let id = id().replace("sha256:", "");
                (id.clone(), id)
            }
            Runtime::Docker => (id(), repo_digests.first().cloned().unwrap_or_default()),
        };
        let image = Image { id, repo_tags: vec![reference.to_owned()], repo_digests, ..Image::default() };
        state.images.insert(reference.to_owned(), image);
        PullImageResponse { image_ref }
    }
}

/// Records that a pull was abandoned, unless it has been answered.
struct Answering<'a> {
    shared: &'a Shared,
    number: usize,
    answered: bool,
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.shared.state().pulls[self.number].abandoned = !self.answered;
    }
}

/// The image service.
struct Images(Arc<Shared>);

#[tonic::async_trait]
impl ImageService for Images {
    async fn pull_image(
        &self,
        request: Request<PullImageRequest>,
    ) -> Result<Response<PullImageResponse>, Status> {
        let has_lease = request.metadata().contains_key("containerd-lease");
        let PullImageRequest { image, auth, sandbox_config: _ } = request.into_inner();
        let reference = image.unwrap_or_default().image;
        let password = auth.unwrap_or_default().password;
        let Self(shared) = self;
        let (act, number) = {
            let mut state = shared.state();
            let pull = Pull {
                reference: reference.clone(),
                password: password.clone(),
                has_lease,
                abandoned: false,
            };
            state.pulls.push(pull);
            let number = state.pulls.len() - 1;
            (state.scripts.get_mut(&reference).and_then(VecDeque::pop_front), number)
        };
        let mut answering = Answering { shared, number, answered: false };
        let answer = match act {
            None => Ok(shared.keep(&reference)),
            Some(Act::Fail(code, text)) => Err(Status::new(code, text)),
            Some(Act::Password(right, code, text)) => {
                if password == right {
                    Ok(shared.keep(&reference))
                } else {
                    // The next credential meets the same registry.
                    let act = Act::Password(right, code, text.clone());
                    shared.state().scripts.entry(reference).or_default().push_front(act);
                    Err(Status::new(code, text))
                }
            }
            Some(Act::Download) => {
                let download = Arc::clone(shared).download(reference);
                match shared.runtime {
                    Runtime::CriO => Ok(download.await),
                    // When its client goes away, cri-dockerd doesn't stop dockerd.
                    Runtime::Docker => {
                        let download = tokio::spawn(download).await;
                        download.map_err(|error| Status::unknown(error.to_string()))
                    }
                }
            }
        };
        answering.answered = true;
        drop(answering);
        answer.map(Response::new)
    }

    async fn image_status(
        &self,
        request: Request<ImageStatusRequest>,
    ) -> Result<Response<ImageStatusResponse>, Status> {
        let reference = request.into_inner().image.unwrap_or_default().image;
        let image = self.0.state().images.get(&reference).cloned();
        Ok(Response::new(ImageStatusResponse { image, ..ImageStatusResponse::default() }))
    }

    async fn image_fs_info(
        &self,
        _: Request<ImageFsInfoRequest>,
    ) -> Result<Response<ImageFsInfoResponse>, Status> {
        let fs_id = Some(FilesystemIdentifier { mountpoint: self.0.store.clone() });
        let usage = FilesystemUsage { fs_id, ..FilesystemUsage::default() };
        let answer = ImageFsInfoResponse { image_filesystems: vec![usage], ..ImageFsInfoResponse::default() };
        Ok(Response::new(answer))
    }

    async fn list_images(
        &self,
        _: Request<ListImagesRequest>,
    ) -> Result<Response<ListImagesResponse>, Status> {
        let images = self.0.state().images.values().cloned().collect();
        Ok(Response::new(ListImagesResponse { images }))
    }

    async fn remove_image(
        &self,
        request: Request<RemoveImageRequest>,
    ) -> Result<Response<RemoveImageResponse>, Status> {
        let asked = request.into_inner().image.unwrap_or_default().image;
        self.0.state().images.retain(|_, image| image.id != asked);
        Ok(Response::new(RemoveImageResponse {}))
    }
}
