//! Admission of nodes, as the cluster stores it: join tokens in Secrets, the keys and revocations of nodes in
//! ConfigMaps. cloudcore-prepull decides by them; its commands and those of the plugin create and change them.
//!
//! ```text
//!  tokens ─▶ Secrets prepull-token-…         records ─▶ ConfigMaps prepull-nodes-…
//!      ▲                                         ▲
//!      └── commands::token ── ca (prepull-ca)    └── commands::node
//! ```

pub mod ca;
mod key_hash;
pub mod records;
pub mod tokens;

/// What people do with tokens and nodes, for the programs that have commands for it.
pub mod commands {
    pub mod node;
    pub mod token;
}

pub use key_hash::KeyHash;

use kube::api::PostParams;
use ring::digest::{SHA256, digest};

/// The manager in `managedFields` of what cloudcore-prepull and these commands write. The API server would take it from the
/// User-Agent, which a proxy on the way may change.
pub const FIELD_MANAGER: &str = "cloudcore-prepull";

/// How objects are created and replaced.
pub fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hash
}
