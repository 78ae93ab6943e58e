#![allow(clippy::unwrap_used)]

use std::time::{Duration, UNIX_EPOCH};

use futures::FutureExt;
use prepull_admission::records::record::NodeRecord;
use prepull_api::enroll::SubjectForm;
use tokio::time::Instant;

use super::*;

const CA: CaFingerprint = [7; 32];
const LATER: Duration = Duration::from_secs(1_800_000_000);
/// By then a key that was seen is recorded.
const SEEN: Duration = Duration::from_secs(3);

fn held(byte: u8) -> HeldKey {
    HeldKey::new(KeyHash::new([byte; 32]), UNIX_EPOCH + LATER)
}

fn peer(node: &str, byte: u8) -> PeerIdentity {
    let (key, form) = (KeyHash::new([byte; 32]), SubjectForm::Own);
    PeerIdentity { node: node.into(), form, key, not_after: UNIX_EPOCH + LATER }
}

/// Another process with the same store, as a command or a successor is.
fn beside(roster: &Roster) -> Roster {
    Roster::new(roster.shared.store.clone(), Alarms::new(None, RosterMetrics::default()))
}

async fn stored(roster: &Roster, node: &str) -> NodeRecord {
    let node = node.into();
    roster.shared.store.read(ShardId::for_node(&node)).await.unwrap().record(&node)
}

async fn revoke(roster: &Roster, node: &str) {
    let change = RecordChange::Revoke { at: "t".to_owned() };
    roster.shared.store.change(&node.into(), &change).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_thousand_joins_at_once_are_a_few_writes() {
    let roster = Roster::in_memory();
    let joins = (0..1000).map(|n| {
        let roster = roster.clone();
        async move { roster.join(&NodeName(format!("edge-{n}")), JoinScope::Fleet, held(1)).await }
    });
    for joined in futures::future::join_all(joins).await {
        joined.unwrap();
    }
    let shards = roster.shared.store.read_all().await.unwrap();
    let records: usize = shards.iter().map(|(_, shard)| shard.records.len()).sum();
    let writes: u64 =
        shards.iter().map(|(_, shard)| shard.version.as_ref().unwrap().parse::<u64>().unwrap()).sum();
    assert_eq!(records, 1000);
    assert!(writes <= 48, "{writes} writes");
}

/// One request after the other, so that nothing is queued when the next one comes.
#[tokio::test(start_paused = true)]
async fn writes_of_a_shard_keep_their_pace() {
    let (roster, begun) = (Roster::in_memory(), Instant::now());
    for n in 0..34 {
        roster.renew(&peer("edge-1", 1), held(2 + n), UNIX_EPOCH).await.unwrap();
    }
    let took = begun.elapsed().as_secs();
    assert!((29..=31).contains(&took), "34 writes within {took} s");
}

#[tokio::test(start_paused = true)]
async fn a_refused_renewal_takes_no_turn() {
    let (roster, begun) = (Roster::in_memory(), Instant::now());
    roster.admit(&peer("edge-1", 1), CA).unwrap();
    roster.renew(&peer("edge-1", 1), held(2), UNIX_EPOCH).await.unwrap();
    roster.admit(&peer("edge-1", 2), CA).unwrap();
    tokio::time::sleep(SEEN).await;
    for n in 0..100 {
        roster.renew(&peer("edge-1", 1), held(3 + n), UNIX_EPOCH).await.unwrap_err();
    }
    assert!(begun.elapsed() <= SEEN, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_used_key_survives_a_failover() {
    let roster = Roster::in_memory();
    roster.admit(&peer("edge-1", 1), CA).unwrap();
    assert!(stored(&roster, "edge-1").await.is_empty(), "nobody waits for the write");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(
        stored(&roster, "edge-1").await.key,
        Some(HeldKey { seen: true, ..held(1).with_certificate(Some(CA.into()), SubjectForm::Own) })
    );
    let successor = beside(&roster);
    successor.load().await;
    // Before it has written anything, which would read the record as well.
    let standing = successor.shared.view.key_standing(&"edge-1".into(), KeyHash::new([1; 32]));
    assert_eq!(standing, Ok(Standing::Known));
    successor.renew(&peer("edge-1", 1), held(2), UNIX_EPOCH).await.unwrap();
    successor.admit(&peer("edge-1", 2), CA).unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let refused = successor.renew(&peer("edge-1", 1), held(3), UNIX_EPOCH).await;
    assert!(matches!(refused, Err(Some(NodeRefusal::Superseded { .. }))), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn writes_notice_a_revocation_without_a_watch() {
    let roster = Roster::in_memory();
    roster.join(&"edge-1".into(), JoinScope::Fleet, held(1)).await.unwrap();
    revoke(&roster, "edge-1").await;
    // The watch hasn't seen the record yet: the stored one decides.
    let refused = roster.renew(&peer("edge-1", 1), held(2), UNIX_EPOCH).await;
    assert!(matches!(refused, Err(Some(NodeRefusal::Revoked { .. }))), "{refused:?}");
    assert!(roster.admit(&peer("edge-1", 1), CA).is_err(), "and from then on handshakes as well");
    let successor = beside(&roster);
    successor.load().await;
    assert!(successor.admit(&peer("edge-1", 1), CA).is_err());
}

#[tokio::test(start_paused = true)]
async fn sessions_are_looked_at_after_revocations_only() {
    let roster = Roster::in_memory();
    roster.join(&"edge-1".into(), JoinScope::Fleet, held(1)).await.unwrap();
    roster.admit(&peer("edge-1", 1), CA).unwrap();
    tokio::time::sleep(SEEN).await;
    assert_eq!(roster.wait_for_change().now_or_never(), None, "a key that is recorded ends no session");
    revoke(&roster, "edge-1").await;
    roster.load().await;
    assert_eq!(roster.wait_for_change().now_or_never(), Some(()));
    roster.renew(&peer("edge-2", 1), held(2), UNIX_EPOCH).await.unwrap();
    assert_eq!(roster.wait_for_change().now_or_never(), None, "it was known");
}

#[tokio::test(start_paused = true)]
async fn records_that_somebody_deletes_are_written_again() {
    let roster = Roster::in_memory();
    revoke(&roster, "edge-1").await;
    roster.load().await;
    let id = ShardId::for_node(&"edge-1".into());
    let ShardStore::Memory(memory) = &roster.shared.store else { panic!("in memory") };
    memory.lock().unwrap().clear();
    roster.restore(id);
    assert!(roster.admit(&peer("edge-1", 1), CA).is_err());
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(stored(&roster, "edge-1").await.revoked.is_some());
}

#[tokio::test(start_paused = true)]
async fn an_expired_certificate_raises_an_alarm() {
    let roster = Roster::in_memory();
    let end = UNIX_EPOCH + LATER;
    roster.renew(&peer("edge-1", 1), held(2), end - Duration::from_secs(1)).await.unwrap();
    roster.renew(&peer("edge-2", 1), held(2), end).await.unwrap();
    assert_eq!(roster.shared.alarms.late_renewals(), 1);
}

#[tokio::test(start_paused = true)]
async fn waits_for_a_node_just_created() {
    let (roster, begun, second) = (Roster::in_memory(), Instant::now(), Duration::from_secs(1));
    roster.set_nodes(std::iter::empty());
    let (joined, renewed, ()) = tokio::join!(
        async { roster.join(&"edge-1".into(), JoinScope::Fleet, held(1)).await },
        async { roster.renew(&peer("edge-2", 1), held(2), UNIX_EPOCH).await },
        async {
            tokio::time::sleep(second).await;
            roster.set_node(&"edge-1".into(), Some(true));
            roster.set_nodes([("edge-1".into(), true), ("edge-2".into(), true)].into_iter());
        }
    );
    assert_eq!((joined, renewed), (Ok(()), Ok(())));
    assert!(begun.elapsed() < NODE_PATIENCE, "{:?}", begun.elapsed());
    roster.wait_for_node(&"edge-1".into()).await;
    assert!(begun.elapsed() < NODE_PATIENCE, "who has a Node waits for nothing");
}

#[tokio::test(start_paused = true)]
async fn many_unknown_nodes_are_refused_at_once() {
    let (roster, begun) = (Roster::in_memory(), Instant::now());
    roster.set_nodes(std::iter::empty());
    let waits = (0..1000).map(|n| {
        let roster = roster.clone();
        async move {
            roster.wait_for_node(&NodeName(format!("edge-{n}"))).await;
            begun.elapsed()
        }
    });
    let waits = futures::future::join_all(waits).await;
    assert_eq!(waits.iter().filter(|waited| waited.is_zero()).count(), 1000 - NODE_WAITS);
    assert_eq!(begun.elapsed(), NODE_PATIENCE, "and the others after a moment");
}
