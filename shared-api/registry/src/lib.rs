//! The HTTP side of the OCI distribution API: what a reference points to, manifests, and blobs with ranges, asked for as
//! containerd would ask for them, at the endpoints of its `hosts.toml`.
//!
//! ```text
//!  reference, credential ─▶ RegistryClient ─▶ Repository ─▶ resolve ─▶ choose (platform) ─▶ blob (from an offset on)
//!                               │                 │
//!                     hosts (hosts.toml)          ▼
//!                               └──────▶ auth ─▶ transport (redirects) ─▶ connect (proxy, TLS, addresses) ═▶ registry
//! ```
//!
//! A registry is not trusted with anything but its content: each answer has a bound, content counts by its digest alone, and
//! a registry leads us neither to the node itself nor to the metadata service of its cloud. Credentials are in memory
//! only, go to the endpoint and its token server only, and are in no message.

mod address;
mod auth;
mod blob;
mod body;
mod client;
mod connect;
mod connect_error;
pub mod digest;
mod error;
mod hosts;
mod least_rate;
mod location;
pub mod manifest;
mod proxy;
mod repository;
mod retry_after;
mod tls;
mod transport;

pub use blob::{BlobStream, HostId};
pub use client::{ClientSettings, RegistryClient};
pub use error::{ErrorKind, RegistryError};
pub use hosts::HostsFiles;
pub use proxy::{Proxies, Proxy};
pub use repository::{BUNDLE_TYPE, SIGNATURE_TYPES, SIGNED, may_be_signature};
pub use repository::{Chosen, Contents, Open, ReferrerPlace, Repository, ResolvedReference};
pub use retry_after::retry_after;
