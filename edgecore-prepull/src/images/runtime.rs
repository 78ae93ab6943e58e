//! The container runtime's socket: its address, how it is found, and the gRPC channel over it.

#[cfg(test)]
pub(crate) mod fake;
mod search;
mod socket;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use tonic::transport::Channel;

use self::search::{RuntimeSearch, SearchError};
pub(super) use self::socket::was_not_connected;
use self::socket::{NotConnected, connect, lazy_channel};

/// Unix socket of a container runtime: a path, or one to find in the usual places.
#[derive(Clone, Debug)]
pub struct RuntimeEndpoint(SocketPlace);

#[derive(Clone, Debug)]
enum SocketPlace {
    Named(PathBuf),
    /// Shared by all clones, so that all use the same runtime.
    Usual(Arc<RuntimeSearch>),
}

/// The text is not the address of a unix socket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no address of a container runtime: give the path of its socket, such as unix:///run/containerd/containerd.sock"
)]
pub struct EndpointError(String);

impl RuntimeEndpoint {
    /// The first of the usual places with a runtime that answers. We look when we need a connection, until one has
    /// answered: a runtime may start later than the agent.
    pub(crate) fn in_the_usual_places() -> Self {
        Self(SocketPlace::Usual(Arc::new(RuntimeSearch::default())))
    }

    /// Finds the socket. Must be called within a tokio runtime.
    pub(crate) async fn find_socket(&self) -> Result<&Path, SearchError> {
        match &self.0 {
            SocketPlace::Named(path) => Ok(path),
            SocketPlace::Usual(search) => search.find().await,
        }
    }

    /// Returns a channel that connects on its first request, and again after each loss of the connection. Must be
    /// called within a tokio runtime.
    pub(super) fn connect_lazily(&self) -> Channel {
        let endpoint = self.clone();
        lazy_channel(move || {
            let endpoint = endpoint.clone();
            async move {
                let path = endpoint.find_socket().await.map_err(io::Error::other).map_err(NotConnected)?;
                connect(path).await
            }
        })
    }

    /// Id of the process that listens at the socket: 0 if it's in another pid namespace, and `None` if we can't query
    /// it.
    pub(crate) async fn peer_pid(&self) -> Option<u32> {
        let stream = connect(self.find_socket().await.ok()?).await.ok()?;
        u32::try_from(stream.peer_cred().ok()?.pid()?).ok()
    }

    /// Whether nothing here shows a runtime, not even the directory of a socket, which outlives a runtime that is stopped. So
    /// it is in a container without the socket.
    pub(crate) fn has_no_trace(&self) -> bool {
        match &self.0 {
            SocketPlace::Named(path) => !is_traced(path),
            SocketPlace::Usual(search) => !search.places().iter().any(|place| is_traced(place)),
        }
    }

    fn known_path(&self) -> Option<&Path> {
        match &self.0 {
            SocketPlace::Named(path) => Some(path),
            SocketPlace::Usual(search) => search.found(),
        }
    }
}

/// Whether the socket, or a directory of its own, is there.
fn is_traced(socket: &Path) -> bool {
    let own = socket.parent().filter(|directory| !matches!(directory.to_str(), Some("/run" | "/var/run")));
    own.unwrap_or(socket).exists()
}

impl PartialEq for RuntimeEndpoint {
    fn eq(&self, other: &Self) -> bool {
        self.known_path() == other.known_path()
    }
}

impl Eq for RuntimeEndpoint {}

impl FromStr for RuntimeEndpoint {
    type Err = EndpointError;

    /// Parses `unix:///path`, as the kubelet accepts it, or the path alone.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = text.strip_prefix("unix://").unwrap_or(text);
        if path.starts_with('/') && path.len() > 1 {
            Ok(Self(SocketPlace::Named(PathBuf::from(path))))
        } else {
            Err(EndpointError(text.to_owned()))
        }
    }
}

impl fmt::Display for RuntimeEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known_path() {
            Some(path) => write!(f, "unix://{}", path.display()),
            None => f.write_str("no --runtime-endpoint is set"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_endpoint_is_a_path() {
        for text in ["unix:///run/a.sock", "/run/a.sock"] {
            assert_eq!(text.parse::<RuntimeEndpoint>().unwrap().to_string(), "unix:///run/a.sock");
        }
        for text in ["", "/", "unix://", "unix://run/a.sock", "tcp://127.0.0.1:1", "http://x/y", "run/a.sock"]
        {
            let message = text.parse::<RuntimeEndpoint>().unwrap_err().to_string();
            assert!(message.contains(&format!("{text:?}")), "{message}");
        }
    }
}
