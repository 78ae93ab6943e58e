//! The manager in `managedFields` of what we write. The API server would take it from the User-Agent, which a proxy on the
//! way may change.

use kube::api::{PatchParams, PostParams};

const FIELD_MANAGER: &str = "cloudcore-prepull";

/// How objects are created and replaced.
pub(crate) fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// How objects are patched.
pub(crate) fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}
