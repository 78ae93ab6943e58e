//! The names by which a delta is found in a registry's list of referrers. `prepull_registry` keeps them of such a list, and
//! `prepull_delta` reads them.

/// `artifactType` of a delta.
pub const ARTIFACT_TYPE: &str = "application/vnd.io.github.containers.oci-delta.v1";
/// Media type of the empty configuration of an artifact. Registries that don't know the type of an artifact report this one.
pub const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
/// Annotation: digest of the manifest of the new image.
pub const TARGET: &str = "io.github.containers.delta.target";
/// Annotation: digest of the configuration of the old image, which is its ID for CRI.
pub const SOURCE_CONFIG: &str = "io.github.containers.delta.source-config";
/// Our own annotation: the bytes of all its layers, so that the smallest offer can be tried first.
pub const DOWNLOAD_SIZE: &str = "prepull.kubeedge.io/download-size";
