//! edgecore-prepull

pub mod tunnel;
