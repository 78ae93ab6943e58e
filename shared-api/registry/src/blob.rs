//! The content of a blob while it arrives.

use std::fmt;

use bytes::Bytes;
use http::Response;
use http::header::CONTENT_RANGE;
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::body;
use crate::error::{ErrorKind, RegistryError};
use crate::least_rate::LeastRate;

/// An endpoint of a registry, so that one that has sent wrong content can be avoided.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostId(pub(crate) String);

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The bytes of a blob, from [`Self::offset`] to its end.
#[derive(Debug)]
pub struct BlobStream {
    body: Option<Incoming>,
    host: HostId,
    offset: u64,
    /// What has not arrived yet.
    missing: u64,
    /// Counts while another endpoint is there.
    least_rate: Option<LeastRate>,
    has_stalled: bool,
}

impl BlobStream {
    pub(crate) fn new(body: Incoming, host: HostId, offset: u64, size: u64) -> Self {
        let missing = size - offset;
        Self { body: Some(body), host, offset, missing, least_rate: None, has_stalled: false }
    }

    /// Ends the stream if it trickles.
    pub(crate) fn with_least_rate(self) -> Self {
        Self { least_rate: Some(LeastRate::default()), ..self }
    }

    /// The answer of a neighbour to a request for a blob of this size from an offset on. The stream ends if it trickles.
    ///
    /// # Errors
    /// The answer is none to that.
    pub fn of_answer(
        response: Response<Incoming>,
        who: &str,
        (asked, size): (u64, u64),
    ) -> Result<Self, RegistryError> {
        let host = HostId(who.to_owned());
        let offset = begins_at(&response, asked, size).ok_or_else(|| {
            RegistryError::new(
                ErrorKind::Protocol,
                format!("{host}: it answers something else than what was asked"),
            )
        })?;
        Ok(Self::new(response.into_body(), host, offset, size).with_least_rate())
    }

    /// Whether the stream ended because its bytes came too slowly, or stopped coming.
    pub fn has_stalled(&self) -> bool {
        self.has_stalled
    }

    /// Where the bytes begin: a registry without ranges begins at 0, regardless of the request.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The endpoint that sends them, or has redirected to where they are from.
    pub fn host(&self) -> &HostId {
        &self.host
    }

    /// The next bytes. `None` only after the last one of the blob: a body that ends before is an error, after which the
    /// rest can be asked for, and one that goes on is cut there.
    pub async fn next(&mut self) -> Option<Result<Bytes, RegistryError>> {
        if self.missing == 0 {
            // What comes beyond the end is not read, and the connection is closed.
            self.body = None;
            return None;
        }
        let failed = |kind, what: &str| RegistryError::new(kind, format!("{}: {what}", self.host));
        let since = Instant::now();
        let chunk = match self.body.as_mut() {
            None => return None,
            Some(body) => body::next(body).await,
        };
        if let Some(least) = &mut self.least_rate {
            let bytes = chunk.as_ref().and_then(|chunk| chunk.as_ref().ok()).map_or(0, Bytes::len);
            if let Some(what) = least.count(since.elapsed(), bytes) {
                let error = failed(ErrorKind::TooSlow, &format!("{what}, and there is another endpoint"));
                (self.body, self.has_stalled) = (None, true);
                return Some(Err(error));
            }
        }
        match chunk {
            Some(Ok(mut chunk)) => {
                let fits = usize::try_from(self.missing).unwrap_or(usize::MAX).min(chunk.len());
                chunk.truncate(fits);
                self.missing -= fits as u64;
                Some(Ok(chunk))
            }
            Some(Err(error)) => {
                (self.body, self.has_stalled) = (None, since.elapsed() >= body::IDLE);
                Some(Err(failed(error.kind, &error.message)))
            }
            None => {
                self.body = None;
                Some(Err(failed(
                    ErrorKind::Unreachable,
                    &format!("it ended {} bytes before its end", self.missing),
                )))
            }
        }
    }
}

/// Where the body of an answer begins in the blob. `None` if the answer does not keep to what was asked.
pub(crate) fn begins_at(response: &Response<Incoming>, asked: u64, size: u64) -> Option<u64> {
    let length = body::content_length(response);
    match response.status().as_u16() {
        200 => length.is_none_or(|length| length == size).then_some(0),
        206 => {
            let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
            let (first, last) = parse_range(range, size)?;
            let fits =
                first == asked && length.is_none_or(|length| Some(length) == (last - first).checked_add(1));
            fits.then_some(first)
        }
        _ => None,
    }
}

/// First and last byte of `bytes 1-9/10`; the size may be left open, and must be right otherwise.
fn parse_range(text: &str, size: u64) -> Option<(u64, u64)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.trim().split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let total_fits = total.trim() == "*" || total.trim().parse() == Ok(size);
    (total_fits && first <= last && last < size).then_some((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_must_lie_in_the_blob() {
        for (text, expected) in [
            ("bytes 5-9/10", Some((5, 9))),
            ("bytes 5-9/*", Some((5, 9))),
            ("bytes 5-7/10", Some((5, 7))),
            ("bytes 5-10/10", None),
            ("bytes 5-10/11", None),
            ("bytes 7-5/10", None),
            ("bytes */10", None),
            ("bytes 5-/10", None),
            ("5-9/10", None),
            ("bytes 5-9", None),
            ("", None),
            ("bytes 18446744073709551615-18446744073709551615/*", None),
        ] {
            assert_eq!(parse_range(text, 10), expected, "{text:?}");
        }
    }
}
