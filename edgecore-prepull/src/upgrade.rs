//! Another version of this program, in place of the installed one, and the way back.
//!
//! ```text
//!  a task, or `upgrade IMAGE` ─▶ state/upgrade/programs/DIGEST, record.json (a trial)
//!                                          │ restart
//!  installed `run` ─▶ launch ─▶ Record::start ─┬─ Own ──────▶ runs itself
//!                                              ├─ Proved ───▶ becomes the other program
//!                                              └─ Trial ────▶ starts it, and watches: connected, and the runtime answers?
//!                                                               yes: proved │ no: goes back
//! ```
//!
//! The installed program is never replaced: it launches the other one, and is there when that one doesn't start, doesn't
//! connect, or is damaged. So nothing outside of the state directory is written, as the unit's sandbox demands.

mod files;
mod launch;
mod of_task;
mod program;
mod record;

pub(crate) use files::{MOST_BYTES, UpgradeFiles};
pub(crate) use launch::{Launched, SETTLE, launch_chosen, relaunch};
pub(crate) use of_task::{Obstacles, Upgrades};
pub(crate) use program::{put_on_trial, read_key, signature_by};
pub(crate) use record::{Program, TrialOutcome, UpgradeRecord, UpgradeStage};

/// The program in the released images.
pub(crate) const PATH: &str = "usr/local/bin/edgecore-prepull";
/// The public key by which releases are signed. `install --upgrade-key` or an administrator puts it on the
/// machine, so that no cluster can replace it.
pub(crate) const KEY: &str = "/etc/edgecore-prepull/upgrade.pub";

/// The version of this program.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Why an agent in a container isn't upgraded from within.
pub(crate) const IN_CONTAINER: &str =
    "the agent runs in a container: Kubernetes upgrades it, with the image of its DaemonSet";
/// Why an agent without a port isn't upgraded.
pub(crate) const UNASKED: &str = "metricsListen is off, so that a new program can't be asked whether it's connected: set it in the agent's file";
