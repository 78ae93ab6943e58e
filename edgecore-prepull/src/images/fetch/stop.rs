//! Why a fetch ends without an image: it failed, or it is left to the container runtime.

use prepull_api::failure::FailureCode;
use prepull_registry::{Kind, RegistryError};

use crate::images::containerd::WriteError;
use crate::images::puller::cri::to_pull_error;
use crate::images::puller::{ErrorClass, PullError};
use crate::images::runtime::RuntimeEndpoint;

/// Why a fetch ended without an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Failed(PullError),
    /// The agent cannot fetch this image here, for this reason. The container runtime may be able to pull it.
    StepBack(String),
}

impl From<PullError> for Stop {
    fn from(error: PullError) -> Self {
        Self::Failed(error)
    }
}

impl From<RegistryError> for Stop {
    fn from(error: RegistryError) -> Self {
        match error.kind {
            Kind::Unsupported => Self::StepBack(error.message),
            _ => Self::Failed(error.into()),
        }
    }
}

/// Translates an answer of containerd's content store.
pub(super) fn of_write(error: WriteError, reference: &str, endpoint: &RuntimeEndpoint) -> PullError {
    let message = error.to_string();
    match error {
        WriteError::Refused(status) => to_pull_error(&status, reference, endpoint),
        WriteError::Silent(_) => PullError::new(ErrorClass::RuntimeDown, format!("{message} ({endpoint})")),
        WriteError::Mismatch { .. } => {
            PullError::new(ErrorClass::Transient, message).with_code(FailureCode::RegistryError)
        }
        WriteError::Locked(_) => PullError::new(ErrorClass::Transient, message),
    }
}
