#![allow(clippy::unwrap_used)]

use tokio::io::{DuplexStream, duplex};
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;
use crate::{ByteCount, websocket_config};

const TERMS: Terms = Terms { heartbeat: Duration::from_secs(15), write_grace: Duration::from_secs(10) };

async fn channel(stream: DuplexStream, role: Role) -> Channel<DuplexStream> {
    let socket = WebSocketStream::from_raw_socket(
        CountingStream::new(stream, ByteCount::default()),
        role,
        Some(websocket_config()),
    )
    .await;
    Channel::new(socket, TERMS)
}

/// A server's channel, and the bare stream of its peer.
async fn server_and_stream(room: usize) -> (Channel<DuplexStream>, DuplexStream) {
    let (ours, theirs) = duplex(room);
    (channel(ours, Role::Server).await, theirs)
}

/// A server's and a client's channel, connected to each other.
async fn server_and_client(room: usize) -> (Channel<DuplexStream>, Channel<DuplexStream>) {
    let (ours, theirs) = duplex(room);
    (channel(ours, Role::Server).await, channel(theirs, Role::Client).await)
}

async fn until_text(channel: &mut Channel<DuplexStream>) -> Result<Utf8Bytes, ChannelEnd> {
    loop {
        if let ChannelEvent::Text(text) = channel.next(true).await? {
            return Ok(text);
        }
    }
}

async fn until_end(channel: &mut Channel<DuplexStream>, read: bool) -> ChannelEnd {
    loop {
        if let Err(ended) = channel.next(read).await {
            return ended;
        }
    }
}

/// A masked text frame, as a client sends it; the mask is zero.
fn frame(text: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x81, 0x80 | 127];
    frame.extend((text.len() as u64).to_be_bytes());
    frame.extend([0; 4]);
    frame.extend(text);
    frame
}

#[tokio::test(start_paused = true)]
async fn heartbeats_keep_two_idle_peers_connected() {
    let (mut a, mut b) = server_and_client(1024).await;
    let hour = Duration::from_secs(3600);
    let both = async { tokio::join!(until_end(&mut a, true), until_end(&mut b, true)) };
    assert!(timeout(hour, both).await.is_err(), "a session ended although both ends were alive");
}

#[tokio::test(start_paused = true)]
async fn fragments_without_content_count() {
    let (mut channel, mut peer) = server_and_stream(1 << 20).await;
    // A text that goes on, and a thousand times that it still does, between which pings may come.
    let fragments = [[0x01, 0x80, 0, 0, 0, 0]].into_iter().chain([[0, 0x80, 0, 0, 0, 0]; 1000]);
    peer.write_all(&fragments.flatten().collect::<Vec<u8>>()).await.unwrap();
    peer.write_all(&[0x89, 0x80, 0, 0, 0, 0]).await.unwrap();
    assert!(matches!(channel.next(true).await, Ok(ChannelEvent::Control)));
    assert_eq!((channel.take_received(), channel.take_received()), (6 * 1002, 0));
}

#[tokio::test(start_paused = true)]
async fn silence_ends_the_session_after_two_heartbeats() {
    let (mut channel, mut peer) = server_and_stream(1024).await;
    peer.write_all(&[0x8a, 0x80, 0, 0, 0, 0]).await.unwrap(); // a pong, and then nothing
    let start = Instant::now();
    assert!(matches!(until_end(&mut channel, true).await, ChannelEnd::Silent(_)));
    assert_eq!(start.elapsed().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_slowly_arriving_message_is_not_silence() {
    let (mut channel, mut peer) = server_and_stream(64).await;
    let slowly = async {
        for chunk in frame(&[b'x'; 600]).chunks(10) {
            tokio::time::sleep(Duration::from_secs(5)).await;
            peer.write_all(chunk).await.unwrap();
        }
        std::future::pending::<()>().await;
    };
    let text = tokio::select! {
        text = until_text(&mut channel) => text.unwrap(),
        () = slowly => unreachable!(),
        // Limited, because the peer never reads our pings.
        () = tokio::time::sleep(Duration::from_secs(3600)) => panic!("never came"),
    };
    assert_eq!(text.len(), 600);
}

#[tokio::test(start_paused = true)]
async fn a_write_deadline_grows_with_the_size_of_the_message() {
    for (size, seconds) in [(1000, 10), (512 * 1024, 10 + 64)] {
        let (mut channel, _peer) = server_and_stream(64).await;
        let start = Instant::now();
        channel.start_send("x".repeat(size).into()).unwrap();
        assert!(!channel.is_writable());
        let ended = until_end(&mut channel, false).await;
        assert!(matches!(ended, ChannelEnd::Stalled(_)), "{ended}");
        assert_eq!(start.elapsed().as_secs(), seconds);
    }
}

#[tokio::test(start_paused = true)]
async fn silence_does_not_count_while_we_do_not_read() {
    let (mut channel, _peer) = server_and_stream(64 * 1024).await;
    assert!(timeout(Duration::from_secs(600), until_end(&mut channel, false)).await.is_err());
}

#[tokio::test]
async fn simultaneous_writes_do_not_block() {
    let (mut a, mut b) = server_and_client(512).await;
    a.start_send("a".repeat(900_000).into()).unwrap();
    b.start_send("b".repeat(900_000).into()).unwrap();
    let both = async {
        let one = async |channel: &mut Channel<DuplexStream>| {
            let (mut came, mut went) = (0, false);
            while came == 0 || !went {
                match channel.next(true).await.unwrap() {
                    ChannelEvent::Text(text) => came = text.len(),
                    ChannelEvent::Writable => went = true,
                    ChannelEvent::Control => {}
                }
            }
            came
        };
        tokio::join!(one(&mut a), one(&mut b))
    };
    assert_eq!(timeout(Duration::from_secs(20), both).await.unwrap(), (900_000, 900_000));
}

#[tokio::test]
async fn invalid_frames_end_the_session() {
    let cases: [(&[u8], u16, &str); 3] = [
        (
            &[0x81, 0xff, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0],
            1009,
            "message of 2097152 bytes; at most 1048576",
        ),
        (&[0x82, 0x81, 0, 0, 0, 0, b'x'], 1002, "messages are text frames"),
        (&[0x81, 0x01, b'x'], 1002, "protocol violation"), // not masked
    ];
    for (bytes, code, reason) in cases {
        let (mut channel, mut peer) = server_and_stream(4096).await;
        peer.write_all(bytes).await.unwrap();
        let ended = until_end(&mut channel, true).await;
        let told = ended.to_string();
        let close = channel.close(ended.close_code().unwrap(), &told);
        let heard = async {
            let mut head = [0; 4];
            peer.read_exact(&mut head).await.unwrap();
            assert_eq!((head[0], u16::from_be_bytes([head[2], head[3]])), (0x88, code));
            let mut text = vec![0; usize::from(head[1]) - 2];
            peer.read_exact(&mut text).await.unwrap();
            drop(peer);
            String::from_utf8(text).unwrap()
        };
        let ((), heard) = tokio::join!(close, heard);
        assert!(heard.contains(reason), "{heard}");
    }
}

#[tokio::test]
async fn control_characters_in_the_peers_reason_are_replaced() {
    let (mut a, b) = server_and_client(1024).await;
    let (ended, ()) = tokio::join!(until_end(&mut a, true), b.close(CloseCode::Away, "line\nbreak"));
    let ChannelEnd::ByPeer { code, reason } = ended else { panic!("{ended}") };
    assert_eq!((code, reason.as_str()), (1001, "line break"));
}

#[tokio::test(start_paused = true)]
async fn closing_takes_at_most_two_seconds() {
    let (channel, _peer) = server_and_stream(1).await;
    let start = Instant::now();
    channel.close(CloseCode::Normal, "bye").await;
    assert_eq!(start.elapsed(), CLOSE_GRACE);
}

#[tokio::test]
async fn ending_without_a_close_frame_is_a_cut() {
    let (mut channel, peer) = server_and_stream(1).await;
    drop(peer);
    assert!(matches!(until_end(&mut channel, true).await, ChannelEnd::Cut));
}
