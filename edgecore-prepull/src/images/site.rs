//! Sharing of layers with the neighbours of the site.
//!
//! ```text
//!  fetch ─▶ Seeker ─▶ Hub ═Blobs═▶ cloud          neighbour ─▶ server ─ticket, turn─▶ content store, or arrivals
//!             ▲        │ ▲                                      ▲                               ▲
//!             └─ Way ──┘ └═Sources═ cloud        fetch ─▶ client┘         fetch ─▶ Arriving ────┘
//! ```
//!
//! The cloud knows who has what and says who gets it where; see `prepull_engine::sites`. What a neighbour sends counts only
//! once its digest is the one that the registry has named, and no credential ever goes to a neighbour.

mod arrivals;
pub(crate) mod client;
mod hub;
mod order;
mod seeker;
pub(crate) mod server;
mod tickets;
mod turns;

pub(crate) use arrivals::Arriving;
pub(crate) use hub::Hub;
pub(crate) use seeker::{BlobOrigin, Seeker, Sought};
