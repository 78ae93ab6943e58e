//! Why an image is not on its node, or a node has not done its work, in one word of a closed list.
//!
//! A reason is a sentence for a person; tools group by the code. The codes are part of the API of the status, the metrics
//! and the events, and `docs/api.md` has a remedy for each. A new one is added before [`FailureCode::Other`]
//! and never takes over the meaning of another.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The cause of a failure, as far as the edge or the cloud can tell it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum FailureCode {
    /// The registry refuses every credential that there is, or asks for one.
    Unauthorized,
    /// The registry has no such image, or hides it from these credentials.
    NotFound,
    /// A secret that is named for the image does not exist, may not be read or used, could not be read in time, is
    /// malformed, or has no entry for the registry.
    SecretUnusable,
    /// The reference or the format of the image is not valid, or its signature is refused.
    InvalidImage,
    /// The image has no variant for the operating system and the processor of the node.
    PlatformMismatch,
    /// The policy is Never, and the image is not on the node.
    NotPresent,
    /// The registry cannot be reached: its name is not resolved, or connections to it fail or break.
    Unreachable,
    /// The registry has had too many requests.
    RateLimited,
    /// The registry answers with an error of its own.
    RegistryError,
    /// There is no room left for the image.
    NoSpace,
    /// The container runtime does not answer.
    RuntimeDown,
    /// The time of the try, of the node or of the job was over.
    Timeout,
    /// The node has not passed its checkItems.
    CheckFailed,
    /// The task was cancelled.
    Cancelled,
    /// There is no Node of this name.
    NodeNotFound,
    /// The edge of the node was not connected when its time was over.
    Offline,
    /// The edge of the node was connected, and sent no result in its time.
    NoResult,
    /// The agent or cloudcore-prepull has failed, and not the pull.
    Internal,
    /// The image has no signature as the job demands it.
    SignatureInvalid,
    /// The node had the image, and a re-check did not find it any more.
    Removed,
    /// The job requires deltas, and the registry has none to the image from a version that the node has.
    NoDelta,
    /// The agent of the node is too old for the job.
    AgentTooOld,
    /// The version of the agent in the image can't be tried on the node, or has not proved itself: the one before runs.
    UpgradeFailed,
    /// None of these, or unknown: the code of a newer version, or of a version without codes.
    #[serde(other)]
    Other,
}

impl FailureCode {
    /// All codes.
    pub const ALL: [Self; 24] = [
        Self::Unauthorized,
        Self::NotFound,
        Self::SecretUnusable,
        Self::InvalidImage,
        Self::PlatformMismatch,
        Self::NotPresent,
        Self::Unreachable,
        Self::RateLimited,
        Self::RegistryError,
        Self::NoSpace,
        Self::RuntimeDown,
        Self::Timeout,
        Self::CheckFailed,
        Self::Cancelled,
        Self::NodeNotFound,
        Self::Offline,
        Self::NoResult,
        Self::Internal,
        Self::SignatureInvalid,
        Self::Removed,
        Self::NoDelta,
        Self::AgentTooOld,
        Self::UpgradeFailed,
        Self::Other,
    ];

    /// The code as the API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unauthorized => "Unauthorized",
            Self::NotFound => "NotFound",
            Self::SecretUnusable => "SecretUnusable",
            Self::InvalidImage => "InvalidImage",
            Self::PlatformMismatch => "PlatformMismatch",
            Self::NotPresent => "NotPresent",
            Self::Unreachable => "Unreachable",
            Self::RateLimited => "RateLimited",
            Self::RegistryError => "RegistryError",
            Self::NoSpace => "NoSpace",
            Self::RuntimeDown => "RuntimeDown",
            Self::Timeout => "Timeout",
            Self::CheckFailed => "CheckFailed",
            Self::Cancelled => "Cancelled",
            Self::NodeNotFound => "NodeNotFound",
            Self::Offline => "Offline",
            Self::NoResult => "NoResult",
            Self::Internal => "Internal",
            Self::SignatureInvalid => "SignatureInvalid",
            Self::Removed => "Removed",
            Self::NoDelta => "NoDelta",
            Self::AgentTooOld => "AgentTooOld",
            Self::UpgradeFailed => "UpgradeFailed",
            Self::Other => "Other",
        }
    }
}

impl fmt::Display for FailureCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_unknown_code_is_other() {
        assert_eq!(serde_json::from_str::<FailureCode>("\"NoSpace\"").unwrap(), FailureCode::NoSpace);
        assert_eq!(serde_json::from_str::<FailureCode>("\"Newer\"").unwrap(), FailureCode::Other);
    }

    /// Each code, as the definitions list them.
    #[cfg(feature = "crd")]
    fn all() -> Vec<String> {
        let schema = schemars::schema_for!(FailureCode);
        let variants = schema.get("oneOf").unwrap().as_array().unwrap();
        let name = |variant: &serde_json::Value| {
            let value = variant.get("const").or_else(|| variant.get("enum")?.get(0));
            value.unwrap().as_str().unwrap().to_owned()
        };
        variants.iter().map(name).collect()
    }

    #[cfg(feature = "crd")]
    #[test]
    fn every_code_is_documented_as_spelt() {
        let api = include_str!("../../docs/api.md");
        let all = all();
        assert_eq!(all, FailureCode::ALL.map(FailureCode::as_str));
        for name in all {
            let code: FailureCode = serde_json::from_str(&format!("{name:?}")).unwrap();
            assert_eq!(code.as_str(), name);
            assert!(api.contains(&format!("| `{name}` |")), "docs/api.md does not explain {name}");
        }
    }
}
