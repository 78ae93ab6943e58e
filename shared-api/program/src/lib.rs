//! What cloudcore-prepull and edgecore-prepull do alike as programs: their log, the signals that end them, how they
//! print an error, and how a metric is declared. What they say to each other is in `prepull-api` and `prepull-tunnel`.

pub mod errors;
pub mod log;
pub mod metrics;
pub mod signals;
