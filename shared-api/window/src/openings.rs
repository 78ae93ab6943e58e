//! The times at which the windows of all sides are open, and how much of that lies between two moments.

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use prepull_api::download::Window;

use crate::schedule::{Schedule, Span};

/// How far an opening is looked for. Windows recur weekly; those of two zones that never meet within five weeks may do
/// so in another part of the year, for which no node is to wait.
pub const HORIZON: Duration = Duration::from_secs(HORIZON_WEEKS as u64 * 7 * 24 * 3600);
const HORIZON_WEEKS: u32 = 5;
/// Beyond this many weeks we extrapolate open time from the weeks before: such a deadline needn't be exact to the minute.
const EXACT_WEEKS: u32 = 53;
/// Beyond this many openings as well: those of two windows in a year, or of 16 in nine weeks. A box may send 16 windows of a
/// second each, many times a second, and thousands of them make up the time of one task.
const EXACT_OPENINGS: usize = 1024;
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// When downloads may run: at any time, or where all schedules are open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Openings {
    schedules: Vec<Schedule>,
}

/// Whether downloads may run at a moment, and until when that does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowState {
    /// Whether they may.
    pub is_open: bool,
    /// The state holds at least until then; ask again at that time. `None`: it never changes.
    pub until: Option<Timestamp>,
}

impl Openings {
    /// At any time.
    pub fn always() -> Self {
        Self::default()
    }

    /// In these windows, each opening this much later on the node; at any time if there are none. `node_zone`:
    /// the time zone of windows that are in the node's own; UTC if it is not known.
    pub fn new(windows: &[Window], delay: Duration, node_zone: Option<&str>) -> Self {
        if windows.is_empty() {
            return Self::always();
        }
        Self { schedules: vec![Schedule::new(windows, delay, node_zone)] }
    }

    /// Where the other ones are open as well.
    #[must_use]
    pub fn intersect_with(mut self, other: Self) -> Self {
        self.schedules.extend(other.schedules);
        self
    }

    /// Whether downloads may run at any time.
    pub fn is_always(&self) -> bool {
        self.schedules.is_empty()
    }

    /// Whether downloads may run at this moment.
    pub fn is_open(&self, at: Timestamp) -> bool {
        self.state_at(at).is_open
    }

    /// Whether downloads may run at this moment, and for how long that is so.
    pub fn state_at(&self, at: Timestamp) -> WindowState {
        let states = self.schedules.iter().map(|schedule| schedule.state_at(at));
        let state = states.reduce(|one, other| match (one.0, other.0) {
            (true, true) => (true, one.1.min(other.1)),
            (false, false) => (false, one.1.max(other.1)),
            (true, false) => other,
            (false, true) => one,
        });
        WindowState { is_open: state.is_none_or(|state| state.0), until: state.map(|state| state.1) }
    }

    /// When downloads may run next: this moment if they may now. `None` if that is not before [`HORIZON`].
    pub fn next_open(&self, from: Timestamp) -> Option<Timestamp> {
        weeks_from(from, HORIZON_WEEKS).find_map(|week| Some(self.open_within(week).first()?.start))
    }

    /// How much of the time between two moments downloads could run.
    pub fn open_between(&self, from: Timestamp, to: Timestamp) -> Duration {
        if self.is_always() {
            return time_between(from, to);
        }
        let passed = time_between(from, to);
        let weeks = u32::try_from(passed.as_secs() / WEEK.as_secs()).unwrap_or(u32::MAX);
        if passed > WEEK * EXACT_WEEKS {
            return self.open_between(from, add_saturating(from, WEEK)).saturating_mul(weeks);
        }
        let until_then = |week: Span| Span { end: week.end.min(to), ..week };
        let open = |week| self.open_within(until_then(week)).into_iter().map(length).sum::<Duration>();
        weeks_from(from, weeks + 1).map(open).sum()
    }

    /// The moment by which downloads could run for this long. Where no window opens before [`HORIZON`] that much later:
    /// no task should wait for ever. An estimate beyond `EXACT_WEEKS` and `EXACT_OPENINGS`.
    pub fn after_open_time(&self, from: Timestamp, open: Duration) -> Timestamp {
        self.after_open_time_until(from, open, Timestamp::MAX)
    }

    /// The same, but no later than `latest`: what lies beyond is not walked.
    pub fn after_open_time_until(&self, from: Timestamp, open: Duration, latest: Timestamp) -> Timestamp {
        if self.is_always() {
            return add_saturating(from, open).min(latest);
        }
        let exact = self.exact_weeks();
        match u32::try_from(time_between(from, latest).as_secs() / WEEK.as_secs() + 1) {
            Ok(weeks) if weeks <= exact => self.walk(from, open, weeks).unwrap_or(latest).min(latest),
            _ => self.walk_on(from, open, exact).min(latest),
        }
    }

    /// Walks these weeks, which are more than five, and goes on by an estimate.
    fn walk_on(&self, from: Timestamp, open: Duration, weeks: u32) -> Timestamp {
        let left = match self.walk(from, open, weeks) {
            Ok(end) => return end,
            Err(left) => left.as_nanos(),
        };
        // As much again in each further time of that length, since windows recur weekly: only changes of an offset shift them.
        // It was open at least once, so this is not zero. The last of these times is walked again, for the hour of the end.
        let so_far = open.as_nanos().saturating_sub(left).max(1);
        let times = left.saturating_sub(1) / so_far;
        let rest = u64::try_from(left - times * so_far).map_or(Duration::MAX, Duration::from_nanos);
        let times = u32::try_from(times).unwrap_or(u32::MAX).saturating_add(1);
        let later = add_saturating(from, (WEEK * weeks).saturating_mul(times));
        self.walk(later, rest, weeks).unwrap_or_else(|_| add_saturating(later, WEEK * weeks))
    }

    /// The moment by which it was open for this long, or that lies [`HORIZON`] after the last closing. If neither comes
    /// within these weeks, the time that's left then.
    fn walk(&self, from: Timestamp, open: Duration, weeks: u32) -> Result<Timestamp, Duration> {
        let (mut left, mut latest) = (open, add_saturating(from, HORIZON));
        for week in weeks_from(from, weeks) {
            for span in self.open_within(week) {
                if span.start >= latest {
                    return Ok(latest);
                }
                if left <= length(span) {
                    return Ok(add_saturating(span.start, left));
                }
                left -= length(span);
                latest = add_saturating(span.end, HORIZON);
            }
            if week.end >= latest {
                return Ok(latest);
            }
        }
        Err(left)
    }

    /// The number of weeks in which a walk is exact.
    fn exact_weeks(&self) -> u32 {
        let windows: usize = self.schedules.iter().map(Schedule::window_count).sum();
        let weeks = u32::try_from(EXACT_OPENINGS / (7 * windows).max(1)).unwrap_or(EXACT_WEEKS);
        weeks.clamp(HORIZON_WEEKS + 1, EXACT_WEEKS)
    }

    /// The parts of this time in which all schedules are open.
    fn open_within(&self, time: Span) -> Vec<Span> {
        let common = |open: Vec<Span>, schedule: &Schedule| {
            intersect(&open, &schedule.open_spans(time.start, time.end).collect::<Vec<_>>())
        };
        self.schedules.iter().fold(vec![time], common)
    }

    /// A sentence for a person about the next time that downloads may run. `None` while they may.
    pub fn explain_wait(&self, at: Timestamp) -> Option<String> {
        if self.is_open(at) {
            return None;
        }
        if let Some(part) = self.schedules.iter().find_map(Schedule::unknown_part) {
            return Some(format!(
                "waits for its window; its {part} is not known to this version of edgecore-prepull"
            ));
        }
        let Some(opens) = self.next_open(at) else {
            let weeks = HORIZON.as_secs() / WEEK.as_secs();
            return Some(format!("waits for its window, which does not open within {weeks} weeks"));
        };
        let zone = self.schedules.first().map_or(TimeZone::UTC, |schedule| schedule.zone_of(opens));
        let name = zone.iana_name().unwrap_or("UTC").to_owned();
        let civil = zone.to_datetime(opens);
        Some(format!(
            "waits for its window, opens at {} {name} ({})",
            civil.strftime("%H:%M"),
            civil.strftime("%a %-d %b")
        ))
    }
}

/// Weeks one after another.
fn weeks_from(from: Timestamp, weeks: u32) -> impl Iterator<Item = Span> {
    let begin = move |week: u32| add_saturating(from, WEEK * week);
    (0..weeks).map(move |week| Span { start: begin(week), end: begin(week + 1) })
}

/// What two lists have in common. Each is in its order and without overlaps.
fn intersect(one: &[Span], other: &[Span]) -> Vec<Span> {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut common = Vec::new();
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let span = Span { start: a.start.max(b.start), end: a.end.min(b.end) };
        if span.start < span.end {
            common.push(span);
        }
        if a.end < b.end {
            one.next()
        } else {
            other.next()
        };
    }
    common
}

fn length(span: Span) -> Duration {
    time_between(span.start, span.end)
}

/// The time that has passed since `from`; none if the clock was set back.
fn time_between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}

fn add_saturating(from: Timestamp, wait: Duration) -> Timestamp {
    let wait = SignedDuration::try_from(wait).unwrap_or(SignedDuration::MAX);
    from.saturating_add(wait).unwrap_or(Timestamp::MAX)
}
