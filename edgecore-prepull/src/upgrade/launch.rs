//! The installed program launches the one that was chosen for this machine.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context, anyhow};
use futures::FutureExt as _;
use prepull_program::errors::with_causes;
use prepull_program::signals::wait_for_termination;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use tokio::process::Child;
use tokio::time::{Instant, interval, sleep, timeout};
use tracing::{error, info, warn};

use super::record::{Program, StartChoice, UpgradeRecord};
use super::{UpgradeFiles, VERSION};
use crate::boot::BootTime;
use crate::config::Listen;
use crate::health;

/// Set for a launched program, which launches no other one: the version of the installed program.
const LAUNCHED: &str = "PREPULL_LAUNCHED_BY";
/// Set with it: the path of the installed program.
const INSTALLED: &str = "PREPULL_INSTALLED";
/// Set for a program that the installed one watches: the process of that one, or "1" by an older one.
const WATCHED: &str = "PREPULL_WATCHED";
/// A watched program ends with this in favour of another one. With an older launcher, the unit starts it again.
const RELAUNCH: u8 = 75;
/// How often we ask a program on trial whether it's connected.
const ASK: Duration = Duration::from_secs(1);
/// For how many looks in a row it must be: one that ends on its first tasks has got them by then.
const LOOKS: u32 = 5;
/// The wait before a program that ended early is started again.
const RETRY: Duration = Duration::from_secs(1);
/// How long a trial waits for a machine that lets no agent start: at a boot, the address of a VPN may come within two minutes.
pub(crate) const SETTLE: Duration = Duration::from_secs(120);
/// The wait before a record that couldn't be written is tried again: a full disk stays full for a while.
const WRITE_AGAIN: Duration = Duration::from_secs(60);
/// How long a program may take to stop; the unit kills it after 20 s.
const STOP: Duration = Duration::from_secs(15);

/// The result of [`launch_chosen`].
pub(crate) enum Launched {
    /// This program is the agent.
    Own,
    /// Another program has been the agent, and has ended.
    Other(ExitCode),
}

/// Runs the program that was chosen for this machine, if it isn't this one. `check_start` checks whether this one could run in
/// the place of one that ends again and again: otherwise the other one isn't given up for that. It's absent if this program
/// doesn't understand its settings.
pub(crate) async fn launch_chosen(
    state_dir: &Path,
    listen: Listen,
    check_start: Option<impl AsyncFn() -> anyhow::Result<()>>,
) -> Launched {
    if is_launched() {
        end_with_launcher();
        return Launched::Own;
    }
    match launch_other(&UpgradeFiles::in_state_dir(state_dir), listen, check_start).await {
        Ok(Some(status)) => Launched::Other(exit_code(status)),
        Ok(None) => Launched::Own,
        Err(error) => {
            error!(error = %with_causes(error.as_ref()), "the upgrade of this program can't be used; the installed one runs");
            Launched::Own
        }
    }
}

async fn launch_other(
    files: &UpgradeFiles,
    listen: Listen,
    check_start: Option<impl AsyncFn() -> anyhow::Result<()>>,
) -> anyhow::Result<Option<ExitStatus>> {
    // One listener for all starts: a signal between two of them counts as well.
    let mut stop = pin!(wait_for_termination());
    let mut after_trial = None;
    loop {
        if let Some(check) = check_start.as_ref().filter(|_| after_trial.is_none())
            && files.read_record()?.is_trying()
        {
            tokio::select! {
                signal = stop.as_mut() => return signal.map(|_| Some(ExitStatus::default())),
                () = settle(check) => {}
            }
        }
        // A person may have ended the trial.
        let before = files.read_record()?;
        let mut record = before.clone();
        let choice = if let Some(choice) = after_trial.take() {
            choice
        } else {
            let counts = match &check_start {
                Some(check) if before.proved_program().is_some() => check().await.is_ok(),
                _ => false,
            };
            choose_start(files, &mut record, counts.then(BootTime::now).flatten())?
        };
        match choice {
            StartChoice::Own => {
                if let Some(last) = record.last_outcome().filter(|last| before.last_outcome() != Some(last))
                    && let Some(reason) = &last.went_back
                {
                    warn!(version = last.program.version, reason, "back from the upgrade");
                }
                return Ok(None);
            }
            StartChoice::Proved(program) => match become_program(files, &program) {
                Ok(never) => match never {},
                Err(error) => {
                    let reason = with_causes(error.as_ref());
                    error!(version = program.version, reason, "the upgraded program can't be started");
                    record.give_up(reason);
                    files.write_record(&record)?;
                }
            },
            StartChoice::Trial(program, within) => {
                info!(version = program.version, image = program.image, within, "an upgrade is tried");
                match watch_trial(files, &program, Duration::from_secs(within), listen, stop.as_mut()).await?
                {
                    TrialEnd::Ended(status) if status.code() == Some(RELAUNCH.into()) => {}
                    TrialEnd::Ended(status) | TrialEnd::Stopped(status) => return Ok(Some(status)),
                    TrialEnd::EndedEarly(reason) if record.has_starts_left() => {
                        warn!(version = program.version, reason, "the upgraded program ended early");
                        sleep(RETRY).await;
                    }
                    TrialEnd::EndedEarly(reason) | TrialEnd::Failed(reason) => {
                        warn!(version = program.version, reason, "back from the upgrade");
                        after_trial = Some(go_back(files, record, reason));
                    }
                }
                if let Some(signal) = stop.as_mut().now_or_never() {
                    signal?;
                    return Ok(Some(ExitStatus::default()));
                }
            }
        }
    }
}

/// Waits until the machine lets an agent start, for at most [`SETTLE`]. A missing address or a held lock would spend the starts
/// of a trial within seconds. Then the trial begins even so: a newer program may need less.
async fn settle(check_start: impl AsyncFn() -> anyhow::Result<()>) {
    let (began, mut is_logged) = (Instant::now(), false);
    while let Err(error) = check_start().await
        && began.elapsed() < SETTLE
    {
        if !is_logged {
            warn!(error = %with_causes(error.as_ref()), "an upgrade waits, since no agent can start on this machine now");
            is_logged = true;
        }
        sleep(RETRY).await;
    }
}

/// Decides on the program of this start, and writes that down.
///
/// # Errors
/// The record can't be written, and the installed program is the one to run.
fn choose_start(
    files: &UpgradeFiles,
    record: &mut UpgradeRecord,
    now: Option<BootTime>,
) -> anyhow::Result<StartChoice> {
    let before = record.clone();
    let start = record.decide_start(VERSION, now);
    if *record == before {
        return Ok(start);
    }
    // Before the start: a program that stops the machine must not be started for ever.
    let Err(error) = files.write_record(record) else { return Ok(start) };
    // One that has proved itself runs even so: its starts are only counted for the case that it fails later.
    let proved = match start {
        StartChoice::Own => None,
        StartChoice::Proved(program) => Some(program),
        StartChoice::Trial(..) => before.proved_program().cloned(),
    };
    let Some(proved) = proved else { return Err(error) };
    warn!(version = proved.version, error = %with_causes(error.as_ref()), "this start of the upgraded program can't be written down; it runs even so");
    Ok(StartChoice::Proved(proved))
}

/// Ends the trial, and chooses the program before. That one runs even if the record can't be written: the next start then
/// tries the trial again, as often as it may.
fn go_back(files: &UpgradeFiles, known: UpgradeRecord, reason: String) -> StartChoice {
    // A person may have ended the upgrade.
    let mut record = files.read_record().unwrap_or(known);
    record.go_back(reason);
    if let Err(error) = files.write_record(&record) {
        warn!(error = %with_causes(error.as_ref()), "the end of the trial can't be written down");
    }
    record.proved_program().cloned().map_or(StartChoice::Own, StartChoice::Proved)
}

/// Replaces this process.
fn become_program(files: &UpgradeFiles, program: &Program) -> anyhow::Result<Infallible> {
    let path = files.verified_path(program)?;
    Err(anyhow!(program_command(&path)?.exec()).context(format!("cannot run {}", path.display())))
}

fn program_command(path: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(path);
    command.args(std::env::args_os().skip(1)).env(LAUNCHED, VERSION).env(INSTALLED, installed_program()?);
    Ok(command)
}

/// The version of the installed program, which has launched this one if they differ.
pub(super) fn installed_version() -> String {
    std::env::var(LAUNCHED).unwrap_or_else(|_| VERSION.to_owned())
}

/// The path of the installed program.
pub(super) fn installed_program() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(INSTALLED) {
        return Ok(path.into());
    }
    let path = std::env::current_exe().context("cannot find the running program")?;
    // As Linux names a file that was replaced.
    let name = path.to_string_lossy();
    Ok(name.strip_suffix(" (deleted)").map_or_else(|| path.clone(), PathBuf::from))
}

/// Whether the installed program has launched this one.
pub(super) fn is_launched() -> bool {
    std::env::var_os(LAUNCHED).is_some()
}

/// Whether the installed program watches this one, which is then the program on trial.
pub(super) fn is_watched() -> bool {
    std::env::var_os(WATCHED).is_some()
}

/// Has the kernel stop this program when its launcher is killed, if one watches it. It would keep the lock and the port from the
/// next launcher, where no init system kills what is left. The signal is sent at the end of the thread that has spawned us, which
/// is the launcher's main thread.
fn end_with_launcher() {
    let Ok(launcher) = std::env::var(WATCHED) else { return };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::TERM)) {
        warn!(%error, "this program may outlive the one that watches it");
    }
    // It may have been killed before.
    let is_orphan = getppid().is_none_or(|parent| parent.as_raw_nonzero().to_string() != launcher);
    if is_orphan && launcher != "1" {
        warn!("the program that watches this one has ended");
        std::process::exit(0);
    }
}

/// Ends this program in favour of the installed one, which launches what is on trial now. Only fails to return.
pub(crate) fn relaunch() -> anyhow::Result<ExitCode> {
    if is_watched() {
        return Ok(ExitCode::from(RELAUNCH));
    }
    let path = installed_program()?;
    let mut command = Command::new(&path);
    command.args(std::env::args_os().skip(1)).env_remove(LAUNCHED).env_remove(INSTALLED);
    Err(anyhow!(command.exec()).context(format!("cannot run {}", path.display())))
}

/// How a trial ended.
enum TrialEnd {
    /// We were stopped, and so was the program.
    Stopped(ExitStatus),
    /// The program had proved itself.
    Ended(ExitStatus),
    /// It ended by itself before that.
    EndedEarly(String),
    /// It didn't prove itself in time, or can't be started at all.
    Failed(String),
}

async fn watch_trial(
    files: &UpgradeFiles,
    program: &Program,
    within: Duration,
    listen: Listen,
    mut stop: Pin<&mut impl Future<Output = anyhow::Result<&'static str>>>,
) -> anyhow::Result<TrialEnd> {
    let Listen::On(listen) = listen else {
        return Ok(TrialEnd::Failed(
            "--metrics-listen is off, so that it can't be asked whether it's connected".to_owned(),
        ));
    };
    let spawned = files.verified_path(program).and_then(|path| {
        let mut command = tokio::process::Command::from(program_command(&path)?);
        command
            .env(WATCHED, std::process::id().to_string())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {}", path.display()))
    });
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return Ok(TrialEnd::Failed(with_causes(error.as_ref()))),
    };
    let began = Instant::now();
    tokio::select! {
        status = child.wait() => {
            let (status, after) = (status?, began.elapsed().as_secs_f64());
            return Ok(TrialEnd::EndedEarly(format!("it ended after {after:.1} s: {status}")));
        }
        signal = stop.as_mut() => {
            signal?;
            return Ok(TrialEnd::Stopped(stop_child(&mut child).await?));
        }
        proved = timeout(within, until_connected(listen)) => {
            if proved.is_err() {
                let lack = name_lack(listen).await;
                stop_child(&mut child).await?;
                return Ok(TrialEnd::Failed(format!("{lack} within {} s", within.as_secs())));
            }
        }
    }
    info!(
        version = program.version,
        seconds = began.elapsed().as_secs(),
        "the upgrade has proved itself: it's connected"
    );
    // It goes on as a process of ours until the next start.
    tokio::select! {
        status = child.wait() => Ok(TrialEnd::Ended(status?)),
        signal = stop.as_mut() => {
            signal?;
            Ok(TrialEnd::Stopped(stop_child(&mut child).await?))
        }
        never = write_proof(files, program) => match never {},
    }
}

/// Writes down that the program has proved itself, and never returns. The program is well, so it goes on while a full disk
/// refuses that. If it ends before, its next start is a trial again.
async fn write_proof(files: &UpgradeFiles, program: &Program) -> Infallible {
    let write = || {
        let mut record = files.read_record()?;
        // Otherwise a person has ended the upgrade.
        if record.is_on_trial(program) {
            record.prove();
            files.write_record(&record)?;
        }
        anyhow::Ok(())
    };
    while let Err(error) = write() {
        let error = with_causes(error.as_ref());
        warn!(
            version = program.version,
            error, "the upgrade has proved itself, and that can't be written down yet"
        );
        sleep(WRITE_AGAIN).await;
    }
    pending().await
}

/// Waits until the agent has been connected for some seconds, and its runtime answers.
async fn until_connected(listen: SocketAddr) {
    let mut asks = interval(ASK);
    let mut looks = 0;
    while looks < LOOKS {
        asks.tick().await;
        let health = health::fetch_health(listen).await;
        let is_well = health.is_ok_and(|health| health.session.is_some() && health.is_runtime_up);
        looks = if is_well { looks + 1 } else { 0 };
    }
}

/// What a program on trial lacks.
async fn name_lack(listen: SocketAddr) -> String {
    match health::fetch_health(listen).await {
        Err(error) => format!("it did not answer at {listen} ({error})"),
        Ok(health) if health.session.is_none() => "it did not connect to cloudcore".to_owned(),
        Ok(_) => "it did not reach the container runtime".to_owned(),
    }
}

async fn stop_child(child: &mut Child) -> std::io::Result<ExitStatus> {
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw) {
        // It may have ended by now.
        let _ = kill_process(pid, Signal::TERM);
    }
    if let Ok(status) = timeout(STOP, child.wait()).await {
        return status;
    }
    child.kill().await?;
    child.wait().await
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(files: &UpgradeFiles, content: &[u8], version: &str) -> anyhow::Result<UpgradeRecord> {
        let (digest, _) = files.store_program(content)?;
        let mut record = UpgradeRecord::default();
        let program = Program { digest, version: version.to_owned(), image: format!("agent:{version}") };
        record.try_program(VERSION, program, 60);
        Ok(record)
    }

    #[test]
    fn a_full_disk_keeps_the_proved_program() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let files = UpgradeFiles::in_state_dir(dir.path());
        let mut proved = trial(&files, b"a program", "2")?;
        proved.prove();
        let program = proved.proved_program().cloned().context("it has proved itself")?;
        files.write_record(&proved)?;
        // The record is written to this file first. A full disk refuses the write as well.
        std::fs::create_dir(dir.path().join("upgrade/record.tmp"))?;
        assert!(files.write_record(&proved).is_err());

        let now = Some(BootTime { id: 1, millis: 1000 });
        let mut record = files.read_record()?;
        assert_eq!(choose_start(&files, &mut record, now)?, StartChoice::Proved(program.clone()));
        assert_eq!(files.read_record()?, proved);
        files.verified_path(&program)?;
        Ok(())
    }

    #[test]
    fn no_trial_begins_without_a_record() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let files = UpgradeFiles::in_state_dir(dir.path());
        let mut first = trial(&files, b"a program", "2")?;
        std::fs::create_dir(dir.path().join("upgrade/record.tmp"))?;
        assert!(choose_start(&files, &mut first.clone(), None).is_err());

        // Then the one before goes on, which may be an upgrade itself.
        first.prove();
        let proved = first.proved_program().cloned().context("it has proved itself")?;
        first.try_program(VERSION, Program { version: "3".to_owned(), ..proved.clone() }, 60);
        assert_eq!(choose_start(&files, &mut first, None)?, StartChoice::Proved(proved));
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn a_proof_is_written_once_there_is_room() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let files = UpgradeFiles::in_state_dir(dir.path());
        let record = trial(&files, b"a program", "2")?;
        let program = record.digests().next().map(str::to_owned).context("it's on trial")?;
        let program = Program { digest: program, version: "2".to_owned(), image: "agent:2".to_owned() };
        for other in [false, true] {
            files.write_record(&record)?;
            let full = dir.path().join("upgrade/record.tmp");
            std::fs::create_dir(&full)?;
            let program = if other {
                Program { digest: "other".to_owned(), ..program.clone() }
            } else {
                program.clone()
            };
            assert!(timeout(WRITE_AGAIN * 2, write_proof(&files, &program)).await.is_err());
            assert_eq!(files.read_record()?, record);
            std::fs::remove_dir(&full)?;
            assert!(timeout(WRITE_AGAIN * 2, write_proof(&files, &program)).await.is_err());
            assert_eq!(files.read_record()?.proved_program().is_some(), !other);
        }
        Ok(())
    }
}
