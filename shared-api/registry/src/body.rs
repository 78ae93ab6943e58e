//! Bodies of responses, as much of them as one is ready to take.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::header::CONTENT_ENCODING;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::error::{ErrorKind, RegistryError, error_chain};

/// Longest silence in the middle of a body.
pub(crate) const IDLE: Duration = Duration::from_secs(30);
/// Limit for a small body as a whole, which one that sends a byte now and then would never reach otherwise.
const WHOLE: Duration = Duration::from_secs(120);

/// The next bytes of a body; `None` at its end.
pub(crate) async fn next(body: &mut Incoming) -> Option<Result<Bytes, RegistryError>> {
    loop {
        let frame = match timeout(IDLE, body.frame()).await {
            Err(_) => {
                let message = format!("no byte for {} s", IDLE.as_secs());
                return Some(Err(RegistryError::new(ErrorKind::Unreachable, message)));
            }
            Ok(None) => return None,
            Ok(Some(Err(error))) => {
                return Some(Err(RegistryError::new(ErrorKind::Unreachable, error_chain(&error))));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers say nothing that counts.
        if let Ok(data) = frame.into_data()
            && !data.is_empty()
        {
            return Some(Ok(data));
        }
    }
}

/// Reads a body of at most `limit` bytes.
pub(crate) async fn read_body(response: Response<Incoming>, limit: usize) -> Result<Vec<u8>, RegistryError> {
    refuse_encoded(&response)?;
    let too_large =
        || RegistryError::new(ErrorKind::Protocol, format!("its answer is larger than {limit} bytes"));
    let announced = content_length(&response);
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    let all = async {
        while let Some(chunk) = next(&mut body).await {
            let chunk = chunk?;
            if bytes.len() + chunk.len() > limit {
                return Err(too_large());
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(())
    };
    let slow = |_| {
        RegistryError::new(ErrorKind::Unreachable, format!("no whole answer within {} s", WHOLE.as_secs()))
    };
    timeout(WHOLE, all).await.map_err(slow)??;
    Ok(bytes)
}

/// Refuses what is compressed although we have asked for what is not.
pub(crate) fn refuse_encoded(response: &Response<Incoming>) -> Result<(), RegistryError> {
    match response.headers().get(CONTENT_ENCODING) {
        Some(encoding) if !encoding.as_bytes().eq_ignore_ascii_case(b"identity") => Err(RegistryError::new(
            ErrorKind::Protocol,
            "its answer is compressed, although the request didn't accept that",
        )),
        _ => Ok(()),
    }
}

/// The length that a response announces.
pub(crate) fn content_length(response: &Response<Incoming>) -> Option<u64> {
    response.headers().get(http::header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
