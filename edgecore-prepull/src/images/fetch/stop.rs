//! The reasons for ending a fetch without an image: a failure, or leaving the image to the container runtime.

use prepull_api::failure::FailureCode;
use prepull_registry::{ErrorKind, RegistryError};

use crate::images::containerd::BlobWriteError;
use crate::images::puller::cri::to_pull_error;
use crate::images::puller::{ErrorClass, PullError};
use crate::images::runtime::RuntimeEndpoint;

/// Reason for ending a fetch without an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FetchStop {
    Failed(PullError),
    /// The agent cannot fetch this image here, for this reason. The container runtime may be able to pull it.
    StepBack(String),
    /// The agent has no connection to this registry, nor to a mirror of it.
    NoConnection {
        registry: String,
        error: PullError,
    },
}

impl FetchStop {
    /// The reason, in words.
    pub(super) fn into_message(self) -> String {
        match self {
            Self::Failed(error) | Self::NoConnection { error, .. } => error.message,
            Self::StepBack(why) => why,
        }
    }

    /// Translates the first request to a registry for an image: without a connection, nothing has been fetched yet.
    pub(super) fn of_resolve(error: RegistryError, registry: &str) -> Self {
        match error.kind {
            ErrorKind::NoConnection => {
                Self::NoConnection { registry: registry.to_owned(), error: error.into() }
            }
            _ => error.into(),
        }
    }
}

impl From<PullError> for FetchStop {
    fn from(error: PullError) -> Self {
        Self::Failed(error)
    }
}

impl From<RegistryError> for FetchStop {
    fn from(error: RegistryError) -> Self {
        match error.kind {
            ErrorKind::Unsupported => Self::StepBack(error.message),
            _ => Self::Failed(error.into()),
        }
    }
}

impl FetchStop {
    /// The same error for a runtime that answered earlier in this attempt. It has gone down during the attempt, perhaps
    /// because of this image, so the attempt counts. `unpacking` is the layer that it was unpacking.
    pub(super) fn after_answer(self, reference: &str, unpacking: Option<&str>) -> Self {
        match self {
            Self::Failed(error) if error.class == ErrorClass::RuntimeDown => {
                let doing = match unpacking {
                    Some(layer) => format!("unpacked layer {layer} of {reference}"),
                    None => format!("stored {reference}"),
                };
                let message = format!("the container runtime ended while it {doing}: {}", error.message);
                Self::Failed(PullError::new(ErrorClass::RuntimeLost, message))
            }
            stop => stop,
        }
    }
}

/// Translates an answer of containerd's content store.
pub(super) fn of_write(error: BlobWriteError, reference: &str, endpoint: &RuntimeEndpoint) -> PullError {
    let message = error.to_string();
    match error {
        BlobWriteError::Refused(status) => to_pull_error(&status, reference, endpoint),
        BlobWriteError::Silent(_) => {
            PullError::new(ErrorClass::RuntimeDown, format!("{message} ({endpoint})"))
        }
        BlobWriteError::Mismatch { .. } => {
            PullError::new(ErrorClass::Transient, message).with_code(FailureCode::RegistryError)
        }
        BlobWriteError::Locked(_) => PullError::new(ErrorClass::Transient, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_answered_was_lost() {
        let failed = |class| FetchStop::Failed(PullError::new(class, "broken pipe (unix:///run/a.sock)"));
        for (unpacking, message) in [
            (
                Some("sha256:5a"),
                "the container runtime ended while it unpacked layer sha256:5a of r.io/a:1: broken pipe (unix:///run/a.sock)",
            ),
            (None, "the container runtime ended while it stored r.io/a:1: broken pipe (unix:///run/a.sock)"),
        ] {
            let lost = failed(ErrorClass::RuntimeDown).after_answer("r.io/a:1", unpacking);
            assert_eq!(lost, FetchStop::Failed(PullError::new(ErrorClass::RuntimeLost, message)));
        }
        for other in [failed(ErrorClass::Transient), FetchStop::StepBack("no endpoint".to_owned())] {
            assert_eq!(other.clone().after_answer("r.io/a:1", None), other);
        }
    }
}
