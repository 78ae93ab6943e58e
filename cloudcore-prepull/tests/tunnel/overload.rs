//! More edges than sessions, and a controller that is behind: who is sent away is told when to come back, and who
//! is there stays.

use std::time::Duration;

use cloudcore_prepull::edges::tunnel::Settings;
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::agent::Agent;
use crate::cloud::{Cloud, SOON, ack, fast, task};
use crate::raw::{self, Credentials, Socket, closed, dial, heard, say, tls};

/// Dials and says `Hello`; when to come back, and why.
async fn sent_away(cloud: &Cloud, node: &str) -> (Duration, String) {
    let mut socket = dial(cloud.tunnel, tls(cloud, Some(&Credentials::of(cloud, node)))).await.unwrap();
    say(&mut socket, &EdgeMessage::Hello(Hello::default())).await;
    goaway(&mut socket).await
}

async fn goaway(socket: &mut Socket) -> (Duration, String) {
    let CloudMessage::Goaway { after, reason } = heard(socket).await else { panic!("no goaway") };
    assert_eq!(closed(socket).await, (1013, reason.clone()));
    (after, reason)
}

#[tokio::test]
async fn beyond_the_last_session_each_is_told_a_time_of_its_own() {
    let mut cloud = Cloud::start_with(Settings { max_connections: 2, ..Settings::default() });
    let mut first = raw::session(&mut cloud, "edge-1").await;
    let second = raw::session(&mut cloud, "edge-2").await;
    let mut times = Vec::new();
    for node in ["edge-3", "edge-4", "edge-5"] {
        let (after, reason) = sent_away(&cloud, node).await;
        assert_eq!(reason, "cloudcore is overloaded: it has as many sessions as it takes");
        times.push(after);
    }
    // Some milliseconds pass between them, so that the later ones may be told a shorter time for a later moment.
    assert!(times.iter().all(|after| (1900..2100).contains(&after.as_millis())), "{times:?}");
    let metrics = cloud.metrics.render();
    assert!(metrics.contains("cloudcore_prepull_sent_away_total{reason=\"full\"} 3\n"), "{metrics}");
    assert!(metrics.contains("cloudcore_prepull_waiting_connections 0\n"), "{metrics}");
    cloud.sessions.send(&"edge-1".into(), ack("still there")).unwrap();
    assert_eq!(heard(&mut first).await, ack("still there"));
    cloud.no_event(Duration::from_millis(50)).await;

    // Who leaves makes room.
    drop(second);
    cloud.down().await;
    raw::session(&mut cloud, "edge-3").await;
}

#[tokio::test]
async fn an_agent_that_was_sent_away_comes_back_at_its_time() {
    let mut cloud = Cloud::start_with(Settings { max_connections: 1, ..Settings::default() });
    let first = raw::session(&mut cloud, "edge-1").await;
    let mut agent = Agent::start(&cloud, "edge-2", None).await;
    // Its own waits here are a tenth of a second at most: it obeys the cloud instead.
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
async fn a_controller_that_takes_no_message_sends_away_who_speaks_and_who_is_new() {
    const REASON: &str = "cloudcore is overloaded: a message was not taken within 1s";
    let settings = Settings { heartbeat: Duration::from_secs(1), ..fast() };
    let mut cloud = Cloud::start_with(settings);
    let mut talker = raw::session(&mut cloud, "edge-1").await;
    let mut quiet = raw::session(&mut cloud, "edge-2").await;
    // The test is the controller, and its queue holds 64.
    for _ in 0..65 {
        say(&mut talker, &EdgeMessage::Accepted { task: task("j") }).await;
    }
    let ((after, reason), ()) = tokio::join!(goaway(&mut talker), async {
        // Pings are answered only by who reads, and it has nothing to say.
        let _ = timeout(Duration::from_millis(1500), heard(&mut quiet)).await;
    });
    assert_eq!((after, reason.as_str()), (Duration::from_secs(2), REASON));
    let (after, reason) = sent_away(&cloud, "edge-3").await;
    assert_eq!(reason, "cloudcore is overloaded: messages wait too long");
    assert!(after > Duration::from_millis(1500), "{after:?}");

    // It catches up, and all is as before. The one that said nothing was left in peace.
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
async fn handshakes_that_stall_make_room_as_soon_as_others_wait() {
    let settings = Settings {
        max_handshakes: 4,
        contended_handshake_deadline: Duration::from_millis(200),
        ..Settings::default()
    };
    let mut cloud = Cloud::start_with(settings);
    let mut idle = Vec::new();
    for _ in 0..12 {
        idle.push(TcpStream::connect(cloud.tunnel).await.unwrap());
    }
    let begin = Instant::now();
    raw::session(&mut cloud, "edge-1").await;
    // Three turns of a fifth of a second; by their deadline it would be three times ten seconds.
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
