//! The container runtime's socket: its address, and the gRPC channel over it.

use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::str::FromStr;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Sockets to look for, in this order, when no endpoint is configured. containerd's own socket comes before that of
/// k3s (which RKE2 uses too), because k3s can be configured to use the system's containerd.
const USUAL_PLACES: [&str; 5] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/run/crio/crio.sock",
    "/run/crio/crio.sock",
];

/// Path of the unix socket on which a container runtime listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RuntimeEndpoint {
    path: PathBuf,
}

/// Reason why there is no endpoint of a container runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// The text is not the address of a unix socket.
    #[error(
        "{0:?} is no address of a container runtime: give the path of its socket, such as unix:///run/containerd/containerd.sock"
    )]
    Address(String),
    /// None of these usual places has a socket.
    #[error("found no container runtime; looked at {}; name its socket with --runtime-endpoint unix:///…", .0.join(", "))]
    NotFound(Vec<String>),
}

impl RuntimeEndpoint {
    /// Finds the first of the usual places that has a socket.
    pub(crate) fn discover() -> Result<Self, EndpointError> {
        Self::first_of(&USUAL_PLACES)
    }

    fn first_of(places: &[&str]) -> Result<Self, EndpointError> {
        let is_socket =
            |place: &&&str| std::fs::metadata(place).is_ok_and(|metadata| metadata.file_type().is_socket());
        let place = places.iter().find(is_socket);
        place
            .map(|place| Self { path: PathBuf::from(place) })
            .ok_or_else(|| EndpointError::NotFound(places.iter().map(|&place| place.to_owned()).collect()))
    }

    /// Returns a channel that connects on its first request, and again after each loss of the connection. Must be
    /// called within a tokio runtime.
    pub(super) fn connect_lazily(&self) -> Channel {
        let path = self.path.clone();
        let connect = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // tonic wants an address; a unix socket has none, and the connector ignores it.
        Endpoint::from_static("http://runtime.invalid").connect_with_connector_lazy(connect)
    }
}

impl FromStr for RuntimeEndpoint {
    type Err = EndpointError;

    /// Parses `unix:///path`, as the kubelet accepts it, or the path alone.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = text.strip_prefix("unix://").unwrap_or(text);
        if path.starts_with('/') && path.len() > 1 {
            Ok(Self { path: PathBuf::from(path) })
        } else {
            Err(EndpointError::Address(text.to_owned()))
        }
    }
}

impl fmt::Display for RuntimeEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_endpoint_is_a_path_with_or_without_scheme() {
        for text in ["unix:///run/a.sock", "/run/a.sock"] {
            assert_eq!(text.parse::<RuntimeEndpoint>().unwrap().to_string(), "unix:///run/a.sock");
        }
        for text in ["", "/", "unix://", "unix://run/a.sock", "tcp://127.0.0.1:1", "http://x/y", "run/a.sock"]
        {
            let message = text.parse::<RuntimeEndpoint>().unwrap_err().to_string();
            assert!(message.contains(&format!("{text:?}")), "{message}");
        }
    }

    #[test]
    fn the_first_socket_wins_and_plain_files_are_ignored() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let (absent, file, first, second) = (path("absent"), path("file"), path("first"), path("second"));
        std::fs::write(&file, "").unwrap();
        let places = [absent.as_str(), &file, &first, &second];
        let message = RuntimeEndpoint::first_of(&places).unwrap_err().to_string();
        assert!(message.contains(&first) && message.contains("--runtime-endpoint"), "{message}");
        let _sockets = [&first, &second].map(|path| std::os::unix::net::UnixListener::bind(path).unwrap());
        assert_eq!(RuntimeEndpoint::first_of(&places).unwrap().path, PathBuf::from(&first));
    }
}
