//! The engines behind both APIs: events go in, actions come out.
//!
//! ```text
//!  Job, time ─────────────▶ prepull:  validate ─▶ plan ─▶ rollout ─▶ aggregate ─▶ writes, tasks, events
//!  Kruise's kinds, time ──▶ kruise:   rules ─▶ jobs ⇄ node_images ───────────▶ writes, tasks, events
//!  Settings ──────────────▶ settings: wanted ─▶ settings of nodes, statuses
//!  Blobs, time ───────────▶ sites:    book ─▶ look ─▶ directions
//!  Node, session ─────────▶ fleet:    to each of them
//! ```
//!
//! Pure: no runtime, no Kubernetes client, no clock. Time is an argument, so a test decides what happens when.

pub mod engine;

/// Nodes, their sessions and their slots: what happens to them concerns every part of the engine.
pub mod fleet {
    pub mod event;
    pub mod in_hand;
    pub mod node_view;
    pub mod session;
    pub(crate) mod slots;
}

pub mod kruise;

/// The engine of ImagePrePullJob.
pub mod prepull {
    pub mod aggregate;
    pub mod controller;
    pub mod download;
    pub mod plan;
    pub mod rollout;
    pub mod validate;
}

pub mod recording;
pub mod settings;
pub mod sites;

/// What both engines use.
pub mod shared {
    pub mod access;
    pub(crate) mod agenda;
    pub(crate) mod counted;
    pub(crate) mod delay_queue;
    pub(crate) mod effects;
    pub mod events;
    pub mod objects;
    pub mod outcomes;
    pub mod pacing;
    pub(crate) mod postponement;
    pub mod reasons;
    #[cfg(test)]
    pub(crate) mod rng;
    pub mod shelf;
    pub(crate) mod writes;
}
