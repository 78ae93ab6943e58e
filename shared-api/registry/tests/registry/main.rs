//! The client against small registries on loopback that say whatever a test wants: also what no HTTP library would send.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod auth;
mod content;
mod hosts;
mod lies;
mod limits;
mod redirects;
mod server;
