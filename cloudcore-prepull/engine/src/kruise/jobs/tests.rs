//! Stories: events go in, and the tests check the resulting objects in the API server.

mod driver;
mod lists;
mod model;
mod pull;
mod tag_requests;
