//! Both ends of the tunnel in one process, over real TLS on loopback.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod agent;
mod cloud;
mod raw;
mod rotation;

mod addresses;
mod certificates;
mod floods;
mod hostile;
mod joining;
mod overload;
mod sessions;
