#![allow(clippy::unwrap_used)]

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use prepull_api::enroll::SubjectForm;
use prepull_tunnel::{ByteCount, CloseCode, CountingStream, Terms, websocket_config};
use tokio::io::{AsyncWriteExt, DuplexStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;
use crate::edges::pki::{Authority, KeyHash};
use crate::edges::tunnel::node_connections::NodeConnections;
use crate::run::metrics::Metrics;

/// A deadline that no step exceeds, even on a busy machine.
const SOON: Duration = Duration::from_secs(15);

const KEY: KeyHash = KeyHash::new([1; 32]);

/// Runs a session with an edge, until both have ended.
async fn run_with<T>(
    roster: &Roster,
    sessions: &Sessions,
    edge: impl AsyncFnOnce(WebSocketStream<DuplexStream>) -> T,
) -> T {
    let (authority, _) = Authority::generate(SystemTime::now()).unwrap();
    let identity = ServerIdentity::new(authority, &[]).unwrap();
    let settings = ListenerSettings::default();
    let overload = Overload::new(Metrics::default().edges(), Instant::now());
    let (events, _controller) = mpsc::channel(8);
    let peer = PeerIdentity {
        node: "edge-1".into(),
        form: SubjectForm::Own,
        key: KEY,
        not_after: SystemTime::now() + Duration::from_secs(3600),
    };
    let (near, far) = tokio::io::duplex(64 * 1024);
    let near = CountingStream::new(near, ByteCount::default());
    let socket = WebSocketStream::from_raw_socket(near, Role::Server, Some(websocket_config())).await;
    let channel =
        Channel::new(socket, Terms { heartbeat: settings.heartbeat, write_grace: settings.write_grace });

    let context = SessionContext {
        peer,
        issuer: identity.cas().signer().fingerprint(),
        identity: &identity,
        sessions,
        roster,
        events: &events,
        settings: &settings,
        overload: &overload,
        limit: NodeConnections::default().try_open(&"edge-1".into(), 1).unwrap().limit(),
    };
    let edge = async {
        let mut socket = WebSocketStream::from_raw_socket(far, Role::Client, None).await;
        let hello = encode_frame(&EdgeMessage::Hello(Box::default())).unwrap();
        socket.send(Message::text(hello)).await.unwrap();
        edge(socket).await
    };
    tokio::join!(edge, run(channel, context)).0
}

#[tokio::test]
async fn a_revocation_before_hello_ends_the_session() {
    let (roster, sessions) = (Roster::in_memory(), Sessions::default());
    // What ends the sessions of refused nodes has looked before this one could be found.
    roster.set_nodes(std::iter::empty());
    let refusal = roster.check_key(&"edge-1".into(), KEY).unwrap_err().to_string();
    let edge = run_with(&roster, &sessions, async |mut socket| {
        loop {
            if let Message::Close(close) = socket.next().await.unwrap().unwrap() {
                return close.unwrap();
            }
        }
    });
    let close = timeout(SOON, edge).await.expect("its session goes on");
    assert_eq!(close.code, CloseCode::Policy);
    assert!(close.reason.contains("the cluster has no Node edge-1"), "{}: {refusal}", close.reason);
    assert_eq!(sessions.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn fragments_without_content_are_slowed_down() {
    /// A text that goes on without content, and a ping, as a client sends them.
    const TEXT: [u8; 6] = [0x01, 0x80, 0, 0, 0, 0];
    const GOES_ON: [u8; 6] = [0x00, 0x80, 0, 0, 0, 0];
    const PING: [u8; 6] = [0x89, 0x80, 0, 0, 0, 0];
    let took = run_with(&Roster::in_memory(), &Sessions::default(), async |mut socket| {
        let begun = Instant::now();
        let stream = socket.get_mut();
        stream.write_all(&TEXT).await.unwrap();
        for _ in 0..5 {
            stream.write_all(&GOES_ON.repeat(3 * (1 << 19) / GOES_ON.len())).await.unwrap();
            stream.write_all(&PING).await.unwrap();
        }
        begun.elapsed()
    })
    .await;
    // Six MiB were read before the last ones, and four of them may come at once.
    assert!(took > Duration::from_secs(3), "{took:?}");
}
