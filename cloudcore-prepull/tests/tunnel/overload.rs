//! Overload: with too many edges or a slow controller, further edges get a time to come back, and existing sessions
//! go on.

use std::time::Duration;

use cloudcore_prepull::edges::tunnel::ListenerSettings;
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::agent::Agent;
use crate::cloud::{Cloud, SOON, ack, fast, task};
use crate::raw::{self, Credentials, Socket, client_hello, closed, dial, heard, say, tls};

/// Dials, sends `Hello`, and returns the delay and the reason of the `Goaway`.
async fn sent_away(cloud: &Cloud, node: &str) -> (Duration, String) {
    let mut socket = dial(cloud.tunnel, tls(cloud, Some(&Credentials::of(cloud, node)))).await.unwrap();
    say(&mut socket, &EdgeMessage::Hello(Box::default())).await;
    goaway(&mut socket).await
}

async fn goaway(socket: &mut Socket) -> (Duration, String) {
    let CloudMessage::Goaway { after, reason } = heard(socket).await else { panic!("no goaway") };
    assert_eq!(closed(socket).await, (1013, reason.clone()));
    (after, reason)
}

#[tokio::test]
async fn edges_beyond_the_limit_return_later() {
    let mut cloud = Cloud::start_with(ListenerSettings { max_connections: 2, ..ListenerSettings::default() });
    let mut first = raw::session(&mut cloud, "edge-1").await;
    let second = raw::session(&mut cloud, "edge-2").await;
    let mut times = Vec::new();
    for node in ["edge-3", "edge-4", "edge-5"] {
        let (after, reason) = sent_away(&cloud, node).await;
        assert_eq!(reason, "cloudcore is overloaded: it has as many sessions as it takes");
        times.push(after);
    }
    // Milliseconds pass between the edges, so that a later return may still be a shorter delay.
    assert!(times.iter().all(|after| (1900..2100).contains(&after.as_millis())), "{times:?}");
    let metrics = cloud.metrics.render();
    assert!(metrics.contains("cloudcore_prepull_sent_away_total{reason=\"full\"} 3\n"), "{metrics}");
    assert!(metrics.contains("cloudcore_prepull_waiting_connections 0\n"), "{metrics}");
    cloud.sessions.send(&"edge-1".into(), ack("still there")).unwrap();
    assert_eq!(heard(&mut first).await, ack("still there"));
    cloud.no_event(Duration::from_millis(50)).await;

    // An edge that leaves makes room.
    drop(second);
    cloud.down().await;
    raw::session(&mut cloud, "edge-3").await;
}

#[tokio::test]
async fn a_sent_away_agent_returns_later() {
    let mut cloud = Cloud::start_with(ListenerSettings { max_connections: 1, ..ListenerSettings::default() });
    let first = raw::session(&mut cloud, "edge-1").await;
    let mut agent = Agent::start(&cloud, "edge-2", None).await;
    // Its own backoff is at most a tenth of a second here: the cloud's delay overrides it.
    let tries = async {
        let mut tries: u32 = 0;
        loop {
            if let edgecore_prepull::cloud::tunnel::TunnelEvent::Connecting(hello) = agent.event().await {
                tries += 1;
                hello.send(Hello::default()).unwrap();
                if tries == 2 {
                    return;
                }
            }
        }
    };
    let begin = Instant::now();
    timeout(SOON, tries).await.unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(1900), "{:?}", begin.elapsed());
    drop(first);
    cloud.down().await;
    agent.connected(Hello::default()).await;
    assert_eq!(cloud.up().await.0, "edge-2".into());
}

#[tokio::test]
async fn a_stalled_controller_keeps_quiet_sessions() {
    const REASON: &str = "cloudcore is overloaded: a message was not taken within 1s";
    let settings = ListenerSettings { heartbeat: Duration::from_secs(1), ..fast() };
    let mut cloud = Cloud::start_with(settings);
    let mut talker = raw::session(&mut cloud, "edge-1").await;
    let mut quiet = raw::session(&mut cloud, "edge-2").await;
    // The test is the controller, and its queue holds 64.
    for _ in 0..65 {
        say(&mut talker, &EdgeMessage::Accepted { task: task("j") }).await;
    }
    let ((after, reason), ()) = tokio::join!(goaway(&mut talker), async {
        // Reads, and thereby answers pings, but sends no message.
        let _ = timeout(Duration::from_millis(1500), heard(&mut quiet)).await;
    });
    assert_eq!((after, reason.as_str()), (Duration::from_secs(2), REASON));
    let (after, reason) = sent_away(&cloud, "edge-3").await;
    assert_eq!(reason, "cloudcore is overloaded: messages wait too long");
    assert!(after > Duration::from_millis(1500), "{after:?}");

    // Once the controller catches up, everything works again. The quiet session was not affected.
    for _ in 0..64 {
        cloud.message().await;
    }
    assert_eq!(cloud.down().await.0, "edge-1".into());
    cloud.sessions.send(&"edge-2".into(), ack("still there")).unwrap();
    assert_eq!(heard(&mut quiet).await, ack("still there"));
    drop(quiet);
    cloud.down().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    raw::session(&mut cloud, "edge-3").await;
}

#[tokio::test]
async fn stalled_handshakes_make_room_while_others_wait() {
    let settings = ListenerSettings {
        max_handshakes: 4,
        handshake_patience: Duration::from_millis(200),
        ..ListenerSettings::default()
    };
    let mut cloud = Cloud::start_with(settings);
    let hello = client_hello(&cloud);
    let mut stalled = Vec::new();
    for _ in 0..12 {
        let mut stream = TcpStream::connect(cloud.tunnel).await.unwrap();
        stream.write_all(&hello).await.unwrap();
        stalled.push(stream);
    }
    let begin = Instant::now();
    raw::session(&mut cloud, "edge-1").await;
    // Three rounds of 200 ms each; with the full deadline it would be three times ten seconds.
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
