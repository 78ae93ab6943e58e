//! The life of a session, with the real dialler.

use std::time::Duration;

use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::addresses::Proxy;
use crate::agent::Agent;
use crate::cloud::{Cloud, SOON, ack, fast, task};

#[tokio::test]
async fn messages_go_both_ways_until_shutdown() {
    let mut cloud = Cloud::start();
    let mut agent = Agent::start(&cloud, "edge-1", None).await;
    let hello = Hello { version: "1.2.3".into(), ..Hello::default() };
    let welcome = agent.connected(hello.clone()).await;
    assert_eq!(welcome.heartbeat, Duration::from_secs(15));
    let (node, session, said) = cloud.up().await;
    // What the tunnel itself adds.
    assert!(said.trusts.is_some());
    let said = Hello { trusts: None, ..said };
    assert_eq!((node, said, session.to_string()), ("edge-1".into(), hello, welcome.session));
    for n in 0..100 {
        let job = n.to_string();
        agent.link.send(EdgeMessage::Accepted { task: task(&job) }).await;
        assert_eq!(cloud.message().await.1, EdgeMessage::Accepted { task: task(&job) });
        cloud.sessions.send(&"edge-1".into(), ack(&job)).unwrap();
        assert_eq!(agent.message().await, ack(&job));
    }
    agent.shutdown.cancel();
    agent.disconnected().await;
    assert_eq!(cloud.down().await.1, session);
    assert!(cloud.sessions.is_empty());
}

#[tokio::test]
async fn unknown_messages_end_no_session() {
    let mut cloud = Cloud::start();
    let mut agent = Agent::start(&cloud, "edge-1", None).await;
    agent.connected(Hello::default()).await;
    cloud.up().await;
    for job in ["1", "2"] {
        agent.link.send(EdgeMessage::Other).await;
        agent.link.send(EdgeMessage::Accepted { task: task(job) }).await;
        assert_eq!(cloud.message().await.1, EdgeMessage::Accepted { task: task(job) });
        cloud.sessions.send(&"edge-1".into(), CloudMessage::Other).unwrap();
        cloud.sessions.send(&"edge-1".into(), ack(job)).unwrap();
        assert_eq!(agent.message().await, ack(job));
    }
}

#[tokio::test]
async fn heartbeats_keep_an_idle_session_up() {
    let mut cloud = Cloud::start_with(fast());
    let mut agent = Agent::start(&cloud, "edge-1", None).await;
    agent.connected(Hello::default()).await;
    cloud.up().await;
    cloud.no_event(Duration::from_secs(2)).await;
    cloud.sessions.send(&"edge-1".into(), ack("j")).unwrap();
    assert_eq!(agent.message().await, ack("j"));
}

#[tokio::test]
async fn an_agent_that_never_reads_can_send() {
    let mut cloud = Cloud::start();
    let mut agent = Agent::start(&cloud, "edge-1", None).await;
    agent.connected(Hello::default()).await;
    cloud.up().await;
    // More than the agent's queue holds, so that the dialler stops reading but keeps writing.
    for _ in 0..50 {
        cloud.sessions.send(&"edge-1".into(), ack("j")).unwrap();
    }
    for _ in 0..50 {
        timeout(SOON, agent.link.send(EdgeMessage::Accepted { task: task("j") })).await.unwrap();
        cloud.message().await;
    }
    for _ in 0..50 {
        agent.message().await;
    }
}

#[tokio::test]
async fn shutdown_ends_sessions_and_listener() {
    let mut cloud = Cloud::start();
    let mut agent = Agent::start(&cloud, "edge-1", None).await;
    agent.connected(Hello::default()).await;
    cloud.up().await;
    cloud.shutdown.cancel();
    agent.disconnected().await;
    cloud.down().await;
    timeout(SOON, &mut cloud.serving).await.unwrap().unwrap();
    assert!(TcpStream::connect(cloud.tunnel).await.is_err());
}

#[tokio::test]
async fn both_ends_notice_a_silent_link() {
    let mut cloud = Cloud::start_with(fast());
    let proxy = Proxy::to(cloud.tunnel).await;
    let mut agent = Agent::start(&cloud, "edge-1", Some(format!("wss://{}/v1/edge", proxy.address))).await;
    agent.connected(Hello::default()).await;
    let (_, first, _) = cloud.up().await;
    proxy.frozen.notify_one();
    let start = Instant::now();
    agent.disconnected().await;
    assert_eq!(cloud.down().await.1, first);
    assert!(!cloud.sessions.is_online(&"edge-1".into()));
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    // Without a session, sending never blocks the agent.
    for _ in 0..100 {
        timeout(SOON, agent.link.send(EdgeMessage::Accepted { task: task("lost") })).await.unwrap();
    }
    agent.connected(Hello::default()).await;
    assert!(cloud.up().await.1 > first);
    agent.link.send(EdgeMessage::Accepted { task: task("kept") }).await;
    assert_eq!(cloud.message().await.1, EdgeMessage::Accepted { task: task("kept") });
}
