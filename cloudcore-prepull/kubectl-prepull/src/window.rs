//! A window on the command line: `22:00-04:00`, `Sat,Sun,22:00-04:00@Europe/Berlin`, `Mon-Fri,22:00+6h`. Pure.

use std::str::FromStr;

use prepull_api::crd::download::WindowSpec;

const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
/// The time zone of each node, as the API writes it.
const OF_NODE: &str = "Node";
const MINUTES_A_DAY: u32 = 24 * 60;

/// A window as a person writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WindowArg(pub(crate) WindowSpec);

impl FromStr for WindowArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || "[DAYS,]START-END[@ZONE], such as 22:00-04:00 or Mon-Fri,22:00+6h@Europe/Berlin".to_owned();
        let (times, time_zone) = text.split_once('@').unwrap_or((text, OF_NODE));
        let (days, times) = times.rsplit_once(',').map_or((None, times), |(days, times)| (Some(days), times));
        let mut named = Vec::new();
        for part in days.into_iter().flat_map(|days| days.split(',')) {
            named.extend(days_of(part).ok_or_else(wrong)?);
        }
        let (start, duration) = if let Some((start, duration)) = times.split_once('+') {
            (start, duration.to_owned())
        } else {
            let (start, end) = times.split_once('-').ok_or_else(wrong)?;
            let [from, to] = [start, end].map(minutes);
            let (from, to) = (from.ok_or_else(wrong)?, to.ok_or_else(wrong)?);
            // An end that isn't later is on the next day.
            let open = if to > from { to - from } else { to + MINUTES_A_DAY - from };
            (start, format!("{open}m"))
        };
        minutes(start).ok_or_else(wrong)?;
        let (start, time_zone) = (start.to_owned(), time_zone.to_owned());
        Ok(Self(WindowSpec { days: named, start, duration, time_zone }))
    }
}

/// The days of `Sat`, or of `Mon-Fri`.
fn days_of(text: &str) -> Option<Vec<String>> {
    let place = |day: &str| DAYS.iter().position(|known| known.eq_ignore_ascii_case(day));
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (place(first)?, place(last)?);
    let days = DAYS.iter().cycle().skip(first).take((last + DAYS.len() - first) % DAYS.len() + 1);
    Some(days.map(ToString::to_string).collect())
}

/// Minutes since midnight of `HH:MM`.
fn minutes(text: &str) -> Option<u32> {
    let (hours, minutes) = text.split_once(':')?;
    let number = |text: &str, below: u32| {
        Some(text).filter(|text| text.len() == 2)?.parse::<u32>().ok().filter(|number| *number < below)
    };
    Some(number(hours, 24)? * 60 + number(minutes, 60)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_read_as_people_write_them() {
        let read = |text: &str| {
            text.parse().map(|WindowArg(window)| {
                let WindowSpec { days, start, duration, time_zone } = window;
                format!("{} {start} {duration} {time_zone}", days.join(","))
            })
        };
        for (text, window) in [
            ("22:00-04:00", " 22:00 360m Node"),
            ("01:00-04:30@Europe/Berlin", " 01:00 210m Europe/Berlin"),
            ("Sat,sun,22:00+6h", "Sat,Sun 22:00 6h Node"),
            ("Fri-Mon,00:00-00:00@UTC", "Fri,Sat,Sun,Mon 00:00 1440m UTC"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(window), "{text}");
        }
        for wrong in ["22-4", "22:00", "Someday,22:00-04:00", "24:00-04:00", "9:00-10:00", "22:00-"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
