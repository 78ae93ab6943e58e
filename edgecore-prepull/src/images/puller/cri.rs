//! A [`Puller`] over the CRI socket of containerd or CRI-O.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    AuthConfig, ImageFsInfoRequest, ImageSpec, ImageStatusRequest, PodSandboxConfig, PullImageRequest,
    VersionRequest,
};
use prepull_api::credentials::RegistryCredential;
use prepull_api::task::SandboxMetadata;
use prepull_api::wire::Filesystem;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use super::lease::{self, Leases};
use super::progress::{Content, Stalled};
use super::socket::RuntimeEndpoint;
use super::{ErrorClass, Present, ProgressSink, PullError, PullRequest, Pulled, Puller};

/// containerd sends at most 16 MiB; tonic would refuse beyond 4. An `ImageStatus` is some KiB.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// A runtime that is busy unpacking takes its time over a question, but not this long. The kubelet waits two
/// minutes; we ask again anyway.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A container runtime at a unix socket. The connection is made when it is first needed, and again whenever it
/// was lost.
#[derive(Clone, Debug)]
pub struct CriPuller {
    endpoint: RuntimeEndpoint,
    images: ImageServiceClient<Channel>,
    runtime: RuntimeServiceClient<Channel>,
    content: Arc<Content>,
    leases: Arc<Leases>,
}

impl CriPuller {
    /// Connects to nothing yet. Takes a tokio runtime to be in.
    pub fn new(endpoint: RuntimeEndpoint) -> Self {
        let channel = channel(endpoint.path().to_owned());
        Self {
            endpoint,
            images: ImageServiceClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER),
            runtime: RuntimeServiceClient::new(channel.clone()),
            content: Arc::new(Content::new(channel.clone())),
            leases: Arc::new(Leases::new(channel)),
        }
    }

    async fn image_status(&self, reference: &str) -> Result<Option<k8s_cri::v1::Image>, PullError> {
        let request = ImageStatusRequest { image: Some(spec(reference)), verbose: false };
        let answer = self.ask(reference, self.images.clone().image_status(request)).await?;
        Ok(answer.image)
    }

    async fn ask<T>(
        &self,
        reference: &str,
        question: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, PullError> {
        match tokio::time::timeout(ANSWER_TIMEOUT, question).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.error(&status, reference)),
            Err(_) => Err(PullError::new(
                ErrorClass::RuntimeDown,
                format!("the container runtime at {} gave no answer for {ANSWER_TIMEOUT:?}", self.endpoint),
            )),
        }
    }

    fn error(&self, status: &tonic::Status, reference: &str) -> PullError {
        let error = PullError::from_status(status, reference);
        match error.class {
            ErrorClass::RuntimeDown => {
                PullError::new(error.class, format!("{} ({})", error.message, self.endpoint))
            }
            _ => error,
        }
    }

    /// The id of an image that was pulled. containerd answers a pull with it; CRI-O with a digest in a repository,
    /// and is asked for the id.
    async fn id(&self, reference: &str, image_ref: &str) -> Option<String> {
        if let Some(id) = image_id(image_ref) {
            return Some(id);
        }
        let image = self.image_status(reference).await.ok().flatten()?;
        image_id(&image.id)
    }

    /// The digest under the reference of an image that is there. containerd is asked first, since CRI lists all
    /// digests that the image has ever had in that repository and does not say which is the reference's.
    async fn digest(&self, reference: &str) -> Option<String> {
        if let Some((_, digest)) = reference.split_once('@') {
            return Some(digest.to_owned());
        }
        if let Some(digest) = self.content.target(reference).await {
            return Some(digest);
        }
        let image = self.image_status(reference).await.ok().flatten()?;
        digest_among(reference, &image.repo_digests)
    }
}

impl Puller for CriPuller {
    async fn pull(&self, request: PullRequest<'_>, progress: ProgressSink<'_>) -> Result<Pulled, PullError> {
        let PullRequest { reference, credential, sandbox } = request;
        let mut request = tonic::Request::new(PullImageRequest {
            image: Some(spec(reference)),
            auth: credential.map(auth),
            sandbox_config: sandbox.map(sandbox_config),
        });
        if let Some(lease) = self.leases.hold(reference).await {
            request.metadata_mut().insert(lease::HEADER, lease);
        }
        let mut images = self.images.clone();
        let watch = self.content.watch(reference);
        let image_ref = tokio::select! {
            answer = images.pull_image(request) => {
                answer.map_err(|status| self.error(&status, reference))?.into_inner().image_ref
            }
            Stalled(after) = watch.follow(progress) => {
                return Err(PullError::new(
                    ErrorClass::Transient,
                    format!("no byte of the image arrived for {} s, the connection seems dead", after.as_secs()),
                ));
            }
        };
        // The image is there. What follows only describes it, and must not turn a success into a failure.
        let ((), digest, id) = tokio::join!(
            self.leases.release(reference),
            self.digest(reference),
            self.id(reference, &image_ref)
        );
        let Some(digest) = digest else { return Ok(Pulled { digest: None, id, bytes: None }) };
        watch.settle(&digest);
        let bytes = self.content.size(&digest).await;
        Ok(Pulled { digest: Some(digest), id, bytes })
    }

    async fn present(&self, reference: &str) -> Result<Option<Present>, PullError> {
        let Some(image) = self.image_status(reference).await? else { return Ok(None) };
        Ok(Some(Present { digest: self.digest(reference).await, id: image_id(&image.id) }))
    }

    async fn filesystem(&self) -> Result<Filesystem, PullError> {
        let answer = self.ask("", self.images.clone().image_fs_info(ImageFsInfoRequest {})).await?;
        let mountpoint = answer.image_filesystems.into_iter().find_map(|usage| Some(usage.fs_id?.mountpoint));
        let mountpoint = mountpoint.ok_or_else(|| {
            PullError::new(ErrorClass::Transient, "the container runtime does not say where it keeps images")
        })?;
        // A file system of a dead server may block for long.
        let read = tokio::task::spawn_blocking(move || filesystem_of(&mountpoint)).await;
        read.unwrap_or_else(|error| Err(PullError::new(ErrorClass::Transient, error.to_string())))
    }

    async fn give_up(&self, reference: &str) {
        self.leases.release(reference).await;
    }

    async fn version(&self) -> Result<String, PullError> {
        let request = VersionRequest { version: "v1".to_owned() };
        let answer = self.ask("", self.runtime.clone().version(request)).await?;
        Ok(format!("{} {}", answer.runtime_name, answer.runtime_version))
    }
}

fn channel(path: PathBuf) -> Channel {
    let connect = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is never looked at: a unix socket has none.
    Endpoint::from_static("http://runtime.invalid").connect_with_connector_lazy(connect)
}

fn spec(reference: &str) -> ImageSpec {
    ImageSpec { image: reference.to_owned(), ..ImageSpec::default() }
}

/// Without a server address, as the kubelet sends it: containerd would compare it with the host that it talks
/// to, which is another one for docker.io and for mirrors, and then drop the credential without a word.
fn auth(credential: &RegistryCredential) -> AuthConfig {
    let RegistryCredential { server: _, username, password, identity_token, registry_token } = credential;
    AuthConfig {
        username: username.expose().to_owned(),
        password: password.expose().to_owned(),
        auth: String::new(),
        server_address: String::new(),
        identity_token: identity_token.expose().to_owned(),
        registry_token: registry_token.expose().to_owned(),
    }
}

/// As the kubelet does it for a pod, with nothing of the pod but what the task has.
fn sandbox_config(sandbox: &SandboxMetadata) -> PodSandboxConfig {
    let SandboxMetadata { labels, annotations } = sandbox;
    let map = |entries: &BTreeMap<String, String>| entries.clone().into_iter().collect();
    PodSandboxConfig { labels: map(labels), annotations: map(annotations), ..PodSandboxConfig::default() }
}

/// An id as it is shown: `sha256:` and the digits, which CRI-O leaves without their algorithm. None where the text
/// is something else.
fn image_id(text: &str) -> Option<String> {
    let digits = text.strip_prefix("sha256:").unwrap_or(text);
    let is_id = digits.len() == 64 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_id.then(|| format!("sha256:{digits}"))
}

/// The digest listed for the repository of a tag, where there is only one.
fn digest_among(name: &str, repo_digests: &[String]) -> Option<String> {
    // A colon after the last slash begins the tag; before it, a port.
    let tag = name.rfind(':').filter(|colon| !name[*colon..].contains('/'));
    let repository = &name[..tag.unwrap_or(name.len())];
    let mut digests =
        repo_digests.iter().filter_map(|entry| entry.strip_prefix(repository)?.strip_prefix('@'));
    let first = digests.next()?;
    digests.next().is_none().then(|| first.to_owned())
}

fn filesystem_of(mountpoint: &str) -> Result<Filesystem, PullError> {
    match crate::tasks::checks::filesystem(std::path::Path::new(mountpoint)) {
        Ok(filesystem) => Ok(filesystem),
        Err(error) => Err(PullError::new(
            ErrorClass::Transient,
            format!(
                "cannot read the room on {mountpoint}, where the container runtime keeps images: {error} (in a container, mount it at the same place)"
            ),
        )),
    }
}

#[cfg(test)]
mod tests;
