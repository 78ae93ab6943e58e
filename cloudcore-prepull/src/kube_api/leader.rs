//! Leader election among the replicas, by a Lease of coordination.k8s.io.
//!
//! ```text
//!  Lease ◀─read, write─▶ elector ─▶ election (pure): write the Lease, wait, or notice another holder
//!                                       │ renewed since
//!  Core::act, fence (every write) ◀─ Leadership ─▶ watchdog (a thread of its own) ─▶ exit
//!  readyz, metrics                ◀─────┘
//! ```
//!
//! No two clocks have to agree: a standby counts from when it saw the Lease change, the leader from before it requested
//! the change, and a standby waits longer than a leader leads. Why no crate is used: docs/decisions/0008-leader-election.md.

mod election;
mod elector;
mod fence;
mod identity;
mod leadership;
mod timing;
mod watchdog;

pub(crate) use elector::wait_to_lead;
pub(crate) use fence::Fence;
pub(crate) use leadership::Leadership;
pub(crate) use timing::{Timing, TimingError};
