//! Times of events, which depend only on the seed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use tokio::time::Instant;

/// A clock that runs from one planned moment to the next. On a machine that's too slow for the plan, the rest of it
/// comes late, and in the same order.
pub(super) struct StormSchedule<T> {
    begun: Instant,
    /// The planned time, since the beginning.
    now: Duration,
    end: Duration,
    /// Planned events, by time and in the order of planning.
    planned: BinaryHeap<Reverse<(Duration, u64, T)>>,
    count: u64,
}

impl<T: Ord> StormSchedule<T> {
    pub(super) fn new(end: Duration) -> Self {
        Self { begun: Instant::now(), now: Duration::ZERO, end, planned: BinaryHeap::new(), count: 0 }
    }

    /// Begins now.
    pub(super) fn begin(&mut self) {
        self.begun = Instant::now();
    }

    /// Plans an event for this long after the current moment of the plan.
    pub(super) fn plan(&mut self, after: Duration, what: T) {
        self.count += 1;
        self.planned.push(Reverse((self.now + after, self.count, what)));
    }

    /// Waits for the next moment of the plan; `None` after the end. Later events stay in the plan.
    pub(super) async fn next(&mut self) -> Option<T> {
        let Reverse((at, ..)) = self.planned.peek()?;
        if *at > self.end {
            return None;
        }
        let Reverse((at, _, what)) = self.planned.pop()?;
        self.now = at;
        tokio::time::sleep_until(self.begun + at).await;
        Some(what)
    }

    /// All that is still planned, in order.
    pub(super) fn take_rest(&mut self) -> Vec<T> {
        let planned = std::mem::take(&mut self.planned);
        let mut rest: Vec<_> = planned.into_iter().map(|Reverse(entry)| entry).collect();
        rest.sort();
        rest.into_iter().map(|(_, _, what)| what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn planned_events_come_in_order() {
        let unit = Duration::from_millis(10);
        let mut schedule = StormSchedule::new(10 * unit);
        for (after, what) in [(3, 'c'), (1, 'a'), (1, 'b'), (11, 'd')] {
            schedule.plan(after * unit, what);
        }
        let begun = Instant::now();
        assert_eq!(schedule.next().await, Some('a'));
        schedule.plan(unit, 'x');
        assert_eq!(schedule.next().await, Some('b'));
        assert_eq!(schedule.next().await, Some('x'));
        assert!(begun.elapsed() >= 2 * unit);
        assert_eq!(schedule.next().await, Some('c'));
        assert_eq!(schedule.next().await, None);
        assert_eq!(schedule.take_rest(), ['d']);
    }
}
