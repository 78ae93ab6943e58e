//! edgecore-prepull

pub mod identity;
pub mod join;
pub mod tunnel;
