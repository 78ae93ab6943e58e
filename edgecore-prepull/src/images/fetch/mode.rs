//! The choice between downloads by the agent and by the container runtime.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The program that downloads images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub enum FetchMode {
    /// The agent. An image that it cannot fetch fails.
    Agent,
    /// The container runtime.
    Runtime,
    /// The agent, and the container runtime where the agent cannot.
    #[default]
    Auto,
}

/// A text that is no [`FetchMode`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not one of agent, runtime and auto")]
pub struct BadFetchMode(String);

impl FetchMode {
    fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Runtime => "runtime",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for FetchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for FetchMode {
    type Err = BadFetchMode;

    fn from_str(text: &str) -> Result<Self, BadFetchMode> {
        let found = [Self::Agent, Self::Runtime, Self::Auto].into_iter().find(|mode| mode.as_str() == text);
        found.ok_or_else(|| BadFetchMode(text.to_owned()))
    }
}

impl TryFrom<String> for FetchMode {
    type Error = BadFetchMode;

    fn try_from(text: String) -> Result<Self, BadFetchMode> {
        text.parse()
    }
}

impl From<FetchMode> for String {
    fn from(mode: FetchMode) -> Self {
        mode.to_string()
    }
}
