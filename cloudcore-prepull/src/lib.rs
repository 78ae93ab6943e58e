//! The cloud side: from jobs to tasks on edge nodes, and back to the status of the jobs.
//!
//! ```text
//!  Kubernetes API                                                              edge nodes
//!  Job, Node, … ─▶ kube_api::watch ─▶ run ─▶ engine ─▶ edges::dispatch ═edges::tunnel═▶
//!  status, report ◀─ kube_api::status_writer ◀── engine ◀─── run ◀──────────────────────
//! ```
//!
//! What is decided is decided in `prepull-engine`, which is pure. Here is the shell around it: [`run`] carries what
//! happened in and what is to be done out, [`edges`] and `kube_api` talk to either side.

pub(crate) mod commands;

/// Everything that an edge talks to.
pub mod edges {
    mod accept;
    pub(crate) mod directory;
    pub mod dispatch;
    mod door;
    pub mod enroll;
    mod log_rate;
    mod metrics;
    pub mod pki;
    mod ports;
    pub mod roster;
    pub(crate) mod tickets;
    pub mod tokens;
    pub mod tunnel;

    pub use metrics::EdgeMetrics;
    pub use ports::PortTerms;
}

mod kube_api {
    pub(crate) mod cluster;
    mod connection;
    pub(crate) mod consents;
    pub(crate) mod definitions;
    pub(crate) mod events;
    #[cfg(test)]
    #[allow(clippy::unwrap_used)]
    pub(crate) mod fake_api;
    pub(crate) mod field_manager;
    mod guarded;
    pub(crate) mod kruise_owner;
    pub(crate) mod kruise_watch;
    pub(crate) mod kruise_writer;
    pub(crate) mod kubeedge;
    pub(crate) mod leader;
    pub(crate) mod leader_label;
    mod object_write;
    pub(crate) mod recall;
    pub(crate) mod refusal;
    mod report_object;
    pub(crate) mod secrets;
    pub(crate) mod settings_writer;
    pub(crate) mod status_writer;
    mod stored_job;
    pub(crate) mod watch;
    pub(crate) mod withheld;
}

pub mod run;

pub use commands::args::Cli;
