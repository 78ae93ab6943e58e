//! The conditions of a job. Pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use prepull_api::crd::status::JobPhase;

use crate::shared::reasons;

/// Condition type: whether the spec was taken over.
const VALID: &str = "Valid";
/// Condition type: whether `spec.suspend` keeps further nodes from starting.
pub(crate) const SUSPENDED: &str = "Suspended";
/// Condition type: whether `spec.pause` keeps nodes from downloading. Only jobs that were ever paused have it.
pub(crate) const PAUSED: &str = "Paused";
/// Condition type: whether nodes pull, or are still to begin.
pub(crate) const PROGRESSING: &str = "Progressing";
/// Condition type: whether the job has ended well.
const COMPLETE: &str = "Complete";
/// Condition type: whether the job has ended badly.
pub(crate) const FAILED: &str = "Failed";

/// Condition type: whether the job has ended, either way.
pub(crate) const FINISHED: &str = "Finished";

/// A condition before it's compared with the one that was written last.
#[derive(Clone, Debug)]
pub(crate) struct Fact {
    /// Of a job Valid, Progressing, Suspended, Paused, Complete, Failed or Finished.
    pub(crate) type_: &'static str,
    /// True or False; `None` where it's unknown.
    pub(crate) status: Option<bool>,
    /// One CamelCase word.
    pub(crate) reason: &'static str,
    /// One sentence.
    pub(crate) message: String,
}

/// The fate of a spec that differs from the one carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherSpec {
    /// A new run begins with it.
    Next,
    /// A person has to change it.
    Refused,
}

/// The facts behind the conditions of a job.
#[derive(Debug, Default)]
pub struct Situation<'a> {
    /// The phase of the job.
    pub phase: JobPhase,
    /// Whether nodes were chosen, at any time.
    pub started: bool,
    /// `spec.suspend`, or `spec.pause`.
    pub suspended: bool,
    /// `spec.pause`.
    pub paused: bool,
    /// The reason of the condition Failed, where it isn't the usual one.
    pub ended_as: Option<&'static str>,
    /// Why the spec, or its last change, was not accepted.
    pub refusal: Option<&'a str>,
    /// The fate of a spec that differs from the one carried out. The end of the latter proves nothing about it.
    pub other: Option<OtherSpec>,
    /// A danger in the spec, though the job follows it.
    pub warning: Option<&'a str>,
    /// `status.reason`, without the refusal.
    pub reason: &'a str,
}

/// The conditions of a job, each about the spec of this generation. `before`: as they were written last.
pub fn conditions(
    situation: &Situation<'_>,
    before: &[Condition],
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let mut facts = facts(situation);
    facts.extend(pause_fact(situation, before));
    merge_conditions(before, facts, generation, now)
}

/// Whether downloads stand still. A job that was paused keeps the condition, which has the time when that ended.
fn pause_fact(situation: &Situation<'_>, before: &[Condition]) -> Option<Fact> {
    let is_paused = situation.paused && matches!(situation.phase, JobPhase::Init | JobPhase::InProgress);
    let (reason, message) = if is_paused {
        (reasons::PAUSED, "spec.pause is true: nodes at work keep what they have downloaded")
    } else {
        (reasons::NOT_PAUSED, "")
    };
    let is_shown = is_paused || before.iter().any(|condition| condition.type_ == PAUSED);
    is_shown.then(|| Fact { type_: PAUSED, status: Some(is_paused), reason, message: message.to_owned() })
}

fn facts(situation: &Situation<'_>) -> Vec<Fact> {
    let &Situation { phase, started, suspended, paused, ended_as, refusal, other, warning, reason } =
        situation;
    let fact = |type_, status, reason, message: &str| Fact {
        type_,
        status: Some(status),
        reason,
        message: message.to_owned(),
    };
    let valid = match refusal {
        None => fact(VALID, true, reasons::ACCEPTED, warning.unwrap_or_default()),
        Some(refusal) => fact(VALID, false, reasons::REFUSED, refusal),
    };
    let suspended = suspended && matches!(phase, JobPhase::Init | JobPhase::InProgress);
    let suspension = if suspended {
        let field = if paused { "pause" } else { "suspend" };
        fact(SUSPENDED, true, reasons::SUSPENDED, &format!("spec.{field} is true: no further node starts"))
    } else {
        fact(SUSPENDED, false, reasons::NOT_SUSPENDED, "")
    };
    let rest = match phase {
        JobPhase::Init | JobPhase::InProgress if suspended => [
            fact(PROGRESSING, false, reasons::SUSPENDED, reason),
            fact(COMPLETE, false, reasons::SUSPENDED, ""),
            fact(FAILED, false, reasons::SUSPENDED, ""),
        ],
        JobPhase::Init | JobPhase::InProgress => [
            fact(PROGRESSING, true, reasons::NODES_PULLING, reason),
            fact(COMPLETE, false, reasons::NODES_PULLING, ""),
            fact(FAILED, false, reasons::NODES_PULLING, ""),
        ],
        JobPhase::Completed => [
            fact(PROGRESSING, false, reasons::COMPLETED, ""),
            fact(COMPLETE, true, reasons::COMPLETED, reason),
            fact(FAILED, false, reasons::COMPLETED, ""),
        ],
        JobPhase::Failure => [
            fact(PROGRESSING, false, reasons::FAILED, ""),
            fact(COMPLETE, false, reasons::FAILED, ""),
            fact(
                FAILED,
                true,
                if started { ended_as.unwrap_or(reasons::TOLERANCE_EXCEEDED) } else { reasons::NOT_STARTED },
                reason,
            ),
        ],
    };
    let [progressing, complete, failed] = &rest;
    if let Some(other) = other {
        let why = "what the spec asks for now has not been carried out: see the condition Valid";
        let unknown = |type_| Fact { status: None, ..fact(type_, false, reasons::SPEC_CHANGED, why) };
        let ends = [COMPLETE, FAILED, FINISHED].map(unknown);
        let progressing = if other == OtherSpec::Next && !suspended {
            fact(PROGRESSING, true, reasons::SPEC_CHANGED, reason)
        } else {
            // The next leader knows from it how the job ended.
            let ended_as = ended_as.filter(|_| phase == JobPhase::Failure);
            Fact { reason: ended_as.unwrap_or(progressing.reason), ..progressing.clone() }
        };
        return [valid, suspension, progressing].into_iter().chain(ends).collect();
    }
    let end = [complete, failed].into_iter().find(|fact| fact.status == Some(true));
    let finished = match end {
        Some(end) => fact(FINISHED, true, end.reason, &end.message),
        None => fact(FINISHED, false, complete.reason, ""),
    };
    [valid, suspension].into_iter().chain(rest).chain([finished]).collect()
}

/// The conditions of these facts. One with the status that it had keeps its transition time.
pub(crate) fn merge_conditions(
    before: &[Condition],
    facts: Vec<Fact>,
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let condition = |Fact { type_, status, reason, message }: Fact| {
        let status = match status {
            Some(true) => "True",
            Some(false) => "False",
            None => "Unknown",
        };
        let same = before.iter().find(|old| old.type_ == type_ && old.status == status);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: generation,
            last_transition_time: same.map_or(Time(now), |old| old.last_transition_time.clone()),
        }
    };
    facts.into_iter().map(condition).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unchanged_condition_keeps_its_transition_time() {
        let early = Timestamp::from_second(1_000).unwrap();
        let late = Timestamp::from_second(2_000).unwrap();
        let fact =
            |status| Fact { type_: "Complete", status: Some(status), reason: "X", message: String::new() };
        let first = merge_conditions(&[], vec![fact(false)], Some(1), early);
        let second = merge_conditions(&first, vec![fact(false)], Some(1), late);
        assert_eq!(second[0].last_transition_time, Time(early));
        let third = merge_conditions(&second, vec![fact(true)], Some(1), late);
        assert_eq!((third[0].status.as_str(), third[0].last_transition_time.clone()), ("True", Time(late)));
    }

    /// A job at work.
    fn working() -> Situation<'static> {
        Situation { phase: JobPhase::InProgress, started: true, ..Situation::default() }
    }

    fn shown<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
        conditions.iter().find(|condition| condition.type_ == type_)
    }

    #[test]
    fn only_a_job_that_was_paused_says_so() {
        let mut before = Vec::new();
        for (paused, status) in [(false, None), (false, None), (true, Some("True")), (false, Some("False"))] {
            before = conditions(&Situation { paused, ..working() }, &before, None, Timestamp::UNIX_EPOCH);
            assert_eq!(shown(&before, PAUSED).map(|condition| condition.status.as_str()), status);
        }
    }

    #[test]
    fn a_job_progresses_to_a_spec_that_is_next() {
        for (other, suspended, reason) in [
            (OtherSpec::Next, false, reasons::SPEC_CHANGED),
            (OtherSpec::Next, true, reasons::SUSPENDED),
            (OtherSpec::Refused, false, reasons::NODES_PULLING),
        ] {
            let situation = Situation { other: Some(other), suspended, ..working() };
            let conditions = conditions(&situation, &[], None, Timestamp::UNIX_EPOCH);
            assert_eq!(shown(&conditions, PROGRESSING).unwrap().reason, reason, "{situation:?}");
        }
    }
}
