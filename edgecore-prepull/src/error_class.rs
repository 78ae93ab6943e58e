//! Classes of errors: each decides on the next attempt.

use prepull_api::failure::FailureCode;

/// The consequence of a failure for the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// May pass by itself: a broken link, a busy registry. Unknown errors count as transient.
    Transient,
    /// The disk of the container runtime is full. May pass, but not before the content of this pull is removed.
    NoSpace,
    /// The image wouldn't fit, by an estimate before its first byte. May pass when images are removed. Content of
    /// earlier attempts is already counted, so it isn't in the way.
    NoRoom,
    /// The container runtime does not answer. Not counted as an attempt, because no registry was asked.
    RuntimeDown,
    /// The container runtime stopped answering during the pull. It was restarted, or the image crashes it.
    RuntimeLost,
    /// The registry refuses this credential. Another one may be accepted.
    Auth,
    /// The registry has no such image, or hides it from this credential. Another one may see it.
    NotFound,
    /// No attempt can succeed: an invalid reference, or no image for this platform.
    Permanent,
}

impl ErrorClass {
    /// Name of the class in logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::NoSpace => "no_space",
            Self::NoRoom => "no_room",
            Self::RuntimeDown => "runtime_down",
            Self::RuntimeLost => "runtime_lost",
            Self::Auth => "auth",
            Self::NotFound => "not_found",
            Self::Permanent => "permanent",
        }
    }

    /// Code of an error with a known class and no more details.
    pub(crate) fn usual_code(self) -> FailureCode {
        match self {
            Self::Transient => FailureCode::Other,
            Self::NoSpace | Self::NoRoom => FailureCode::NoSpace,
            Self::RuntimeDown | Self::RuntimeLost => FailureCode::RuntimeDown,
            Self::Auth => FailureCode::Unauthorized,
            Self::NotFound => FailureCode::NotFound,
            Self::Permanent => FailureCode::InvalidImage,
        }
    }
}
