//! Another version of this program, in place of the installed one, and the way back.
//!
//! ```text
//!  edgecore-prepull upgrade IMAGE ──▶ state/upgrade/programs/DIGEST, record.json (a trial)
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
mod record;

pub(crate) use files::{Files, MOST_BYTES};
pub(crate) use launch::{Launched, launch};
pub(crate) use record::{Outcome, Program, Record};

/// The version of this program.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
