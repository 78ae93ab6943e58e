//! Fake gRPC services at a socket, and one of CRI that only answers `Version`. The end-to-end tests include it as well.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::path::Path;
use std::task::{Context, Poll};

use futures::stream;
use tokio::net::UnixListener;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

/// The answers of a gRPC service.
pub(crate) trait FakeAnswers: Clone + Send + Sync + 'static {
    const SERVICE: &'static str;

    /// The message that a method answers with, of less than 256 bytes.
    fn answer(&self, method: &str) -> Result<Vec<u8>, Status>;
}

/// A gRPC service with these answers.
#[derive(Clone)]
pub(crate) struct FakeService<A>(pub(crate) A);

impl<A: FakeAnswers> NamedService for FakeService<A> {
    const NAME: &'static str = A::SERVICE;
}

impl<A: FakeAnswers, B> Service<http::Request<B>> for FakeService<A> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let answer = self.0.answer(method);
        ready(Ok(answer.map_or_else(Status::into_http, |message| answer_with(&message))))
    }
}

/// Answer to `Version`: the name of the runtime, or an error.
#[derive(Clone, Debug)]
pub(crate) struct VersionAnswer(pub(crate) Result<&'static str, (Code, &'static str)>);

impl FakeAnswers for VersionAnswer {
    const SERVICE: &'static str = "runtime.v1.RuntimeService";

    fn answer(&self, _: &str) -> Result<Vec<u8>, Status> {
        let name = self.0.map_err(|(code, message)| Status::new(code, message))?;
        // The fields 2 and 3 of VersionResponse, name and version.
        let mut message = Vec::new();
        for (field, text) in [(2_u8, name), (3, "1")] {
            message.extend([field << 3 | 2, u8::try_from(text.len()).unwrap()]);
            message.extend(text.as_bytes());
        }
        Ok(message)
    }
}

fn answer_with(message: &[u8]) -> http::Response<Body> {
    // Behind the header of a gRPC message.
    let header = [0, 0, 0, 0, u8::try_from(message.len()).unwrap()];
    let frame = [&header, message].concat();
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let frames = [hyper::body::Frame::data(frame.into()), hyper::body::Frame::trailers(trailers)];
    let body = http_body_util::StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
    let response = http::Response::builder().header("content-type", "application/grpc");
    response.body(Body::new(body)).unwrap()
}

/// Serves at a socket until it is dropped.
pub(crate) fn serve(path: &Path, answers: impl FakeAnswers) -> AbortOnDropHandle<()> {
    let server = tonic::transport::Server::builder().add_service(FakeService(answers));
    let connections = accept(path);
    AbortOnDropHandle::new(tokio::spawn(async { server.serve_with_incoming(connections).await.unwrap() }))
}

/// The connections that a new socket accepts.
pub(crate) fn accept(
    path: &Path,
) -> impl futures::Stream<Item = std::io::Result<tokio::net::UnixStream>> + use<> {
    let listener = UnixListener::bind(path).unwrap();
    stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    })
}
