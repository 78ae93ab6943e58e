//! cloudcore-prepull

pub mod plan;
pub mod plan_command;
pub mod tunnel;
pub mod validate;
