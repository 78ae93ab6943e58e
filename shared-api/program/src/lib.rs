//! The shell that both programs share: the log, signals, printing of errors and tables, declaring and serving metrics, and
//! places for connections. The messages between them are in `prepull-api` and `prepull-tunnel`.

pub mod errors;
pub mod http;
pub mod log;
pub mod metrics;
pub mod places;
pub mod process;
pub mod signals;
pub mod table;
