//! Formats of bytes, times and counts.

use indicatif::HumanBytes;
use jiff::Timestamp;

pub(crate) fn format_bytes(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// A part of bytes and the whole: `12.30 of 20.10 GiB` where both have the same unit.
pub(crate) fn part_of(done: u64, total: u64) -> String {
    let (part, whole) = (format_bytes(done), format_bytes(total));
    match (part.split_once(' '), whole.split_once(' ')) {
        (Some((number, unit)), Some((_, same))) if unit == same => format!("{number} of {whole}"),
        _ => format!("{part} of {whole}"),
    }
}

/// Seconds in the two units that matter: `9s`, `4m12s`, `3h5m`, `2d4h`.
pub(crate) fn format_duration(seconds: u64) -> String {
    let units = [(86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")];
    let largest = units.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(units.len() - 1);
    let (unit, name) = units[largest];
    let first = format!("{}{name}", seconds / unit);
    match units.get(largest + 1).filter(|(smaller, _)| seconds % unit >= *smaller) {
        Some((smaller, name)) => format!("{first}{}{name}", seconds % unit / smaller),
        None => first,
    }
}

/// Seconds from one moment to a later one; none if it is not later.
pub(crate) fn seconds_between(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.duration_since(from).as_secs()).unwrap_or(0)
}

pub(crate) fn format_age(time: Option<Timestamp>, now: Timestamp) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format_duration(seconds_between(time, now)))
}

/// A number and the noun in its number: `1 node`, `3 nodes`.
pub(crate) fn format_count(number: u64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// The names, and how many more there are.
pub(crate) fn format_names(names: &[String], all: u64) -> String {
    let more = all.saturating_sub(names.len() as u64);
    if more == 0 { names.join(", ") } else { format!("{} and {more} more", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_at_most_two_units() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (252, "4m12s"),
            (3_600, "1h"),
            (3_630, "1h"),
            (11_100, "3h5m"),
            (187_200, "2d4h"),
        ] {
            assert_eq!(format_duration(seconds), text);
        }
    }

    #[test]
    fn equal_units_are_written_once() {
        assert_eq!(part_of(5 << 20, 10 << 20), "5.00 of 10.00 MiB");
        assert_eq!(part_of(512 << 10, 10 << 20), "512.00 KiB of 10.00 MiB");
        assert_eq!(part_of(0, 0), "0 of 0 B");
    }

    #[test]
    fn counts_and_cut_lists_show_numbers() {
        assert_eq!(
            (format_count(1, "node").as_str(), format_count(0, "node").as_str()),
            ("1 node", "0 nodes")
        );
        let names = ["a".to_owned(), "b".to_owned()];
        assert_eq!(
            (format_names(&names, 2).as_str(), format_names(&names, 5).as_str()),
            ("a, b", "a, b and 3 more")
        );
    }
}
