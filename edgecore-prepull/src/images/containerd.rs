//! containerd's own gRPC API, which its CRI socket serves as well: content store, images, snapshots and
//! leases.
//!
//! Other runtimes answer `Unimplemented`, so every caller must work without it.

mod holdings;
mod ingest_files;
mod labels;
mod leases;
mod namespace;
mod pins;
mod records;
mod source;
mod store;
mod unpack;
mod writer;

use std::sync::Arc;

use containerd_client::types;
use prepull_registry::manifest::Descriptor;
use tonic::transport::Channel;

use crate::images::flushes::Flushes;
use crate::images::runtime::RuntimeEndpoint;
pub(crate) use holdings::{Holdings, HoldingsReader, ImageRecord};
#[cfg(test)]
pub(crate) use holdings::{Snapshot, StoredBlob};
pub(crate) use ingest_files::{ingests_dir, open_blob};
pub(crate) use labels::{ContentLabels, Labels, of_index, of_manifest, of_rebuilt, of_unpacked};
pub(crate) use leases::{Leases, Owner, of_blob, of_snapshot};
pub(crate) use namespace::LEASE_HEADER;
pub(crate) use pins::Pins;
pub(crate) use records::ImageRecords;
pub(crate) use source::SourceRepository;
pub(crate) use store::{ContentStore, FoundBlob, Ingest};
pub(crate) use unpack::{OpenView, Unpack, Unpacker};
pub(crate) use writer::{BlobKind, BlobToWrite, BlobWriteError, ContentWriter, PartialBlob};

/// The connection to one containerd, shared by all its clients.
#[derive(Clone, Debug)]
pub(crate) struct Containerd {
    pub(crate) channel: Channel,
    pub(crate) endpoint: RuntimeEndpoint,
    pub(crate) store: Arc<ContentStore>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) flushes: Arc<Flushes>,
}

/// A descriptor as containerd's API has it.
fn to_wire(descriptor: &Descriptor) -> types::Descriptor {
    let Descriptor { media_type, digest, size, .. } = descriptor;
    types::Descriptor {
        media_type: media_type.clone(),
        digest: digest.clone(),
        size: to_wire_size(*size),
        ..types::Descriptor::default()
    }
}

/// Sizes are signed on the wire, and none is negative.
fn to_size(size: i64) -> u64 {
    u64::try_from(size).unwrap_or(0)
}

/// Sizes are signed on the wire. Every size that fits into a store fits into an i64.
fn to_wire_size(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}
