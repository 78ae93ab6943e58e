//! cloudcore-prepull

pub mod tunnel;
pub mod plan;
pub mod validate;
