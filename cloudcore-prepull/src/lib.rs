//! The cloud side: from jobs to tasks on edge nodes, and back to the status of the jobs.
//!
//! ```text
//!  Job, Node ─▶ watch ─▶ controller: validate ─▶ plan ─▶ rollout ─▶ dispatch ═tunnel═▶ (edge)
//!  Secret ──────────────────────────────────────────────────────────▲                     │
//!  Job.status ◀─ status_writer ◀─ aggregate ◀─ rollout ◀── controller ◀──── tunnel ◀══════┘
//! ```
//!
//! Pure, with the time passed in: [`validate`], [`plan`], [`rollout`], [`aggregate`], [`controller`]. The rest
//! is a thin shell around them, put together in [`runtime`].

pub mod aggregate;
pub mod args;
pub mod cluster;
pub mod controller;
pub mod crds_command;
pub mod dispatch;
pub mod enroll;
pub mod events;
pub mod http;
pub mod kruise;
pub mod leader;
pub mod metrics;
pub mod pki;
pub mod plan;
pub mod plan_command;
pub mod preflight;
pub mod refusal;
pub mod rollout;
pub mod runtime;
pub mod secrets;
pub mod status_writer;
pub mod token_command;
pub mod tokens;
pub mod tunnel;
pub mod validate;
pub mod watch;
