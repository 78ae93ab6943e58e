//! cloudcore-prepull

pub mod enroll;
pub mod pki;
pub mod token_command;
pub mod tokens;
pub mod tunnel;
