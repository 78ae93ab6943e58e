//! The identity of this node: its certificate and key, and the CA that it trusts.
//!
//! ```text
//!  join ──▶ DIR/pki/{ca.crt,client.crt,client.key} ──▶ Identity ──▶ TLS of the tunnel
//!                     ▲                                   │
//!                     └──────── renew, over mTLS ◀────────┘
//! ```

mod current;
mod error;
mod files;
pub(super) mod patient;
mod peers;
mod renew;
mod trust;

pub(crate) use current::CurrentCertificate;
pub use current::Identity;
pub use error::IdentityError;
pub(crate) use error::REMEDY_OF_DENIAL;
pub use files::Connection;
pub(crate) use files::{DEFAULT_STATE_DIR, StateDir, check_issued, replace_file, temporary_of};
pub(crate) use peers::node_of;
pub use renew::RenewError;
