//! The manager in `managedFields` of what we write.

use kube::api::PatchParams;
use prepull_admission::FIELD_MANAGER;

pub(crate) use prepull_admission::post_params;

pub(crate) fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}
