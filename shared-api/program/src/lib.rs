//! What the programs do alike as programs: their log, the signals that end them, how they print an error and a table, how
//! a metric is declared and served, and how connections compete for places. What they say to each
//! other is in `prepull-api` and `prepull-tunnel`.

pub mod errors;
pub mod http;
pub mod log;
pub mod metrics;
pub mod places;
pub mod process;
pub mod signals;
pub mod table;
