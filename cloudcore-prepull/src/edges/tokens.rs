//! Join tokens at the door, where anybody may bring wrong ones: a watch of the good ones spares a request for each.

mod known;

use std::future::Future;
use std::time::{Instant, SystemTime};

pub use prepull_admission::tokens::Scope;
pub(crate) use prepull_admission::tokens::{RedeemError, TokenError};
use prepull_api::enroll::JoinToken;
use prepull_api::task::NodeName;

use known::{KnownTokens, Recognised};

/// All join tokens.
#[derive(Clone, Debug)]
pub struct Tokens {
    stored: prepull_admission::tokens::JoinTokens,
    /// What a watch has shown, where there is one.
    known: Option<KnownTokens>,
}

impl Tokens {
    /// Tokens that are stored as Secrets in `namespace`, and a watch of them, which is to be run: for a server, to which
    /// anybody may send wrong tokens.
    pub(crate) fn with_watch(
        client: kube::Client,
        namespace: &str,
    ) -> (Self, impl Future<Output = ()> + use<>) {
        let known = KnownTokens::default();
        let watch = known.clone().follow_secrets(kube::Api::namespaced(client.clone(), namespace));
        let stored = prepull_admission::tokens::JoinTokens::in_cluster(client, namespace);
        (Self { stored, known: Some(known) }, watch)
    }

    /// Tokens that are stored in this process, for tests.
    pub fn in_memory() -> Self {
        Self { stored: prepull_admission::tokens::JoinTokens::in_memory(), known: None }
    }

    /// The tokens themselves, without the watch.
    pub fn stored(&self) -> &prepull_admission::tokens::JoinTokens {
        &self.stored
    }

    /// Refuses a token that is certainly wrong, without a request to the API server; others are for [`Self::redeem`].
    pub(crate) fn recognise(&self, bearer: &str, now: Instant) -> Result<(), TokenError> {
        let (id, secret) = JoinToken::split_bearer(bearer).map_err(|_| RedeemError::Malformed)?;
        match self.known.as_ref().map(|known| known.recognise(id, secret, now)) {
            None | Some(Recognised::Perhaps) => Ok(()),
            Some(Recognised::Wrong) => Err(RedeemError::Unknown.into()),
            Some(Recognised::TooMany) => Err(TokenError::TooManyUnknown),
        }
    }

    /// Checks that the holder of `bearer` may become `node` with this key: see [`prepull_admission::tokens::JoinTokens::redeem`].
    pub(crate) async fn redeem(
        &self,
        bearer: &str,
        node: &NodeName,
        key: [u8; 32],
        now: SystemTime,
    ) -> Result<(Scope, Option<String>), TokenError> {
        self.stored.redeem(bearer, node, key, now).await
    }
}
