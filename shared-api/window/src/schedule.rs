//! The windows of one side, the job or the node: when any of them is open.

use std::time::Duration;

use jiff::civil::Date;
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp, ToSpan};
use prepull_api::download::{TimeOfDay, Weekday, Window, Zone};

use crate::zones;

/// Windows recur weekly: within eight days each of them opens, also where a change of the offset moves it.
const LOOK_AHEAD: SignedDuration = SignedDuration::from_hours(8 * 24);
/// The civil date of a moment differs by at most one day from that of another zone.
const DAY: SignedDuration = SignedDuration::from_hours(24);

/// A schedule is open while at least one of its windows is. Windows open with a delay. Never without windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Schedule {
    windows: Vec<Recurring>,
    delay: SignedDuration,
    /// A time zone that the database doesn't have, or a day that only a newer version knows. Such a window never opens.
    unknown: Option<String>,
}

/// A window in its zone.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Recurring {
    days: Vec<Weekday>,
    start: TimeOfDay,
    duration: SignedDuration,
    zone: TimeZone,
}

/// One time in which windows are open without a break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: Timestamp,
    pub(crate) end: Timestamp,
}

#[cfg(test)]
thread_local! {
    /// Openings that were looked up in the database of time zones: what a walk costs.
    pub(crate) static LOOKUPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl Schedule {
    /// `node_zone`: the zone of windows that name none. Unknown ones count as UTC there.
    pub(crate) fn new(windows: &[Window], delay: Duration, node_zone: Option<&str>) -> Self {
        // Windows that have a break at all have one each week, so no longer delay leaves them open.
        let delay = to_signed(delay).min(LOOK_AHEAD);
        let mut schedule = Self { windows: Vec::with_capacity(windows.len()), delay, unknown: None };
        for window in windows {
            let zone = match &window.time_zone {
                Zone::Node => node_zone.and_then(zones::find_zone).unwrap_or(TimeZone::UTC),
                Zone::Named(name) => {
                    let Some(zone) = zones::find_zone(name) else {
                        schedule.unknown = Some(format!("time zone {name:?}"));
                        continue;
                    };
                    zone
                }
            };
            if window.days.contains(&Weekday::Other) {
                schedule.unknown = Some("day".to_owned());
            }
            let (days, start) = (window.days.clone(), window.start);
            schedule.windows.push(Recurring { days, start, duration: to_signed(window.duration), zone });
        }
        schedule
    }

    /// Whether a window is open, and until when that is so at least.
    pub(crate) fn state_at(&self, now: Timestamp) -> (bool, Timestamp) {
        // Most windows open daily.
        let near = self.state_within(now, DAY);
        near.or_else(|| self.state_within(now, LOOK_AHEAD))
            .unwrap_or_else(|| (false, now.saturating_add(LOOK_AHEAD).unwrap_or(Timestamp::MAX)))
    }

    /// The state, if a window is open or opens within this time.
    fn state_within(&self, now: Timestamp, ahead: SignedDuration) -> Option<(bool, Timestamp)> {
        let span = self.open_spans(now, now.saturating_add(ahead).unwrap_or(Timestamp::MAX)).next()?;
        Some(if span.start <= now { (true, span.end) } else { (false, span.start) })
    }

    /// The times that end after `from`, and with windows that begin by `to`, in their order.
    pub(crate) fn open_spans(&self, from: Timestamp, to: Timestamp) -> impl Iterator<Item = Span> {
        // What lies before the earliest window of importance may be cut off: the delay is over then.
        let longest = self.windows.iter().map(|window| window.duration).max().unwrap_or_default();
        let delay = self.delay;
        let first = from.saturating_sub(longest + delay + DAY).unwrap_or(Timestamp::MIN);
        let mut spans: Vec<Span> = self.windows.iter().flat_map(|window| window.spans(first, to)).collect();
        spans.sort_unstable_by_key(|span| span.start);
        let mut spans = spans.into_iter().peekable();
        let merged = std::iter::from_fn(move || {
            let mut span = spans.next()?;
            while let Some(next) = spans.next_if(|next| next.start <= span.end) {
                span.end = span.end.max(next.end);
            }
            Some(span)
        });
        let delayed = merged.map(move |span| Span {
            start: span.start.saturating_add(delay).unwrap_or(Timestamp::MAX),
            end: span.end,
        });
        delayed.filter(move |span| span.end > from && span.start < span.end)
    }

    /// The number of windows: a walk looks up one opening of each for each day.
    pub(crate) fn window_count(&self) -> usize {
        self.windows.len()
    }

    /// The zone in which to tell a person when it opens: that of the window that opens then.
    pub(crate) fn zone_of(&self, opens: Timestamp) -> TimeZone {
        let opens = opens.saturating_sub(self.delay).unwrap_or(opens);
        let until = opens.saturating_add(SignedDuration::from_secs(1)).unwrap_or(opens);
        let opening =
            self.windows.iter().find(|window| window.spans(opens, until).any(|span| span.start == opens));
        opening.or(self.windows.first()).map_or(TimeZone::UTC, |window| window.zone.clone())
    }

    /// The time zone or the day that is not known here, if there is one.
    pub(crate) fn unknown_part(&self) -> Option<&str> {
        self.unknown.as_deref()
    }
}

impl Recurring {
    /// Those times in which it is open that begin in this time, and perhaps some before.
    fn spans(&self, from: Timestamp, to: Timestamp) -> impl Iterator<Item = Span> {
        let first = self.zone.to_datetime(from).date();
        let first = first.checked_sub(1.day()).unwrap_or(first);
        std::iter::successors(Some(first), |date| date.tomorrow().ok())
            .map(|date| (date, self.opening_on(date)))
            // Only dates at the beginning or end of time have no opening.
            .skip_while(|(_, opening)| opening.is_none())
            .take_while(move |(_, opening)| opening.is_some_and(|opening| opening <= to))
            .filter(|(date, _)| self.is_on(*date))
            .filter_map(|(_, opening)| {
                let start = opening?;
                Some(Span { start, end: start.saturating_add(self.duration).ok()? })
            })
    }

    fn is_on(&self, date: Date) -> bool {
        let day = Weekday::ALL[usize::from(date.weekday().to_monday_zero_offset().unsigned_abs())];
        self.days.is_empty() || self.days.contains(&day)
    }

    /// When it opens on this date.
    fn opening_on(&self, date: Date) -> Option<Timestamp> {
        #[cfg(test)]
        LOOKUPS.set(LOOKUPS.get() + 1);
        // The casts can't fail: hour and minute are in their ranges, and jiff's types are signed.
        let [hour, minute] = [self.start.hour(), self.start.minute()].map(u8::cast_signed);
        let civil = date.at(hour, minute, 0, 0);
        match self.zone.to_ambiguous_timestamp(civil).offset() {
            AmbiguousOffset::Unambiguous { offset } | AmbiguousOffset::Fold { before: offset, .. } => {
                offset.to_timestamp(civil).ok()
            }
            // By the later offset the time lies before the change. The first valid moment is the end of the gap.
            AmbiguousOffset::Gap { after, .. } => {
                let before = after.to_timestamp(civil).ok()?;
                Some(self.zone.following(before).next()?.timestamp())
            }
        }
    }
}

fn to_signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}
