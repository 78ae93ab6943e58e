//! A relay that records an agent's requests to its container runtime. gRPC isn't compressed there, so we can search the
//! bytes for text.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

use super::Containerd;
use crate::background;

/// A recording relay in front of a runtime's socket. Ends when dropped.
pub(super) struct Eavesdropper {
    socket: PathBuf,
    heard: Arc<Mutex<Vec<u8>>>,
    listening: JoinHandle<()>,
}

impl Eavesdropper {
    /// Starts a relay to the given runtime.
    pub(super) fn in_front_of(containerd: &Containerd) -> Result<Self> {
        let (socket, target) = (containerd.dir().join("relay.sock"), containerd.socket());
        let heard = Arc::new(Mutex::default());
        let runtime = background::runtime()?;
        let _context = runtime.enter();
        let listener = UnixListener::bind(&socket)?;
        let listening = runtime.spawn(relay(listener, target, Arc::clone(&heard)));
        Ok(Self { socket, heard, listening })
    }

    /// Endpoint for the agent, `unix:///…`.
    pub(super) fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }

    /// Whether the agent has sent this text.
    pub(super) fn has_heard(&self, text: &[u8]) -> bool {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.windows(text.len()).any(|window| window == text)
    }
}

impl Drop for Eavesdropper {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

async fn relay(listener: UnixListener, target: PathBuf, heard: Arc<Mutex<Vec<u8>>>) {
    while let Ok((agent, _)) = listener.accept().await {
        let (target, heard) = (target.clone(), Arc::clone(&heard));
        tokio::spawn(async move {
            let Ok(runtime) = UnixStream::connect(target).await else { return };
            let ((mut said, mut back), (mut answers, mut there)) = (agent.into_split(), runtime.into_split());
            let says = async {
                let mut piece = vec![0; 16 * 1024];
                while let Ok(length @ 1..) = said.read(&mut piece).await {
                    heard.lock().unwrap_or_else(PoisonError::into_inner).extend(&piece[..length]);
                    if there.write_all(&piece[..length]).await.is_err() {
                        break;
                    }
                }
            };
            // When either side closes, the other one is closed as well.
            tokio::select! {
                () = says => {}
                _ = tokio::io::copy(&mut answers, &mut back) => {}
            }
        });
    }
}
