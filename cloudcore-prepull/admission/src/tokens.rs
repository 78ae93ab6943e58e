//! Join tokens, which entitle their holder to become a node. Only a hash of a token's secret part is stored.
//!
//! Each token is a Secret in the namespace of cloudcore-prepull. Redeeming a node's token replaces that Secret under
//! its resource version, so that of two edges that redeem it at two replicas, one is refused.

mod record;
mod store;

use std::time::{Duration, SystemTime};

use prepull_api::credentials::Sensitive;
use prepull_api::enroll::{JoinToken, TOKEN_ID_LEN, TOKEN_SECRET_LEN, hex};
use prepull_api::task::NodeName;
use ring::rand::{SecureRandom, SystemRandom};

pub use record::{RedeemError, Scope, SecretHash};
use record::{TokenDecision, TokenRecord};
use store::TokenStore;
pub use store::{StoreError, TOKEN_LABEL, hash_of, id_of};

/// The most attempts to mark a token as used. One fails only if the same token was changed at the same moment.
const MARK_ATTEMPTS: usize = 5;

/// How long an expired token is kept, though hidden: the clock may be that of a laptop, and may be hours ahead.
const KEPT_EXPIRED: Duration = Duration::from_secs(24 * 3600);

/// Why a token was not created, listed, revoked or redeemed.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The token does not entitle its holder. The text is for the operator of the edge.
    #[error(transparent)]
    Refused(#[from] RedeemError),
    /// The tokens' storage failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No token has this id.
    #[error("there is no token {0}: `token list` shows all tokens")]
    NotFound(String),
    /// `--node` is not a valid node name.
    #[error("{0:?} is not a node's name: lower-case letters, digits, '-' and '.', as in `kubectl get nodes`")]
    NotANode(String),
    /// The token was changed at every attempt to mark it as used.
    #[error("token {0} is being redeemed by another edge at the same moment: try again")]
    Contended(String),
    /// Too many unknown tokens have come at once to look all of them up.
    #[error("too many unknown tokens have come at once: if this one is right, try again in a second")]
    TooManyUnknown,
    /// The operating system provides no random bytes.
    #[error("no random bytes from the operating system")]
    Random,
}

/// A token without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedToken {
    /// The id, which names the token.
    pub id: String,
    /// Which nodes may join with the token.
    pub scope: Scope,
    /// When the token expires.
    pub expires: SystemTime,
    /// Whether the token's node has joined with it; always false for a fleet's token.
    pub used: bool,
}

/// All join tokens.
#[derive(Clone, Debug)]
pub struct JoinTokens {
    store: TokenStore,
}

impl JoinTokens {
    /// Tokens that are stored as Secrets in `namespace`.
    pub fn in_cluster(client: kube::Client, namespace: &str) -> Self {
        Self { store: TokenStore::in_cluster(client, namespace) }
    }

    /// Tokens that are stored in this process, for tests.
    pub fn in_memory() -> Self {
        Self { store: TokenStore::in_memory() }
    }

    /// Creates a token for the server with the CA fingerprint `ca`. The full token is only in the return value.
    pub async fn create(
        &self,
        ca: [u8; 32],
        scope: Scope,
        ttl: Duration,
        now: SystemTime,
    ) -> Result<JoinToken, TokenError> {
        self.create_after(None, ca, scope, ttl, now).await
    }

    /// Like [`Self::create`], for a node that is revoked: only a token that names the revocation lets it in again.
    pub async fn create_after(
        &self,
        revocation: Option<String>,
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
        let record = TokenRecord::new(&token, scope, now + ttl, revocation);
        self.store.create(&token.id, &record).await?;
        // A user who may only create tokens can't delete any; the new token is valid anyway.
        let _ = self.delete_expired(now).await;
        Ok(token)
    }

    /// Lists the valid tokens by expiry, and deletes those that expired a day ago.
    pub async fn list(&self, now: SystemTime) -> Result<Vec<ListedToken>, TokenError> {
        let mut tokens = self.delete_expired(now).await?;
        tokens.sort_by(|a, b| (a.expires, &a.id).cmp(&(b.expires, &b.id)));
        Ok(tokens)
    }

    /// Deletes a token. Nodes that have joined with it stay joined.
    pub async fn revoke(&self, id: &str) -> Result<(), TokenError> {
        if self.store.delete(id).await? { Ok(()) } else { Err(TokenError::NotFound(id.to_owned())) }
    }

    /// Checks that the holder of `bearer` may become `node` with this key. A node's token is bound to the first key
    /// that redeems it: the same key may redeem it again if the answer was lost, another may not. Returns which nodes
    /// the token is for, and the revocation that it names.
    pub async fn redeem(
        &self,
        bearer: &str,
        node: &NodeName,
        key: [u8; 32],
        now: SystemTime,
    ) -> Result<(Scope, Option<String>), TokenError> {
        let (id, secret) = JoinToken::split_bearer(bearer).map_err(|_| RedeemError::Malformed)?;
        for _ in 0..MARK_ATTEMPTS {
            let (record, version) = self.store.get(id).await?.ok_or(RedeemError::Unknown)?;
            let is_admitted = match record.decide_join(secret, node, key, now)? {
                TokenDecision::Admit => true,
                TokenDecision::AdmitOnceMarked(marked) => self.store.replace(id, &marked, version).await?,
            };
            if is_admitted {
                return Ok((record.scope, record.after_revocation));
            }
        }
        Err(TokenError::Contended(id.to_owned()))
    }

    /// Deletes the tokens that expired a day ago and returns the valid ones.
    async fn delete_expired(&self, now: SystemTime) -> Result<Vec<ListedToken>, TokenError> {
        let mut valid = Vec::new();
        for (id, record) in self.store.list().await? {
            match record {
                Some(TokenRecord { scope, expires, used_by, secret_hash: _, after_revocation: _ })
                    if expires > now =>
                {
                    valid.push(ListedToken { id, scope, expires, used: used_by.is_some() });
                }
                Some(TokenRecord { expires, .. }) if expires + KEPT_EXPIRED > now => {}
                Some(_) => {
                    self.store.delete(&id).await?;
                }
                // Edited by someone: `redeem` refuses it, and deleting it is left to them.
                None => tracing::warn!(token = id, "the Secret of this token is malformed: delete it"),
            }
        }
        Ok(valid)
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
        tokens: &JoinTokens,
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
    async fn a_nodes_token_admits_one_key() {
        let (tokens, now) = (JoinTokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
        assert_eq!(refusal(&tokens, &token, "edge-2", 1, now).await, RedeemError::OtherNode("edge-1".into()));
        for _ in 0..2 {
            tokens.redeem(token.bearer().expose(), &"edge-1".into(), [1; 32], now).await.unwrap();
        }
        assert_eq!(refusal(&tokens, &token, "edge-1", 2, now).await, RedeemError::UsedByOtherKey);
        assert!(tokens.list(now).await.unwrap()[0].used);
    }

    #[tokio::test]
    async fn only_one_concurrent_key_is_admitted() {
        let (tokens, now) = (JoinTokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
        let (bearer, node) = (token.bearer(), NodeName::from("edge-1"));
        let tries = (0..20).map(|key| tokens.redeem(bearer.expose(), &node, [key; 32], now));
        let admitted =
            futures::future::join_all(tries).await.iter().filter(|outcome| outcome.is_ok()).count();
        assert_eq!(admitted, 1);
    }

    #[tokio::test]
    async fn a_fleet_token_admits_every_node_name() {
        let (tokens, now) = (JoinTokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Fleet, HOUR, now).await.unwrap();
        for (node, key) in [("edge-1", 1), ("edge-2", 2)] {
            tokens.redeem(token.bearer().expose(), &node.into(), [key; 32], now).await.unwrap();
        }
        assert_eq!(refusal(&tokens, &token, "Edge_3", 3, now).await, RedeemError::NotANode("Edge_3".into()));
        assert!(matches!(refusal(&tokens, &token, "edge-3", 3, now + HOUR).await, RedeemError::Expired(_)));
    }

    #[tokio::test]
    async fn a_wrong_secret_reveals_nothing() {
        let (tokens, now) = (JoinTokens::in_memory(), SystemTime::now());
        let token = tokens.create([1; 32], Scope::Node("edge-1".into()), HOUR, now).await.unwrap();
        let guessed = JoinToken { secret: Sensitive::new("0".repeat(64)), ..token.clone() };
        assert_eq!(refusal(&tokens, &guessed, "edge-2", 1, now + HOUR).await, RedeemError::Unknown);
        let renamed = JoinToken { id: "0".repeat(12), ..token };
        assert_eq!(refusal(&tokens, &renamed, "edge-1", 1, now).await, RedeemError::Unknown);
        let outcome = tokens.redeem("../../x.y", &"edge-1".into(), [1; 32], now).await;
        assert!(matches!(outcome, Err(TokenError::Refused(RedeemError::Malformed))));
    }

    #[tokio::test]
    async fn listing_and_revoking_delete_tokens() {
        let (tokens, now) = (JoinTokens::in_memory(), SystemTime::now());
        let short = tokens.create([1; 32], Scope::Fleet, HOUR, now).await.unwrap();
        let long = tokens.create([1; 32], Scope::Fleet, 3 * HOUR, now).await.unwrap();
        let ids = |listed: Vec<ListedToken>| listed.into_iter().map(|token| token.id).collect::<Vec<_>>();
        assert_eq!(ids(tokens.list(now).await.unwrap()), [short.id.clone(), long.id.clone()]);
        assert_eq!(ids(tokens.list(now + 2 * HOUR).await.unwrap()), std::slice::from_ref(&long.id));
        // The clock was two hours ahead.
        assert_eq!(ids(tokens.list(now).await.unwrap()), [short.id, long.id.clone()]);
        tokens.list(now + HOUR + KEPT_EXPIRED).await.unwrap();
        assert_eq!(ids(tokens.list(now).await.unwrap()), std::slice::from_ref(&long.id));
        tokens.revoke(&long.id).await.unwrap();
        assert_eq!(refusal(&tokens, &long, "edge-1", 1, now).await, RedeemError::Unknown);
        assert!(matches!(tokens.revoke(&long.id).await, Err(TokenError::NotFound(id)) if id == long.id));
        assert!(tokens.create([1; 32], Scope::Node("A".into()), HOUR, now).await.is_err());
    }
}
