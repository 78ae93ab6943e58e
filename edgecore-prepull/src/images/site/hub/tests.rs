#![allow(clippy::unwrap_used)]

use futures::FutureExt;
use prepull_api::sites::{BlobPeer, BlobSource, PeerFault, TicketTerms};
use prepull_api::task::JobUid;

use super::super::{BlobOrigin, Seeker, Sought};
use super::*;
use crate::images::rate::Bucket;

const SIZE: u64 = 10 << 20;

fn hub() -> Arc<Hub> {
    Arc::new(Hub::new(Duration::from_secs(60), Arc::default()))
}

fn task() -> TaskId {
    TaskId { job: JobUid("uid".to_owned()), attempt: 1 }
}

fn seek(hub: &Arc<Hub>, digest: &str, size: u64, done: u64, site_limited: bool) -> Option<Seeker> {
    let (task, repository) = (&task(), "r.io/a");
    hub.seek(&Sought { task, repository, digest, size, done, site_limited, deadline: None })
}

fn welcome(tickets: bool) -> Welcome {
    let second = Duration::from_secs(1);
    let terms = TicketTerms { key: "00".repeat(32), now: second };
    let (session, state_interval, tickets) = ("s".to_owned(), None, tickets.then_some(terms));
    Welcome { session, heartbeat: second, progress_interval: second, state_interval, tickets }
}

/// What the cloud hears now: the state of each blob, and who did not deliver.
fn heard(hub: &Hub) -> Vec<(String, BlobState, u64)> {
    let messages = hub.take_news().into_iter().map(|message| match message {
        EdgeMessage::Blobs(blobs) => blobs,
        other => panic!("{other:?}"),
    });
    messages.flat_map(|blobs| blobs.blobs).map(|blob| (blob.digest, blob.state, blob.done)).collect()
}

fn peer(node: &str) -> BlobPeer {
    BlobPeer {
        node: node.into(),
        addresses: vec!["10.0.0.1:1".to_owned()],
        ticket: "9999999999.ab".to_owned(),
    }
}

fn tell(hub: &Hub, digest: &str, from: From) {
    let blobs = vec![BlobSource { digest: digest.to_owned(), from }];
    hub.apply_sources(BlobSources { task: task(), blobs });
}

fn carry() -> From {
    From::Registry { alone: String::new(), max_rate: None }
}

#[tokio::test(start_paused = true)]
async fn a_pull_does_as_the_cloud_says_and_tells_what_becomes_of_it() {
    let hub = hub();
    hub.begin_session(&welcome(true));
    let mut seeker = seek(&hub, "a", SIZE, 7, false).unwrap();
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Wanted, 7)]);
    assert!(seeker.wait_for_origin().now_or_never().is_none());
    tell(&hub, "a", carry());
    assert_eq!(seeker.wait_for_origin().await, BlobOrigin::Registry(None));
    seeker.set_done(9);
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Carrying, 9)]);
    tell(&hub, "a", carry());
    assert!(!seeker.is_redirected(), "a repetition breaks nothing off");
    tell(&hub, "a", From::Peers { peers: vec![peer("b"), peer("c")] });
    assert!(seeker.is_redirected());
    assert_eq!(seeker.wait_for_origin().await, BlobOrigin::Peer(peer("b")));
    seeker.note_fault(&"b".into(), PeerFault::Unreachable);
    assert_eq!(
        seeker.wait_for_origin().await,
        BlobOrigin::Peer(peer("c")),
        "the next one, without a question"
    );
    seeker.note_fault(&"c".into(), PeerFault::Busy);
    assert!(seeker.wait_for_origin().now_or_never().is_none());
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Wanted, 9)]);
    seeker.note_arrived();
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Here, SIZE)]);
    drop(seek(&hub, "b", SIZE, 0, false).unwrap());
    assert_eq!(heard(&hub), [("b".to_owned(), BlobState::Dropped, 0)]);
    assert!(seek(&hub, "small", LEAST_SHARED - 1, 0, false).is_none());
}

#[tokio::test]
async fn a_task_sent_again_repeats_its_wants() {
    let hub = hub();
    hub.begin_session(&welcome(true));
    let _seeker = seek(&hub, "a", SIZE, 0, false).unwrap();
    assert_eq!(heard(&hub).len(), 1);
    hub.repeat_wants(&TaskId { attempt: 2, ..task() });
    assert_eq!(heard(&hub), []);
    hub.repeat_wants(&task());
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Wanted, 0)]);
}

#[tokio::test(start_paused = true)]
async fn without_a_word_from_the_cloud_a_pull_helps_itself() {
    let hub = hub();
    let mut seeker = seek(&hub, "a", SIZE, 0, false).unwrap();
    let (begun, way) = (Instant::now(), seeker.wait_for_origin().await);
    assert!(matches!(way, BlobOrigin::Registry(Some(why)) if why.contains("60 s")));
    assert_eq!(begun.elapsed().as_secs(), 60);
    drop(seeker);
    // Any word about the task is a sign that the others are waited for.
    let mut seeker = seek(&hub, "a", SIZE, 0, false).unwrap();
    let begun = Instant::now();
    let reminding = async {
        for _ in 0..9 {
            sleep(Duration::from_secs(20)).await;
            tell(&hub, "other", From::Wait);
        }
    };
    tokio::join!(reminding, async { seeker.wait_for_origin().await });
    assert_eq!(begun.elapsed().as_secs(), 9 * 20 + 60);
}

#[tokio::test(start_paused = true)]
async fn where_the_site_has_a_limit_a_pull_waits_for_the_cloud_and_keeps_to_its_part() {
    let hub = hub();
    let mut seeker = seek(&hub, "a", SIZE, 0, true).unwrap();
    let day = Duration::from_secs(24 * 3600);
    assert!(tokio::time::timeout(day, seeker.wait_for_origin()).await.is_err());
    let part = |rate| From::Registry { alone: String::new(), max_rate: std::num::NonZeroU64::new(rate) };
    tell(&hub, "a", part(1000));
    assert_eq!(seeker.wait_for_origin().await, BlobOrigin::Registry(None));
    let begun = Instant::now();
    seeker.take_bytes(10_000, None).await;
    assert!((9..=10).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    tell(&hub, "a", part(10_000));
    assert!(!seeker.is_redirected(), "another part breaks nothing off");
    let begun = Instant::now();
    seeker.take_bytes(10_000, None).await;
    assert!(begun.elapsed().as_secs() <= 1, "{:?}", begun.elapsed());
    // A larger part holds for bytes that are being paid for.
    tell(&hub, "a", part(100));
    let begun = Instant::now();
    let raising = async {
        sleep(Duration::from_secs(10)).await;
        tell(&hub, "a", part(10_000));
    };
    tokio::join!(seeker.take_bytes(11_000, None), raising);
    assert!((10..=13).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}

#[test]
fn a_new_session_hears_everything_and_an_older_cloud_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _guard = runtime.enter();
    let hub = hub();
    let seeker = seek(&hub, "a", SIZE, 0, false).unwrap();
    hub.announce(&task(), "b", SIZE);
    assert_eq!(heard(&hub), []);
    hub.begin_session(&welcome(false));
    assert_eq!(heard(&hub), [], "it would end the session");
    let all = [("a".to_owned(), BlobState::Wanted, 0), ("b".to_owned(), BlobState::Here, SIZE)];
    for _ in 0..2 {
        hub.begin_session(&welcome(true));
        assert_eq!(heard(&hub), all);
        assert_eq!(heard(&hub), []);
        hub.end_session();
    }
    drop(seeker);
    hub.begin_session(&welcome(true));
    heard(&hub);
    // What the cloud believes of a node that was restarted is put right.
    tell(&hub, "a", carry());
    tell(&hub, "b", carry());
    assert_eq!(
        heard(&hub),
        [("a".to_owned(), BlobState::Dropped, 0), ("b".to_owned(), BlobState::Here, SIZE)]
    );
}

#[tokio::test]
async fn a_wanted_blob_is_not_here() {
    let hub = hub();
    hub.announce(&task(), "a", SIZE);
    let (task, repository) = (&TaskId { attempt: 2, ..task() }, "r.io/a");
    let (digest, size, done, site_limited, deadline) = ("a", SIZE, 0, false, None);
    let sought = Sought { task, repository, digest, size, done, site_limited, deadline };
    let _seeker = hub.seek(&sought).unwrap();
    hub.begin_session(&welcome(true));
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Wanted, 0)]);
}

#[tokio::test]
async fn what_has_come_further_is_told_now_and_then() {
    let hub = hub();
    hub.begin_session(&welcome(true));
    let seeker = seek(&hub, "a", SIZE, 0, false).unwrap();
    heard(&hub);
    seeker.set_done(5);
    assert_eq!(heard(&hub), []);
    hub.lock().note_progress();
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Wanted, 5)]);
    hub.lock().note_progress();
    assert_eq!(heard(&hub), [], "nothing has come");
}

#[tokio::test(start_paused = true)]
async fn a_pull_helps_itself_in_time() {
    let hub = hub();
    let (task, deadline) = (task(), Some(Instant::now() + Duration::from_secs(1000)));
    let (task, repository) = (&task, "r.io/a");
    let sought = Sought { task, repository, digest: "a", size: SIZE, done: 0, site_limited: true, deadline };
    let mut seeker = hub.seek(&sought).unwrap();
    let begun = Instant::now();
    let reminding = async {
        loop {
            sleep(Duration::from_secs(20)).await;
            tell(&hub, "a", From::Wait);
        }
    };
    let way = tokio::select! {
        way = seeker.wait_for_origin() => way,
        () = reminding => unreachable!(),
    };
    assert!(matches!(way, BlobOrigin::Registry(Some(why)) if why.contains("half of its time")));
    assert_eq!(begun.elapsed().as_secs(), 500);
    tell(&hub, "a", From::Peers { peers: vec![peer("b")] });
    assert!(!seeker.is_redirected(), "it ignores the cloud");
    let site = Bucket::new(std::num::NonZeroU64::new(1000));
    let begun = Instant::now();
    seeker.take_bytes(10_000, Some(&site)).await;
    assert!((9..=10).contains(&begun.elapsed().as_secs()), "the site's limit holds: {:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_expired_ticket_is_asked_for_again() {
    let hub = hub();
    hub.begin_session(&welcome(true));
    let mut seeker = seek(&hub, "a", SIZE, 0, false).unwrap();
    let with =
        |ticket: &str| From::Peers { peers: vec![BlobPeer { ticket: ticket.to_owned(), ..peer("b") }] };
    tell(&hub, "a", with("60.ab"));
    assert!(matches!(seeker.wait_for_origin().await, BlobOrigin::Peer(_)));
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Fetching, 0)]);
    sleep(Duration::from_secs(60)).await;
    assert!(seeker.wait_for_origin().now_or_never().is_none());
    assert_eq!(heard(&hub), [("a".to_owned(), BlobState::Wanted, 0)]);
    tell(&hub, "a", with("120.ab"));
    assert!(matches!(seeker.wait_for_origin().await, BlobOrigin::Peer(peer) if peer.ticket == "120.ab"));
    tell(&hub, "a", with("180.ab"));
    assert!(!seeker.is_redirected(), "a fresh ticket breaks nothing off");
}

#[tokio::test(start_paused = true)]
async fn tickets_for_one_repository_open_no_others_blob() {
    let hub = hub();
    hub.begin_session(&welcome(true));
    let want = |task: &TaskId, repository: &str| {
        let (digest, deadline) = ("a", None);
        hub.seek(&Sought { task, repository, digest, size: SIZE, done: 0, site_limited: false, deadline })
            .unwrap()
    };
    let evil = want(&task(), "evil.io/x");
    assert_eq!(hub.sought_from("a").as_deref(), Some("evil.io/x"));
    // It has never had the blob, but its neighbours may have tickets for what would have come.
    drop(evil);
    assert_eq!(hub.sought_from("a"), None);
    assert!(hub.may_serve("a", "evil.io/x") && !hub.may_serve("a", "r.io/bank"));
    assert!(hub.may_serve("b", "r.io/bank"), "another blob");
    want(&TaskId { attempt: 2, ..task() }, "r.io/bank").note_arrived();
    assert!(!hub.may_serve("a", "r.io/bank"), "here, and the tickets are still good");
    tokio::time::advance(TICKET).await;
    assert!(hub.may_serve("a", "r.io/bank"));
}
