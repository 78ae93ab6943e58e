//! The choice of the program for this machine. Pure.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::boot::BootTime;

/// How often a program may be started before it has proved itself: once for the upgrade, and twice more for a power cut,
/// or a restart by a person, in the middle.
const MOST_STARTS: u32 = 3;
/// How often a program that has proved itself may be started within [`RESTARTING`]: it then ends again and again, on a box that
/// may be out of reach. A unit restarts it after 5 s.
const MOST_RESTARTS: usize = 8;
const RESTARTING: Duration = Duration::from_secs(600);
/// Why a program doesn't run any more that a person has undone.
const UNDONE: &str = "it was undone on the machine, by upgrade --undo";

/// A program in the state directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Program {
    /// `sha256:…` of the file.
    pub(crate) digest: String,
    /// As it prints it.
    pub(crate) version: String,
    /// The image that it came from.
    pub(crate) image: String,
}

/// The programs of this machine besides the installed one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct UpgradeRecord {
    /// Version of the installed program that this was written beside. If it has
    /// another one now, it was installed since, and runs.
    base: String,
    /// The program that runs in place of the installed one.
    proved: Option<Program>,
    /// Its last starts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    restarts: Vec<BootTime>,
    trial: Option<Trial>,
    last: Option<TrialOutcome>,
}

/// A program that hasn't proved itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Trial {
    program: Program,
    /// Seconds that it has in each start.
    within: u64,
    starts: u32,
}

/// How the last trial ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TrialOutcome {
    pub(crate) program: Program,
    /// Why the machine went back to the program before; absent if the program has proved itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) went_back: Option<String>,
}

/// The program that a task has put on trial. Not a part of the record: an older launcher, which writes that as well, would
/// leave out the task.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TaskTrial {
    pub(super) task: String,
    pub(super) digest: String,
}

/// How far the upgrade of a task has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpgradeStage {
    /// The task has put no program on trial.
    New,
    /// A program is on trial, whether that of the task or another one.
    OnTrial,
    /// The program of the task has proved itself.
    Proved,
    /// The program before runs again, for this reason.
    WentBack(String),
}

/// What `run` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StartChoice {
    /// It's the agent itself.
    Own,
    /// It becomes this program.
    Proved(Program),
    /// It starts this program, which has this many seconds to prove itself.
    Trial(Program, u64),
}

impl UpgradeRecord {
    /// Whether a program is being tried.
    pub(crate) fn is_trying(&self) -> bool {
        self.trial.is_some()
    }

    /// Whether this program is being tried.
    pub(super) fn is_on_trial(&self, program: &Program) -> bool {
        self.trial.as_ref().is_some_and(|trial| trial.program == *program)
    }

    /// The program that runs in place of the installed one.
    pub(crate) fn proved_program(&self) -> Option<&Program> {
        self.proved.as_ref()
    }

    /// How the last trial ended.
    pub(crate) fn last_outcome(&self) -> Option<&TrialOutcome> {
        self.last.as_ref()
    }

    /// Digests of the programs that may still run.
    pub(crate) fn digests(&self) -> impl Iterator<Item = &str> {
        let trial = self.trial.as_ref().map(|trial| &trial.program);
        self.proved.iter().chain(trial).map(|program| program.digest.as_str())
    }

    /// How far the upgrade of a task has come that has put this program on trial, if any.
    pub(super) fn stage(&self, trial: Option<&TaskTrial>) -> UpgradeStage {
        if self.is_trying() {
            return UpgradeStage::OnTrial;
        }
        let Some(TaskTrial { digest, .. }) = trial else { return UpgradeStage::New };
        let last = self.last.as_ref().filter(|last| last.program.digest == *digest);
        match last.map(|last| (&last.went_back, &last.program.version)) {
            Some((Some(reason), version)) => {
                UpgradeStage::WentBack(format!("{version} has not proved itself: {reason}"))
            }
            Some((None, _)) => UpgradeStage::Proved,
            None if self.proved.as_ref().is_some_and(|proved| proved.digest == *digest) => {
                UpgradeStage::Proved
            }
            None => {
                UpgradeStage::WentBack("another program was installed on the machine in between".to_owned())
            }
        }
    }

    /// Has a program tried at the next start. It has `within` seconds to prove itself.
    pub(crate) fn try_program(&mut self, base: &str, program: Program, within: u64) {
        if self.base != base {
            *self = Self { base: base.to_owned(), ..Self::default() };
        }
        self.trial = Some(Trial { program, within, starts: 0 });
    }

    /// Decides at a start of the installed program. The record must be on the disk before the program is started.
    pub(super) fn decide_start(&mut self, base: &str, now: Option<BootTime>) -> StartChoice {
        if self.digests().next().is_none() {
            return StartChoice::Own;
        }
        if self.base != base {
            let last = self.last.take();
            *self = Self { base: base.to_owned(), last, ..Self::default() };
            return StartChoice::Own;
        }
        match &mut self.trial {
            Some(trial) if trial.starts < MOST_STARTS => {
                trial.starts += 1;
                return StartChoice::Trial(trial.program.clone(), trial.within);
            }
            Some(_) => self.go_back(format!("it was started {MOST_STARTS} times and has not proved itself")),
            None => {}
        }
        if let (Some(now), Some(_)) = (now, &self.proved) {
            self.count_restart(now);
        }
        self.proved.clone().map_or(StartChoice::Own, StartChoice::Proved)
    }

    fn count_restart(&mut self, now: BootTime) {
        self.restarts.retain(|start| now.elapsed_since(*start).is_some_and(|ago| ago <= RESTARTING));
        if self.restarts.len() >= MOST_RESTARTS {
            self.give_up(format!(
                "it was started {MOST_RESTARTS} times within {} minutes",
                RESTARTING.as_secs() / 60
            ));
        } else {
            self.restarts.push(now);
        }
    }

    /// The program of the trial is the one to run from now on.
    pub(super) fn prove(&mut self) {
        if let Some(Trial { program, .. }) = self.trial.take() {
            self.last = Some(TrialOutcome { program: program.clone(), went_back: None });
            self.proved = Some(program);
            self.restarts.clear();
        }
    }

    /// Whether the program of the trial may be started once more.
    pub(super) fn has_starts_left(&self) -> bool {
        self.trial.as_ref().is_some_and(|trial| trial.starts < MOST_STARTS)
    }

    /// Ends the trial: the program before runs again.
    pub(super) fn go_back(&mut self, reason: String) {
        if let Some(Trial { program, .. }) = self.trial.take() {
            self.last = Some(TrialOutcome { program, went_back: Some(reason) });
        }
    }

    /// Gives up the program that had proved itself: the installed one runs again.
    pub(crate) fn give_up(&mut self, reason: String) {
        self.restarts.clear();
        if let Some(program) = self.proved.take() {
            self.last = Some(TrialOutcome { program, went_back: Some(reason) });
        }
    }

    /// Has the installed program run again. The record keeps the reason, for the task of the trial.
    pub(crate) fn undo(&mut self) {
        self.give_up(UNDONE.to_owned());
        self.go_back(UNDONE.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "0.1.0";

    fn program(version: &str) -> Program {
        Program {
            digest: format!("sha256:{version}"),
            version: version.to_owned(),
            image: format!("agent:{version}"),
        }
    }

    fn tried(version: &str) -> UpgradeRecord {
        let mut record = UpgradeRecord::default();
        record.try_program(BASE, program(version), 60);
        record
    }

    #[test]
    fn a_program_runs_once_it_has_proved_itself() {
        let mut record = tried("2");
        assert_eq!(record.decide_start(BASE, None), StartChoice::Trial(program("2"), 60));
        record.prove();
        assert_eq!(record.decide_start(BASE, None), StartChoice::Proved(program("2")));
        assert_eq!(record.last_outcome(), Some(&TrialOutcome { program: program("2"), went_back: None }));
    }

    #[test]
    fn without_another_program_nothing_is_written() {
        let mut record = UpgradeRecord::default();
        assert_eq!((record.decide_start(BASE, None), record), (StartChoice::Own, UpgradeRecord::default()));
    }

    #[test]
    fn a_failed_trial_leads_to_the_program_before() {
        let mut record = tried("2");
        record.go_back("why".to_owned());
        assert_eq!(record.decide_start(BASE, None), StartChoice::Own);

        let mut record = tried("2");
        record.prove();
        record.try_program(BASE, program("3"), 60);
        assert_eq!(record.digests().collect::<Vec<_>>(), ["sha256:2", "sha256:3"]);
        record.go_back("why".to_owned());
        assert_eq!(record.decide_start(BASE, None), StartChoice::Proved(program("2")));
        let last =
            record.last_outcome().map(|last| (last.program.version.as_str(), last.went_back.as_deref()));
        assert_eq!(last, Some(("3", Some("why"))));
    }

    #[test]
    fn a_program_that_ends_the_machine_is_started_three_times() {
        let mut record = tried("2");
        let starts: Vec<_> = (0..5).map(|_| record.decide_start(BASE, None)).collect();
        assert_eq!(starts[..3], vec![StartChoice::Trial(program("2"), 60); 3]);
        assert_eq!(starts[3..], [StartChoice::Own, StartChoice::Own]);
        assert!(record.last_outcome().is_some_and(|last| last.went_back.is_some()));
    }

    #[test]
    fn an_installed_program_of_another_version_wins() {
        for proved in [false, true] {
            let mut record = tried("2");
            if proved {
                record.prove();
            }
            assert_eq!(record.decide_start("0.3.0", None), StartChoice::Own, "{proved}");
            assert_eq!(record.decide_start("0.3.0", None), StartChoice::Own, "{proved}");
            assert_eq!(record.digests().count(), 0);
        }
    }

    #[test]
    fn a_damaged_program_is_given_up() {
        let mut record = tried("2");
        record.prove();
        record.give_up("damaged".to_owned());
        assert_eq!(record.decide_start(BASE, None), StartChoice::Own);
    }

    #[test]
    fn an_undone_upgrade_keeps_its_reason() {
        let mut record = tried("2");
        record.prove();
        record.try_program(BASE, program("3"), 60);
        record.undo();
        assert_eq!(record.decide_start(BASE, None), StartChoice::Own);
        assert_eq!(record.digests().count(), 0);
        let task = TaskTrial { task: "uid/1".to_owned(), digest: "sha256:3".to_owned() };
        let stage = record.stage(Some(&task));
        assert!(matches!(&stage, UpgradeStage::WentBack(why) if why.contains("--undo")), "{stage:?}");
    }

    #[test]
    fn a_program_that_ends_again_and_again_is_given_up() {
        let at = |id, seconds: u64| Some(BootTime { id, millis: seconds * 1000 });
        let proved = || {
            let mut record = tried("2");
            record.prove();
            record
        };
        // Once a minute, and then it's given up; every two minutes, or with a boot in between, it may go on.
        let runs = |start: &dyn Fn(u64) -> Option<BootTime>| {
            let mut record = proved();
            (0..30)
                .take_while(|n| record.decide_start(BASE, start(*n)) == StartChoice::Proved(program("2")))
                .count()
        };
        assert_eq!(runs(&|n| at(1, n * 60)), MOST_RESTARTS);
        assert_eq!(runs(&|n| at(1, n * 120)), 30);
        assert_eq!(runs(&|n| at(n / 6, n)), 30);
        assert_eq!(runs(&|_| None), 30);
        let mut record = proved();
        for n in 0..20 {
            record.decide_start(BASE, at(1, n));
        }
        let reason = record.last_outcome().and_then(|last| last.went_back.as_deref());
        assert_eq!(reason, Some("it was started 8 times within 10 minutes"));
    }

    #[test]
    fn a_task_goes_on_where_its_trial_ended() {
        let of = |digest: &str| TaskTrial { task: "uid/1".to_owned(), digest: format!("sha256:{digest}") };
        let mut record = UpgradeRecord::default();
        assert_eq!(record.stage(None), UpgradeStage::New);
        record.try_program(BASE, program("2"), 60);
        assert_eq!(
            (record.stage(None), record.stage(Some(&of("2")))),
            (UpgradeStage::OnTrial, UpgradeStage::OnTrial)
        );
        record.prove();
        assert_eq!(
            (record.stage(None), record.stage(Some(&of("2")))),
            (UpgradeStage::New, UpgradeStage::Proved)
        );

        record.try_program(BASE, program("3"), 60);
        record.go_back("it ended".to_owned());
        let back = UpgradeStage::WentBack("3 has not proved itself: it ended".to_owned());
        assert_eq!(record.stage(Some(&of("3"))), back);
        assert_eq!(record.stage(Some(&of("2"))), UpgradeStage::Proved);
        // The record was removed with another installation.
        assert!(matches!(UpgradeRecord::default().stage(Some(&of("2"))), UpgradeStage::WentBack(_)));
    }
}
