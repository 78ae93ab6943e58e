//! Stories: what happens goes in, and what the API server and the NodeImages come to is looked at.

mod driver;
mod lists;
mod model;
mod pull;
mod tag_requests;
