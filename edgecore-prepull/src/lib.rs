//! edgecore-prepull

pub mod endpoint;
pub mod identity;
pub mod join;
pub mod tunnel;
