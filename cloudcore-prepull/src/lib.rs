//! cloudcore-prepull

pub mod tunnel;
