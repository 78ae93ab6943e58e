//! Windows in one line, as a setting of a node has them, and durations as people write them: `Mon-Fri 01:00+4h`.

use std::time::Duration;

use prepull_api::download::{MAX_WINDOW_DURATION, Weekday, Window, Zone};

use crate::zones::is_zone;

/// Why a text is no window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadWindow {
    /// It does not have the parts.
    #[error(
        "{0:?} is not a window: write \"[DAYS] HH:MM+DURATION [ZONE]\", such as \"Mon-Fri 01:00+4h Europe/Berlin\""
    )]
    Form(String),
    /// A day is none.
    #[error("{0:?} is not a day: write Mon, Tue, Wed, Thu, Fri, Sat or Sun, as Mon-Fri or Sat,Sun")]
    Day(String),
    /// The time of day is none.
    #[error("{0:?} is not a time of day: write 00:00 to 23:59, such as 01:00")]
    Start(String),
    /// The duration is none.
    #[error("{0}")]
    Duration(String),
    /// The zone is none.
    #[error("{0:?} is not a time zone: write a name of the IANA database, such as Europe/Berlin, or Node")]
    Zone(String),
}

/// Parses `[DAYS] HH:MM+DURATION [ZONE]`. Without days it is every day, without a zone the node's own.
pub fn parse_window(text: &str) -> Result<Window, BadWindow> {
    let form = || BadWindow::Form(text.to_owned());
    let parts: Vec<&str> = text.split_whitespace().collect();
    let timed = parts.iter().position(|part| part.contains('+')).ok_or_else(form)?;
    let (start, duration) = parts[timed].split_once('+').ok_or_else(form)?;
    let days = match &parts[..timed] {
        [] => Vec::new(),
        [days] => parse_days(days)?,
        _ => return Err(form()),
    };
    let zone = match &parts[timed + 1..] {
        [] => Zone::Node,
        [name] => Zone::from((*name).to_owned()),
        _ => return Err(form()),
    };
    if let Zone::Named(name) = &zone
        && !is_zone(name)
    {
        return Err(BadWindow::Zone(name.clone()));
    }
    Ok(Window {
        days,
        start: start.parse().map_err(|_| BadWindow::Start(start.to_owned()))?,
        duration: parse_duration(duration).and_then(check_duration).map_err(BadWindow::Duration)?,
        time_zone: zone,
    })
}

/// The window as [`parse_window`] reads it.
pub fn write_window(window: &Window) -> String {
    let Window { days, start, duration, time_zone } = window;
    let days: Vec<_> = days.iter().map(|day| day.as_str()).collect();
    let days = if days.is_empty() { String::new() } else { format!("{} ", days.join(",")) };
    format!("{days}{start}+{} {time_zone}", write_duration(*duration))
}

/// Days as `Mon,Wed` or `Mon-Fri`, where a range may go over the end of the week.
fn parse_days(text: &str) -> Result<Vec<Weekday>, BadWindow> {
    let day = |name: &str| {
        let known = Weekday::ALL.into_iter().find(|day| day.as_str().eq_ignore_ascii_case(name));
        known.ok_or_else(|| BadWindow::Day(name.to_owned()))
    };
    let mut days = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (day(first)?, day(last)?);
        let from_first = Weekday::ALL.into_iter().cycle().skip_while(|day| *day != first);
        for day in from_first {
            if !days.contains(&day) {
                days.push(day);
            }
            if day == last {
                break;
            }
        }
    }
    days.sort_unstable();
    Ok(days)
}

/// Parses hours, minutes and seconds: `4h`, `90m`, `1h30m`, `20s`. The error shows how to write it.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is not a duration: write hours, minutes and seconds, such as 4h, 90m or 1h30m");
    let (mut rest, mut sum) = (text, 0_u64);
    if rest.is_empty() {
        return Err(wrong());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        let mut units = rest[digits..].chars();
        let unit = match units.next() {
            Some('h') => 3600,
            Some('m') => 60,
            Some('s') => 1,
            _ => return Err(wrong()),
        };
        sum = number.checked_mul(unit).and_then(|seconds| sum.checked_add(seconds)).ok_or_else(wrong)?;
        rest = units.as_str();
    }
    Ok(Duration::from_secs(sum))
}

/// A duration as [`parse_duration`] reads it. What is below a second is left out.
pub fn write_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let parts = [(seconds / 3600, 'h'), (seconds / 60 % 60, 'm'), (seconds % 60, 's')];
    let parts = parts.into_iter().filter(|(number, _)| *number > 0);
    let text = parts.fold(String::new(), |text, (number, unit)| format!("{text}{number}{unit}"));
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// Returns the duration if a window may have it.
pub fn check_duration(duration: Duration) -> Result<Duration, String> {
    if duration.is_zero() || duration > MAX_WINDOW_DURATION {
        let longest = write_duration(MAX_WINDOW_DURATION);
        return Err(format!("{} is not allowed: write 1s to {longest}", write_duration(duration)));
    }
    Ok(duration)
}
