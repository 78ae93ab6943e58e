//! Fake CRI image service that answers immediately and records the pulls.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use futures::TryStreamExt as _;
use k8s_cri::v1::image_service_server::{ImageService, ImageServiceServer};
use k8s_cri::v1::{
    FilesystemIdentifier, FilesystemUsage, Image, ImageFsInfoResponse, ImageStatusResponse,
    ListImagesRequest, ListImagesResponse, PullImageResponse, RemoveImageRequest, RemoveImageResponse,
};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use super::*;
use crate::images::runtime::fake::{FakeService, VersionAnswer, accept};

/// A server at a socket of its own, until it is dropped.
pub(super) struct FakeRuntime {
    directory: tempfile::TempDir,
    asked: Arc<Mutex<Vec<PullImageRequest>>>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
    server: AbortOnDropHandle<()>,
}

struct Answers {
    asked: Arc<Mutex<Vec<PullImageRequest>>>,
    /// `None`: a pull is never answered.
    image_ref: Option<String>,
    id: String,
    /// Where it says that it keeps images.
    mountpoint: String,
}

impl FakeRuntime {
    /// Starts a server that answers each pull with `image_ref`, and each image status with `id`.
    pub(super) fn start(image_ref: &str, id: &str) -> Self {
        Self::named("containerd", Some(image_ref), id)
    }

    /// Starts a runtime of another name. Without `image_ref` it never answers a pull.
    pub(super) fn named(name: &'static str, image_ref: Option<&str>, id: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let asked = Arc::default();
        let image_ref = image_ref.map(str::to_owned);
        let mountpoint = directory.path().display().to_string();
        let answers = Answers { asked: Arc::clone(&asked), image_ref, id: id.to_owned(), mountpoint };
        let connections: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let accepted = Arc::clone(&connections);
        let streams = accept(&directory.path().join("cri.sock")).inspect_ok(move |stream| {
            accepted.lock().unwrap().push(stream.as_fd().try_clone_to_owned().unwrap().into());
        });
        let server = tokio::spawn(async move {
            let server = tonic::transport::Server::builder()
                .add_service(ImageServiceServer::new(answers))
                .add_service(FakeService(VersionAnswer(Ok(name))));
            server.serve_with_incoming(streams).await.unwrap();
        });
        Self { directory, asked, connections, server: AbortOnDropHandle::new(server) }
    }

    /// Ends the server, with its connections.
    pub(super) async fn end(&mut self) {
        self.server.abort();
        // Only then the socket is closed.
        (&mut self.server).await.unwrap_err();
        for connection in self.connections.lock().unwrap().iter() {
            connection.shutdown(Shutdown::Both).unwrap();
        }
    }

    pub(super) fn endpoint(&self) -> RuntimeEndpoint {
        format!("unix://{}/cri.sock", self.directory.path().display()).parse().unwrap()
    }

    /// The pulls so far, in their order.
    pub(super) fn pulls(&self) -> Vec<PullImageRequest> {
        self.asked.lock().unwrap().clone()
    }
}

#[tonic::async_trait]
impl ImageService for Answers {
    async fn pull_image(
        &self,
        request: Request<PullImageRequest>,
    ) -> Result<Response<PullImageResponse>, Status> {
        self.asked.lock().unwrap().push(request.into_inner());
        match self.image_ref.clone() {
            Some(image_ref) => Ok(Response::new(PullImageResponse { image_ref })),
            None => std::future::pending().await,
        }
    }

    async fn image_status(
        &self,
        _: Request<ImageStatusRequest>,
    ) -> Result<Response<ImageStatusResponse>, Status> {
        let image = Image { id: self.id.clone(), ..Image::default() };
        Ok(Response::new(ImageStatusResponse { image: Some(image), ..ImageStatusResponse::default() }))
    }

    async fn list_images(
        &self,
        _: Request<ListImagesRequest>,
    ) -> Result<Response<ListImagesResponse>, Status> {
        Err(Status::unimplemented("not expected in these tests"))
    }

    async fn remove_image(
        &self,
        _: Request<RemoveImageRequest>,
    ) -> Result<Response<RemoveImageResponse>, Status> {
        Err(Status::unimplemented("not expected in these tests"))
    }

    async fn image_fs_info(
        &self,
        _: Request<ImageFsInfoRequest>,
    ) -> Result<Response<ImageFsInfoResponse>, Status> {
        let fs_id = Some(FilesystemIdentifier { mountpoint: self.mountpoint.clone() });
        let image_filesystems = vec![FilesystemUsage { fs_id, ..FilesystemUsage::default() }];
        Ok(Response::new(ImageFsInfoResponse { image_filesystems, ..ImageFsInfoResponse::default() }))
    }
}
