//! `kubectl prepull`: for the people who run image pre-pull jobs. It talks to the Kubernetes API with the rights of the
//! person who calls it. Only `delta` and `plan --sizes` talk to registries.
//!
//! ```text
//!  cli ─▶ run ─▶ cluster (kubeconfig) ─▶ commands::NAME ─▶ jobs (read, patch) ─▶ Kubernetes API
//!                                          │
//!                                          └▶ a view, which is pure ─▶ its text by width (screen), or -o json (output)
//! ```
//!
//! Each command is a file in `commands`: it reads, makes a view of what it has read, and renders that. Views and their
//! texts are pure: time, width and colours are arguments. What went wrong is put into words by `problem`, the exit status
//! by `run`.

mod amounts;
mod checklist;
mod cli;
mod cluster;
mod complete;
mod edges;
mod events;
mod hearing;
mod job_fields;
mod jobs;
mod kruise;
mod leader;
mod listing;
mod name;
mod order;
mod output;
mod pages;
mod problem;
mod rights;
mod run;
mod screen;
mod session;
#[cfg(test)]
mod snapshot;
mod start;
mod table;
mod version;
mod window;
mod workload;

mod commands {
    pub(crate) mod allow;
    pub(crate) mod cancel;
    pub(crate) mod check;
    pub(crate) mod completion;
    pub(crate) mod delta;
    pub(crate) mod events;
    pub(crate) mod failures;
    pub(crate) mod from;
    pub(crate) mod list;
    pub(crate) mod node;
    pub(crate) mod nodes;
    pub(crate) mod pause;
    pub(crate) mod plan;
    pub(crate) mod rates;
    pub(crate) mod remove;
    pub(crate) mod resume;
    pub(crate) mod retry;
    pub(crate) mod run;
    pub(crate) mod set;
    pub(crate) mod sites;
    pub(crate) mod status;
    pub(crate) mod suspend;
    pub(crate) mod tokens;
    pub(crate) mod upgrade;
    pub(crate) mod verify;
    pub(crate) mod why;
}

/// A job as people follow it: what `status`, `run` and `from` show.
mod progress {
    pub(crate) mod follow;
    mod lines;
    pub(crate) mod look;
    pub(crate) mod pace;
    pub(crate) mod render;
    pub(crate) mod show;
    pub(crate) mod tally;
    #[cfg(test)]
    mod tests;
    pub(crate) mod view;
}

/// The page of `ui`: who may ask, what is known, and what is sent.
mod ui {
    mod assets;
    pub(crate) mod command;
    mod feed;
    mod guard;
    mod known;
    pub(crate) mod peer;
    mod rows;
    mod server;
    mod watching;
}

pub use run::main;
