//! Join tokens: who may become which node, until when. Only a hash of a token's secret part is kept.
//!
//! A token is a Secret of our own namespace. Redeeming one is a replacement of that Secret by its resource
//! version, so that of two edges with the same token, at two replicas, one is refused.

mod record;
mod store;

use std::time::{Duration, SystemTime};

use prepull_api::credentials::Sensitive;
use prepull_api::enroll::{JoinToken, TOKEN_ID_LEN, TOKEN_SECRET_LEN, hex};
use prepull_api::task::NodeName;
use ring::rand::{SecureRandom, SystemRandom};

use record::{Decision, Record};
pub use record::{RedeemError, Scope};
pub use store::TOKEN_LABEL;
use store::{Store, StoreError};

/// Tries to mark a token as used. Each is lost only where someone else has changed the very same token.
const MARK_TRIES: usize = 5;

/// Why a token was not made, listed, revoked or redeemed.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// It does not entitle its holder. The text is for the operator on the edge.
    #[error(transparent)]
    Refused(#[from] RedeemError),
    /// Where the tokens are kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such token.
    #[error("there is no token {0}: `cloudcore-prepull token list` shows those there are")]
    NotFound(String),
    /// `--node` with something else than a node's name.
    #[error("{0:?} is not a node's name: lower-case letters, digits, '-' and '.', as in `kubectl get nodes`")]
    NotANode(String),
    /// It was changed again and again while it was to be marked.
    #[error("token {0} is being redeemed by others at the same moment: try again")]
    Contended(String),
    /// The operating system gives no random bytes.
    #[error("no random bytes from the operating system")]
    Random,
}

/// A token, without what would let anyone use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedToken {
    /// Its name.
    pub id: String,
    /// Whom it lets in.
    pub scope: Scope,
    /// Its end.
    pub expires: SystemTime,
    /// Whether its node has joined with it. A fleet's token does not keep count.
    pub used: bool,
}

/// All join tokens.
#[derive(Clone, Debug)]
pub struct Tokens {
    store: Store,
}

impl Tokens {
    /// Kept as Secrets in `namespace`.
    pub fn in_cluster(client: kube::Client, namespace: &str) -> Self {
        Self { store: Store::in_cluster(client, namespace) }
    }

    /// Kept by this process alone: for tests, and for trying things out without a cluster.
    pub fn in_memory() -> Self {
        Self { store: Store::in_memory() }
    }

    /// A new token, for the server whose CA has this hash. Its text exists in the answer and nowhere else.
    pub async fn create(
        &self,
        ca: [u8; 32],
        scope: Scope,
        ttl: Duration,
        now: SystemTime,
    ) -> Result<JoinToken, TokenError> {
        if let Scope::Node(node) = &scope
            && !node.is_valid()
        {
            return Err(TokenError::NotANode(node.to_string()));
        }
        let token = JoinToken {
            ca,
            id: random_hex(TOKEN_ID_LEN)?,
            secret: Sensitive::new(random_hex(TOKEN_SECRET_LEN)?),
        };
        let record = Record::new(&token, scope, now + ttl);
        self.store.create(&token.id, &record).await?;
        self.delete_expired(now).await?;
        Ok(token)
    }

    /// The tokens that are still good, by their end. Those that are not are deleted.
    pub async fn list(&self, now: SystemTime) -> Result<Vec<ListedToken>, TokenError> {
        let mut tokens = self.delete_expired(now).await?;
        tokens.sort_by(|a, b| (a.expires, &a.id).cmp(&(b.expires, &b.id)));
        Ok(tokens)
    }

    /// Makes a token worthless. What has joined with it stays joined.
    pub async fn revoke(&self, id: &str) -> Result<(), TokenError> {
        if self.store.delete(id).await? { Ok(()) } else { Err(TokenError::NotFound(id.to_owned())) }
    }

    /// Whether the holder of `bearer` and of the key may become `node`. A node's token is used up by it, for
    /// every key but this one: an answer that was lost can be asked for again.
    pub async fn redeem(
        &self,
        bearer: &str,
        node: &NodeName,
        key: [u8; 32],
        now: SystemTime,
    ) -> Result<(), TokenError> {
        let (id, secret) = JoinToken::split_bearer(bearer).map_err(|_| RedeemError::Malformed)?;
        for _ in 0..MARK_TRIES {
            let (record, version) = self.store.get(id).await?.ok_or(RedeemError::Unknown)?;
            match record.redeem(secret, node, key, now)? {
                Decision::Admit => return Ok(()),
                Decision::AdmitOnceMarked(marked) => {
                    if self.store.replace(id, &marked, version).await? {
                        return Ok(());
                    }
                }
            }
        }
        Err(TokenError::Contended(id.to_owned()))
    }

    async fn delete_expired(&self, now: SystemTime) -> Result<Vec<ListedToken>, TokenError> {
        let mut good = Vec::new();
        for (id, record) in self.store.list().await? {
            match record {
                Some(Record { scope, expires, used_by, secret_hash: _ }) if expires > now => {
                    good.push(ListedToken { id, scope, expires, used: used_by.is_some() });
                }
                Some(_) => {
                    self.store.delete(&id).await?;
                }
                // Someone's hand was in it; `redeem` refuses it, and it is theirs to delete.
                None => tracing::warn!(token = id, "the Secret of the token is malformed: delete it"),
            }
        }
        Ok(good)
    }
}

fn random_hex(digits: usize) -> Result<String, TokenError> {
    let mut bytes = [0; TOKEN_SECRET_LEN / 2];
    let bytes = &mut bytes[..digits / 2];
    SystemRandom::new().fill(bytes).map_err(|_| TokenError::Random)?;
    Ok(hex(bytes))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    async fn refusal(
        tokens: &Tokens,
        token: &JoinToken,
        node: &str,
        key: u8,
        now: SystemTime,
    ) -> RedeemError {
        match tokens.redeem(token.bearer().expose(), &node.into(), [key; 32], now).await {
            Err(TokenError::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_nodes_token_is_good_for_one_key_of_that_node() {
        let (tokens, now) = (Tokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
        assert_eq!(refusal(&tokens, &token, "edge-2", 1, now).await, RedeemError::OtherNode("edge-1".into()));
        for _ in 0..2 {
            tokens.redeem(token.bearer().expose(), &"edge-1".into(), [1; 32], now).await.unwrap();
        }
        assert_eq!(refusal(&tokens, &token, "edge-1", 2, now).await, RedeemError::UsedByOtherKey);
        assert!(tokens.list(now).await.unwrap()[0].used);
    }

    #[tokio::test]
    async fn of_many_keys_at_once_one_is_admitted() {
        let (tokens, now) = (Tokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
        let (bearer, node) = (token.bearer(), NodeName::from("edge-1"));
        let tries = (0..20).map(|key| tokens.redeem(bearer.expose(), &node, [key; 32], now));
        let admitted =
            futures::future::join_all(tries).await.iter().filter(|outcome| outcome.is_ok()).count();
        assert_eq!(admitted, 1);
    }

    #[tokio::test]
    async fn a_fleets_token_is_good_for_every_valid_node_until_its_end() {
        let (tokens, now) = (Tokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Fleet, HOUR, now).await.unwrap();
        for (node, key) in [("edge-1", 1), ("edge-2", 2)] {
            tokens.redeem(token.bearer().expose(), &node.into(), [key; 32], now).await.unwrap();
        }
        assert_eq!(refusal(&tokens, &token, "Edge_3", 3, now).await, RedeemError::NotANode("Edge_3".into()));
        assert!(matches!(refusal(&tokens, &token, "edge-3", 3, now + HOUR).await, RedeemError::Expired(_)));
    }

    #[tokio::test]
    async fn a_wrong_secret_tells_nothing_of_the_token() {
        let (tokens, now) = (Tokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
        let guessed = JoinToken { secret: Sensitive::new("0".repeat(64)), ..token.clone() };
        assert_eq!(refusal(&tokens, &guessed, "edge-2", 1, now + HOUR).await, RedeemError::Unknown);
        let renamed = JoinToken { id: "0".repeat(12), ..token };
        assert_eq!(refusal(&tokens, &renamed, "edge-1", 1, now).await, RedeemError::Unknown);
        let outcome = tokens.redeem("../../x.y", &"edge-1".into(), [1; 32], now).await;
        assert!(matches!(outcome, Err(TokenError::Refused(RedeemError::Malformed))));
    }

    #[tokio::test]
    async fn listing_deletes_what_has_expired_and_revoking_what_has_not() {
        let (tokens, now) = (Tokens::in_memory(), SystemTime::now());
        let short = tokens.create([1; 32], Scope::Fleet, HOUR, now).await.unwrap();
        let long = tokens.create([1; 32], Scope::Fleet, 3 * HOUR, now).await.unwrap();
        let ids = |listed: Vec<ListedToken>| listed.into_iter().map(|token| token.id).collect::<Vec<_>>();
        assert_eq!(ids(tokens.list(now).await.unwrap()), [short.id.clone(), long.id.clone()]);
        assert_eq!(ids(tokens.list(now + HOUR).await.unwrap()), std::slice::from_ref(&long.id));
        assert_eq!(ids(tokens.list(now).await.unwrap()), std::slice::from_ref(&long.id));
        tokens.revoke(&long.id).await.unwrap();
        assert_eq!(refusal(&tokens, &long, "edge-1", 1, now).await, RedeemError::Unknown);
        assert!(matches!(tokens.revoke(&long.id).await, Err(TokenError::NotFound(id)) if id == long.id));
        assert!(tokens.create([1; 32], Scope::Node("A".into()), HOUR, now).await.is_err());
    }
}
