#![allow(clippy::unwrap_used)]

use super::*;

fn key(byte: u8) -> KeyHash {
    KeyHash::new([byte; 32])
}

fn held(byte: u8) -> HeldKey {
    HeldKey::new(key(byte), UNIX_EPOCH + Duration::from_secs(1_800_000_000))
}

fn node() -> NodeName {
    "edge-1".into()
}

/// A node and what is asked of it.
#[derive(Clone, Debug, Default)]
struct Subject(NodeRecord);

impl Subject {
    fn after(&mut self, change: &RecordChange) -> Result<(), NodeRefusal> {
        self.0 = self.0.with_change(&node(), change)?;
        Ok(())
    }

    fn seen(&mut self, byte: u8) -> &mut Self {
        self.after(&RecordChange::Seen(held(byte))).unwrap();
        self
    }

    fn renew(&mut self, by: u8, requested: u8) -> Result<(), NodeRefusal> {
        self.after(&RecordChange::Renewed { by: held(by), requested: held(requested) })
    }

    fn join(&mut self, by: JoinScope, requested: u8) -> Result<(), NodeRefusal> {
        self.after(&RecordChange::Joined { by, requested: held(requested) })
    }

    fn revoke(&mut self, at: &str) {
        self.after(&RecordChange::Revoke { at: at.to_owned() }).unwrap();
    }

    fn stand(&self, byte: u8) -> Result<Standing, NodeRefusal> {
        self.0.check_standing(&node(), key(byte))
    }
}

fn own_token(after: Option<&str>) -> JoinScope {
    JoinScope::Node { after_revocation: after.map(str::to_owned) }
}

#[test]
fn a_new_key_supersedes_the_old_once_seen() {
    let mut subject = Subject::default();
    assert_eq!(subject.stand(1), Ok(Standing::ToBeRecorded), "an edge of a release without records");
    subject.seen(1).renew(1, 2).unwrap();
    assert_eq!(subject.stand(1), Ok(Standing::Known));
    assert_eq!(subject.stand(2), Ok(Standing::ToBeRecorded));
    subject.seen(2);
    assert_eq!(subject.stand(2), Ok(Standing::Known));
    assert_eq!(subject.stand(1), Ok(Standing::Superseded { newest: key(2) }));
    assert_eq!(subject.renew(1, 3), Err(NodeRefusal::Superseded { node: node(), newest: key(2) }));
    subject.renew(2, 3).unwrap();
    // A renewal is a use as well.
    subject.renew(3, 4).unwrap();
    assert!(subject.renew(2, 5).is_err());
    assert_eq!(subject.0.key.map(|held| held.sha256), Some(key(3)));
}

#[test]
fn an_unanswered_renewal_may_be_repeated() {
    let mut subject = Subject::default();
    subject.seen(1);
    subject.renew(1, 2).unwrap();
    subject.renew(1, 2).unwrap();
    subject.renew(1, 3).unwrap();
    assert_eq!(
        subject.stand(2),
        Ok(Standing::Superseded { newest: key(1) }),
        "it shows itself if it was used"
    );
    subject.seen(3);
    assert!(subject.renew(1, 2).is_err());
}

#[test]
fn a_renewal_heals_an_unanswered_join() {
    let mut subject = Subject::default();
    subject.seen(1).join(own_token(None), 2).unwrap();
    assert_eq!(subject.stand(1), Ok(Standing::Known), "no alarm as long as nobody uses the newer one");
    // The agent finds the key of the join on the disk, and asks for a certificate of it.
    subject.renew(1, 2).unwrap();
    assert_eq!(subject.0.key.map(|held| held.sha256), Some(key(2)));
    assert!(subject.renew(1, 3).is_err(), "another machine does not have that key");
    assert_eq!(subject.seen(2).stand(1), Ok(Standing::Superseded { newest: key(2) }));
}

#[test]
fn only_a_newer_token_readmits_a_revoked_node() {
    let mut subject = Subject::default();
    subject.seen(1);
    subject.renew(1, 2).unwrap(); // a second before
    subject.revoke("t1");
    subject.revoke("t2");
    for byte in [1, 2, 3] {
        assert_eq!(subject.stand(byte), Err(NodeRefusal::Revoked { node: node(), at: "t1".to_owned() }));
        assert!(matches!(subject.renew(byte, 4), Err(NodeRefusal::Revoked { .. })));
    }
    // A use that was noted before the revocation and is written after it changes nothing.
    let before = subject.clone();
    assert_eq!(subject.seen(2).0, before.0);
    assert!(matches!(subject.join(JoinScope::Fleet, 5), Err(NodeRefusal::Revoked { .. })));
    for old in [None, Some("t0")] {
        assert!(matches!(subject.join(own_token(old), 5), Err(NodeRefusal::OldToken { .. })), "{old:?}");
    }
    subject.join(own_token(Some("t1")), 5).unwrap();
    subject.join(own_token(Some("t1")), 5).unwrap(); // without an answer
    assert_eq!(subject.stand(5), Ok(Standing::ToBeRecorded));
    subject.seen(5).renew(5, 6).unwrap();
    assert!(subject.seen(6).stand(6).is_ok());
    for byte in [1, 2, 5] {
        assert!(subject.stand(byte).is_err(), "{byte}");
        assert!(subject.renew(byte, 6).is_err(), "{byte}");
    }
    // Revoked once more, the same token is of no use.
    subject.revoke("t3");
    assert!(subject.stand(6).is_err());
    assert!(matches!(subject.join(own_token(Some("t1")), 7), Err(NodeRefusal::OldToken { .. })));
}

#[test]
fn an_undone_revocation_leaves_no_trace() {
    let mut subject = Subject::default();
    subject.seen(1);
    let before = subject.clone();
    subject.revoke("t1");
    subject.after(&RecordChange::Allow { old_keys: false }).unwrap();
    assert_eq!(subject.0, before.0);
    let mut unknown = Subject::default();
    unknown.revoke("t1");
    unknown.after(&RecordChange::Allow { old_keys: false }).unwrap();
    assert!(unknown.0.is_empty());
}

#[test]
fn unrevoking_a_rejoined_node_is_refused() {
    let mut subject = Subject::default();
    subject.seen(1).revoke("t1");
    subject.join(own_token(Some("t1")), 2).unwrap();
    subject.seen(2);
    let refused = subject.after(&RecordChange::Allow { old_keys: false });
    assert_eq!(refused, Err(NodeRefusal::HasRejoined { node: node(), at: "t1".to_owned() }));
    assert!(subject.stand(1).is_err() && subject.stand(2).is_ok());
    subject.after(&RecordChange::Allow { old_keys: true }).unwrap();
    assert!(subject.stand(1).is_ok());
}

/// An edge with a disk. Its requests and answers may be lost, and it may be killed at any moment.
#[derive(Clone, Default)]
struct Edge {
    certificate: u8,
    requested: Option<u8>,
}

#[test]
fn an_uncopied_edge_is_never_locked_out() {
    let chances = |mut state: u64| {
        move |of: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % of
        }
    };
    for seed in 1..2000_u64 {
        let mut chance = chances(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (mut subject, mut last) = (Subject::default(), 1);
        let mut edge = Edge { certificate: 1, requested: None };
        for step in 0..60 {
            match chance(5) {
                0 => {
                    let standing = subject.stand(edge.certificate);
                    assert!(
                        !matches!(standing, Ok(Standing::Superseded { .. }) | Err(_)),
                        "seed {seed} step {step}: {standing:?}"
                    );
                    // The write may be lost with its cloudcore.
                    if chance(3) > 0 {
                        subject.seen(edge.certificate);
                    }
                }
                1..=3 => {
                    // The key is on the disk before it is asked for; now and then its file is lost.
                    if edge.requested.is_none() || chance(20) == 0 {
                        last += 1;
                        edge.requested = Some(last);
                    }
                    let requested = edge.requested.unwrap();
                    // Lost on its way, or recorded; and then the answer may be lost.
                    if chance(4) > 0 {
                        let renewed = subject.renew(edge.certificate, requested);
                        assert_eq!(renewed, Ok(()), "seed {seed} step {step}");
                        if chance(3) > 0 {
                            edge = Edge { certificate: requested, requested: None };
                        }
                    }
                }
                _ => {
                    // Joined again by a person, on the same disk, until an answer has come.
                    if chance(10) == 0 {
                        let requested = edge.requested.unwrap_or(last + 1);
                        last = last.max(requested);
                        subject.join(own_token(None), requested).unwrap();
                        if chance(2) == 0 {
                            subject.join(own_token(None), requested).unwrap();
                        }
                        edge = Edge { certificate: requested, requested: None };
                    }
                }
            }
        }
    }
}
