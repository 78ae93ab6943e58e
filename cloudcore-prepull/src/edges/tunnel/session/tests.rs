#![allow(clippy::unwrap_used)]

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use prepull_api::enroll::SubjectForm;
use prepull_tunnel::{ByteCount, CloseCode, CountingStream, Terms, websocket_config};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;
use crate::edges::pki::{Authority, KeyHash};
use crate::run::metrics::Metrics;

/// A deadline that no step exceeds, even on a busy machine.
const SOON: Duration = Duration::from_secs(15);

#[tokio::test]
async fn a_revocation_before_hello_ends_the_session() {
    let (authority, _) = Authority::generate(SystemTime::now()).unwrap();
    let identity = ServerIdentity::new(authority, &[]).unwrap();
    let (sessions, roster, settings) =
        (Sessions::default(), Roster::in_memory(), ListenerSettings::default());
    let overload = Overload::new(Metrics::default().edges(), Instant::now());
    let (events, _controller) = mpsc::channel(8);
    let peer = PeerIdentity {
        node: "edge-1".into(),
        form: SubjectForm::Own,
        key: KeyHash::new([1; 32]),
        not_after: SystemTime::now() + Duration::from_secs(3600),
    };
    let (near, far) = tokio::io::duplex(64 * 1024);
    let near = CountingStream::new(near, ByteCount::default());
    let socket = WebSocketStream::from_raw_socket(near, Role::Server, Some(websocket_config())).await;
    let channel =
        Channel::new(socket, Terms { heartbeat: settings.heartbeat, write_grace: settings.write_grace });

    // What ends the sessions of refused nodes has looked before this one could be found.
    roster.set_nodes(std::iter::empty());
    let refusal = roster.check_key(&peer.node, peer.key).unwrap_err().to_string();
    let context = SessionContext {
        peer,
        issuer: identity.cas().signer().fingerprint(),
        identity: &identity,
        sessions: &sessions,
        roster: &roster,
        events: &events,
        settings: &settings,
        overload: &overload,
    };
    let edge = async {
        let mut socket = WebSocketStream::from_raw_socket(far, Role::Client, None).await;
        let hello = encode_frame(&EdgeMessage::Hello(Box::default())).unwrap();
        socket.send(Message::text(hello)).await.unwrap();
        loop {
            if let Message::Close(close) = socket.next().await.unwrap().unwrap() {
                return close.unwrap();
            }
        }
    };
    let both = async { tokio::join!(edge, run(channel, context)) };
    let (close, ()) = timeout(SOON, both).await.expect("its session goes on");
    assert_eq!(close.code, CloseCode::Policy);
    assert!(close.reason.contains("the cluster has no Node edge-1"), "{}: {refusal}", close.reason);
    assert_eq!(sessions.len(), 0);
}
