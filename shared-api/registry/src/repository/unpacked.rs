//! The unpacked size of a layer, read from its last bytes where they hold it.

use super::Repository;
use crate::error::RegistryError;
use crate::manifest::Descriptor;

/// Length of the field at the end of a gzip file with the size of what is in it.
const FIELD: u64 = 4;

impl Repository {
    /// Asks for the last bytes of a layer, which tell its size when it is unpacked. `None` if they do not, or if the
    /// registry knows no ranges.
    pub async fn unpacked_size(&self, layer: &Descriptor) -> Result<Option<u64>, RegistryError> {
        let Some(from) = layer.size.checked_sub(FIELD).filter(|_| layer.is_gzip()) else { return Ok(None) };
        let mut stream = self.fetch_blob(layer, from, &[]).await?;
        if stream.offset() != from {
            return Ok(None);
        }
        let mut field = Vec::new();
        while let Some(bytes) = stream.next().await {
            field.extend_from_slice(&bytes?);
        }
        Ok(field.try_into().ok().and_then(|field| told_by(layer, field)))
    }
}

/// The size that the last four bytes of a gzip file tell, which is that of its last member, modulo 2^32. What seems to
/// be smaller than its compressed bytes has several members, or is larger than the field; but what cannot be compressed,
/// such as a model or a video, is smaller by the little that gzip adds: a head, and five bytes for each 16 KiB or more.
fn told_by(layer: &Descriptor, field: [u8; 4]) -> Option<u64> {
    let size = u64::from(u32::from_le_bytes(field));
    let added = 64 + layer.size / 2048;
    (size >= layer.size.saturating_sub(added)).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(media_type: &str, size: u64) -> Descriptor {
        Descriptor { media_type: media_type.to_owned(), size, ..Descriptor::default() }
    }

    #[test]
    fn a_layer_is_guessed_unless_its_trailer_tells_its_size() {
        let gzip = layer("application/vnd.oci.image.layer.v1.tar+gzip", 100);
        assert_eq!(told_by(&gzip, 250_u32.to_le_bytes()), Some(250));
        assert_eq!(told_by(&gzip, 7_u32.to_le_bytes()), None, "the last of several members");
        let random = layer(&gzip.media_type, 12_585_192);
        assert_eq!(
            told_by(&random, 12_584_960_u32.to_le_bytes()),
            Some(12_584_960),
            "it cannot be compressed"
        );
        assert_eq!(gzip.guess_unpacked(), 300);
        assert_eq!(layer("application/vnd.oci.image.layer.v1.tar+zstd", 100).guess_unpacked(), 300);
        assert_eq!(layer("application/vnd.oci.image.layer.v1.tar", 100).guess_unpacked(), 100);
    }
}
