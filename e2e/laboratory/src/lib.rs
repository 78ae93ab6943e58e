//! The laboratory: programs that measure, show and shake the system on the parts of the harness, [`prepull_e2e`]. No test
//! needs them.
//!
//! - [`demo`]: `make demo`, a small cluster, edge nodes and a job.
//! - [`fleet`]: `make fleet`, one job over simulated edges, measured. `make bench` uses it too.
//! - [`site`]: `make site`, one image for the boxes of a site, measured.
//! - [`storm`]: `make storm`, faults by chance and all at once.

pub mod demo;
pub mod fleet;
mod interrupt;
mod measured;
pub mod site;
pub mod storm;
