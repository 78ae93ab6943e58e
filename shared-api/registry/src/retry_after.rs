//! `Retry-After`: seconds, or a date.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{DATE, RETRY_AFTER};

/// Longest wait that is believed.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The wait that a response asks for. A date is counted from the date of the response: our clock may be wrong.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let asked = text(RETRY_AFTER)?;
    let wait = if let Ok(seconds) = asked.parse() {
        Duration::from_secs(seconds)
    } else {
        let until = httpdate::parse_http_date(asked).ok()?;
        let now = text(DATE).and_then(|date| httpdate::parse_http_date(date).ok());
        until.duration_since(now.unwrap_or_else(SystemTime::now)).unwrap_or_default()
    };
    Some(wait.min(LONGEST))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_wait_is_given_in_seconds_or_as_a_date() {
        for (value, expected) in [
            ("7", Some(7)),
            (" 7 ", Some(7)),
            ("0", Some(0)),
            ("Sun, 06 Nov 1994 08:49:47 GMT", Some(10)),
            ("Sun, 06 Nov 1994 08:49:07 GMT", Some(0)),
            ("99999999999", Some(LONGEST.as_secs())),
            ("-1", None),
            ("soon", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, value.parse().unwrap());
            headers.insert(DATE, "Sun, 06 Nov 1994 08:49:37 GMT".parse().unwrap());
            assert_eq!(retry_after(&headers).map(|wait| wait.as_secs()), expected, "{value}");
        }
        assert_eq!(retry_after(&HeaderMap::new()), None);
    }
}
