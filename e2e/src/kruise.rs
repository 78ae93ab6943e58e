//! OpenKruise's API from its users' view: definitions and rights, jobs, NodeImages, pods, and the commands of its
//! manual.

mod commands;
mod jobs;
pub mod manual;
mod node_images;
mod object;
mod pods;

use anyhow::Result;

pub use jobs::{Builder, KruiseListJob, KruisePullJob, PullJobKind};
pub use node_images::{KruiseNodeImage, NodeImageTag, name_and_tag};
pub use object::KruiseObject;

use crate::cloud::{Cloud, Start};
use crate::cluster::Cluster;
pub use crate::cluster::KRUISE_DEFINITIONS as DEFINITIONS;
use crate::parts;

/// Flag of cloudcore that enables Kruise's API.
pub const FLAG: &str = "--enable-kruise-api";
/// Manifests that an operator applies, in this order.
const MANIFESTS: [&str; 2] = ["manifests/kruise/crds.yaml", "manifests/kruise/rbac.yaml"];
impl Cluster {
    /// Starts a cluster like [`Cluster::start`], with Kruise's definitions and the rights to serve them.
    pub async fn with_kruise() -> Result<Self> {
        let cluster = Self::start().await?;
        cluster.install_kruise().await?;
        Ok(cluster)
    }

    /// Applies Kruise's definitions and the rights to serve them, as an operator does.
    pub async fn install_kruise(&self) -> Result<()> {
        for file in MANIFESTS {
            self.apply_file(&parts::workspace().join(file)).await?;
        }
        self.definitions_are_established().await
    }
}

impl Cloud {
    /// Starts a cloud like [`Cloud::start`], with Kruise's API. The cluster needs [its definitions](Cluster::with_kruise).
    pub fn with_kruise(cluster: &Cluster) -> Start<'_> {
        Self::start(cluster).arg(FLAG)
    }
}
