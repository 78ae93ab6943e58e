//! The agent on an edge node: it dials out, pulls the images that the cloud assigns, and reports until the cloud
//! acknowledges.
//!
//! ```text
//!  (cloud) ═cloud::tunnel═▶ tasks::node: agent ─▶ executor ─▶ checks ─▶ images::puller ─▶ CRI, containerd
//!     ▲                           │   ▲        │
//!     └═══════cloud::tunnel═════ link └updates─┘
//!                                 │
//!                               ledger (disk; never a credential)
//! ```
//!
//! [`tasks::agent`] is pure and decides; [`tasks::executor`] carries out one task; `tasks::node` connects both with
//! tunnel and ledger; [`run`] is the program. Only items that other crates use are public.

/// The command line, and the commands `install`, `pull`, `status`, `uninstall` and `upgrade`.
mod commands {
    pub(crate) mod args;
    pub(crate) mod install;
    pub(crate) mod pull;
    pub(crate) mod status;
    pub(crate) mod uninstall;
    pub(crate) mod upgrade;
}

/// Everything that talks to cloudcore-prepull: the identity of this node, joining, the tunnel.
pub mod cloud {
    pub mod endpoint;
    pub mod identity;
    pub mod join;
    pub mod tunnel;
}

/// The tasks that the cloud assigns: decisions, execution, and the ledger.
pub mod tasks {
    /// Follows the name of something that only a newer cloud knows, in a reason.
    pub(crate) const NOT_KNOWN: &str = concat!(
        "not known to edgecore-prepull ",
        env!("CARGO_PKG_VERSION"),
        ": update edgecore-prepull on this node"
    );

    pub mod agent;
    pub(crate) mod checks;
    pub mod executor;
    pub(crate) mod ledger;
    pub(crate) mod node;
    pub mod removal;
}

/// Images and the container runtime: pulling, the runtime's own APIs, and the node's credential providers.
pub mod images {
    pub(crate) mod containerd;
    pub mod fetch;
    pub(crate) mod filesystem;
    pub(crate) mod flushes;
    pub(crate) mod kubelet;
    pub mod providers;
    pub mod puller;
    pub mod rate;
    pub mod runtime;
    pub(crate) mod site;
    pub mod verify;
}

mod backoff;
mod boot;
mod by_key;
mod clock;
pub mod config;
mod error_class;
mod health;
mod machine;
mod metrics;
mod node_clock;
mod one_question;
pub mod run;
mod settings;
mod status;
mod time_zone;
mod units;
mod upgrade;
