//! The tar in the blob of a layer.

use std::io::{self, BufRead, BufReader, Read};

/// Begins to decompress a blob. The compression is known by the first bytes: media types are sometimes wrong.
///
/// # Errors
/// The blob can't be read.
pub fn unpack<'a>(blob: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut blob = BufReader::with_capacity(super::PIECE, blob);
    let magic = blob.fill_buf()?;
    Ok(if magic.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(blob))
    } else if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::stream::read::Decoder::with_buffer(blob)?)
    } else {
        Box::new(blob)
    })
}
