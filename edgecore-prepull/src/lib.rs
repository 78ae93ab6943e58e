//! The edge side: dials out, pulls what the cloud assigns, and reports until it is heard.
//!
//! ```text
//!  (cloud) ═tunnel═▶ node: agent ─▶ executor ─▶ checks ─▶ puller ─▶ CRI, containerd
//!     ▲                     │   ▲        │
//!     └══════tunnel══════ link  └─events─┘
//!                           │
//!                         ledger (disk; never a credential)
//! ```
//!
//! [`agent`] is pure and decides; [`executor`] carries out one task; [`node`] puts them between tunnel and ledger,
//! generic over what pulls; [`runtime`] is the program.

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
pub mod providers;
pub mod pull_command;
pub mod puller;
pub mod runtime;
pub mod tunnel;
