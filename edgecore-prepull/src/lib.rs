//! Pulls images ahead on an edge node and reports how each fared.
//!
//! ```text
//!                      ┌──────────── node (the loop) ────────────┐
//!  cloud ═tunnel═▶ events ─▶ agent (pure) ─effects─▶ ledger (disk) │
//!        ◀═tunnel═ link ◀──────┘    ▲    └────────▶ executor ──────┼─▶ checks, puller ─▶ CRI, containerd
//!                                   └── reports ───────┘           │
//!                      └──────────────────────────────────────────┘
//! ```
//!
//! - [`agent`]: the tasks of the node as a state machine without IO; every rule about order is here.
//! - [`ledger`]: the tasks on the disk. [`executor`]: carries one task out. [`checks`]: fit to pull?
//! - [`puller`]: what pulls, as a trait; [`puller::cri`] is the real one.
//! - [`node`]: wires these together, for any puller and any store: a simulation runs it by the thousand.
//! - [`join`], [`identity`], [`endpoint`], [`tunnel`]: who the node is, and its link to the cloud.
//! - [`args`], [`config`], [`runtime`], [`pull_command`], [`metrics`], [`logging`]: the program around it.

pub mod agent;
pub mod args;
pub mod checks;
pub mod config;
pub mod endpoint;
pub mod executor;
pub mod identity;
pub mod join;
pub mod ledger;
pub mod logging;
pub mod metrics;
pub mod node;
pub mod pull_command;
pub mod puller;
pub mod runtime;
pub mod tunnel;
