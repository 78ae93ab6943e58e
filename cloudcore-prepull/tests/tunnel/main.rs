//! Both ends of the tunnel in one process, over real TLS on loopback.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod agent;
mod cloud;
#[path = "../../../e2e/src/flood.rs"]
#[allow(dead_code, unreachable_pub, reason = "the harness of the tests on real parts has the rest")]
mod flood;
mod raw;
mod rotation;

mod addresses;
mod certificates;
mod floods;
mod hostile;
mod joining;
mod overload;
mod sessions;
