//! Rules for the course, the end and the deletion of a job.

use std::collections::BTreeSet;

use prepull_api::crd::job::ImagePrePullJobSpec;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, NodePhase, Summary};
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_engine::prepull::controller::Content;
use prepull_engine::prepull::rollout::is_missing;
use prepull_engine::prepull::validate::Ratio;
use prepull_engine::shared::events::ObjectEvent;
use prepull_engine::shared::reasons;

use super::{Check, PARKED, RECHECK, add_up, count, is_final};
use crate::api::{Api, first_attempt};
use crate::edge::Edge;
use crate::world::millis;

impl Check {
    /// A write begins.
    pub(crate) fn emitted(&mut self, job: &JobUid, content: &Content, now: u64) {
        match content {
            Content::Report(report) => self.emitted_report(job, report, now),
            Content::Status(status) => self.emitted_status(job, status, now),
        }
    }

    /// A job does not run for longer than `activeDeadlineSeconds`, and no pause between two waves lasts for longer than
    /// `pauseSeconds`, as the spec has them by now.
    fn emitted_status(&mut self, job: &JobUid, status: &ImagePrePullJobStatus, now: u64) {
        let key = (job.clone(), first_attempt(status));
        let Some(start) = status.start_time.as_ref().map(|start| millis(start.0)) else {
            self.begun.remove(&key);
            return;
        };
        self.begun.extend(self.beginnings.get(job).map(|beginning| (key, beginning.clone())));
        if self.confirmed.get(job) != Some(&Some(first_attempt(status))) {
            // A run begins before anything ends it.
            return;
        }
        assert!(status.completion_time.is_some() || !self.is_cancelled(job), "{job} was cancelled, and runs");
        let since = start.max(self.active_since.get(job).copied().unwrap_or(start));
        let Some(spec) = self.accepted(job).filter(|_| status.completion_time.is_none()) else { return };
        // A re-check has a time of its own.
        if status.recheck.as_ref().is_some_and(|recheck| recheck.completion_time.is_none()) {
            let until = self.rechecks.get(job).map_or(0, |since| since + RECHECK);
            assert!(now < until, "{job} is re-checked, and that was over at {until}");
            return;
        }
        let seconds = |seconds: i64| u64::try_from(seconds).unwrap() * 1_000;
        if let Some(deadline) = spec.active_deadline_seconds.filter(|_| !spec.suspend && !spec.pause) {
            let until = since + seconds(deadline);
            assert!(now < until, "{job} runs, and its activeDeadlineSeconds were over at {until}");
        }
        let longest = spec.rollout.as_ref().map_or(0, |rollout| seconds(rollout.pause_seconds));
        let pause = status.rollout.as_ref().and_then(|waves| waves.paused_until.as_ref());
        if let Some(until) = pause.map(|until| millis(until.0)) {
            assert!(until <= now + longest, "{job} pauses until {until}, and pauseSeconds is {longest} ms");
        }
    }

    /// The active time of a job counts from now on, or from earlier.
    pub(super) fn count_active_time(&mut self, job: &JobUid, now: u64) {
        self.active_since.insert(job.clone(), now);
    }

    /// A leader takes over. What the one before it did last need not be in the API server: that a suspension has ended,
    /// that a further round was begun, that the job was started, or that it is over.
    pub(super) fn take_over(&mut self, job: &JobUid, status: &ImagePrePullJobStatus, now: u64) {
        let mut conditions = status.conditions.iter();
        let is_suspended = conditions.any(|known| known.type_ == "Suspended" && known.status == "True");
        if is_suspended || status.completion_time.is_some() {
            self.count_active_time(job, now);
        }
        if status.conditions.iter().any(|known| known.type_ == "Paused") {
            self.resumed.insert(job.clone(), now);
        }
        if status.start_time.is_none() {
            self.active_since.remove(job);
            // Before the start is in its status, nothing else of it is written: it starts over.
            self.beginnings.remove(job);
        } else if let Some(beginning) = self.begun.get(&(job.clone(), first_attempt(status))) {
            self.beginnings.insert(job.clone(), beginning.clone());
        }
        self.enter_run(job, first_attempt(status));
        self.confirm_run(job, status);
        self.rechecks.insert(job.clone(), now);
        if status.completion_time.is_some() {
            self.ended.insert(job.clone());
        } else {
            self.ended.remove(job);
        }
    }

    /// Events announce changes. One event announces that too many nodes have failed, not one per further node; and a
    /// round begins only if one of its nodes can start. `nodes`: the Nodes that the controller knew at that time.
    pub(crate) fn announced(&mut self, nodes: &BTreeSet<NodeName>, event: &ObjectEvent, now: u64) {
        let job = &event.object.uid;
        if event.reason == reasons::NODE_FAILED {
            // A task that waited for a secret until no time was left was never sent.
            let is_of = |(node, task): &&(NodeName, TaskId)| {
                task.job == *job && event.note.starts_with(&format!("{node}: "))
            };
            self.unsendable.extend(self.postponed.iter().filter(is_of).cloned());
        }
        if event.reason == reasons::TOLERANCE_EXCEEDED {
            assert!(self.exceeded.insert(job.clone()), "{job} has told before: {}", event.note);
        }
        let ends = [
            reasons::COMPLETED,
            reasons::FAILED,
            reasons::DEADLINE_EXCEEDED,
            reasons::CANCELLED,
            reasons::NOT_STARTED,
        ];
        if ends.contains(&event.reason) {
            self.ended.insert(job.clone());
        }
        let begins = [reasons::STARTED, reasons::INVALID_SPEC, reasons::NO_ELIGIBLE_NODES];
        if begins.contains(&event.reason) && self.ended.contains(job) {
            self.begin_run(job, event.reason == reasons::STARTED, now);
        }
        // It may have waited for a Ready node since then.
        if event.reason == reasons::STARTED
            && let Some(spec) = self.accepted(job).cloned()
        {
            self.beginnings.entry(job.clone()).or_insert(spec);
        }
        // It has not begun, so it may begin with the next valid spec.
        if event.reason == reasons::NO_ELIGIBLE_NODES {
            self.beginnings.remove(job);
        }
        if [reasons::RETRYING, reasons::RECHECKING, reasons::RESUMED].contains(&event.reason) {
            assert!(!self.was_cancelled(job), "{job} was cancelled: {} {}", event.reason, event.note);
        }
        if event.reason == reasons::RECHECKING {
            self.ended.remove(job);
            self.exceeded.remove(job);
            self.rechecks.insert(job.clone(), now);
        }
        if event.reason == reasons::RETRYING {
            self.ended.remove(job);
            self.exceeded.remove(job);
            let round = event.note.split(' ').nth(1).and_then(|round| round.parse().ok());
            let attempts = self.nodes.iter().filter(|((of, _), _)| of == job);
            let attempts = attempts.map(|((_, node), (attempt, _))| (node.clone(), *attempt)).collect();
            let round = round.expect("the event names the round");
            // A leader that takes over may begin the same one again.
            if self.rounds.get(job).is_none_or(|(known, _)| *known != round) {
                self.rounds.insert(job.clone(), (round, attempts));
            }
            let nodes_of_job = self.emitted.range((job.clone(), NodeName(String::new()))..);
            let mut nodes_of_job = nodes_of_job.take_while(|((of, _), _)| of == job).peekable();
            let is_written = nodes_of_job.peek().is_some();
            // A node that is there by now may join.
            let joins = self.accepted(job).is_some_and(|spec| spec.follow_nodes)
                && nodes.iter().any(|node| !self.emitted.contains_key(&(job.clone(), node.clone())));
            let can_start = joins
                || nodes_of_job
                    .any(|((_, node), phase)| *phase != NodePhase::Successful && nodes.contains(node));
            assert!(can_start || !is_written, "{job} begins a round in which nothing can start");
        }
    }

    /// Fewer nodes than before may count as failed: a result arrived late, or there are other nodes.
    pub(crate) fn may_exceed_again(&mut self) {
        self.exceeded.clear();
    }

    /// Another cloudcore leads, which has announced nothing yet.
    pub(crate) fn restarted(&mut self) {
        self.exceeded.clear();
    }

    pub(crate) fn expires(&self, api: &Api, job: &JobUid, now: u64) {
        let Some(stored) = api.jobs.get(job) else { return };
        let ended = stored.object.status.as_ref().and_then(|status| status.completion_time.as_ref());
        let ended = millis(ended.expect("deleted, and its end is not written").0);
        let ttl =
            |spec: &ImagePrePullJobSpec| spec.ttl_seconds_after_finished.map(|ttl| ttl.unsigned_abs() * 1000);
        let due = |spec| ttl(spec).is_some_and(|ttl| ended + ttl <= now);
        assert!(self.in_force(job, now).any(due), "{job} is deleted before its time");
    }

    pub(super) fn status(&mut self, api: &Api, job: &JobUid, status: &ImagePrePullJobStatus) {
        self.enter_run(job, first_attempt(status));
        self.conditions(api, job, status);
        if let Some(start) = &status.start_time {
            let start = millis(start.0);
            let first = *self.start_times.entry(job.clone()).or_insert(start);
            assert_eq!(first, start, "{job} has another startTime");
        } else {
            assert!(!self.start_times.contains_key(job), "{job} has lost its startTime");
            if self.delivered.contains_key(job) && self.accepted(job).is_none() {
                assert_eq!(status.phase, JobPhase::Failure, "(7) {job} is no valid job");
            }
        }
        let rechecks = status.recheck.as_ref().map_or(0, |recheck| recheck.rounds);
        let rounds_now = status.retry + rechecks;
        let Some(ended) = &status.completion_time else {
            if let Some((ended, rounds)) = self.over.remove(job) {
                assert!(rounds_now > rounds, "(8) {job} had ended and continues without a further round");
                self.asks_again(job, ended);
            }
            return;
        };
        let ended_at = millis(ended.0);
        let before = self.over.insert(job.clone(), (ended_at, rounds_now));
        assert_eq!(status.summary.in_progress, 0, "{job} has ended and nodes are in progress");
        if before.is_some_and(|(_, rounds)| rounds == rounds_now) {
            return;
        }
        self.has_tried_again(api, job, status.retry);
        if let Some((ended, _)) = before {
            self.asks_again(job, ended);
        }
        let bad = status.summary.failure + status.summary.unknown;
        let late = self.late.get(job).copied().unwrap_or_default();
        let mut rules = self.in_force(job, ended_at);
        let exceeded = |spec: &ImagePrePullJobSpec, bad| {
            let tolerance = Ratio::parse(&spec.image_pre_pull_template.failure_tolerate);
            tolerance.is_ok_and(|tolerance| tolerance.exceeded_by(bad, status.summary.desired))
        };
        match status.phase {
            JobPhase::Completed => {
                assert_eq!(status.summary.pending, 0, "{job} is Completed and nodes wait");
                assert!(rules.any(|spec| !exceeded(spec, bad)), "{job} is Completed with {bad} bad nodes");
            }
            JobPhase::Failure if self.cancelled_while_held.contains(job) => {}
            JobPhase::Failure => assert!(
                rules.any(|spec| {
                    status.summary.desired == 0
                        || spec.cancel
                        || spec.active_deadline_seconds.is_some()
                        || spec.rollout.is_some()
                        || rechecks > 0 && status.summary.pending > 0
                        || exceeded(spec, bad + late)
                }),
                "{job} is a Failure with {bad} bad nodes"
            ),
            JobPhase::Init | JobPhase::InProgress => panic!("{job} has an end and is {:?}", status.phase),
        }
        let is_complete = status.summary.successful == status.summary.desired && status.summary.desired > 0;
        assert!(
            !is_complete || status.phase == JobPhase::Completed || late > 0,
            "every node of {job} succeeded, and it is a Failure: {}",
            status.reason
        );
    }

    /// (8) A round that was begun is carried out: a node that has failed in the end has had one more try.
    pub(super) fn has_tried_again(&self, api: &Api, job: &JobUid, rounds: u32) {
        let Some((_, before)) = self.rounds.get(job).filter(|(round, _)| *round == rounds) else { return };
        for record in api.records(job).filter(|record| is_final(record.phase)) {
            let tried = before.get(&NodeName(record.node_name.clone())).copied().unwrap_or(0);
            assert!(
                record.phase == NodePhase::Successful || record.attempt > tried || is_missing(record),
                "(8) {} of {job} was not tried in round {rounds}: {:?}/{}",
                record.node_name,
                record.phase,
                record.attempt
            );
        }
    }

    /// A job that had ended continues only if `retry` or `recheck` was raised since.
    fn asks_again(&self, job: &JobUid, ended: u64) {
        let asked: Vec<_> =
            self.in_force_since(job, ended, u64::MAX).map(|spec| (spec.retry, spec.recheck)).collect();
        let is_raised = asked.windows(2).any(|pair| pair[1].0 > pair[0].0 || pair[1].1 > pair[0].1);
        assert!(
            is_raised,
            "{job} had ended at {ended} and continues, and neither retry nor recheck was raised"
        );
    }

    /// What is pinned on an edge belongs to a job that exists and wants it so.
    pub(crate) fn pins(api: &Api, edge: &Edge) {
        for uid in &edge.pins {
            let stored = api.jobs.get(uid);
            let stored = stored.unwrap_or_else(|| panic!("{} has pins of {uid}, which is gone", edge.node));
            let carried_out = stored.object.status.as_ref().map(|status| status.started_spec.as_str());
            let spec: ImagePrePullJobSpec = serde_json::from_str(carried_out.unwrap_or_default()).unwrap();
            assert!(spec.pin, "{} has pins of {uid}, which wants none", edge.node);
        }
    }

    /// A cloudcore is killed.
    pub(crate) fn killed(&mut self, api: &Api) {
        let is_behind = |uid: &JobUid, status: &ImagePrePullJobStatus| {
            status.completion_time.is_some()
                && Summary { skipped: 0, ..status.summary.clone() } != count(api.records(uid))
        };
        let jobs = api.jobs.iter().filter_map(|(uid, stored)| Some((uid, stored.object.status.as_ref()?)));
        self.behind.extend(jobs.filter(|(uid, status)| is_behind(uid, status)).map(|(uid, _)| uid.clone()));
    }

    /// Every job has ended, and its status agrees with its reports.
    pub(crate) fn settled(&self, api: &Api, now: u64) {
        let missing = api.lost_reports().find(|job| api.jobs.contains_key(job));
        assert_eq!(missing, None, "a deleted report is not written again");
        for (uid, stored) in &api.jobs {
            let status = stored.object.status.clone().unwrap_or_default();
            let over = matches!(status.phase, JobPhase::Completed | JobPhase::Failure);
            assert!(over, "{uid} does not end: {:?} {:?} {}", status.phase, status.summary, status.reason);
            assert_eq!(status.observed_generation, stored.object.metadata.generation, "{uid}");
            if status.start_time.is_none() {
                continue;
            }
            let finished = status.conditions.iter().find(|condition| condition.type_ == "Finished");
            let finished = finished.map(|condition| condition.status.as_str());
            // A cancelled job follows no later spec.
            assert!(finished == Some("True") || self.is_cancelled(uid), "{uid} has ended as {finished:?}");
            let mut names: Vec<_> = api.records(uid).map(|record| &record.node_name).collect();
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "(8) a node of {uid} is in two reports");
            let ended = status.completion_time.as_ref().map_or(now, |ended| millis(ended.0));
            if self.behind.contains(uid) && ended + PARKED <= now {
                continue;
            }
            add_up(&Summary { skipped: 0, ..status.summary.clone() }, api.records(uid));
            Self::removals_add_up(api, uid, &status);
            for shown in &status.node_status {
                let record = api.record(uid, &NodeName(shown.node_name.clone()));
                assert_eq!(record.map(|r| (r.phase, r.attempt)), Some((shown.phase, shown.attempt)), "{uid}");
            }
        }
    }
}
