//! containerd's own gRPC API, which its CRI socket serves as well: content store, images and leases.
//!
//! Other runtimes answer `Unimplemented`, so every caller has to manage without.

mod leases;
mod manifest;
mod namespace;
mod pins;
mod store;

pub(crate) use leases::{LEASE_HEADER, Leases, Owner};
pub(crate) use manifest::Layer;
pub(crate) use pins::Pins;
pub(crate) use store::{ContentStore, Ingest, StoredManifest};
