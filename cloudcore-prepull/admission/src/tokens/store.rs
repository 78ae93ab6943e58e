//! Storage of tokens: Secrets, or memory in tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{DeleteParams, ListParams, ObjectMeta};
use prepull_api::enroll::{hex, unhex};
use prepull_api::task::NodeName;

use super::record::{Scope, SecretHash, TokenRecord};
use crate::post_params;

/// The label of every token's Secret. Its value is the token's id.
pub const TOKEN_LABEL: &str = "prepull.kubeedge.io/join-token";

/// The prefix of the Secrets' names. The token's id follows.
const NAME_PREFIX: &str = "prepull-token-";
/// The type of the Secrets, which shows in `kubectl get secrets`.
const SECRET_TYPE: &str = "prepull.kubeedge.io/join-token";
const PAGE: u32 = 500;

/// A failed request for a token's Secret.
#[derive(Debug, thiserror::Error)]
#[error("{operation} Secret {NAME_PREFIX}{id}")]
pub struct StoreError {
    operation: &'static str,
    id: String,
    source: Box<kube::Error>,
}

#[derive(Clone, Debug)]
pub(super) enum TokenStore {
    Secrets(Box<Api<Secret>>),
    Memory(Arc<Mutex<BTreeMap<String, (TokenRecord, u64)>>>),
}

/// One version of a token. Replacing any other version is refused.
type RecordVersion = Option<String>;

impl TokenStore {
    pub(super) fn in_cluster(client: kube::Client, namespace: &str) -> Self {
        Self::Secrets(Box::new(Api::namespaced(client, namespace)))
    }

    pub(super) fn in_memory() -> Self {
        Self::Memory(Arc::default())
    }

    pub(super) async fn create(&self, id: &str, record: &TokenRecord) -> Result<(), StoreError> {
        match self {
            Self::Secrets(secrets) => {
                let created = secrets.create(&post_params(), &to_secret(id, record, None)).await;
                created.map(drop).map_err(store_error("creating", id))
            }
            Self::Memory(memory) => {
                lock(memory).insert(id.to_owned(), (record.clone(), 0));
                Ok(())
            }
        }
    }

    pub(super) async fn get(&self, id: &str) -> Result<Option<(TokenRecord, RecordVersion)>, StoreError> {
        match self {
            Self::Secrets(secrets) => {
                let secret = secrets.get_opt(&secret_name(id)).await.map_err(store_error("reading", id))?;
                Ok(secret.and_then(|secret| Some((from_secret(&secret)?, secret.metadata.resource_version))))
            }
            Self::Memory(memory) => {
                let found = lock(memory).get(id).cloned();
                Ok(found.map(|(record, count)| (record, Some(count.to_string()))))
            }
        }
    }

    /// Replaces the token. Returns `false` if it is no longer of that version.
    pub(super) async fn replace(
        &self,
        id: &str,
        record: &TokenRecord,
        version: RecordVersion,
    ) -> Result<bool, StoreError> {
        match self {
            Self::Secrets(secrets) => {
                let secret = to_secret(id, record, version);
                match secrets.replace(&secret_name(id), &post_params(), &secret).await {
                    Ok(_) => Ok(true),
                    // 404: revoked since, as the next read finds out.
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
                    Err(error) => Err(store_error("replacing", id)(error)),
                }
            }
            Self::Memory(memory) => Ok(match lock(memory).get_mut(id) {
                Some((current, count)) if version == Some(count.to_string()) => {
                    *current = record.clone();
                    *count += 1;
                    true
                }
                _ => false,
            }),
        }
    }

    /// Deletes the token. Returns `false` if there was none.
    pub(super) async fn delete(&self, id: &str) -> Result<bool, StoreError> {
        match self {
            Self::Secrets(secrets) => {
                match secrets.delete(&secret_name(id), &DeleteParams::default()).await {
                    Ok(_) => Ok(true),
                    Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
                    Err(error) => Err(store_error("deleting", id)(error)),
                }
            }
            Self::Memory(memory) => Ok(lock(memory).remove(id).is_some()),
        }
    }

    /// Lists all tokens by id; a malformed Secret has no record.
    pub(super) async fn list(&self) -> Result<Vec<(String, Option<TokenRecord>)>, StoreError> {
        match self {
            Self::Secrets(secrets) => {
                let mut params = ListParams::default().labels(TOKEN_LABEL).limit(PAGE);
                let mut tokens = Vec::new();
                loop {
                    let page = secrets.list(&params).await.map_err(store_error("listing", "*"))?;
                    tokens.extend(
                        page.items
                            .iter()
                            .filter_map(|secret| Some((id_of(secret)?.to_owned(), from_secret(secret)))),
                    );
                    match page.metadata.continue_.filter(|token| !token.is_empty()) {
                        Some(next) => params = params.continue_token(&next),
                        None => return Ok(tokens),
                    }
                }
            }
            Self::Memory(memory) => {
                Ok(lock(memory).iter().map(|(id, (record, _))| (id.clone(), Some(record.clone()))).collect())
            }
        }
    }
}

fn lock<T>(memory: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds the lock can leave the map half changed.
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

fn store_error(operation: &'static str, id: &str) -> impl FnOnce(kube::Error) -> StoreError {
    move |source| StoreError { operation, id: id.to_owned(), source: Box::new(source) }
}

fn secret_name(id: &str) -> String {
    format!("{NAME_PREFIX}{id}")
}

const SECRET_HASH: &str = "secret-sha256";
const EXPIRATION: &str = "expiration";
const NODE: &str = "node";
const USED_BY: &str = "used-by-key-sha256";
const AFTER_REVOCATION: &str = "after-revocation";

fn to_secret(id: &str, record: &TokenRecord, version: Option<String>) -> Secret {
    let TokenRecord { scope, expires, secret_hash, used_by, after_revocation } = record;
    let mut data = BTreeMap::from([
        (SECRET_HASH, hex(&secret_hash.0)),
        (EXPIRATION, humantime::format_rfc3339_seconds(*expires).to_string()),
    ]);
    if let Scope::Node(node) = scope {
        data.insert(NODE, node.to_string());
    }
    if let Some(key) = used_by {
        data.insert(USED_BY, hex(key));
    }
    if let Some(at) = after_revocation {
        data.insert(AFTER_REVOCATION, at.clone());
    }
    Secret {
        metadata: ObjectMeta {
            name: Some(secret_name(id)),
            resource_version: version,
            labels: Some(BTreeMap::from([(TOKEN_LABEL.to_owned(), id.to_owned())])),
            ..ObjectMeta::default()
        },
        type_: Some(SECRET_TYPE.to_owned()),
        data: Some(
            data.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).collect(),
        ),
        ..Secret::default()
    }
}

/// The token's id, from the name of its Secret.
pub fn id_of(secret: &Secret) -> Option<&str> {
    secret.metadata.name.as_deref()?.strip_prefix(NAME_PREFIX)
}

/// The id of a token and the hash of its secret part; `None` if the Secret is malformed.
pub fn hash_of(secret: &Secret) -> Option<(&str, SecretHash)> {
    Some((id_of(secret)?, from_secret(secret)?.secret_hash))
}

/// The token's record; `None` if the Secret is malformed.
fn from_secret(secret: &Secret) -> Option<TokenRecord> {
    let data = secret.data.as_ref()?;
    let text = |key: &str| data.get(key).map(|bytes| std::str::from_utf8(&bytes.0).ok());
    Some(TokenRecord {
        secret_hash: SecretHash(unhex(text(SECRET_HASH)??)?),
        expires: humantime::parse_rfc3339(text(EXPIRATION)??).ok()?,
        scope: match text(NODE) {
            Some(node) => Scope::Node(NodeName::from(node?)),
            None => Scope::Fleet,
        },
        used_by: match text(USED_BY) {
            Some(key) => Some(unhex(key?)?),
            None => None,
        },
        after_revocation: match text(AFTER_REVOCATION) {
            Some(at) => Some(at?.to_owned()),
            None => None,
        },
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_well_formed_token_round_trips() {
        let expires = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let fleet = TokenRecord {
            scope: Scope::Fleet,
            expires,
            secret_hash: SecretHash([1; 32]),
            used_by: None,
            after_revocation: None,
        };
        let node = TokenRecord {
            scope: Scope::Node("edge-1".into()),
            used_by: Some([2; 32]),
            after_revocation: Some("2026-11-22T04:00:00Z".to_owned()),
            ..fleet.clone()
        };
        for record in [fleet, node] {
            let mut secret = to_secret("0123456789ab", &record, Some("7".into()));
            assert_eq!(secret.metadata.resource_version.as_deref(), Some("7"));
            assert_eq!(from_secret(&secret), Some(record));
            secret.data.as_mut().unwrap().insert(NODE.into(), ByteString(vec![0xff]));
            assert_eq!(from_secret(&secret), None, "a malformed node must not turn into a fleet's token");
        }
    }

    #[tokio::test]
    async fn a_changed_token_is_not_replaced() {
        let (store, expires) = (TokenStore::in_memory(), UNIX_EPOCH);
        let secret_hash = SecretHash([1; 32]);
        let record =
            TokenRecord { scope: Scope::Fleet, expires, secret_hash, used_by: None, after_revocation: None };
        store.create("x", &record).await.unwrap();
        let (_, first) = store.get("x").await.unwrap().unwrap();
        let (_, second) = store.get("x").await.unwrap().unwrap();
        assert!(store.replace("x", &record, first).await.unwrap());
        assert!(!store.replace("x", &record, second).await.unwrap());
    }
}
