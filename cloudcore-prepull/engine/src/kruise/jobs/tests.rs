//! Stories: events go in, and the tests check the resulting objects in the API server.

mod driver;
mod lifecycle;
mod lists;
mod model;
mod pull;
mod roster;
mod tag_requests;
