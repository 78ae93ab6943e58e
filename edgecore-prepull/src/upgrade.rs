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

pub(crate) use files::{Files, MOST_BYTES};
pub(crate) use launch::{Launched, launch, relaunch};
pub(crate) use of_task::{Stage, Upgrades};
pub(crate) use program::{print_version, read_keys};
pub(crate) use record::{Outcome, Program, Record};

/// The program in the released images.
pub(crate) const PATH: &str = "usr/local/bin/edgecore-prepull";
/// The public key by which releases are signed. A person puts it on the machine, so that no cluster can replace it.
pub(crate) const KEY: &str = "/etc/edgecore-prepull/upgrade.pub";

/// The version of this program.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of the installed program, which has launched this one if they differ.
pub(crate) fn installed_version() -> String {
    std::env::var(launch::LAUNCHED).unwrap_or_else(|_| VERSION.to_owned())
}
