//! The client against small scripted registries on loopback. They also send bytes that no HTTP library would send.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod auth;
mod content;
mod hosts;
mod lies;
mod limits;
mod push;
mod redirects;
mod server;
