//! Objects of the API server, as both engines name them.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prepull_api::task::JobUid;
use serde::{Deserialize, Serialize};

/// One object, and no other one of the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectId {
    /// metadata.namespace; empty for a cluster-scoped object.
    pub namespace: String,
    /// metadata.name
    pub name: String,
    /// metadata.uid
    pub uid: JobUid,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// An object with a field of the wrong type: written before its definition was, or past its validation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreadable {
    /// The object.
    pub id: ObjectId,
    /// metadata.generation
    pub generation: i64,
    /// Why it cannot be read.
    pub error: String,
    /// status.startTime: a job may be running.
    #[serde(default)]
    pub start_time: Option<Time>,
    /// status.completionTime: or have ended.
    #[serde(default)]
    pub completion_time: Option<Time>,
}
