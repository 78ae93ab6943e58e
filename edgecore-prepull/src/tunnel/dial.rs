//! skeleton
use super::TunnelEvent;
use crate::identity::Identity;
use prepull_api::wire::EdgeMessage;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
/// Keeps a session up until `shutdown`.
pub async fn run(
    _identity: Identity,
    _tunnel_url: String,
    _events: mpsc::Sender<TunnelEvent>,
    _outgoing: mpsc::Receiver<EdgeMessage>,
    _shutdown: CancellationToken,
) {
    todo!()
}
