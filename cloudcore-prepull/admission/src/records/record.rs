//! The record of one node, and the decisions that follow from it. Pure: a change is applied to a record and yields
//! another one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prepull_api::enroll::SubjectForm;
use prepull_api::task::NodeName;
use serde::{Deserialize, Serialize};

use crate::ca::CaId;
use crate::key_hash::KeyHash;

/// What is recorded of a node. Without a record, it is as if the record were empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The newest key that a token has let in, or that was seen in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<HeldKey>,
    /// The key that was last renewed to, until it is seen in use: the answer with its certificate may have been lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<HeldKey>,
    /// Set by `node revoke`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<Revocation>,
}

/// A key of a node, and the end of its certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldKey {
    /// The key.
    pub sha256: KeyHash,
    /// The end of its certificate.
    #[serde(with = "rfc3339")]
    pub not_after: SystemTime,
    /// Whether a certificate of this key was seen in use.
    #[serde(default)]
    pub seen: bool,
    /// The CA that has signed the certificate, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<CaId>,
    /// Whether the certificate has the subject of release 0.1.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub old_subject: bool,
}

impl HeldKey {
    /// A key that was not seen yet. Times have whole seconds, as in certificates.
    pub fn new(sha256: KeyHash, not_after: SystemTime) -> Self {
        let seconds = not_after.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let not_after = UNIX_EPOCH + Duration::from_secs(seconds);
        Self { sha256, not_after, seen: false, ca: None, old_subject: false }
    }

    /// The same, with the details of its certificate that the commands show.
    #[must_use]
    pub fn with_certificate(self, ca: Option<CaId>, form: SubjectForm) -> Self {
        Self { ca, old_subject: form == SubjectForm::Kubelet, ..self }
    }
}

/// A node's revocation. It stands until it is taken back, also after the node has joined again: it then keeps the old
/// keys out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Revocation {
    /// When it was made, by the clock of its maker. It is shown to people and names the revocation; it is never
    /// compared with another time, so that no clock decides what is revoked.
    pub at: String,
    /// Whether the node has joined since, with a token that was made after the revocation. Then its two keys are good.
    #[serde(default)]
    pub rejoined: bool,
}

/// The scope of a joining node's token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinScope {
    /// A token for the whole fleet.
    Fleet,
    /// A token for this node. It names the revocation that stood when it was made.
    Node {
        /// That revocation.
        after_revocation: Option<String>,
    },
}

/// What happened to a node, or is to happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordChange {
    /// A certificate of this key was seen in use.
    Seen(HeldKey),
    /// The holder of `by` asks for a certificate of `requested`. It has proved to hold both keys.
    Renewed {
        /// The key of before.
        by: HeldKey,
        /// The key of the new certificate.
        requested: HeldKey,
    },
    /// The holder of a token asks for a certificate of `requested`.
    Joined {
        /// The scope of the token.
        by: JoinScope,
        /// The key of the certificate.
        requested: HeldKey,
    },
    /// `node revoke`
    Revoke {
        /// When it was made: see [`Revocation`].
        at: String,
    },
    /// `node allow`; `old_keys`: also after the node has joined again.
    Allow {
        /// Whether the keys of before are let in as well.
        old_keys: bool,
    },
}

/// Why a node is refused although its certificate, or its token, is valid. The text is for the operator of the edge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the text of each explains it")]
pub enum NodeRefusal {
    #[error(
        "node {node} is revoked ({at}): `edgecore-prepull install --rejoin` with a new token of its own lets it in again \
         (`kubectl prepull tokens create --node {node}`), and `kubectl prepull node allow {node}` takes the revocation back"
    )]
    Revoked { node: NodeName, at: String },
    #[error(
        "a newer key of node {node} has superseded this one, and only the newest is renewed: this state directory was \
         copied, or restored from a copy. Stop the other machine, and run `edgecore-prepull install --rejoin` with a new \
         token of this node (`kubectl prepull tokens create --node {node}`)"
    )]
    Superseded { node: NodeName, newest: KeyHash },
    #[error(
        "the cluster has no Node {node}: is --node-name right? An edge is served as long as its Node exists; this one \
         tries again by itself"
    )]
    NoNode { node: NodeName },
    #[error(
        "a token for the fleet admits edge nodes only, and the Node {node} is none: label it {}=, or ask for a token of \
         its own (`kubectl prepull tokens create --node {node}`)",
        prepull_api::crd::EDGE_LABEL
    )]
    NotAnEdge { node: NodeName },
    #[error(
        "node {node} has joined before, and a token for the fleet admits a node once: ask for a token of its own \
         (`kubectl prepull tokens create --node {node}`)"
    )]
    HasJoined { node: NodeName },
    #[error(
        "node {node} was revoked ({at}) after this token was made: ask for a new one of its own (`kubectl prepull \
         tokens create --node {node}`)"
    )]
    OldToken { node: NodeName, at: String },
    #[error(
        "node {node} has joined again since it was revoked ({at}), and is let in: there is nothing to take back. Without the \
         revocation its keys of before would be let in as well; if that is what you want, give --old-keys"
    )]
    HasRejoined { node: NodeName, at: String },
}

/// How a key that is let in stands to its node's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The record has all of it.
    Known,
    /// The record does not say yet that this key is in use.
    ToBeRecorded,
    /// A newer key of the node is in use: one of the two holders has a copy.
    Superseded {
        /// That key.
        newest: KeyHash,
    },
}

/// What people are shown of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// The end of its certificate.
    pub certificate_until: Option<SystemTime>,
    /// Whether it is kept out.
    pub is_revoked: bool,
}

impl NodeRecord {
    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What people are shown of it. A renewal that was not seen in use yet may have reached the edge.
    pub fn for_display(&self) -> Recorded {
        let until = [self.key, self.next].into_iter().flatten().map(|held| held.not_after).max();
        let is_revoked = self.revoked.as_ref().is_some_and(|revocation| !revocation.rejoined);
        Recorded { certificate_until: until, is_revoked }
    }

    fn holds(&self, key: KeyHash) -> bool {
        [self.key, self.next].iter().flatten().any(|held| held.sha256 == key)
    }

    /// Whether the holder of a valid certificate of this key is let in.
    ///
    /// A superseded key is: it ends with its certificate, since it is not renewed. Its holder may be the thief or the
    /// victim, and a box that was restored from a snapshot must not lose its work at once.
    pub fn check_standing(&self, node: &NodeName, key: KeyHash) -> Result<Standing, NodeRefusal> {
        if let Some(Revocation { at, rejoined }) = &self.revoked
            && !(*rejoined && self.holds(key))
        {
            return Err(NodeRefusal::Revoked { node: node.clone(), at: at.clone() });
        }
        Ok(match (self.key, self.next) {
            (Some(held), _) if held.sha256 == key && held.seen => Standing::Known,
            (Some(held), next) if held.sha256 != key && next.is_none_or(|next| next.sha256 != key) => {
                // Before the newest one was seen, the older one is in its right: a join may have got no answer.
                if held.seen { Standing::Superseded { newest: held.sha256 } } else { Standing::Known }
            }
            _ => Standing::ToBeRecorded,
        })
    }

    /// The record after the change.
    pub fn with_change(&self, node: &NodeName, change: &RecordChange) -> Result<Self, NodeRefusal> {
        let mut record = self.clone();
        match change {
            RecordChange::Seen(used) => record.note_use(node, *used),
            RecordChange::Renewed { by, requested } => record.renew(node, *by, *requested)?,
            RecordChange::Joined { by, requested } => record.join(node, by, *requested)?,
            RecordChange::Revoke { at } => match &record.revoked {
                Some(Revocation { rejoined: false, .. }) => {}
                _ => record.revoked = Some(Revocation { at: at.clone(), rejoined: false }),
            },
            RecordChange::Allow { old_keys } => match &record.revoked {
                Some(Revocation { at, rejoined: true }) if !old_keys => {
                    return Err(NodeRefusal::HasRejoined { node: node.clone(), at: at.clone() });
                }
                _ => record.revoked = None,
            },
        }
        Ok(record)
    }

    /// A key that is let in and is in use supersedes those before it.
    fn note_use(&mut self, node: &NodeName, used: HeldKey) {
        let used = HeldKey { seen: true, ..used };
        match (self.check_standing(node, used.sha256), self.next) {
            (Ok(Standing::ToBeRecorded), Some(next)) if next.sha256 == used.sha256 => {
                (self.key, self.next) = (Some(HeldKey { seen: true, ..next }), None);
            }
            (Ok(Standing::ToBeRecorded), _) => {
                self.key = Some(self.key.map_or(used, |held| HeldKey { seen: true, ..held }));
            }
            _ => {}
        }
    }

    fn renew(&mut self, node: &NodeName, by: HeldKey, requested: HeldKey) -> Result<(), NodeRefusal> {
        let newest = self.key.map(|held| held.sha256);
        let standing = self.check_standing(node, by.sha256)?;
        self.note_use(node, by);
        let holds_by = self.holds(by.sha256);
        match (&mut self.key, &mut self.next) {
            // It has proved to hold a recorded key, be it by TLS or by the request: an agent that runs on while a join
            // on the same machine has got no answer asks for the key of that join.
            (Some(held), _) if held.sha256 == requested.sha256 => {
                *held = HeldKey { seen: held.seen, ..requested }
            }
            (_, Some(next)) if next.sha256 == requested.sha256 => *next = requested,
            // A second unseen key replaces the first one, since the first one's file was lost. If it wasn't, its use
            // will show.
            (_, next) if holds_by => *next = Some(requested),
            _ => {
                let newest = match standing {
                    Standing::Superseded { newest } => newest,
                    Standing::Known | Standing::ToBeRecorded => newest.unwrap_or(by.sha256),
                };
                return Err(NodeRefusal::Superseded { node: node.clone(), newest });
            }
        }
        Ok(())
    }

    /// A join with a token is deliberate, so its key is the node's at once. Its answer may be lost, so the same key
    /// may join again.
    fn join(&mut self, node: &NodeName, by: &JoinScope, requested: HeldKey) -> Result<(), NodeRefusal> {
        let again = self.key.filter(|held| held.sha256 == requested.sha256);
        match (by, &mut self.revoked) {
            (JoinScope::Fleet, Some(Revocation { at, .. })) => {
                return Err(NodeRefusal::Revoked { node: node.clone(), at: at.clone() });
            }
            (JoinScope::Fleet, None) if self.key.is_some() && again.is_none() => {
                return Err(NodeRefusal::HasJoined { node: node.clone() });
            }
            (JoinScope::Node { after_revocation }, Some(Revocation { at, rejoined })) => {
                if after_revocation.as_ref() != Some(at) {
                    return Err(NodeRefusal::OldToken { node: node.clone(), at: at.clone() });
                }
                *rejoined = true;
            }
            (JoinScope::Fleet | JoinScope::Node { .. }, None) => {}
        }
        let seen = again.is_some_and(|held| held.seen);
        (self.key, self.next) = (Some(HeldKey { seen, ..requested }), None);
        Ok(())
    }
}

mod rfc3339 {
    //! Times as people read them.

    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_rfc3339_seconds(*time))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
