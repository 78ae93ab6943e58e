//! Search for the container runtime in the usual places.
//!
//! A socket alone proves nothing: the containerd of a Docker host, or one beside CRI-O, has CRI switched off. So we ask
//! each for its version, and use the first that answers.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use k8s_cri::v1::VersionRequest;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tonic::Code;
use tracing::{info, warn};

use super::socket::{connect, lazy_channel, was_not_connected};

/// Sockets to look for, in this order, if no endpoint is configured. containerd's own socket comes before that of k3s
/// (which RKE2 uses too), because k3s can be configured to use the system's containerd.
const USUAL_PLACES: [&str; 6] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/run/crio/crio.sock",
    "/run/crio/crio.sock",
    DOCKER,
];
/// cri-dockerd's socket for Docker.
const DOCKER: &str = "/run/cri-dockerd.sock";
/// Longest wait for an answer: a working runtime answers a version request immediately.
const PATIENCE: Duration = Duration::from_secs(3);

/// Reason why no runtime was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SearchError {
    /// No runtime serves CRI in the usual places. Lists each place with its finding.
    #[error("found no container runtime; looked at {}; name its socket with --runtime-endpoint unix:///…", .0.join(", "))]
    NotFound(Vec<String>),
    /// A runtime was found, and doesn't serve yet.
    #[error("{0} does not serve CRI yet: {1} (another socket: --runtime-endpoint unix:///…)")]
    Starting(String, String),
}

/// The finding at a usual place.
enum Finding {
    /// A runtime of this name and version.
    Runtime(String),
    /// A runtime that isn't ready, or may start soon.
    Starting(String),
    /// No runtime serves CRI there, for this reason.
    Nothing(&'static str),
}

/// The usual places, and the one with the runtime in use.
#[derive(Debug)]
pub(super) struct RuntimeSearch {
    places: Vec<PathBuf>,
    docker: PathBuf,
    found: OnceLock<PathBuf>,
    /// One search at a time.
    searching: Mutex<()>,
}

impl Default for RuntimeSearch {
    fn default() -> Self {
        Self::in_places(USUAL_PLACES.map(PathBuf::from).to_vec(), PathBuf::from(DOCKER))
    }
}

impl RuntimeSearch {
    fn in_places(places: Vec<PathBuf>, docker: PathBuf) -> Self {
        Self { places, docker, found: OnceLock::new(), searching: Mutex::new(()) }
    }

    pub(super) fn places(&self) -> &[PathBuf] {
        &self.places
    }

    /// The place with the runtime that has answered, if any.
    pub(super) fn found(&self) -> Option<&Path> {
        self.found.get().map(PathBuf::as_path)
    }

    /// Finds the first place whose runtime answers, and keeps it: another one that answers earlier after a reboot of
    /// both would have none of the images.
    pub(super) async fn find(&self) -> Result<&Path, SearchError> {
        let _one = self.searching.lock().await;
        if let Some(path) = self.found() {
            return Ok(path);
        }
        let mut looked_at = Vec::new();
        for place in &self.places {
            match ask_place(place).await {
                Finding::Runtime(version) => {
                    info!(socket = %place.display(), runtime = version, "found the container runtime");
                    self.warn_of_docker(place);
                    return Ok(self.found.get_or_init(|| place.clone()));
                }
                // Don't try the next one, because it would be used for good.
                Finding::Starting(why) => {
                    return Err(SearchError::Starting(place.display().to_string(), why));
                }
                Finding::Nothing(why) => looked_at.push(format!("{} ({why})", place.display())),
            }
        }
        Err(SearchError::NotFound(looked_at))
    }

    /// On a Docker host, the kubelet's pods don't see images in containerd.
    fn warn_of_docker(&self, place: &Path) {
        if place != self.docker && is_socket(&self.docker) {
            warn!(
                socket = %place.display(), cri_dockerd = %self.docker.display(),
                "this node has cri-dockerd as well; if its kubelet uses that, set --runtime-endpoint to it, or it will not see the images"
            );
        }
    }
}

fn is_socket(place: &Path) -> bool {
    std::fs::metadata(place).is_ok_and(|metadata| metadata.file_type().is_socket())
}

async fn ask_place(place: &Path) -> Finding {
    if !is_socket(place) {
        return Finding::Nothing("no socket");
    }
    let path = place.to_owned();
    let channel = lazy_channel(move || {
        let path = path.clone();
        async move { connect(&path).await }
    });
    let request = VersionRequest { version: "v1".to_owned() };
    match timeout(PATIENCE, RuntimeServiceClient::new(channel).version(request)).await {
        Ok(Ok(answer)) => {
            let answer = answer.into_inner();
            Finding::Runtime(format!("{} {}", answer.runtime_name, answer.runtime_version))
        }
        Ok(Err(status)) if status.code() == Code::Unimplemented => Finding::Nothing("does not serve CRI v1"),
        // The socket of a runtime that has ended.
        Ok(Err(status)) if was_not_connected(&status) => Finding::Nothing("no listener"),
        Ok(Err(status)) => Finding::Starting(status.message().to_owned()),
        Err(_) => Finding::Starting(format!("no answer within {PATIENCE:?}")),
    }
}

#[cfg(test)]
mod tests;
