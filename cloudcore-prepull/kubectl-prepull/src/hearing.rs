//! The connection to the cluster, as a followed job and the page show it: since when something isn't heard, and why. Pure.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use kube::runtime::watcher::Event;
use serde::Serialize;

/// How long after its last error a watch counts as lost, although the API server answers: a watch that goes on reports
/// nothing until something changes. One that fails tries again, after a second at first and after 30 s at most.
const RETRIED_WITHIN: [SignedDuration; 2] = [SignedDuration::from_secs(5), SignedDuration::from_secs(35)];

/// The API server itself, among what is read.
pub(crate) const SERVER: &str = "server";

/// What isn't heard, and what can't be shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hearing {
    /// By what is read.
    lost: BTreeMap<&'static str, Loss>,
    /// Watches that read a list: without it they don't go on.
    listing: BTreeSet<&'static str>,
    /// When the API server answered last.
    answered: Option<Timestamp>,
    leaderless: Option<String>,
    without_sites: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Loss {
    since: Timestamp,
    last: Timestamp,
    text: String,
}

/// The state of the connection, as a page receives it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HearingState<'a> {
    /// Since when something hasn't been heard.
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<Timestamp>,
    /// Why: the error of the API server itself, or of the watch that was lost first.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<&'a str>,
    /// Since when no replica leads, as a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    leaderless: Option<&'a str>,
    /// Why the sites of nodes aren't known.
    #[serde(skip_serializing_if = "Option::is_none")]
    without_sites: Option<&'a str>,
}

impl Loss {
    /// The pauses between its tries double.
    fn retried_within(&self) -> SignedDuration {
        let [least, most] = RETRIED_WITHIN;
        self.last.duration_since(self.since).saturating_mul(2).clamp(least, most)
    }
}

impl Hearing {
    /// An error of something that is read. The first one counts until it's heard again.
    pub(crate) fn note_loss(&mut self, what: &'static str, text: String, now: Timestamp) {
        let loss = self.lost.entry(what).or_insert(Loss { since: now, last: now, text });
        loss.last = now;
    }

    /// An event of a watch. One that lists is heard again once the list is there: the rest of it may fail.
    pub(crate) fn note_event<K>(&mut self, what: &'static str, event: &Event<K>) {
        match event {
            Event::Init => {
                self.listing.insert(what);
            }
            Event::InitApply(_) => {}
            Event::InitDone | Event::Apply(_) | Event::Delete(_) => self.forget(what),
        }
    }

    /// Something is heard again, or isn't read any more.
    pub(crate) fn forget(&mut self, what: &'static str) {
        self.lost.remove(what);
        self.listing.remove(what);
    }

    /// The API server answers, and this is known of its leader.
    pub(crate) fn hear_server(&mut self, leaderless: Option<String>, now: Timestamp) {
        self.lost.remove(SERVER);
        self.answered = Some(now);
        let may_be_resumed = |loss: &Loss| now.duration_since(loss.last) >= loss.retried_within();
        self.lost.retain(|what, loss| self.listing.contains(what) || !may_be_resumed(loss));
        self.leaderless = leaderless;
    }

    /// Whether a lost watch still has to read a list again. One that goes on without a list may be silent.
    pub(crate) fn awaits_list(&self) -> bool {
        self.listing.iter().any(|what| self.lost.contains_key(what))
    }

    /// The labels of nodes can't be read.
    pub(crate) fn lack_sites(&mut self, text: String) {
        self.without_sites = Some(text);
    }

    pub(crate) fn state(&self) -> HearingState<'_> {
        let server = self.lost.get(SERVER);
        // Between its last answer and the first error it may have been silent.
        let silent = server.and(self.answered);
        let first = server.or_else(|| self.lost.values().min_by_key(|loss| loss.since));
        HearingState {
            since: silent.or_else(|| first.map(|loss| loss.since)),
            lost: first.map(|loss| loss.text.as_str()),
            leaderless: self.leaderless.as_deref(),
            without_sites: self.without_sites.as_deref(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn lost(hearing: &Hearing) -> Option<(i64, &str)> {
        let HearingState { since, lost, .. } = hearing.state();
        Some((since?.as_second(), lost?))
    }

    #[test]
    fn the_first_loss_is_shown_with_its_time() {
        let mut hearing = Hearing::default();
        assert_eq!(hearing.state(), HearingState::default());
        hearing.note_loss("jobs", "refused".to_owned(), at(10));
        hearing.note_loss("reports", "reset".to_owned(), at(12));
        hearing.note_loss("jobs", "silent".to_owned(), at(20));
        assert_eq!(lost(&hearing), Some((10, "refused")));
        hearing.forget("jobs");
        assert_eq!(lost(&hearing), Some((12, "reset")));
        hearing.forget("reports");
        assert_eq!(lost(&hearing), None);
    }

    #[test]
    fn a_lost_server_counts_from_its_last_answer() {
        let mut hearing = Hearing::default();
        hearing.note_loss(SERVER, "refused".to_owned(), at(5));
        assert_eq!(lost(&hearing), Some((5, "refused")));
        hearing.note_loss("jobs", "busy".to_owned(), at(6));
        hearing.hear_server(None, at(7));
        assert_eq!(lost(&hearing), Some((6, "busy")), "it may fail again");
        hearing.note_loss(SERVER, "silent".to_owned(), at(22));
        assert_eq!(lost(&hearing), Some((7, "silent")));
    }

    #[test]
    fn a_silent_watch_counts_as_resumed() {
        let mut hearing = Hearing::default();
        for (errors, until) in [(vec![10], 15), (vec![10, 20], 40), (vec![10, 30, 60], 95)] {
            for second in errors {
                hearing.note_loss("jobs", "refused".to_owned(), at(second));
            }
            hearing.hear_server(None, at(until - 1));
            assert_eq!(lost(&hearing), Some((10, "refused")), "it may fail again");
            hearing.hear_server(None, at(until));
            assert_eq!(lost(&hearing), None);
        }
    }

    #[test]
    fn a_relisting_watch_stays_lost() {
        let mut hearing = Hearing::default();
        hearing.note_event("jobs", &Event::<()>::Init);
        hearing.hear_server(None, at(5));
        assert_eq!(lost(&hearing), None, "nothing has failed yet");
        assert!(!hearing.awaits_list());
        hearing.note_event("jobs", &Event::<()>::InitDone);
        hearing.note_loss("jobs", "refused".to_owned(), at(10));
        hearing.note_event("jobs", &Event::<()>::Init);
        hearing.hear_server(None, at(500));
        assert_eq!(lost(&hearing), Some((10, "refused")), "the list isn't there");
        hearing.note_event("jobs", &Event::InitApply(()));
        hearing.hear_server(None, at(900));
        assert_eq!(lost(&hearing), Some((10, "refused")), "the rest of the list may fail");
        assert!(hearing.awaits_list());
        hearing.note_event("jobs", &Event::<()>::InitDone);
        assert_eq!(lost(&hearing), None);
        hearing.note_loss("jobs", "refused".to_owned(), at(1000));
        assert!(!hearing.awaits_list(), "it may go on without an event");
        hearing.hear_server(None, at(1100));
        assert_eq!(lost(&hearing), None, "it went on without a list");
    }

    #[test]
    fn leader_and_sites_are_no_losses() {
        let mut hearing = Hearing::default();
        hearing.hear_server(Some("no cloudcore-prepull has led".to_owned()), at(1));
        hearing.lack_sites("user jane lacks a right".to_owned());
        let state = serde_json::to_value(hearing.state()).unwrap();
        let expected = serde_json::json!({
            "leaderless": "no cloudcore-prepull has led", "withoutSites": "user jane lacks a right",
        });
        assert_eq!(state, expected);
        hearing.hear_server(None, at(2));
        assert_eq!(hearing.state().leaderless, None);
    }
}
