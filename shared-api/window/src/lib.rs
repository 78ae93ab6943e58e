//! Windows in which downloads may run: they recur weekly, in any time zone and over the changes of its offset. Pure: time is
//! an argument.
//!
//! ```text
//!  Window ──zones──▶ Schedule (of the job, of the node) ──▶ Openings: where all of them are open
//! ```
//!
//! - A window opens at a time of day of its zone. Where the clocks skip that time it opens at the first valid moment;
//!   where they show it twice, at the first of both.
//! - It stays open for its duration, which is elapsed time. Windows that overlap or touch are one.
//! - The delay of a node puts off the opening and not the end.
//!
//! The cloud counts the time of a node with it, and the edge counts the same time and lets downloads begin and stop.

mod openings;
mod schedule;
mod text;
mod zones;

pub use openings::{HORIZON, Openings, WindowState};
pub use text::{BadWindow, check_duration, parse_duration, parse_window, write_duration, write_window};
pub use zones::is_zone;

#[cfg(test)]
mod tests;
