//! The edge side: dials out, pulls what the cloud assigns, and reports until it is heard.
//!
//! ```text
//!  (cloud) ═cloud::tunnel═▶ tasks::node: agent ─▶ executor ─▶ checks ─▶ images::puller ─▶ CRI, containerd
//!     ▲                           │   ▲        │
//!     └═══════cloud::tunnel═════ link └─events─┘
//!                                 │
//!                               ledger (disk; never a credential)
//! ```
//!
//! [`tasks::agent`] is pure and decides; [`tasks::executor`] carries out one task; [`tasks::node`] puts them between
//! tunnel and ledger, generic over what pulls; [`run`] is the program.

/// The command line, and the commands that end.
pub mod commands {
    pub mod args;
    pub mod pull;
}

/// Everything that talks to cloudcore-prepull: who this node is, how it joins, the tunnel.
pub mod cloud {
    pub mod endpoint;
    pub mod identity;
    pub mod join;
    pub mod tunnel;
}

/// The tasks that the cloud assigned: what is decided, carried out and remembered.
pub mod tasks {
    pub mod agent;
    pub mod checks;
    pub mod executor;
    pub mod ledger;
    pub mod node;
}

/// Images and the container runtime: pulling, the runtime's own APIs, and the node's credential providers.
pub mod images {
    pub(crate) mod containerd;
    pub(crate) mod filesystem;
    pub mod providers;
    pub mod puller;
    pub mod runtime;
}

pub mod config;
pub mod metrics;
pub mod run;
mod signals;
