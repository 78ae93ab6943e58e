//! Durations in Go's notation: `12h`, `1h30m`, `0s`.

use std::time::Duration;

/// Each unit in nanoseconds. `m` must come after `ms`, because the first unit that matches is taken.
const UNITS: [(&str, u128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60 * 1_000_000_000),
    ("h", 3600 * 1_000_000_000),
];

/// A duration that may be negative, as in Go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GoDuration {
    pub(super) negative: bool,
    pub(super) length: Duration,
}

/// Parses as Go's `time.ParseDuration` does. None for invalid text, and beyond the 292 years that Go can represent.
pub(super) fn parse(text: &str) -> Option<GoDuration> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let negative = text.starts_with('-');
    if unsigned == "0" {
        return Some(GoDuration { negative: false, length: Duration::ZERO });
    }
    let mut rest = unsigned;
    let mut total = 0u128;
    while !rest.is_empty() || unsigned.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|at| *at > 0)?;
        let (digits, after) = rest.split_at(number);
        let (unit, nanos) = UNITS.into_iter().find(|(unit, _)| after.starts_with(unit))?;
        total = total.checked_add(parse_amount(digits, nanos)?)?;
        rest = &after[unit.len()..];
    }
    let length = Duration::from_nanos(i64::try_from(total).ok()?.unsigned_abs());
    Some(GoDuration { negative: negative && !length.is_zero(), length })
}

/// A decimal number of units in nanoseconds.
fn parse_amount(digits: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let whole = if whole.is_empty() { 0 } else { whole.parse::<u128>().ok()? };
    let mut total = whole.checked_mul(unit)?;
    // Further digits are less than a nanosecond, even of an hour.
    let mut scale = unit;
    for digit in fraction.bytes().take(13) {
        scale /= 10;
        total = total.checked_add(u128::from(digit - b'0') * scale)?;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_parsed_as_in_go() {
        let seconds = |text: &str| {
            let duration = parse(text)?;
            Some(duration.length.as_secs_f64() * if duration.negative { -1.0 } else { 1.0 })
        };
        for (text, expected) in [
            ("0", 0.0),
            ("0s", 0.0),
            ("-0s", 0.0),
            ("12h", 43_200.0),
            ("1h30m", 5_400.0),
            ("1.5h", 5_400.0),
            ("1h0m0s", 3_600.0),
            ("300ms", 0.3),
            ("2us", 0.000_002),
            ("2µs", 0.000_002),
            ("5ns", 0.000_000_005),
            (".5s", 0.5),
            ("5.s", 5.0),
            ("+5s", 5.0),
            ("-5m", -300.0),
        ] {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        for text in ["", "-", "5", "s", ".", ".s", "1..5s", "5 s", "5d", "1h30", "--5s", "9999999h", "٣s"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(text in "[-+0-9.a-zµ ]{0,30}", other: String) {
            let _ = (parse(&text), parse(&other));
        }

        #[test]
        fn durations_from_go_are_parsed(hours in 0u64..9999, minutes in 0u64..60, seconds in 0u64..60) {
            let read = parse(&format!("{hours}h{minutes}m{seconds}s")).unwrap();
            prop_assert_eq!(read.length.as_secs(), hours * 3600 + minutes * 60 + seconds);
        }
    }
}
