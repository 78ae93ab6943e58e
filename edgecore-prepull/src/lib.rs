//! edgecore-prepull

pub mod agent;
pub mod config;
pub mod ledger;
pub mod metrics;
pub mod puller;
pub mod tunnel;
