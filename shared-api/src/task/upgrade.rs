//! The upgrade of an agent to the version in an image that its task pulls.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::millis;

/// What an agent does with the program in the only image of its task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Upgrade {
    /// Time that the program has to connect, with a container runtime that answers. Then the one before runs again.
    #[serde(with = "millis")]
    pub within: Duration,
    /// Whether an agent that a package installed is upgraded too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packaged: bool,
}
