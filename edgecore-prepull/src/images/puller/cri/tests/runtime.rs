//! Fake CRI image service: answers at once and records the pulls.

use std::sync::{Arc, Mutex};

use k8s_cri::v1::image_service_server::{ImageService, ImageServiceServer};
use k8s_cri::v1::{
    Image, ImageFsInfoResponse, ImageStatusResponse, ListImagesRequest, ListImagesResponse,
    PullImageResponse, RemoveImageRequest, RemoveImageResponse,
};
use tokio::net::UnixListener;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use super::*;

/// A server at a socket of its own, until it is dropped.
pub(super) struct FakeRuntime {
    directory: tempfile::TempDir,
    asked: Arc<Mutex<Vec<PullImageRequest>>>,
    _server: AbortOnDropHandle<()>,
}

struct Answers {
    asked: Arc<Mutex<Vec<PullImageRequest>>>,
    image_ref: String,
    id: String,
}

impl FakeRuntime {
    /// Starts a server that answers each pull with `image_ref`, and each image status with `id`.
    pub(super) fn start(image_ref: &str, id: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("cri.sock")).unwrap();
        let asked = Arc::default();
        let answers =
            Answers { asked: Arc::clone(&asked), image_ref: image_ref.to_owned(), id: id.to_owned() };
        let connections = futures::stream::unfold(listener, |listener| async {
            let accepted = listener.accept().await.map(|(stream, _)| stream);
            Some((accepted, listener))
        });
        let server = tokio::spawn(async {
            let server = tonic::transport::Server::builder().add_service(ImageServiceServer::new(answers));
            server.serve_with_incoming(connections).await.unwrap();
        });
        Self { directory, asked, _server: AbortOnDropHandle::new(server) }
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
        Ok(Response::new(PullImageResponse { image_ref: self.image_ref.clone() }))
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
        Err(Status::unimplemented("not expected in these tests"))
    }
}
