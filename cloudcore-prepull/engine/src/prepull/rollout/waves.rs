//! The waves: how many nodes may have started by now.

use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::status::{RolloutStatus, Summary};

use crate::prepull::validate::WaveStep;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waves {
    /// Index of the wave that runs. Beyond the last step: all nodes.
    at: usize,
    /// When the wave ended. The next one begins a pause later, which may still be changed.
    ended: Option<Timestamp>,
}

impl Waves {
    /// The waves as an earlier run of cloudcore left them, which paused them for so long.
    pub(super) fn from_status(status: &RolloutStatus, pause: Duration) -> Self {
        Self {
            at: (status.step as usize).saturating_sub(1),
            ended: status.paused_until.as_ref().and_then(|until| until.0.checked_sub(pause).ok()),
        }
    }

    /// Goes on to the wave that the nodes have reached: more of them may have started than the status shows, and
    /// their failures must not count against a smaller wave.
    pub(super) fn catch_up(&mut self, steps: &[WaveStep], counts: &Summary) {
        while self.start_limit(steps, counts.desired) < counts.desired - counts.pending {
            (self.at, self.ended) = (self.at + 1, None);
        }
    }

    /// The waves of a further round, which begins with the first one that is not complete.
    pub(super) fn for_further_round(steps: &[WaveStep], counts: &Summary) -> Self {
        let started = counts.desired - counts.pending;
        let at = steps.iter().position(|step| step.nodes(counts.desired) > started);
        Self { at: at.unwrap_or(steps.len()), ended: None }
    }

    /// How many nodes may have started by now, those of the earlier waves included.
    pub(super) fn start_limit(&self, steps: &[WaveStep], desired: u32) -> u32 {
        // The largest so far: a percentage may be less than a number before it.
        steps
            .get(..=self.at)
            .map_or(desired, |steps| steps.iter().map(|step| step.nodes(desired)).max().unwrap_or(desired))
    }

    /// Goes on to the next wave if this one has ended. The caller has checked the tolerance.
    pub(super) fn advance(&mut self, steps: &[WaveStep], pause: Duration, counts: &Summary, now: Timestamp) {
        while counts.pending > 0
            && counts.in_progress == 0
            && counts.desired - counts.pending >= self.start_limit(steps, counts.desired)
        {
            let ended = *self.ended.get_or_insert(now);
            if ended.checked_add(pause).is_ok_and(|until| until > now) {
                return;
            }
            self.ended = None;
            self.at += 1;
        }
        // The wave has not ended: more nodes have joined, or an earlier life of cloudcore had written that it had,
        // and not yet how its nodes did.
        self.ended = None;
    }

    /// When the next wave begins, while a pause runs that takes so long.
    pub(super) fn paused_until(&self, pause: Duration) -> Option<Timestamp> {
        self.ended?.checked_add(pause).ok()
    }

    pub(super) fn is_paused(&self) -> bool {
        self.ended.is_some()
    }

    /// The waves as the status has them, for people and for the next run of cloudcore. `size`: nodes of the wave that
    /// runs, those of the earlier waves included.
    pub(super) fn status(&self, steps: &[WaveStep], size: u32, pause: Duration) -> Option<RolloutStatus> {
        let last_is_all = steps.last()? == &WaveStep::Percent(100);
        let waves = steps.len() + usize::from(!last_is_all);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Some(RolloutStatus {
            step: count(self.at.saturating_add(1).min(waves)),
            steps: count(waves),
            nodes: size,
            paused_until: self.paused_until(pause).map(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time),
        })
    }
}
