//! Hostile and broken nodes, which can end their own session and nothing else.

use std::convert::Infallible;
use std::time::Duration;

use cloudcore_prepull::edges::tunnel::{ListenerSettings, SendError};
use futures::{SinkExt, StreamExt};
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello, MAX_MESSAGE, OpenPhase, OpenTask};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::cloud::{Cloud, SOON, ack, task};
use crate::raw::{self, Credentials, client_hello, closed, dial, heard, say, tls};

#[tokio::test]
async fn an_invalid_message_closes_its_session_only() {
    let mut cloud = Cloud::start();
    let mut honest = raw::session(&mut cloud, "edge-1").await;
    let second_hello = prepull_api::wire::encode_frame(&EdgeMessage::Hello(Box::default())).unwrap();
    let long_uid = format!(r#"{{"type":"accepted","task":{{"job":"{}","attempt":1}}}}"#, "j".repeat(129));
    for (message, code, reason) in [
        (Message::text("{"), 1007, "not a message of prepull.v1"),
        (Message::text(r#"{"kind":"become_root"}"#), 1007, "not a message of prepull.v1"),
        (Message::text(r#"{"type":"accepted","task":7}"#), 1007, "not a message of prepull.v1"),
        (Message::text(long_uid), 1007, "not a message of prepull.v1"),
        (Message::text(second_hello), 1002, "Hello may come only once"),
        (Message::binary(vec![1]), 1002, "text frames"),
        (Message::text("x".repeat(MAX_MESSAGE + 1)), 1009, "message of 1048577 bytes; at most 1048576"),
        (Message::text("x".repeat(3 * MAX_MESSAGE)), 1009, "at most 1048576"),
    ] {
        let mut hostile = raw::session(&mut cloud, "edge-2").await;
        let what = format!("{message:.30}");
        let _ = hostile.send(message).await; // the server may close before all of it is written
        let (got, text) = raw::closed(&mut hostile).await;
        assert_eq!((got, text.contains(reason)), (code, true), "{what}: {text}");
        assert_eq!(cloud.down().await.0, "edge-2".into());
    }
    cloud.sessions.send(&"edge-1".into(), ack("still there")).unwrap();
    assert_eq!(heard(&mut honest).await, ack("still there"));
}

#[tokio::test]
async fn fragments_without_an_end_close_the_session() {
    let mut cloud = Cloud::start();
    let hostile = raw::session(&mut cloud, "edge-2").await;
    let fragment = |opcode| Message::Frame(Frame::message(Vec::new(), OpCode::Data(opcode), false));
    let (mut sink, mut stream) = hostile.split();
    let flood = async {
        sink.feed(fragment(Data::Text)).await?;
        loop {
            sink.feed(fragment(Data::Continue)).await?;
        }
    };
    let closed = raw::closed(&mut stream);
    let (code, reason) = tokio::select! {
        closed = closed => closed,
        ended = flood => { let ended: Result<Infallible, Error> = ended; panic!("not told why: {ended:?}") }
    };
    assert_eq!((code, reason.contains("without an end")), (1002, true), "{reason}");
    assert_eq!(cloud.down().await.0, "edge-2".into());
}

#[tokio::test]
async fn no_control_character_gets_in() {
    let mut cloud = Cloud::start();
    let tls = tls(&cloud, Some(&Credentials::of(&cloud, "edge-1")));
    let mut socket = dial(cloud.tunnel, tls).await.unwrap();
    let hello = r#"{"type":"hello","version":"1\u001b]52;c;eA==\u0007","os":"l\u202ex\u009b2K","arch":"a\r\b","open":[]}"#;
    socket.send(Message::text(hello)).await.unwrap();
    let (_, _, said) = cloud.up().await;
    let said = [said.version, said.os, said.arch];
    assert_eq!(said, ["1\u{fffd}]52;c;eA==\u{fffd}", "l\u{fffd}x\u{fffd}2K", "a\u{fffd}\u{fffd}"]);
    let progress = "{\"type\":\"progress\",\"task\":{\"job\":\"j\",\"attempt\":1},\"images\":[],\"waits\":\"a\u{2028}\u{7f}\\n\\\\u001b\"}";
    socket.send(Message::text(progress)).await.unwrap();
    let EdgeMessage::Progress(said) = cloud.message().await.1 else { panic!("no progress") };
    assert_eq!(said.waits, "a\u{fffd}\u{fffd}\n\\u001b", "a line feed and a written escape stay");
}

#[tokio::test]
async fn hello_must_come_first_and_in_time() {
    let settings =
        ListenerSettings { hello_deadline: Duration::from_millis(300), ..ListenerSettings::default() };
    let mut cloud = Cloud::start_with(settings);
    let tls = tls(&cloud, Some(&Credentials::of(&cloud, "edge-1")));

    let mut silent = dial(cloud.tunnel, tls.clone()).await.unwrap();
    assert_eq!(closed(&mut silent).await, (1002, "no Hello within 300ms".to_owned()));

    let mut hasty = dial(cloud.tunnel, tls.clone()).await.unwrap();
    say(&mut hasty, &EdgeMessage::Accepted { task: task("j") }).await;
    assert_eq!(closed(&mut hasty).await, (1002, "the first message must be Hello".to_owned()));

    let mut greedy = dial(cloud.tunnel, tls).await.unwrap();
    let open = vec![OpenTask { task: task("j"), phase: OpenPhase::Running, limited: false }; 65];
    say(&mut greedy, &EdgeMessage::Hello(Box::new(Hello { open, ..Hello::default() }))).await;
    assert_eq!(closed(&mut greedy).await.1, "Hello lists 65 tasks; at most 64 are accepted");
    cloud.no_event(Duration::from_millis(50)).await;
}

#[tokio::test]
async fn a_node_that_never_reads_is_disconnected() {
    let mut cloud = Cloud::start();
    let mut other = raw::session(&mut cloud, "edge-1").await;
    let _slow = raw::session(&mut cloud, "edge-2").await;
    let start = Instant::now();
    let large = CloudMessage::Cancel { task: task("j"), reason: "x".repeat(900_000) };
    let full = async {
        loop {
            match cloud.sessions.send(&"edge-2".into(), large.clone()) {
                Ok(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(error) => return error,
            }
        }
    };
    assert_eq!(timeout(SOON, full).await.unwrap(), SendError::Full);
    assert!(!cloud.sessions.is_online(&"edge-2".into()));
    // The close does not wait for the write that is stuck.
    assert_eq!(cloud.down().await.0, "edge-2".into());
    assert!(start.elapsed() < Duration::from_secs(10));
    cloud.sessions.send(&"edge-1".into(), ack("still there")).unwrap();
    assert_eq!(heard(&mut other).await, ack("still there"));
}

#[tokio::test]
async fn a_flood_ends_its_session() {
    let mut cloud = Cloud::start();
    let socket = raw::session(&mut cloud, "edge-1").await;
    let (mut sink, mut stream) = socket.split();
    let flood = async {
        let text = prepull_api::wire::encode_frame(&EdgeMessage::Accepted { task: task("j") }).unwrap();
        while sink.send(Message::text(text.clone())).await.is_ok() {}
        std::future::pending::<()>().await;
    };
    let ended = async {
        loop {
            match stream.next().await {
                Some(Ok(Message::Close(frame))) => return frame.unwrap().reason.as_str().to_owned(),
                Some(Ok(_)) => {}
                // The flood may break its connection before it reads the close frame.
                Some(Err(_)) | None => return "too many messages".to_owned(),
            }
        }
    };
    let (start, mut counted) = (Instant::now(), 0_u32);
    let counting = async {
        loop {
            match cloud.event().await {
                prepull_engine::fleet::session::SessionEvent::Message { .. } => counted += 1,
                prepull_engine::fleet::session::SessionEvent::Down { .. } => return,
                other @ prepull_engine::fleet::session::SessionEvent::Up { .. } => panic!("{other:?}"),
            }
        }
    };
    let both = timeout(4 * SOON, async { tokio::join!(ended, counting) });
    let reason = tokio::select! {
        () = flood => unreachable!(),
        both = both => both.expect("the flood did not end").0,
    };
    assert!(reason.starts_with("too many messages"), "{reason}");
    // The burst, the tolerated excess, and the rate for as long as it took.
    let most = 400.0 + 450.0 + 150.0 * start.elapsed().as_secs_f64() + 1.0;
    assert!(counted >= 400 && f64::from(counted) <= most, "{counted} of {most}");
}

#[tokio::test]
async fn abandoned_handshakes_do_not_block_others() {
    let settings = ListenerSettings {
        max_handshakes: 2,
        handshake_deadline: Duration::from_millis(500),
        ..ListenerSettings::default()
    };
    let mut cloud = Cloud::start_with(settings);
    let mut idle = Vec::new();
    for _ in 0..4 {
        idle.push(TcpStream::connect(cloud.tunnel).await.unwrap());
    }
    raw::session(&mut cloud, "edge-1").await;
    let mut rest = Vec::new();
    timeout(SOON, idle[0].read_to_end(&mut rest)).await.unwrap().ok();
}

/// The connection is accepted at once rather than left in the kernel's backlog, which would overflow.
#[tokio::test]
async fn a_late_handshake_is_closed() {
    let (queue_deadline, handshake_deadline) = (Duration::from_millis(300), Duration::from_secs(20));
    let settings = ListenerSettings {
        max_handshakes: 1,
        queue_deadline,
        handshake_deadline,
        handshake_patience: handshake_deadline,
        handshake_turn: handshake_deadline,
        ..ListenerSettings::default()
    };
    let cloud = Cloud::start_with(settings);
    let hello = client_hello(&cloud);
    let mut first = TcpStream::connect(cloud.tunnel).await.unwrap();
    first.write_all(&hello).await.unwrap(); // and nothing more
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (mut second, mut rest) = (TcpStream::connect(cloud.tunnel).await.unwrap(), Vec::new());
    second.write_all(&hello).await.unwrap();
    let start = Instant::now();
    timeout(SOON, second.read_to_end(&mut rest)).await.unwrap().ok();
    let waited = start.elapsed();
    assert!((queue_deadline..handshake_deadline / 2).contains(&waited), "{waited:?}");
}

#[tokio::test]
async fn the_connections_of_one_node_are_limited() {
    let cloud = Cloud::start();
    let tls = tls(&cloud, Some(&Credentials::of(&cloud, "edge-1")));
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(dial(cloud.tunnel, tls.clone()).await.unwrap());
    }
    let Err(Error::Http(response)) = dial(cloud.tunnel, tls.clone()).await else {
        panic!("a fifth was accepted")
    };
    assert_eq!(response.status().as_u16(), 429);
    drop(open);
    let again = async {
        while dial(cloud.tunnel, tls.clone()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, again).await.unwrap();
}
