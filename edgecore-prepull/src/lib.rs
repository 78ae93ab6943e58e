//! edgecore-prepull

pub(crate) mod endpoint;
pub mod identity;
pub mod join;
pub mod tunnel;
