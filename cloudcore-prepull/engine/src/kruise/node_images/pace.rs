//! When what is due.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use prepull_api::task::NodeName;

/// Nodes by the moment at which they are to be looked at again.
#[derive(Debug, Default)]
pub(super) struct Due {
    order: BTreeSet<(Timestamp, NodeName)>,
    at: HashMap<NodeName, Timestamp>,
}

impl Due {
    pub(super) fn set(&mut self, node: &NodeName, at: Option<Timestamp>) {
        if let Some(before) = self.at.remove(node) {
            self.order.remove(&(before, node.clone()));
        }
        if let Some(at) = at {
            self.at.insert(node.clone(), at);
            self.order.insert((at, node.clone()));
        }
    }

    pub(super) fn pop(&mut self, now: Timestamp, into: &mut BTreeSet<NodeName>) {
        while self.order.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, node)) = self.order.pop_first() {
                self.at.remove(&node);
                into.insert(node);
            }
        }
    }

    pub(super) fn next(&self) -> Option<Timestamp> {
        self.order.first().map(|(at, _)| *at)
    }
}

/// Writes of statuses that tell of nothing but progress, over all nodes: so many a second. Ten thousand nodes that pull
/// at once must not keep etcd busy with percentages.
#[derive(Debug)]
pub(super) struct Budget {
    left: f64,
    counted: Option<Timestamp>,
}

/// A second.
const PROGRESS_RATE: f64 = 20.0;
/// When there is none left.
const PROGRESS_WAIT: Duration = Duration::from_secs(1);

impl Default for Budget {
    fn default() -> Self {
        Self { left: PROGRESS_RATE, counted: None }
    }
}

impl Budget {
    /// Takes one; where there is none, says when to come back.
    pub(super) fn take(&mut self, now: Timestamp) -> Result<(), Timestamp> {
        let passed = self.counted.map_or(SignedDuration::ZERO, |then| now.duration_since(then));
        self.counted = Some(now);
        self.left = (self.left + passed.as_secs_f64().max(0.0) * PROGRESS_RATE).min(PROGRESS_RATE);
        if self.left >= 1.0 {
            self.left -= 1.0;
            return Ok(());
        }
        Err(now.checked_add(PROGRESS_WAIT).unwrap_or(Timestamp::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_statuses_a_second_tell_of_progress_and_the_others_wait() {
        let mut budget = Budget::default();
        let start = Timestamp::from_second(1_800_000_000).unwrap();
        let told = |budget: &mut Budget, at| (0..1000).filter(|_| budget.take(at).is_ok()).count();
        assert_eq!(told(&mut budget, start), 20);
        assert_eq!(told(&mut budget, start + Duration::from_millis(500)), 10);
        let later = start + Duration::from_millis(500);
        assert_eq!(budget.take(later), Err(later + PROGRESS_WAIT));
    }
}
