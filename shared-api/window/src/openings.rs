//! The times at which the windows of all sides are open, and how much of that lies between two moments.

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use prepull_api::download::Window;

use crate::schedule::Schedule;

/// How far an opening is looked for. Windows recur weekly; those of two zones that never meet within five weeks may do
/// so in another part of the year, for which no node is to wait.
pub const HORIZON: Duration = Duration::from_secs(5 * 7 * 24 * 3600);
/// Beyond this many weeks we extrapolate open time from the weeks before: such a deadline needn't be exact to the minute.
const EXACT_WEEKS: u32 = 53;
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
        let end = add_saturating(from, HORIZON);
        let mut at = from;
        while at < end {
            match self.state_at(at) {
                WindowState { is_open: true, .. } => return Some(at),
                WindowState { is_open: false, until } => at = until?,
            }
        }
        None
    }

    /// How much of the time between two moments downloads could run.
    pub fn open_between(&self, from: Timestamp, to: Timestamp) -> Duration {
        if self.is_always() {
            return time_between(from, to);
        }
        if time_between(from, to) > WEEK * EXACT_WEEKS {
            let week = self.open_between(from, add_saturating(from, WEEK));
            let weeks = time_between(from, to).as_secs() / WEEK.as_secs();
            return week.saturating_mul(u32::try_from(weeks).unwrap_or(u32::MAX));
        }
        let (mut at, mut sum) = (from, Duration::ZERO);
        while at < to {
            let WindowState { is_open, until } = self.state_at(at);
            let end = until.unwrap_or(to).min(to);
            if is_open {
                sum += time_between(at, end);
            }
            at = end;
        }
        sum
    }

    /// The moment by which downloads could run for this long. Where no window opens before [`HORIZON`] that much later:
    /// no task should wait for ever.
    pub fn after_open_time(&self, from: Timestamp, open: Duration) -> Timestamp {
        if self.is_always() {
            return add_saturating(from, open);
        }
        let exact = add_saturating(from, WEEK * EXACT_WEEKS);
        let (mut at, mut left) = (from, open);
        loop {
            let Some(opens) = self.next_open(at) else { return add_saturating(at, HORIZON) };
            if opens >= exact {
                // As much again in each further time of that length. It was open at least once, so this is not zero.
                let so_far = open.saturating_sub(left).as_nanos().max(1);
                let times = u32::try_from(left.as_nanos() / so_far).unwrap_or(u32::MAX);
                return add_saturating(opens, (WEEK * EXACT_WEEKS).saturating_mul(times.saturating_add(1)));
            }
            let closes = self.state_at(opens).until.unwrap_or(Timestamp::MAX);
            let length = time_between(opens, closes);
            if left <= length {
                return add_saturating(opens, left);
            }
            (at, left) = (closes, left.saturating_sub(length));
        }
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

/// The time that has passed since `from`; none if the clock was set back.
fn time_between(from: Timestamp, to: Timestamp) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}

fn add_saturating(from: Timestamp, wait: Duration) -> Timestamp {
    let wait = SignedDuration::try_from(wait).unwrap_or(SignedDuration::MAX);
    from.saturating_add(wait).unwrap_or(Timestamp::MAX)
}
