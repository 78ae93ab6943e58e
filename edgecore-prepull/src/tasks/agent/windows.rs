//! Windows of a task: only time within them counts for its deadline.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use prepull_api::download::{DownloadTerms, Window};
use prepull_api::wire::PullKey;
use prepull_window::{Openings, WindowState};

use super::time::Now;
use crate::clock::{FIRST_KNOWN, timestamp};

/// Time for which we trust the wall clock: it may jump, on a machine without a battery by years.
pub(crate) const LOOK_AT_CLOCK: Duration = Duration::from_secs(60);

/// The node's time zone and windows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeWindows {
    /// Name of the time zone. `None` if it isn't known, which means UTC.
    pub time_zone: Option<String>,
    /// The node's own windows: no task downloads outside of these. Empty: no limit.
    pub windows: Vec<Window>,
    /// Those of the cloud's settings, which limit in the same way.
    pub cloud_windows: Vec<Window>,
}

impl NodeWindows {
    /// Openings that apply to every task of the node.
    pub(crate) fn own_openings(&self) -> Openings {
        let openings = |windows| Openings::new(windows, Duration::ZERO, self.time_zone.as_deref());
        openings(&self.windows).intersect_with(openings(&self.cloud_windows))
    }

    /// The windows for `Hello`, which has one list: that with the shorter time a week, if both limit the node.
    pub(crate) fn reported_windows(&self) -> Vec<Window> {
        let days = |window: &Window| if window.days.is_empty() { 7 } else { window.days.len() };
        let open = |windows: &Vec<Window>| -> Duration {
            windows.iter().map(|window| window.duration * u32::try_from(days(window)).unwrap_or(7)).sum()
        };
        let lists = [&self.windows, &self.cloud_windows].into_iter().filter(|windows| !windows.is_empty());
        lists.min_by_key(|windows| open(windows)).cloned().unwrap_or_default()
    }

    /// Openings of a task with these terms.
    pub(super) fn task_openings(&self, terms: &DownloadTerms) -> Openings {
        let zone = self.time_zone.as_deref();
        let of_task = Openings::new(&terms.windows, terms.delay, zone);
        of_task.intersect_with(self.own_openings())
    }
}

/// The windows of a task that has any.
#[derive(Clone, Debug, PartialEq)]
pub struct CountedWindows {
    /// Start of its time.
    pub(super) since: Instant,
    pub(super) openings: Openings,
}

/// The part of an assignment that each further `Assign` of the task replaces, also while the task runs.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskTerms {
    /// Moment at which the task ends, done or not, if it may download all the time.
    pub deadline: Instant,
    /// The windows in which it may download, and its time counts. `None`: all the time.
    pub windows: Option<CountedWindows>,
    /// Registry keys, one for each image of the task.
    pub keys: Vec<Arc<PullKey>>,
    /// How the task may download.
    pub download: Arc<DownloadTerms>,
}

impl TaskTerms {
    /// Whether the task has windows.
    pub fn has_windows(&self) -> bool {
        self.windows.is_some()
    }

    /// The terms by another clock: the time that's left stays.
    pub(crate) fn under_clock(&self, clock: &NodeWindows, now: Now) -> Self {
        let openings = clock.task_openings(&self.download);
        if self.windows.as_ref().is_some_and(|counted| counted.openings == openings)
            || (self.windows.is_none() && openings.is_always())
        {
            return self.clone();
        }
        let windows = (!openings.is_always()).then_some(CountedWindows { since: now.monotonic, openings });
        Self { deadline: now.monotonic + self.time_left(now), windows, ..self.clone() }
    }

    fn time_left(&self, now: Now) -> Duration {
        let Some(CountedWindows { since, openings }) = &self.windows else {
            return self.deadline.saturating_duration_since(now.monotonic);
        };
        let passed = now.monotonic.saturating_duration_since(*since);
        let spent = timestamp(now.wall)
            .and_then(|wall| Some(openings.open_between(wall.checked_sub(passed).ok()?, wall)))
            .unwrap_or_default();
        self.deadline.saturating_duration_since(*since).saturating_sub(spent)
    }

    /// The end of the task's time. With windows it depends on the wall clock: look again after a minute.
    pub fn deadline_at(&self, now: Now) -> Instant {
        let Some(CountedWindows { since, openings }) = &self.windows else { return self.deadline };
        // No window opens while the time is unknown, so no time counts.
        let Some(wall) = timestamp(now.wall) else { return now.moment_after(Duration::MAX) };
        let passed = now.monotonic.saturating_duration_since(*since);
        // Use the current clock: earlier readings may have been wrong.
        let Ok(begun) = wall.checked_sub(passed) else { return self.deadline };
        let end = openings.after_open_time(begun, self.deadline.saturating_duration_since(*since));
        let takes = Duration::try_from(end.duration_since(begun)).unwrap_or_default();
        now.moment_since(*since, takes)
    }

    /// Whether the task has used up its time.
    pub fn is_over(&self, now: Now) -> bool {
        self.deadline_at(now) <= now.monotonic
    }

    /// Whether the task may download at this time, and until when that holds.
    pub fn window_state(&self, wall: SystemTime) -> WindowState {
        let Some(CountedWindows { openings, .. }) = &self.windows else {
            return WindowState { is_open: true, until: None };
        };
        let unknown = WindowState { is_open: false, until: Some(FIRST_KNOWN) };
        timestamp(wall).map_or(unknown, |wall| openings.state_at(wall))
    }

    /// Explains the wait of a task that may not download at this time.
    pub(crate) fn explain_wait(&self, wall: SystemTime) -> Option<String> {
        let CountedWindows { openings, .. } = self.windows.as_ref()?;
        if self.download.paused {
            return Some("waits: its job is paused".to_owned());
        }
        match timestamp(wall) {
            Some(wall) => openings.explain_wait(wall),
            None => Some("waits for its window, but the time is not known: set the node's clock, or let it connect to a cloudcore-prepull that tells the time".to_owned()),
        }
    }
}

/// The time that a running task has used, from repeated looks at the clock. If the clock jumps into a window, the wait
/// before that doesn't count.
#[derive(Debug, Default)]
pub(crate) struct OpenClock {
    /// Start of the current terms. `None` before the first look.
    since: Option<Instant>,
    spent: Duration,
    looked: Option<(Instant, bool)>,
}

impl OpenClock {
    /// Looks at the clock. Returns the end of the task's time, and the latest time for the next look.
    pub(crate) fn update_deadline(&mut self, terms: &TaskTerms, now: Now) -> (Instant, Instant) {
        let Some(CountedWindows { since, openings }) = &terms.windows else {
            return (terms.deadline, terms.deadline);
        };
        let Some(wall) = timestamp(now.wall) else {
            self.looked = Some((now.monotonic, false));
            return (now.moment_after(Duration::MAX), now.moment_after(LOOK_AT_CLOCK));
        };
        if self.since == Some(*since) {
            let seen = self.looked.filter(|(_, was_open)| *was_open);
            self.spent +=
                seen.map_or(Duration::ZERO, |(then, _)| now.monotonic.saturating_duration_since(then));
        } else {
            // There were no looks while the task was queued: use the current clock.
            self.since = Some(*since);
            let begun = wall.checked_sub(now.monotonic.saturating_duration_since(*since));
            self.spent = begun.map_or(Duration::ZERO, |begun| openings.open_between(begun, wall));
        }
        let state = openings.state_at(wall);
        self.looked = Some((now.monotonic, state.is_open));
        let moment = |time: Timestamp| {
            now.moment_after(Duration::try_from(time.duration_since(wall)).unwrap_or_default())
        };
        let left = terms.deadline.saturating_duration_since(*since).saturating_sub(self.spent);
        let deadline =
            if left.is_zero() { now.monotonic } else { moment(openings.after_open_time(wall, left)) };
        let change = state.until.map_or(deadline, moment);
        (deadline, deadline.min(change).min(now.moment_after(LOOK_AT_CLOCK)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use prepull_window::parse_window;

    use super::*;

    fn terms(begun: Instant, seconds: u64) -> TaskTerms {
        let clock = NodeWindows { time_zone: Some("Europe/Berlin".to_owned()), ..NodeWindows::default() };
        let windows = vec![parse_window("01:00+1h Node").unwrap()];
        let download = DownloadTerms { windows, ..DownloadTerms::default() };
        TaskTerms {
            deadline: begun + Duration::from_secs(seconds),
            keys: Vec::new(),
            windows: Some(CountedWindows { since: begun, openings: clock.task_openings(&download) }),
            download: Arc::new(download),
        }
    }

    fn now(begun: Instant, passed: u64, wall: &str) -> Now {
        let wall: Timestamp = wall.parse().unwrap();
        Now { monotonic: begun + Duration::from_secs(passed), wall: wall.into(), boot: None }
    }

    #[test]
    fn only_open_windows_count() {
        let begun = Instant::now();
        let terms = terms(begun, 2 * 3600);
        // 23:00 in Berlin: one hour tonight, and one tomorrow.
        let asked = now(begun, 0, "2026-01-10T22:00:00Z");
        assert_eq!(terms.deadline_at(asked), begun + Duration::from_secs(27 * 3600));
        assert!(!terms.is_over(now(begun, 27 * 3600 - 1, "2026-01-12T00:59:59Z")));
        assert!(terms.is_over(now(begun, 27 * 3600, "2026-01-12T01:00:00Z")));
    }

    #[test]
    fn each_look_counts_open_time() {
        let begun = Instant::now();
        let terms = terms(begun, 1800);
        let mut clock = OpenClock::default();
        // Noon: closed, for a minute at least.
        let (_, look) = clock.update_deadline(&terms, now(begun, 0, "2026-01-10T11:00:00Z"));
        assert_eq!(look, begun + LOOK_AT_CLOCK);
        // The clock jumps into the window. The wait before that doesn't count.
        let (deadline, _) = clock.update_deadline(&terms, now(begun, 3600, "2026-01-10T00:10:00Z"));
        assert_eq!(deadline, begun + Duration::from_secs(3600 + 1800));
        let (deadline, look) = clock.update_deadline(&terms, now(begun, 3660, "2026-01-10T00:59:50Z"));
        // A minute has counted, and ten seconds of this window are left.
        assert_eq!(look, begun + Duration::from_secs(3670));
        assert_eq!(deadline, begun + Duration::from_secs(3670 + 23 * 3600 + 1800 - 70));
        // The cloud sets a new time.
        let again = self::terms(begun + Duration::from_secs(3665), 60);
        let (deadline, _) = clock.update_deadline(&again, now(begun, 3665, "2026-01-10T00:30:00Z"));
        assert_eq!(deadline, begun + Duration::from_secs(3725));
        let (deadline, _) = clock.update_deadline(&again, now(begun, 3725, "2026-01-10T00:31:00Z"));
        assert_eq!(deadline, begun + Duration::from_secs(3725));
    }

    #[test]
    fn both_lists_of_windows_limit_a_node() {
        let list = |text: &str| vec![parse_window(text).unwrap()];
        let at = |time: &str| time.parse::<Timestamp>().unwrap();
        let clock = NodeWindows {
            time_zone: None,
            windows: list("22:00+8h UTC"),
            cloud_windows: list("Sat 00:00+3h UTC"),
        };
        let openings = clock.own_openings();
        // A Saturday.
        assert!(openings.is_open(at("2026-01-10T01:00:00Z")));
        assert!(
            !openings.is_open(at("2026-01-10T04:00:00Z")) && !openings.is_open(at("2026-01-11T01:00:00Z"))
        );
        assert_eq!(clock.reported_windows(), list("Sat 00:00+3h UTC"));
        let alone = NodeWindows { cloud_windows: Vec::new(), ..clock.clone() };
        assert_eq!(alone.reported_windows(), list("22:00+8h UTC"));
        assert!(NodeWindows::default().reported_windows().is_empty());
    }

    #[test]
    fn other_windows_leave_the_time_that_is_left() {
        let begun = Instant::now();
        let terms = terms(begun, 1800);
        // Twenty minutes of the window have passed in Berlin: ten minutes are left.
        let in_window = now(begun, 1200, "2026-01-10T00:20:00Z");
        let clock = |windows: &[&str]| NodeWindows {
            time_zone: Some("Europe/Berlin".to_owned()),
            windows: Vec::new(),
            cloud_windows: windows.iter().map(|text| parse_window(text).unwrap()).collect(),
        };
        let later = terms.under_clock(&clock(&["Sun 01:00+1h Node"]), in_window);
        assert!(!later.window_state(in_window.wall).is_open);
        let sunday = now(begun, 1200 + 24 * 3600 - 1200, "2026-01-11T00:00:00Z");
        assert_eq!(later.deadline_at(in_window), sunday.monotonic + Duration::from_secs(600));
        // And they stay the same under the same windows.
        assert_eq!(terms.under_clock(&clock(&[]), in_window), terms);
        let free = TaskTerms { windows: None, download: Arc::default(), ..terms.clone() };
        assert_eq!(free.under_clock(&clock(&[]), in_window), free);
        let closed = free.under_clock(&clock(&["Sun 01:00+1h Node"]), in_window);
        assert_eq!(closed.deadline_at(in_window), sunday.monotonic + Duration::from_secs(600));
    }

    #[test]
    fn a_paused_task_waits_and_spends_nothing() {
        let begun = Instant::now();
        let download =
            DownloadTerms { windows: vec![Window::never()], paused: true, ..DownloadTerms::default() };
        let windows =
            CountedWindows { since: begun, openings: NodeWindows::default().task_openings(&download) };
        let terms = TaskTerms { windows: Some(windows), download: Arc::new(download), ..terms(begun, 60) };
        let later = now(begun, 24 * 3600, "2026-01-10T11:00:00Z");
        assert!(!terms.window_state(later.wall).is_open && !terms.is_over(later));
        assert_eq!(terms.explain_wait(later.wall).as_deref(), Some("waits: its job is paused"));
    }

    #[test]
    fn a_corrected_clock_is_believed() {
        let begun = Instant::now();
        let terms = terms(begun, 1800);
        // The board boots in 1970, in the middle of the night: the time isn't known.
        let booted = now(begun, 0, "1970-01-01T00:10:00Z");
        assert!(!terms.window_state(booted.wall).is_open);
        assert!(terms.explain_wait(booted.wall).is_some_and(|why| why.contains("the time is not known")));
        let mut clock = OpenClock::default();
        let (deadline, look) = clock.update_deadline(&terms, now(begun, 7200, "1970-01-01T02:10:00Z"));
        assert!(deadline > begun + Duration::from_secs(30 * 24 * 3600), "no time counts");
        assert_eq!(look, begun + Duration::from_secs(7200) + LOOK_AT_CLOCK);
        assert!(!terms.is_over(now(begun, 600, "1970-01-01T00:20:00Z")));
        // Then it learns that it's noon: the window was closed.
        let noon = now(begun, 660, "2026-01-10T11:00:00Z");
        assert!(!terms.window_state(noon.wall).is_open);
        assert_eq!(terms.deadline_at(noon), begun + Duration::from_secs(660 + 13 * 3600 + 1800));
    }
}
